"""Language models of text, one per kind of memory; those of `text_state` have memories of the same size."""

from dataclasses import replace
from typing import Any

from mnemos.attention.compressive import CompressiveConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.recurrent import (
    DeltaConfig,
    GatedDeltaConfig,
    GLAConfig,
    KimiDeltaConfig,
    Mamba2Config,
    RetentionConfig,
)
from mnemos.attention.relative import RelativeConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import ModelConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.associations import AssociationsConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.memory.tokens import TokensConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.segments import ARMTConfig, MemoryTransformerConfig, RMTConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

from .family import family

CUTOFFS = (20_000, 40_000, 200_000)  # of WikiText-103's 267,735 words, as Transformer-XL divides them


def in_words(recipe: Recipe, cutoffs: tuple[int, ...] = CUTOFFS) -> Recipe:
    """A recipe of text that reads words instead of bytes, with a tied adaptive softmax of these cut-offs.

    The vocabulary is that of the training split.
    """
    model: Any = replace(recipe.model, vocab_size=0)  # type: ignore[call-arg]
    data: Any = recipe.data
    if isinstance(model, TransformerConfig):
        model = replace(model, head=HeadConfig(tied=True, cutoffs=cutoffs))
    else:
        model = replace(model, tied=True, cutoffs=cutoffs)
    return replace(recipe, model=model, data=replace(data, tokens="words"))


