"""Which models the fused kernel computes, and where it finds their sizes and weights."""

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn

from mnemos._compat import has_forward_hooks, has_global_forward_hooks
from mnemos.attention.linear import LinearAttention
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.config import ModelConfig
from mnemos.models.encoder_decoder import EncoderDecoder
from mnemos.models.skeleton import skeleton
from mnemos.models.transformer import Transformer
from mnemos.native import codes, library, why_not
from mnemos.ops.linear.feature_maps import FEATURE_MAPS
from mnemos.ops.sinusoids import frequencies
from mnemos.types import likelihood_of

MAPS = [name for name in codes.FEATURE_MAPS if name in FEATURE_MAPS]  # those that the kernel has


class Plan(NamedTuple):
    """The sizes and parts of a model. `Stack`, `Layer` and `Numbers` are those of native/decode.h.

    sizes: the numbers of `Stack` up to `limit`, in its order; attention, reads: those after `weights`. embedding,
    positions (None: not learned): tables. affine: the linear layers and norms of `Stack`, then those of every `Layer`;
    None: there is none. numbers: those of `Numbers`. outputs: the shape of the logits of a row. window: of the
    attention. turned_sums: linear attention has rotary positions, so that a layer's state is a `PlacedSums`.
    """

    sizes: tuple[int, ...]
    attention: int
    reads: bool
    embedding: nn.Module
    positions: nn.Module | None
    frequencies: Tensor
    affine: list[nn.Module | None]
    numbers: tuple[float, float, float]
    outputs: tuple[int, ...]
    window: int | None
    turned_sums: bool

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.sizes[0]

    @property
    def heads(self) -> tuple[int, int]:
        """The number of heads and their width."""
        return self.sizes[2], self.sizes[1] // self.sizes[2]


