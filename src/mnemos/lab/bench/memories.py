"""The memories that are compared: one line each. A new memory is a function in this file and a line of `MEMORIES`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from mnemos.config import AttentionConfig, ModelConfig
from mnemos.memory.associations import AssociationsConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.memory.tokens import TokensConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.segments import ARMTConfig, RMTConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig


@dataclass(frozen=True)
class Sizes:
    """What a benchmark fixes for every memory.

    dim: the width. segment: tokens that a memory reads at a time, and that a window spans. layers, num_heads: of
    Transformers. mlp: hidden width; 0: no MLPs. tied: the head shares the embedding's weights. The number of slots and
    of memory tokens is that of a segment's tokens, but at most `MOST`.
    """

    dim: int = 64
    segment: int = 32
    layers: int = 2
    num_heads: int = 1
    mlp: int = 128
    tied: bool = False

    @property
    def slots(self) -> int:
        """The number of slots of a memory."""
        return min(MOST, self.segment)


MOST = 16


class Memory(NamedTuple):
    """A model, and how it reads a row: tokens per segment (0: the row in one call), and segments of gradient (0: all).

    A memory that is detached between calls, as published, has a horizon of one segment.
    """

    model: ModelConfig
    segment_length: int = 0
    horizon: int = 0


Builder = Callable[[Sizes], Memory]


def _transformer(s: Sizes, **fields: Any) -> TransformerConfig:
    """Two sublayers per block, or attention alone; the data give vocabulary and length."""
    sizes = {"dim": s.dim, "layers": s.layers, "num_heads": s.num_heads, "mlp": s.mlp}
    return TransformerConfig.classic(vocab_size=0, max_length=0, head=HeadConfig(tied=s.tied), **{**sizes, **fields})


def _softmax(s: Sizes) -> Memory:
    return Memory(_transformer(s, position="rotary"))


def _window(s: Sizes) -> Memory:
    return Memory(_transformer(s, position="rotary", attention=SoftmaxConfig(window=s.segment)))


def _linear(s: Sizes) -> Memory:
    return Memory(_transformer(s, scale_embedding=True, attention=LinearConfig()))  # it has sinusoids


def _recurrent(config: Callable[..., AttentionConfig]) -> Builder:
    """A layer that forgets or corrects, whose sums have the size of linear attention's: [D/H, D/H] a head."""

    def build(s: Sizes) -> Memory:
        width = s.dim // s.num_heads
        return Memory(_transformer(s, position="none", attention=config(key_width=width, value_width=width)))

    return build


def _transformer_xl(s: Sizes) -> Memory:
    return Memory(_transformer(s, position="none", attention=RelativeConfig(memory=s.segment)), s.segment, 1)


def _compressive(s: Sizes) -> Memory:
    ratio = min(4, s.segment // 2)
    attention = CompressiveConfig(memory=s.segment, compressed=s.slots, ratio=ratio)
    return Memory(_transformer(s, position="none", attention=attention), s.segment, 1)


def _gated_cache(s: Sizes, write: bool = True) -> Memory:
    cache = GRC(length=s.slots, block=s.segment, scope="stream")
    model = _transformer(s, position="rotary", attention=SoftmaxConfig(window=s.segment))
    return Memory(replace(model, cache=cache if write else cache.unwritten()))


def _memformer(s: Sizes) -> Memory:
    model = MemformerConfig(
        vocab_size=0,
        dim=s.dim,
        encoder_layers=max(1, s.layers // 2),
        decoder_layers=max(1, s.layers // 2),
        num_heads=s.num_heads,
        mlp=s.mlp or 2 * s.dim,
        segment=s.segment,
        memory=SlotsConfig(slots=s.slots),
        decoder_reads=True,
        tied=s.tied,
    )
    return Memory(model, s.segment)


def _tokens(s: Sizes) -> dict[str, Any]:
    """The sizes that models of memory tokens share."""
    sizes = {"dim": s.dim, "layers": s.layers, "num_heads": s.num_heads, "mlp": s.mlp}
    return {"vocab_size": 0, "segment": s.segment, "tied": s.tied, "norm": "pre", "activation": "gelu", **sizes}


def _rmt(s: Sizes) -> Memory:
    return Memory(RMTConfig(memory=TokensConfig(s.slots), **_tokens(s)), s.segment)


def _armt(s: Sizes) -> Memory:
    return Memory(ARMTConfig(memory=AssociationsConfig(s.slots), **_tokens(s)), s.segment)


def _lstm(s: Sizes) -> Memory:
    return Memory(LSTMConfig(vocab_size=0, dim=s.dim, layers=s.layers, tied=s.tied))


MEMORIES: dict[str, Builder] = {
    "softmax": _softmax,
    "window": _window,
    "linear": _linear,
    "retention": _recurrent(RetentionConfig),
    "gla": _recurrent(GLAConfig),
    "mamba2": _recurrent(Mamba2Config),
    "delta": _recurrent(DeltaConfig),
    "gated-delta": _recurrent(GatedDeltaConfig),
    "kimi-delta": _recurrent(KimiDeltaConfig),
    "transformer-xl": _transformer_xl,
    "compressive": _compressive,
    "rmt": _rmt,
    "armt": _armt,
    "memformer": _memformer,
    "gated-cache": _gated_cache,
    "gated-cache-unwritten": lambda sizes: _gated_cache(sizes, write=False),
    "lstm": _lstm,
}
QUICK = ("softmax", "window", "linear", "gated-cache", "lstm")