_CACHE = GRC(length=32, block=64, scope="stream")
_MODEL = TransformerConfig(vocab_size=0, layers=4, max_length=0, attention=SoftmaxConfig(window=256))
_XL = replace(_MODEL, attention=RelativeConfig(memory=256))
_WORDS = replace(_XL, layers=2, attention=RelativeConfig(memory=64), dropout=0.1)
_MEMORIES: dict[str, tuple[str, ModelConfig]] = {
    "": (
        "Bytes of a file or folder (default: Python's standard library), softmax attention to the last 256 bytes",
        _MODEL,
    ),
    "linear": (
        "text with linear attention: its running sums cover the whole document",
        replace(_MODEL, attention=LinearConfig()),
    ),
    "cached": (
        "text with a gated cache per stream: 32 slots, updated every 64 bytes",
        replace(_MODEL, cache=_CACHE),
    ),
    "cached-unwritten": (
        "text-cached with a cache that is never written: the cached branch without a memory",
        replace(_MODEL, cache=_CACHE.unwritten()),
    ),
    "xl": ("text with Transformer-XL: relative positions, and a memory of the 256 bytes before the segment", _XL),
    "window": (
        "text under a name that says what its memory is: softmax attention to a window of the last 256 bytes",
        _MODEL,
    ),
    "xl-cached": (
        "text-xl with a gated cache per stream beside its memory of 256 bytes",
        replace(_XL, cache=_CACHE),
    ),
    "cached-xl-no-memory": (
        "text-xl with a gated cache per stream in place of its memory: 32 slots, updated every 64 bytes",
        replace(_XL, attention=RelativeConfig(memory=0), cache=_CACHE),
    ),
    "compressive": (
        "text with a Compressive Transformer: 128 bytes before the segment, and 128 slots for the 512 before these",
        replace(_XL, attention=CompressiveConfig(memory=128, compressed=128, ratio=4)),
    ),
    "lstm": (
        "text with an LSTM of two layers, which has as many parameters as the Transformer",
        LSTMConfig(vocab_size=0, dim=216, layers=2),
    ),
    "memformer": (
        "text with Memformer: 32 slots written every 64 bytes, gradients through 8 segments by memory replay",
        MemformerConfig(
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
    ),
    "memory-transformer": (
        "text with a Memory Transformer: 16 learned tokens in front of each segment of 256 bytes, and no recurrence",
        MemoryTransformerConfig(vocab_size=0, layers=4, segment=256),
    ),
    "rmt": (
        "text with a Recurrent Memory Transformer: 16 tokens rewritten every 64 bytes, gradients through 8 segments",
        RMTConfig(vocab_size=0, layers=4),
    ),
    "armt": (
        "text-rmt with an associative memory in each layer: a matrix of 192 × 128, written by 16 tokens every 64 bytes",
        ARMTConfig(vocab_size=0, layers=4),
    ),
    "words": (
        "Words of a file or folder such as WikiText-2, Transformer-XL with a memory of the 64 words before the segment",
        _WORDS,
    ),
    "words-cached": (
        "text-words with a gated cache per stream beside its memory: 32 slots, updated every 16 words",
        replace(_WORDS, cache=GRC(length=32, block=16, scope="stream")),
    ),
}
_THROUGH_SEGMENTS = ("memformer", "rmt", "armt")  # a segment of 64 bytes at a time, with gradient through 8 of them


@family("text-{memory}", memory=_MEMORIES)
def text(memory: str) -> Recipe:
    """Language models of text, one per kind of memory."""
    about, model = _MEMORIES[memory]
    words, through = memory.startswith("words"), memory in _THROUGH_SEGMENTS
    recipe = Recipe(
        about=about,
        model=model,
        data=TextConfig(segment=64 if words or through else 256),
        optim=OptimConfig(lr=1e-3 if memory == "armt" else 3e-3, schedule=ScheduleConfig(name="cosine", warmup=0.05)),
        train=TrainConfig(
            steps=1000 if through else 2000,
            batch_size=16,
            valid_rows=-1,
            test_rows=-1,
            rollout=RolloutConfig(segments=8 if through else 1),
        ),
    )
    return in_words(recipe, cutoffs=(2_000, 10_000)) if words else recipe


_DOCUMENT = 2048  # bytes
_SIZES: dict[str, Any] = {"vocab_size": 0, "dim": 128, "layers": 4, "num_heads": 4, "mlp": 512}
_BLOCKS: dict[str, Any] = {**_SIZES, "norm": "pre", "activation": "gelu"}  # of all Transformers of `text_state`
_ROTARY = TransformerConfig.classic(**_SIZES, max_length=0, position="rotary")
_XL_16 = TransformerConfig.classic(**_SIZES, max_length=0, position="none", attention=RelativeConfig(memory=16))
_RECURRENT = replace(_ROTARY, num_heads=8, position="none")
_DELTA: dict[str, Any] = {"key_width": 12, "value_width": 12}
_STATES: dict[str, tuple[str, ModelConfig]] = {
    "xl": (
        "Bytes with 32 KiB of state: Transformer-XL with the inputs of the last 16 bytes in each of 4 layers",
        _XL_16,
    ),
    "cached": (
        "text-state-xl with a gated cache per stream in place of its memory: 16 slots, and 16 bytes to be written",
        replace(_XL_16, attention=RelativeConfig(memory=0), cache=GRC(length=16, block=16, scope="stream")),
    ),
    "xl-cached": (
        "text-state-xl with half of its memory, and beside it a gated cache per stream of 8 slots",
        replace(_XL_16, attention=RelativeConfig(memory=8), cache=GRC(length=8, block=8, scope="stream")),
    ),
    "compressive": (
        "text-state-xl as a Compressive Transformer: 8 bytes, and 8 slots for the 32 bytes before them",
        replace(_XL_16, attention=CompressiveConfig(memory=8, compressed=8, ratio=4)),
    ),
    "rmt": (
        "text-state-xl as a Recurrent Memory Transformer: 64 memory tokens, rewritten every 64 bytes; rotary",
        RMTConfig(**_BLOCKS, memory=TokensConfig(64)),
    ),
    "armt": (
        "text-state-xl as an associative RMT: a matrix of 16 × 128 in each layer, written by 16 tokens every 64 bytes",
        ARMTConfig(**_BLOCKS, memory=AssociationsConfig(16, key_dim=8, nu=1)),
    ),
    "memformer": (
        "text-state-xl as a Memformer: 32 slots, written every 32 bytes, and the encoding of the last 32 bytes",
        MemformerConfig(
            vocab_size=0,
            encoder_layers=2,
            decoder_layers=2,
            segment=32,
            memory=SlotsConfig(slots=32, temperature=0.125),
            decoder_reads=True,
        ),
    ),
    "linear": (
        "text-state-xl with linear attention: running sums of 8 heads, 17 × 16 each; sinusoids, embeddings times √128",
        replace(_ROTARY, num_heads=8, position="sinusoidal", scale_embedding=True, attention=LinearConfig()),
    ),
    "retention": (
        "text-state-xl with retention: sums of 8 heads, 16 × 16 each",
        replace(_RECURRENT, attention=RetentionConfig(key_width=16, value_width=16)),
    ),
    "gla": (
        "text-state-xl with gated linear attention: sums of 8 heads, 16 × 16 each",
        replace(_RECURRENT, attention=GLAConfig(key_width=16, value_width=16)),
    ),
    "mamba2": (
        "text-state-xl with Mamba-2's mixer: sums of 8 heads, 12 × 16 each, and the last 3 inputs of its convolution",
        replace(_RECURRENT, attention=Mamba2Config(key_width=12, value_width=16)),
    ),
    "delta": (
        "text-state-xl with the delta rule: sums of 8 heads, 12 × 12 each, and the last 3 inputs of its convolution",
        replace(_RECURRENT, attention=DeltaConfig(**_DELTA)),
    ),
    "gated-delta": (
        "text-state-delta with a decay per head (Gated DeltaNet)",
        replace(_RECURRENT, attention=GatedDeltaConfig(**_DELTA)),
    ),
    "kimi-delta": (
        "text-state-delta with a decay per channel (Kimi Delta Attention)",
        replace(_RECURRENT, attention=KimiDeltaConfig(**_DELTA)),
    ),
    "window": (
        "text-state-xl with attention to a sliding window: the keys and values of the 8 bytes before each byte",
        replace(_ROTARY, attention=SoftmaxConfig(window=9)),
    ),
    "lstm": (
        "text-state-xl as an LSTM of two layers: 3.4 KiB of state, as many parameters as the Transformers",
        LSTMConfig(vocab_size=0, dim=216, layers=2),
    ),
    "full": (
        "text-state-xl with attention to the whole document: a reference whose state grows by 4 KiB per byte, to 8 MiB",
        replace(_ROTARY, attention=SoftmaxConfig(window=_DOCUMENT)),
    ),
}


@family("text-state-{memory}", memory=_STATES)
def text_state(memory: str) -> Recipe:
    """Language models of bytes whose memories have the same size: 32 KiB of state per stream, after 64 bytes.

    All have width 128, about a million parameters and the same batches: four segments per update, with gradient through
    all of them where a memory passes it on. Documents have at most 2,048 bytes, so that the reference, whose state
    grows with them, stays affordable. Two recipes have another size: the LSTM's state is smaller, and that of the
    reference grows to 8 MiB. Models that read a segment as a whole also keep its keys and values while they read it;
    these pass to no other segment and are not counted.
    """
    about, model = _STATES[memory]
    return Recipe(
        about=about,
        model=model,
        data=TextConfig(segment=64, longest=_DOCUMENT),
        optim=OptimConfig(lr=1e-3, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(
            steps=1500,
            batch_size=4,
            valid_rows=2048,
            test_rows=8192,
            rollout=RolloutConfig(segments=4, replay=False),
        ),
    )
