"""Small models of tasks that are generated or small: told facts, ListOps, recall, images pixel by pixel."""

from dataclasses import replace

from mnemos import BlockSparseConfig, ReformerConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.fact_recall import ToldConfig
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

from .family import family

WINDOW = 32  # words that an attention of the demo reads, and words per segment
_DEMO = TransformerConfig.classic(
    vocab_size=0,
    dim=64,
    layers=2,
    num_heads=4,
    mlp=128,
    max_length=0,
    position="none",
    attention=SoftmaxConfig(window=WINDOW),
)
_DEMO_MEMFORMER = MemformerConfig(
    vocab_size=0,
    dim=64,
    encoder_layers=1,
    decoder_layers=1,
    num_heads=4,
    mlp=128,
    segment=WINDOW,
    memory=SlotsConfig(slots=8),
    decoder_reads=True,  # the question is in the segment that is decoded, so the decoder must read the memory
)
_DEMOS: dict[str, tuple[str, ModelConfig]] = {
    "": ("Recall a fact told in real text, softmax attention to the last 32 words: a window without a memory", _DEMO),
    "linear": (
        "demo with linear attention: its memory is one matrix per head",
        replace(_DEMO, attention=LinearConfig()),
    ),
    "cached": (
        "demo with a gated recurrent cache per stream around every attention: 8 slots, written every 32 words",
        replace(_DEMO, cache=GRC(length=8, block=WINDOW, scope="stream")),
    ),
    "memformer": (
        "demo with Memformer: 8 slots, written every 32 words, exact gradients by memory replay",
        _DEMO_MEMFORMER,
    ),
}


@family("demo-{memory}", memory=_DEMOS)
def demo(memory: str) -> Recipe:
    """A fact is told in real text and asked for up to 512 words later: `make demo` compares the memories.

    Every model has two layers of 64 channels, reads the same rows, and sees at most the last `WINDOW` words at once, or
    nothing but its memory. None has positions, but for Memformer's bias by distance.
    """
    about, model = _DEMOS[memory]
    rollout = RolloutConfig(segment_length=WINDOW if memory == "memformer" else 0)
    return Recipe(
        about=about,
        model=model,
        data=ToldConfig(grow=200, rows=500),
        optim=OptimConfig(lr=3e-3, schedule=ScheduleConfig(name="cosine", warmup=50, floor=0.05)),
        train=TrainConfig(
            steps=250, batch_size=32, log_every=10, eval_every=125, checkpoint_every=125, rollout=rollout
        ),
    )


_LISTOPS = TransformerConfig.classic(
    vocab_size=0,
    dim=64,
    layers=2,
    num_heads=4,
    mlp=128,
    max_length=0,
    causal=False,
    head=HeadConfig(classes=10, hidden=128),
)
_SHORT: dict[str, tuple[str, TransformerConfig]] = {
    "": ("A small Transformer on ListOps of 5 to 24 symbols: about a minute on two cores", _LISTOPS),
    "cached": (
        "short-listops with a gated recurrent cache around every attention",
        replace(_LISTOPS, cache=GRC()),
    ),
    "cached-unwritten": (
        "short-listops-cached with a cache that is never written: the cached branch without a memory",
        replace(_LISTOPS, cache=GRC().unwritten()),
    ),
    "wider": (
        "short-listops with wider MLPs: as many parameters as short-listops-cached, without a memory",
        replace(_LISTOPS, mlp=210),
    ),
    "linear": ("short-listops with linear attention", replace(_LISTOPS, attention=LinearConfig())),
}


@family("short-listops-{variant}", variant=_SHORT)
def short_listops(variant: str) -> Recipe:
    """A small Transformer on short ListOps, with a gated cache and its baselines: the smallest classification task."""
    about, model = _SHORT[variant]
    return Recipe(
        about=about,
        model=model,
        data=ListOpsConfig(
            min_length=4,
            max_length=25,
            max_depth=3,
            max_arguments=4,
            digit_probability=0.5,
            train_size=200_000,
            valid_size=1_000,
            test_size=5_000,
        ),
        optim=OptimConfig(lr=3e-3, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(steps=6000, batch_size=64, log_every=50, eval_every=500, checkpoint_every=2000),
    )


# Block-sparse attention and Reformer are scaled with the length, so that they stay sparse: 128 symbols are 32 blocks,
# as 2,000 are at the paper's size, and a block of queries reads 8 of them; a query of Reformer reads at most 32 keys.
LISTOPS_128 = ListOpsConfig(min_length=63, max_length=129, train_size=64_000, valid_size=1_000, test_size=5_000)
_ATTENTIONS: dict[str, tuple[str, AttentionConfig]] = {
    "": ("ListOps of 64 to 128 symbols, a small Transformer: a minute of one core", SoftmaxConfig()),
    "bigbird": (
        "listops-128 with BigBird's attention: blocks of 4 read 8 of 32 blocks, 3 of them random",
        BlockSparseConfig(block=4),
    ),
    "reformer": (
        "listops-128 with Reformer's attention: 2 rounds of chunks of 8 that read the chunk before them",
        ReformerConfig(rounds=2, chunk=8),
    ),
    "linear": ("listops-128 with linear attention", LinearConfig()),
}


@family("listops-128-{attention}-{memory}", attention=_ATTENTIONS, memory=("", "cached"))
def listops_128(attention: str, memory: str) -> Recipe:
    """Long ListOps in 64 to 128 symbols: four attentions, with and without the paper's cache, in minutes on one core.

    The trees have the rules of Long Range Arena (10 levels, 10 arguments); only the length is shorter.
    `mnemos compare … --baselines` adds the never-written baseline and the one of equal parameters.
    """
    about, config = _ATTENTIONS[attention]
    if memory:
        slots = "" if attention else ": as many slots as symbols, ratio 0.5"
        plain = f"listops-128-{attention}".removesuffix("-")
        about = f"{plain} with the paper's cache around every attention{slots}"
    return Recipe(
        about=about,
        model=replace(_LISTOPS, attention=config, cache=GRC(preset="paper") if memory else None),
        data=LISTOPS_128,
        optim=OptimConfig(lr=2e-3, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(steps=1500, eval_every=500),
    )


_OPTIM = OptimConfig(lr=1e-3, schedule=ScheduleConfig(name="cosine", warmup=100))


@recipe
def recall() -> Recipe:
    """Associative recall: find the value that was paired with a key."""
    return Recipe(
        model=TransformerConfig.classic(vocab_size=0, max_length=0),
        data=RecallConfig(),
        optim=_OPTIM,
        train=TrainConfig(steps=2000, batch_size=64),
    )


_PIXELS = TransformerConfig.classic(
    vocab_size=0, dim=64, mlp=128, max_length=0, causal=False, head=HeadConfig(classes=10)
)


@recipe
def digits() -> Recipe:
    """Classify scikit-learn's 1,797 digits, each as 64 tokens."""
    return Recipe(_PIXELS, DigitsConfig(), _OPTIM, TrainConfig(steps=1000, batch_size=32))


@recipe
def mnist() -> Recipe:
    """Classify MNIST, each image as 784 tokens, with linear attention (--data.path FOLDER with the idx files)."""
    model = replace(_PIXELS, attention=LinearConfig())
    return Recipe(model, MNISTConfig(), _OPTIM, TrainConfig(steps=2000, batch_size=32))