def plan_of(model: Any) -> Plan:
    """The plan of a model for which `why_not_fused` finds no reason."""
    c, pairs = model.config, isinstance(model, EncoderDecoder)
    blocks = model.decoder if pairs else model.blocks
    attention = blocks[0].attention
    linear = isinstance(attention, LinearAttention)
    norm = model.decoder_norm if pairs else model.final_norm
    head = [part for part in model.head.modules() if isinstance(part, nn.Linear)]
    affine: list[nn.Module | None] = [None if c.norm == "post" else norm, head[0] if head[1:] else None, head[-1]]
    for block in blocks:
        affine += [block.attention_norm, block.attention.qkv, block.attention.output]
        affine += [block.read_norm, block.read.query, block.read.output] if pairs else [None] * 3
        affine += [block.mlp_norm, getattr(block.mlp, "gate", None), block.mlp.expand, block.mlp.contract]
    sizes = (len(blocks), c.dim, c.num_heads, c.mlp, c.vocab_size, head[0].out_features if head[1:] else 0)
    gated = c.activation == "swiglu"
    activation = codes.ACTIVATIONS["silu" if gated else c.activation]
    kinds = (c.norm == "post", c.norm == "rms", activation, gated, _map(attention) if linear else 0)
    outputs = head[-1].out_features
    position = c.position if pairs else c.positions
    rotary = c.rotary.frequencies(c.dim // c.num_heads, "cpu") if position == "rotary" else None
    return Plan(
        sizes=(*sizes, outputs, *map(int, kinds), codes.POSITIONS[position], c.max_length),
        attention=codes.ATTENTIONS["linear" if linear else "softmax"],
        reads=pairs,
        embedding=model.embedding,
        positions=model.positions if position == "learned" else None,
        frequencies=frequencies(c.dim, "cpu") if rotary is None else rotary,
        affine=affine,
        numbers=(
            blocks[0].mlp_norm.eps,
            attention.eps if linear else 0.0,
            (c.dim**0.5 if c.scale_embedding else 1.0) if pairs else c.embedding_scale,
        ),
        outputs=(1, outputs) if pairs or not c.head.classes else (outputs,),
        window=None if linear else attention.window,
        turned_sums=linear and rotary is not None,
    )


def why_not_fused(model: nn.Module) -> str:
    """Why the kernel cannot compute this model, in one line; empty if it can."""
    if library() is None:
        return why_not()
    if type(model) not in (Transformer, EncoderDecoder):
        return f"the kernel needs a mnemos.Transformer or EncoderDecoder, found {type(model).__name__}"
    if has_global_forward_hooks():
        return "there are hooks on the forward of all modules, which the kernel would skip"
    for name, part in model.named_modules():
        if has_forward_hooks(part) and not _encodes(name):
            return f"there is a hook on {name or 'the model'}, which the kernel would skip"
    config: Any = model.config
    if getattr(config, "features", 0):
        return "it reads vectors, and the kernel reads tokens"
    if config.activation not in (*codes.ACTIVATIONS, "swiglu"):
        return f"the kernel has the activations {', '.join(codes.ACTIVATIONS)} and swiglu, found {config.activation}"
    if not config.mlp:
        return "its blocks have no MLP, for which there is no kernel"
    if likelihood_of(model) is not None and not isinstance(model.head, nn.Linear):
        return f"its head is {type(model.head).__name__}, and the kernel has linear heads"
    blocks: Any = model.decoder if isinstance(model, EncoderDecoder) else model.blocks
    return next((why for block in blocks if (why := _attends(block, blocks[0]))), "") or _differs(model)


def _encodes(name: str) -> bool:
    """Whether a module is of the encoder, which a step does not run."""
    return name.startswith(("encoder", "source_"))


def _attends(block: nn.Module, first: Any) -> str:
    attention: Any = block.attention
    if type(attention) not in (LinearAttention, SoftmaxAttention):
        return f"the kernel has LinearAttention and SoftmaxAttention, found {type(attention).__name__}"
    if not attention.causal:
        return "its attention is not causal, so it has no state"
    if type(attention) is LinearAttention:
        if _map(attention) is None:
            return f"the kernel has the feature maps {' and '.join(MAPS)}, found {attention.feature_map!r}"
        if attention.compensated:
            return "its state is compensated, for which there is no kernel"
        if attention.backend not in ("auto", "native"):
            return f"its attention is computed by the backend {attention.backend!r}, and the kernel belongs to 'native'"
    if type(attention) is SoftmaxAttention and attention.kv_heads != attention.num_heads:
        return "its heads share keys and values, for which there is no kernel"
    if type(attention) is SoftmaxAttention and attention.query_norm is not None:
        return "its queries and keys are normalised, for which there is no kernel"
    same = _settings(attention) == _settings(first.attention)
    return "" if same else "its layers' attention differs in kind, heads, eps, feature map, rotary positions or window"


def _settings(attention: Any) -> tuple[Any, ...]:
    if type(attention) is LinearAttention:
        return LinearAttention, attention.num_heads, attention.eps, attention.rotary, _map(attention)
    return SoftmaxAttention, attention.num_heads, attention.rotary, attention.window


def _map(attention: LinearAttention) -> int | None:
    """The kernel's code of a feature map, None if it has none."""
    found = attention.feature_map
    return next((codes.FEATURE_MAPS[name] for name in MAPS if found in (name, FEATURE_MAPS[name])), None)


@functools.lru_cache(maxsize=16)
def _expected(config: ModelConfig) -> dict[str, tuple[type[nn.Module], str, str]]:
    """The modules that a configuration builds, by their names: type, settings, and how they print."""
    modules = skeleton(config).named_modules()
    return {name: (type(part), part.extra_repr(), str(part)) for name, part in modules if name and not _encodes(name)}


def _differs(model: Any) -> str:
    """The first part that is not as the configuration builds it; the head may have another number of outputs."""
    found = {name: part for name, part in model.named_modules() if name and not _encodes(name)}
    for name, (kind, settings, words) in _expected(model.config).items():
        other = found.pop(name, None)
        if kind is not type(other) or (other.extra_repr() != settings and not name.startswith("head")):
            return f"{name}: its configuration says {words}, found {other}"
    return f"{next(iter(found))}: a module that its configuration does not have" if found else ""
