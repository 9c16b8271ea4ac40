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
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.associations import AssociationsConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.memory.tokens import TokensConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.segments import ARMTConfig, MemoryTransformerConfig, RMTConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

from .family import about_lines, cosine, family, transformer

CUTOFFS = (20_000, 40_000, 200_000)  # of WikiText-103's 267,735 words, as Transformer-XL divides them


def in_words(recipe: Recipe, cutoffs: tuple[int, ...] = CUTOFFS) -> Recipe:
    """A recipe of text that reads words instead of bytes, with a tied adaptive softmax of these cut-offs."""
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
_LSTM = LSTMConfig(vocab_size=0, dim=216, layers=2)
_SLOTS = SlotsConfig(slots=32, temperature=0.125)
_MEMFORMER = MemformerConfig(vocab_size=0, encoder_layers=2, decoder_layers=2, memory=_SLOTS)
_MEMORIES: dict[str, ModelConfig] = {
    "": _MODEL,
    "linear": replace(_MODEL, attention=LinearConfig()),
    "cached": replace(_MODEL, cache=_CACHE),
    "cached-unwritten": replace(_MODEL, cache=_CACHE.unwritten()),
    "xl": _XL,
    "window": _MODEL,
    "xl-cached": replace(_XL, cache=_CACHE),
    "cached-xl-no-memory": replace(_XL, attention=RelativeConfig(memory=0), cache=_CACHE),
    "compressive": replace(_XL, attention=CompressiveConfig(memory=128, compressed=128, ratio=4)),
    "lstm": _LSTM,
    "memformer": replace(_MEMFORMER, dim=64, mlp=176, segment=64, norm="rms", activation="swiglu"),
    "memory-transformer": MemoryTransformerConfig(vocab_size=0, layers=4, segment=256),
    "rmt": RMTConfig(vocab_size=0, layers=4),
    "armt": ARMTConfig(vocab_size=0, layers=4),
    "words": _WORDS,
    "words-cached": replace(_WORDS, cache=GRC(length=32, block=16, scope="stream")),
}
_ABOUT = about_lines("""
-: Bytes of a file or folder (default: Python's standard library), softmax attention to the last 256 bytes
linear: text with linear attention: its running sums cover the whole document
cached: text with a gated cache per stream: 32 slots, updated every 64 bytes
cached-unwritten: text-cached with a cache that is never written: the cached branch without a memory
xl: text with Transformer-XL: relative positions, and a memory of the 256 bytes before the segment
window: text under a name that says what its memory is: softmax attention to a window of the last 256 bytes
xl-cached: text-xl with a gated cache per stream beside its memory of 256 bytes
cached-xl-no-memory: text-xl with a gated cache per stream in place of its memory: 32 slots, updated every 64 bytes
compressive: text with a Compressive Transformer: 128 bytes before the segment, and 128 slots for the 512 before these
lstm: text with an LSTM of two layers, which has as many parameters as the Transformer
memformer: text with Memformer: 32 slots written every 64 bytes, gradients through 8 segments by memory replay
memory-transformer: text with a Memory Transformer: 16 learned tokens in front of each segment of 256 bytes, and no \
recurrence
rmt: text with a Recurrent Memory Transformer: 16 tokens rewritten every 64 bytes, gradients through 8 segments
armt: text-rmt with an associative memory in each layer: a matrix of 192 × 128, written by 16 tokens every 64 bytes
words: Words of a file or folder such as WikiText-2, Transformer-XL with a memory of the 64 words before the segment
words-cached: text-words with a gated cache per stream beside its memory: 32 slots, updated every 16 words
""")
_THROUGH_SEGMENTS = ("memformer", "rmt", "armt")  # a segment of 64 bytes at a time, with gradient through 8 of them


@family("text-{memory}", memory=_MEMORIES)
def text(memory: str) -> Recipe:
    """Language models of text, one per kind of memory."""
    words, through = memory.startswith("words"), memory in _THROUGH_SEGMENTS
    rollout = RolloutConfig(segments=8 if through else 1)
    recipe = Recipe(
        about=_ABOUT[memory],
        model=_MEMORIES[memory],
        data=TextConfig(segment=64 if words or through else 256),
        optim=cosine(1e-3 if memory == "armt" else 3e-3, warmup=0.05),
        train=TrainConfig(1000 if through else 2000, batch_size=16, valid_rows=-1, test_rows=-1, rollout=rollout),
    )
    return in_words(recipe, cutoffs=(2_000, 10_000)) if words else recipe


