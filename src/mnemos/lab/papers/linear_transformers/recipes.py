"""Recipes of "Transformers are RNNs": the copy task (§4.1), images byte by byte (§4.2) and speech by CTC (§4.3)."""

from dataclasses import replace

from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig
from mnemos.lab.recipes.family import about_lines, family, transformer, variant
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.speech.models import BiLSTMConfig, SpeechConfig
from mnemos.lab.speech.spoken import SpokenConfig
from mnemos.lab.tasks.generated import CopyConfig
from mnemos.lab.tasks.images import CIFARConfig, DigitsConfig, MNISTConfig
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.pixels import PixelsConfig
from mnemos.lab.tasks.task import DataConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

from ..baselines.reformer import ReformerConfig

LSH_ROUNDS = (1, 4)
NAMES = ("softmax", *(f"lsh-{rounds}" for rounds in LSH_ROUNDS), "linear")
# The paper's chunks for images of MNIST (27 chunks) and CIFAR-10 (83), each with 64 buckets.
PAPER_CHUNKS = {783: 29, 3071: 37}
PAPER_BUCKETS = 64


def attention(name: str, length: int) -> AttentionConfig:
    """The configuration of "softmax", "linear", or "lsh-R" of the paper's tables, for sequences of `length` tokens.

    lsh-R is the Reformer's attention, as published, with R hash rounds: at the paper's two lengths of images in its
    chunks and with its 64 buckets; at other lengths in chunks of length/8, at most 32, with twice as many buckets as
    chunks. So in each round a token can read at most a quarter of the sequence: its own chunk and the one before.
    """
    if name.startswith("lsh-"):
        rounds = int(name.removeprefix("lsh-"))
        if length in PAPER_CHUNKS:
            return ReformerConfig(rounds, PAPER_CHUNKS[length], PAPER_BUCKETS)
        return ReformerConfig(rounds, max(1, min(32, length // 8)))
    return LinearConfig() if name == "linear" else SoftmaxConfig()


# The paper's for MNIST: 8 heads of 32, ten logistics. CIFAR-10 has 16 layers. Learned positions are ours.
PAPER = TransformerConfig.classic(
    vocab_size=256,
    max_length=783,
    dim=256,
    layers=8,
    num_heads=8,
    mlp=1024,
    position="learned",
    attention=LinearConfig(),
    head=HeadConfig(mixture=10),
)
_LARGE = replace(PAPER, vocab_size=0, max_length=0)  # from the data
# One of 256 classes, because a mixture learns later: after 180 updates it has a training loss of 1.19 nats, and the
# classes .93. And narrow, because it takes many updates to learn that the byte above matters too.
_SMALL = replace(_LARGE, dim=64, layers=2, num_heads=4, mlp=256, head=HeadConfig())
_LARGE_OPTIM = OptimConfig(name="radam", lr=1e-4, weight_decay=0.0, grad_clip=0.0)
_SMALL_OPTIM = OptimConfig(name="radam", lr=2e-3, weight_decay=0.0, schedule=ScheduleConfig(name="cosine", floor=0.05))
_EPOCH = (60_000 - 5_000) // 10  # MNIST without the validation split, in batches of the paper's size
_LONG = TrainConfig(steps=250 * _EPOCH, batch_size=10, eval_every=_EPOCH, checkpoint_every=_EPOCH, log_every=500)
# The paper gives every model of CIFAR-10 the same time and no number of steps; 1.5 million is ours.
_LONGER = replace(_LONG, steps=1_500_000, batch_size=4, eval_every=6000, checkpoint_every=6000)
_SHORT = TrainConfig(steps=3600, batch_size=8, eval_every=900, checkpoint_every=300, log_every=50)
_SHORTER = replace(_SHORT, steps=1500, batch_size=32, eval_every=500)
_MNIST = MNISTConfig(layout="image")
_DIGITS = DigitsConfig(layout="image")
_PIXELS: dict[str, tuple[DataConfig, TransformerConfig, OptimConfig, TrainConfig]] = {
    "mnist-pixels": (_MNIST, _LARGE, _LARGE_OPTIM, _LONG),
    "cifar-pixels": (CIFARConfig(), replace(_LARGE, layers=16), _LARGE_OPTIM, _LONGER),
    "mnist-pixels-small": (_MNIST, _SMALL, _SMALL_OPTIM, _SHORT),
    "cifar-pixels-small": (CIFARConfig(size=16), _SMALL, _SMALL_OPTIM, _SHORT),
    "digits-pixels": (_DIGITS, _SMALL, _SMALL_OPTIM, _SHORTER),
    "photos-pixels": (PhotosConfig(size=16), _SMALL, _SMALL_OPTIM, _SHORT),
}
_ABOUT = about_lines("""
mnist-pixels: MNIST byte by byte with linear attention, the paper's size and 250 epochs (Linear transformers, Table 1)
cifar-pixels: CIFAR-10 byte by byte with linear attention, at the paper's size (Linear transformers, Table 2)
mnist-pixels-small: MNIST byte by byte with linear attention: 2 layers of width 64, minutes on one core
cifar-pixels-small: CIFAR-10 at 16 x 16, byte by byte with linear attention: 2 layers of width 64
digits-pixels: scikit-learn's 8 x 8 digits byte by byte with linear attention: a minute or two
photos-pixels: Photos of any folder (--data.images.folder) at 16 x 16, byte by byte with linear attention
""")
_WITH_SOFTMAX = ("mnist-pixels", "cifar-pixels", "mnist-pixels-small")
_WITH_LSH = {"mnist-pixels": 783, "cifar-pixels": 3071}  # the paper's lengths


@family("{images}-{change}", images=_PIXELS, change=("", "softmax", "lsh-1", "lsh-4", "mixture"))
def pixels(images: str, change: str) -> Recipe | None:
    """Images byte by byte: at the settings of Linear transformers (§4.2), and at a size that trains on two cores."""
    data, model, optim, train = _PIXELS[images]
    plain = Recipe(about=_ABOUT[images], model=model, data=PixelsConfig(data), optim=optim, train=train)
    if change == "softmax":
        about = plain.about.replace("linear", "softmax").removesuffix(", minutes on one core")
        return variant(plain, about, attention=SoftmaxConfig()) if images in _WITH_SOFTMAX else None
    if change.startswith("lsh"):
        about = plain.about.replace("linear attention", f"the Reformer's attention ({change})")
        length = _WITH_LSH.get(images)
        return None if length is None else variant(plain, about, attention=attention(change, length))
    if change == "mixture":
        about = f"{images} with the paper's mixture of ten logistics for each byte instead of 256 classes"
        return variant(plain, about, head=PAPER.head) if images == "mnist-pixels-small" else None
    return plain


# The paper's, §4.3: 9 layers, 6 heads of 32, MLPs four times as wide; RAdam at 1e-4, halved on a plateau. The LSTM has
# Adam at 1e-3, lowered the same way. The paper names no clipping of gradients, so there is none. LSH has four rounds,
# as in the paper, and chunks of 16, which are ours: a frame reads at most 32 in a round, of 160 in a mean test string
# (median 151). Words and bands (0) are taken from the data.
_PLATEAU = ScheduleConfig("plateau", patience=3)
_SPEECH: dict[str, tuple[str, AttentionConfig | None]] = {
    "softmax": ("softmax attention", SoftmaxConfig()),
    "linear": ("linear attention", LinearConfig()),
    "lsh": ("the Reformer's attention (LSH)", ReformerConfig(chunk=16)),
    "bilstm": ("a bidirectional LSTM", None),
}
# The small models read 10 to 150 frames of 30 ms; the median is 58 in training and 51 in the test split.
_SHORT_LSH = ReformerConfig(chunk=4)


@family("{size}-{model}", size=("speech", "spoken-digits"), model=_SPEECH)
def speech(size: str, model: str) -> Recipe:
    """Speech by CTC: the models of Linear transformers (§4.3), and small ones of spoken digits for two cores.

    The paper trained on the Wall Street Journal's sentences, which are not free; these recipes train on strings of
    single words that `mnemos.lab.speech.spoken` joins. Their error rates cannot be compared with the
    paper's. The recipes of one size differ in the attention alone, or have a bidirectional LSTM instead. The small ones
    stack three frames as one of 30 ms; the shortest digit has four of these. Their LSH has chunks of 4, so that in each
    round a frame reads at most 8 of the 54 to 59 frames of a mean string. They clip gradients at 1, the library's
    default; the paper's do not.
    """
    called, config = _SPEECH[model]
    small = size == "spoken-digits"
    network: ModelConfig
    if config is None:
        lstm = BiLSTMConfig(vocab_size=0, bands=0)
        network = replace(lstm, stack=3, dim=96, layers=2) if small else lstm
    else:
        paper = SpeechConfig(vocab_size=0, bands=0, attention=_SHORT_LSH if small and model == "lsh" else config)
        network = replace(paper, stack=3, dim=128, layers=4, num_heads=4, mlp=256) if small else paper
    optim = OptimConfig("radam", lr=1e-4, weight_decay=0.0, grad_clip=0.0, schedule=_PLATEAU)
    train = TrainConfig(steps=20_000, batch_size=32, eval_every=250, checkpoint_every=250)
    if small:
        optim = OptimConfig("radam", lr=2e-3, weight_decay=0.0, schedule=_PLATEAU)
        train = TrainConfig(steps=2500, batch_size=16, eval_every=150, checkpoint_every=500)
    elif config is None:
        optim = replace(optim, name="adam", lr=1e-3)
    time = "minutes on two cores" if small else "the paper's size"
    about = f"Spoken {'digits' if small else 'strings'} (--data.path FOLDER of wav files), {time}: {called}"
    return Recipe(about=about, model=network, data=SpokenConfig(), optim=optim, train=train)


_COPYING = about_lines("""
-: Copy a word of 32 to 63 symbols, linear attention (Linear transformers, Figure 2)
softmax: Copy a word of 32 to 63 symbols, softmax attention (Linear transformers, Figure 2)
lsh-1: Copy a word of 32 to 63 symbols, the Reformer's attention, 1 round of chunks of 16
lsh-4: Copy a word of 32 to 63 symbols, the Reformer's attention, 4 rounds of chunks of 16 (Linear transformers, \
Figure 2)
""")


@family("copy-{change}", change=_COPYING)
def copy(change: str) -> Recipe:
    """Copy a word of 32 to 63 symbols in 128 tokens: 4 layers, 8 heads, batches and rates of Linear transformers.

    The paper names neither the width nor the length of the words: 256 and 32 to 63 are ours. It names no chunk for the
    Reformer in this task either. 16 follows `attention`: a quarter of 128 tokens in a round.
    """
    data = CopyConfig()
    memory = attention(change or "linear", data.length)
    schedule = ScheduleConfig("step", drop_at=3000, floor=0.1)
    return Recipe(
        about=_COPYING[change],
        model=transformer(dim=256, layers=4, num_heads=8, mlp=1024, attention=memory),
        data=data,
        # The paper names no clipping.
        optim=OptimConfig("radam", lr=1e-3, weight_decay=0.0, grad_clip=0.0, schedule=schedule),
        train=TrainConfig(steps=5000, batch_size=64),
    )


@recipe
def copy_small() -> Recipe:
    """Copy a word of 16 to 31 symbols with linear attention: 2 layers of width 128, a few minutes on two cores.

    Gradients are clipped at 1, the library's default. The paper names no clipping, and `copy`, at its size, has none.
    """
    return Recipe(
        model=transformer(dim=128, layers=2, num_heads=4, mlp=256, attention=LinearConfig()),
        data=CopyConfig(length=64),
        optim=OptimConfig(name="radam", lr=3e-3, weight_decay=0.0, schedule=ScheduleConfig(name="cosine", floor=0.02)),
        train=TrainConfig(steps=2500, batch_size=64, eval_every=100, log_every=100),
    )
