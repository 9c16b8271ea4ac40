"""A faster step of a model in a search: a fused kernel for few rows, packed matrices for many.

With a few rows a token costs as much for starting operations and calling modules as for the arithmetic, and the kernel
does neither. With many rows the products of packed matrices are faster than the kernel's. Where there is no kernel, an
encoder-decoder has a short way: the same operations without what surrounds them in the modules. It reads the weights
once per search, and does for all layers once what is the same in all (who is whose past). The state is the model's own.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import has_forward_hooks, has_global_forward_hooks, packed_products, with_children
from mnemos.attention.cross import CrossAttention
from mnemos.attention.softmax import SoftmaxAttention, attend
from mnemos.memory.branched import BranchedKeyValues
from mnemos.models.blocks import MLP
from mnemos.models.encoder_decoder import DecoderBlock, EncoderDecoder, EncoderDecoderState, visible_tokens
from mnemos.types import Output

from .fused import ROWS, fused_step

LEAST = 200_000  # weights of a matrix from which on packing saves time; smaller ones stay in the caches


def packed(model: nn.Module) -> nn.Module:
    """The model for decoding without gradient: `logits, state = packed(model)(x, state)`, to rounding the model's.

    Linear layers in float32 on a CPU with at least `LEAST` weights use a copy of their matrix in the order in which
    oneDNN reads it: with 5 rows they take a third of the time, with 160 two thirds. All else is shared with the model.
    A copy is made at the first use, of the weight as it is then: make a new packed model after weights change. A write
    could not be noticed, because PyTorch does not count those of its fused optimisers. Modules with hooks stay as they
    are. Cost: the copies are as large as the matrices, and take about as long to make as to read and write them.
    """
    if packed_products() is None or has_global_forward_hooks():
        return model
    return _packed(model)


def _packed(module: nn.Module) -> nn.Module:
    if type(module) is nn.Linear:
        return PackedLinear(module) if _fits(module) else module
    children = {name: _packed(child) for name, child in module.named_children()}
    if all(child is children[name] for name, child in module.named_children()):
        return module
    return with_children(module, children)


def _fits(layer: nn.Linear) -> bool:
    weight = layer.weight
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.numel() >= LEAST and not has_forward_hooks(layer)


class PackedLinear(nn.Module):
    """A linear layer that multiplies by a packed copy of its matrix where no gradient is needed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self._copy: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The layer's own weight [out, in]."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        layer = self.layer
        weight = layer.weight
        products = packed_products()
        fits = x.dtype == weight.dtype == torch.float32 and not torch.is_grad_enabled() and x.numel() > 0
        if products is None or not fits or torch.is_autocast_enabled("cpu") or weight.is_inference():
            return F.linear(x, weight, layer.bias)
        pack, product = products
        if self._copy is None:
            self._copy = pack(weight.detach())
        return product(x, self._copy, layer.bias)


Map = Callable[[Tensor], Tensor]
FEW = 40  # rows up to which the kernel of softmax attention is faster than products of packed matrices


class _Layer(NamedTuple):
    """The maps of a decoder block, [R, ·] -> [R, ·]."""

    norms: tuple[Map, Map, Map]
    qkv: Map
    output: Map
    query: Map
    read_output: Map
    expand: Map
    activation: Map
    contract: Map


