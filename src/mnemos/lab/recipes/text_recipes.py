"""Language models of text, one per kind of memory."""

from dataclasses import replace
from typing import Any

from mnemos.attention.compressive import CompressiveConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.relative import RelativeConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.grc import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.models.armt import ARMTConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.memory_tokens import MemoryTransformerConfig, RMTConfig
from mnemos.models.transformer import TransformerConfig

from .in_words import in_words

_OPTIM = OptimConfig(lr=3e-3, schedule=ScheduleConfig(name="cosine", warmup=0.05))
_CACHE = GRC(length=32, block=64, scope="stream")
_MODEL = TransformerConfig(vocab_size=0, layers=4, max_length=0, attention=SoftmaxConfig(window=256))
_XL = replace(_MODEL, attention=RelativeConfig(memory=256))


@recipe
def text() -> Recipe:
    """Bytes of a file or folder (default: Python's standard library), softmax attention to the last 256 bytes."""
    return Recipe(
        model=_MODEL,
        data=TextConfig(segment=256),
        optim=_OPTIM,
        train=TrainConfig(steps=2000, batch_size=16, valid_rows=-1, test_rows=-1),
    )


@recipe
def text_linear() -> Recipe:
    """text with linear attention: its running sums cover the whole document."""
    return replace(text(), model=replace(_MODEL, attention=LinearConfig()))


@recipe
def text_cached() -> Recipe:
    """text with a gated cache per stream: 32 slots, updated every 64 bytes."""
    return replace(text(), model=replace(_MODEL, cache=_CACHE))


@recipe
def text_cached_unwritten() -> Recipe:
    """text-cached with a cache that is never written: the cached branch without a memory."""
    return replace(text(), model=replace(_MODEL, cache=_CACHE.unwritten()))


@recipe
def text_xl() -> Recipe:
    """text with Transformer-XL: relative positions, and a memory of the 256 bytes before the segment."""
    return replace(text(), model=_XL)


@recipe
def text_window() -> Recipe:
    """text under a name that says what its memory is: softmax attention to a window of the last 256 bytes."""
    return text()


@recipe
def text_xl_cached() -> Recipe:
    """text-xl with a gated cache per stream beside its memory of 256 bytes."""
    return replace(text(), model=replace(_XL, cache=_CACHE))


@recipe
def text_cached_xl_no_memory() -> Recipe:
    """text-xl with a gated cache per stream in place of its memory: 32 slots, updated every 64 bytes."""
    return replace(text(), model=replace(_XL, attention=RelativeConfig(memory=0), cache=_CACHE))


@recipe
def text_compressive() -> Recipe:
    """text with a Compressive Transformer: 128 bytes before the segment, and 128 slots for the 512 before these."""
    attention = CompressiveConfig(memory=128, compressed=128, ratio=4)
    return replace(text(), model=replace(_XL, attention=attention))


@recipe
def text_lstm() -> Recipe:
    """text with an LSTM of two layers, which has as many parameters as the Transformer."""
    return replace(text(), model=LSTMConfig(vocab_size=0, dim=216, layers=2))


@recipe
def text_memformer() -> Recipe:
    """text with Memformer: 32 slots written every 64 bytes, gradients through 8 segments by memory replay."""
    return Recipe(
        model=MemformerConfig(
            vocab_size=0,
            dim=64,
            encoder_layers=2,
            decoder_layers=2,
            mlp=176,
            segment=64,
            norm="rms",
            activation="swiglu",
            memory=SlotsConfig(slots=32, temperature=0.125),
        ),
        data=TextConfig(segment=64),
        optim=_OPTIM,
        train=TrainConfig(steps=1000, batch_size=16, valid_rows=-1, test_rows=-1, rollout=RolloutConfig(segments=8)),
    )


@recipe
def text_memory_transformer() -> Recipe:
    """text with a Memory Transformer: 16 learned tokens in front of each segment of 256 bytes, and no recurrence."""
    return replace(text(), model=MemoryTransformerConfig(vocab_size=0, layers=4, segment=256))


@recipe
def text_rmt() -> Recipe:
    """text with a Recurrent Memory Transformer: 16 tokens rewritten every 64 bytes, gradients through 8 segments.

    --train.rollout.horizon K passes gradients through K segments only.
    """
    return Recipe(
        model=RMTConfig(vocab_size=0, layers=4),
        data=TextConfig(segment=64),
        optim=_OPTIM,
        train=TrainConfig(steps=1000, batch_size=16, valid_rows=-1, test_rows=-1, rollout=RolloutConfig(segments=8)),
    )


@recipe
def text_armt() -> Recipe:
    """text-rmt with an associative memory in each layer: a matrix of 192 × 128, written by 16 tokens every 64 bytes."""
    base = text_rmt()
    return replace(base, model=ARMTConfig(vocab_size=0, layers=4), optim=replace(base.optim, lr=1e-3))


@recipe
def text_words() -> Recipe:
    """Words of a file or folder such as WikiText-2, Transformer-XL with a memory of the 64 words before the segment."""
    model = replace(_XL, layers=2, attention=RelativeConfig(memory=64), dropout=0.1)
    return in_words(replace(text(), model=model, data=TextConfig(segment=64)), cutoffs=(2_000, 10_000))


@recipe
def text_words_cached() -> Recipe:
    """text-words with a gated cache per stream beside its memory: 32 slots, updated every 16 words."""
    plain = text_words()
    model: Any = plain.model
    return replace(plain, model=replace(model, cache=GRC(length=32, block=16, scope="stream")))
