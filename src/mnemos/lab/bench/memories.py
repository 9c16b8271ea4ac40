"""The memories that are compared: one line each. A new memory is a line of `MEMORIES`."""

from collections.abc import Callable
from dataclasses import dataclass
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

MOST = 16  # slots of a memory


@dataclass(frozen=True)
class Sizes:
    """What a benchmark fixes for every memory."""

    dim: int = 64
    segment: int = 32  # tokens that a memory reads at a time, and that a window spans
    layers: int = 2  # of Transformers, as their heads
    num_heads: int = 1
    mlp: int = 128  # hidden width; 0: no MLPs
    tied: bool = False  # the head shares the embedding's weights

    @property
    def slots(self) -> int:
        return min(MOST, self.segment)

    @property
    def fields(self) -> dict[str, Any]:
        return {"dim": self.dim, "layers": self.layers, "num_heads": self.num_heads, "mlp": self.mlp}


class Memory(NamedTuple):
    """A model, and how it reads a row: tokens per segment (0: the whole row), and segments of gradient (0: all)."""

    model: ModelConfig
    segment_length: int = 0
    horizon: int = 0


Builder = Callable[[Sizes], Memory]


def _transformer(s: Sizes, **fields: Any) -> TransformerConfig:
    head = HeadConfig(tied=s.tied)
    return TransformerConfig.classic(vocab_size=0, max_length=0, head=head, **s.fields, **fields)


def _recurrent(config: Callable[..., AttentionConfig]) -> Builder:
    """A layer that forgets or corrects, whose sums have the size of linear attention's: [D/H, D/H] a head."""

    def build(s: Sizes) -> Memory:
        width = s.dim // s.num_heads
        return Memory(_transformer(s, position="none", attention=config(key_width=width, value_width=width)))

    return build


def _segmented(s: Sizes, attention: AttentionConfig) -> Memory:
    """An attention to earlier segments, which are detached."""
    return Memory(_transformer(s, position="none", attention=attention), s.segment, 1)


def _window(s: Sizes, cache: GRC | None = None) -> Memory:
    return Memory(_transformer(s, position="rotary", attention=SoftmaxConfig(window=s.segment), cache=cache))


def _cache(s: Sizes) -> GRC:
    return GRC(length=s.slots, block=s.segment, scope="stream")


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
    return {"vocab_size": 0, "segment": s.segment, "tied": s.tied, "norm": "pre", "activation": "gelu", **s.fields}


MEMORIES: dict[str, Builder] = {
    "softmax": lambda s: Memory(_transformer(s, position="rotary")),
    "window": _window,
    "linear": lambda s: Memory(_transformer(s, scale_embedding=True, attention=LinearConfig())),  # it has sinusoids
    "retention": _recurrent(RetentionConfig),
    "gla": _recurrent(GLAConfig),
    "mamba2": _recurrent(Mamba2Config),
    "delta": _recurrent(DeltaConfig),
    "gated-delta": _recurrent(GatedDeltaConfig),
    "kimi-delta": _recurrent(KimiDeltaConfig),
    "transformer-xl": lambda s: _segmented(s, RelativeConfig(memory=s.segment)),
    "compressive": lambda s: _segmented(s, CompressiveConfig(s.segment, s.slots, min(4, s.segment // 2))),
    "rmt": lambda s: Memory(RMTConfig(memory=TokensConfig(s.slots), **_tokens(s)), s.segment),
    "armt": lambda s: Memory(ARMTConfig(memory=AssociationsConfig(s.slots), **_tokens(s)), s.segment),
    "memformer": _memformer,
    "gated-cache": lambda s: _window(s, _cache(s)),
    "gated-cache-unwritten": lambda s: _window(s, _cache(s).unwritten()),
    "lstm": lambda s: Memory(LSTMConfig(vocab_size=0, dim=s.dim, layers=s.layers, tied=s.tied)),
}
QUICK = ("softmax", "window", "linear", "gated-cache", "lstm")
