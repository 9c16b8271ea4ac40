"""A recipe to start from for every task but ListOps, each with the memory that suits it: minutes on two cores."""

from dataclasses import replace

from mnemos.attention.linear import LinearConfig
from mnemos.attention.relative import RelativeConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.data.copying import CopyConfig
from mnemos.data.images import DigitsConfig, MNISTConfig
from mnemos.data.recall import RecallConfig
from mnemos.data.text import TextConfig
from mnemos.memory.grc import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

from .recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig

_OPTIM = OptimConfig(lr=1e-3, schedule=ScheduleConfig(name="cosine", warmup=100))
_READER = TransformerConfig(vocab_size=256, layers=4, max_length=256, attention=SoftmaxConfig(window=256))


def text() -> Recipe:
    """Bytes of any text, in segments of 256; attention sees the last 256 bytes, whatever the segment."""
    return Recipe(
        name="text",
        about="bytes of any file or folder (the standard library's source by default), a window of softmax attention",
        model=_READER,
        data=TextConfig(segment=256),
        optim=_OPTIM,
        train=TrainConfig(steps=2000, batch_size=16),
    )


def text_linear() -> Recipe:
    """The same with linear attention, whose running sums carry the whole document."""
    return replace(
        text(),
        name="text-linear",
        about="the same text with linear attention: running sums over the whole document",
        model=replace(_READER, attention=LinearConfig()),
    )


def text_cached() -> Recipe:
    """The same with a gated cache a stream beside the window: 32 slots, an update every 64 bytes."""
    return replace(
        text(),
        name="text-cached",
        about="the same text with a gated cache a stream beside the window",
        model=replace(_READER, cache=GRC(length=32, block=64, scope="stream")),
    )


def text_xl() -> Recipe:
    """The same with Transformer-XL: every layer reads its own inputs of the segment before, too."""
    return replace(
        text(),
        name="text-xl",
        about="the same text with Transformer-XL: relative positions, a memory of the 256 bytes before the segment",
        model=replace(_READER, position="none", attention=RelativeConfig(memory=256)),
    )


def text_lstm() -> Recipe:
    """The same with an LSTM: two layers, of as many parameters as the Transformer has."""
    return replace(
        text(),
        name="text-lstm",
        about="the same text with an LSTM of as many parameters",
        model=LSTMConfig(dim=216, layers=2),
    )


def text_memformer() -> Recipe:
    """The same with Memformer: 32 slots, written every 64 bytes, with exact gradients through 8 writes."""
    return Recipe(
        name="text-memformer",
        about="the same text with Memformer: 32 slots written every 64 bytes, trained by replay through 8 of them",
        model=MemformerConfig(
            dim=64,
            encoder_layers=2,
            decoder_layers=2,
            mlp=256,
            segment=64,
            memory=SlotsConfig(slots=32, temperature=0.125),
        ),
        data=TextConfig(segment=64),
        optim=_OPTIM,
        train=TrainConfig(steps=1000, batch_size=16, rollout=RolloutConfig(segments=8)),
    )


def copy() -> Recipe:
    """The copy task of Linear transformers (Figure 2): 4 layers, 8 heads of 32, RAdam."""
    return Recipe(
        name="copy",
        about="copy a word of 32 to 63 symbols, linear attention (Linear transformers, Figure 2)",
        model=TransformerConfig(
            vocab_size=11, dim=256, layers=4, num_heads=8, mlp=1024, max_length=128, attention=LinearConfig()
        ),
        data=CopyConfig(),
        optim=OptimConfig(
            name="radam", lr=1e-3, weight_decay=0.0, schedule=ScheduleConfig(name="step", drop_at=3000, floor=0.1)
        ),
        train=TrainConfig(steps=5000, batch_size=64),
    )


def recall() -> Recipe:
    """Associative recall: which value stood beside this key?"""
    data = RecallConfig()
    task = data.build()
    return Recipe(
        name="recall",
        about="associative recall: which value stood beside this key?",
        model=TransformerConfig(vocab_size=task.vocab_size, max_length=task.max_length),
        data=data,
        optim=_OPTIM,
        train=TrainConfig(steps=2000, batch_size=64),
    )


def digits() -> Recipe:
    """scikit-learn's 8 x 8 digits, pixel by pixel."""
    return Recipe(
        name="digits",
        about="scikit-learn's 1,797 digits as 64 tokens, a classifier",
        model=TransformerConfig(
            vocab_size=17, dim=64, mlp=128, max_length=64, causal=False, head=HeadConfig(classes=10)
        ),
        data=DigitsConfig(),
        optim=_OPTIM,
        train=TrainConfig(steps=1000, batch_size=32),
    )


def mnist() -> Recipe:
    """MNIST's digits, pixel by pixel: 784 tokens."""
    return Recipe(
        name="mnist",
        about="MNIST as 784 tokens, a classifier with linear attention (--data.path FOLDER of the idx files)",
        model=TransformerConfig(
            vocab_size=256,
            dim=64,
            mlp=128,
            max_length=784,
            causal=False,
            attention=LinearConfig(),
            head=HeadConfig(classes=10),
        ),
        data=MNISTConfig(),
        optim=_OPTIM,
        train=TrainConfig(steps=2000, batch_size=32),
    )