_DOCUMENT = 2048  # bytes
_SIZES: dict[str, Any] = {"dim": 128, "layers": 4, "num_heads": 4, "mlp": 512}
_BLOCKS: dict[str, Any] = {"vocab_size": 0, **_SIZES, "norm": "pre", "activation": "gelu"}  # of the Transformers below
_ROTARY = transformer(**_SIZES, position="rotary")
_XL_16 = transformer(**_SIZES, position="none", attention=RelativeConfig(memory=16))
_RECURRENT = replace(_ROTARY, num_heads=8, position="none")
_DELTA: dict[str, Any] = {"key_width": 12, "value_width": 12}
_STATES: dict[str, ModelConfig] = {
    "xl": _XL_16,
    "cached": replace(_XL_16, attention=RelativeConfig(memory=0), cache=GRC(length=16, block=16, scope="stream")),
    "xl-cached": replace(_XL_16, attention=RelativeConfig(memory=8), cache=GRC(length=8, block=8, scope="stream")),
    "compressive": replace(_XL_16, attention=CompressiveConfig(memory=8, compressed=8, ratio=4)),
    "rmt": RMTConfig(**_BLOCKS, memory=TokensConfig(64)),
    "armt": ARMTConfig(**_BLOCKS, memory=AssociationsConfig(16, key_dim=8, nu=1)),
    "memformer": replace(_MEMFORMER, segment=32, decoder_reads=True),
    "linear": replace(_ROTARY, num_heads=8, position="sinusoidal", scale_embedding=True, attention=LinearConfig()),
    "retention": replace(_RECURRENT, attention=RetentionConfig(key_width=16, value_width=16)),
    "gla": replace(_RECURRENT, attention=GLAConfig(key_width=16, value_width=16)),
    "mamba2": replace(_RECURRENT, attention=Mamba2Config(key_width=12, value_width=16)),
    "delta": replace(_RECURRENT, attention=DeltaConfig(**_DELTA)),
    "gated-delta": replace(_RECURRENT, attention=GatedDeltaConfig(**_DELTA)),
    "kimi-delta": replace(_RECURRENT, attention=KimiDeltaConfig(**_DELTA)),
    "window": replace(_ROTARY, attention=SoftmaxConfig(window=9)),
    "lstm": _LSTM,
    "full": replace(_ROTARY, attention=SoftmaxConfig(window=_DOCUMENT)),
}
_STATE_ABOUT = about_lines("""
xl: Bytes with 32 KiB of state: Transformer-XL with the inputs of the last 16 bytes in each of 4 layers
cached: text-state-xl with a gated cache per stream in place of its memory: 16 slots, and 16 bytes to be written
xl-cached: text-state-xl with half of its memory, and beside it a gated cache per stream of 8 slots
compressive: text-state-xl as a Compressive Transformer: 8 bytes, and 8 slots for the 32 bytes before them
rmt: text-state-xl as a Recurrent Memory Transformer: 64 memory tokens, rewritten every 64 bytes; rotary
armt: text-state-xl as an associative RMT: a matrix of 16 × 128 in each layer, written by 16 tokens every 64 bytes
memformer: text-state-xl as a Memformer: 32 slots, written every 32 bytes, and the encoding of the last 32 bytes
linear: text-state-xl with linear attention: running sums of 8 heads, 17 × 16 each; sinusoids, embeddings times √128
retention: text-state-xl with retention: sums of 8 heads, 16 × 16 each
gla: text-state-xl with gated linear attention: sums of 8 heads, 16 × 16 each
mamba2: text-state-xl with Mamba-2's mixer: sums of 8 heads, 12 × 16 each, and the last 3 inputs of its convolution
delta: text-state-xl with the delta rule: sums of 8 heads, 12 × 12 each, and the last 3 inputs of its convolution
gated-delta: text-state-delta with a decay per head (Gated DeltaNet)
kimi-delta: text-state-delta with a decay per channel (Kimi Delta Attention)
window: text-state-xl with attention to a sliding window: the keys and values of the 8 bytes before each byte
lstm: text-state-xl as an LSTM of two layers: 3.4 KiB of state, as many parameters as the Transformers
full: text-state-xl with attention to the whole document: a reference whose state grows by 4 KiB per byte, to 8 MiB
""")


@family("text-state-{memory}", memory=_STATES)
def text_state(memory: str) -> Recipe:
    """Language models of bytes whose memories have the same size: 32 KiB of state per stream, after 64 bytes.

    All have width 128, about a million parameters and the same batches: four segments per update, with gradient through
    all of them where a memory passes it on. Only the LSTM's state is smaller, and that of the reference `full` grows
    with the document, to 8 MiB. Keys and values within a segment that is read as a whole are not counted.
    """
    rollout = RolloutConfig(segments=4, replay=False)
    return Recipe(
        about=_STATE_ABOUT[memory],
        model=_STATES[memory],
        data=TextConfig(segment=64, longest=_DOCUMENT),
        optim=cosine(1e-3, warmup=100),
        train=TrainConfig(steps=1500, batch_size=4, valid_rows=2048, test_rows=8192, rollout=rollout),
    )