class DecoderStep:
    """`logits, state = DecoderStep(model)(tokens, state)`, to rounding the model's, without gradient, in eval mode.

    tokens [R, 1]. Modules, settings and large weights are read when the step is made and first used: make a new one
    after changing them. short: whether inference mode is safe, because no module that the step calls keeps a tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kernel = fused_step(model)
        plain = isinstance(model, EncoderDecoder) and _plain(model)
        self.short = self.kernel.fused or plain
        self.few = FEW if plain or not self.kernel.fused or self.kernel.plan.attention else ROWS

    @functools.cached_property
    def packed(self) -> nn.Module:
        """The model with packed matrices."""
        return packed(self.kernel.model)

    @functools.cached_property
    def way(self) -> "_ShortWay | None":
        """The short way through a decoder with softmax attention, if the model is one."""
        return _ShortWay(self.packed) if isinstance(self.packed, EncoderDecoder) and _plain(self.kernel.model) else None

    def __call__(self, x: Tensor, state: Any) -> Output:
        """See the class."""
        if self.kernel.fused and x.shape[1] == 1 and len(x) <= self.few:
            return self.kernel(x, state)
        if self.way is None or x.shape[1] != 1 or not isinstance(state, EncoderDecoderState):
            return self.packed(x, state)
        if not all(isinstance(layer, BranchedKeyValues) for layer in state.layers):
            return self.packed(x, state)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or len(x) != len(state.seen):
            return self.packed(x, state)
        return self.way(x, state)


class _ShortWay:
    """The operations of an encoder-decoder's step for branched rows."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.model, self.heads = model, model.config.num_heads
        self.pre = model.config.norm == "pre"
        self.layers = [_layer(block) for block in model.decoder]
        self.final = _norm(model.decoder_norm) if self.pre else None

    def __call__(self, x: Tensor, state: EncoderDecoderState) -> Output:
        y = self.model.embedded(x, state.seen)[:, 0]
        first: BranchedKeyValues = state.layers[0]
        visible, seen, copies = first.visible_after(), state.seen + 1, first.copies
        scores = torch.zeros(visible.shape, dtype=y.dtype, device=y.device).masked_fill_(~visible, -torch.inf)
        own = scores.unflatten(0, (-1, copies))[:, None]
        source = state.source
        read = visible_tokens(source.valid)
        after, pre = [], self.pre
        for layer, before, (keys, values) in zip(self.layers, state.layers, source.layers, strict=True):
            norms = layer.norms
            q, k, v = layer.qkv(norms[0](y) if pre else y).view(-1, copies, 3, self.heads, keys.shape[-1]).unbind(2)
            new = before.extended(k, v, visible, seen)
            after.append(new)
            z = attend(q, new.k, new.v, own, False).reshape(y.shape)
            y = layer.output(z).add_(y) if pre else norms[0](layer.output(z).add_(y))
            q = layer.query(norms[1](y) if pre else y).view(len(keys), -1, self.heads, keys.shape[-1])
            z = attend(q, keys, values, read, False).reshape(y.shape)
            y = layer.read_output(z).add_(y) if pre else norms[1](layer.read_output(z).add_(y))
            z = layer.contract(layer.activation(layer.expand(norms[2](y) if pre else y)))
            y = z.add_(y) if pre else norms[2](z.add_(y))
        logits = self.model.head(y if self.final is None else self.final(y))
        return logits[:, None], EncoderDecoderState(seen, source, tuple(after))


def _plain(model: Any) -> bool:
    """Whether all modules of the decoder are as the model builds them, without hooks, and its attention is softmax."""
    if type(model) is not EncoderDecoder or model.training or has_global_forward_hooks():
        return False
    for block in model.decoder:
        attention = block.attention
        if type(attention) is not SoftmaxAttention or attention.window is not None or attention.rotary:
            return False
        if attention.kv_heads != attention.num_heads or attention.query_norm is not None:
            return False
        if (type(block), type(block.read), type(block.mlp)) != (DecoderBlock, CrossAttention, MLP):
            return False
        if block.norm != model.config.norm or any(has_forward_hooks(part) for part in block.modules()):
            return False
    return not has_forward_hooks(model)


def _layer(block: DecoderBlock) -> _Layer:
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, SoftmaxAttention)
    return _Layer(
        norms=(_norm(block.attention_norm), _norm(block.read_norm), _norm(block.mlp_norm)),
        qkv=_linear(attention.qkv),
        output=_linear(attention.output),
        query=_linear(block.read.query),
        read_output=_linear(block.read.output),
        expand=_linear(mlp.expand),
        activation=mlp.activated,
        contract=_linear(mlp.contract),
    )


def _linear(layer: nn.Module) -> Map:
    """The layer's product, without the call of a module where it is a plain one."""
    if type(layer) is not nn.Linear:
        return layer.forward
    weight, bias = layer.weight, layer.bias
    return lambda x: F.linear(x, weight, bias)


def _norm(layer: nn.Module) -> Map:
    if type(layer) is not nn.LayerNorm:
        return layer
    shape, weight, bias, eps = layer.normalized_shape, layer.weight, layer.bias, layer.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
