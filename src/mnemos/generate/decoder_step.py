"""A faster step of an encoder-decoder in a search: the same operations, without what surrounds them in the modules.

With a few rows a token costs as much for starting operations and calling modules as for the arithmetic. This step reads
the weights once per search, does for all layers once what is the same in all (who is whose past), and multiplies by
packed matrices. Its state is the model's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import has_forward_hooks, has_global_forward_hooks
from mnemos.attention.cross import CrossAttention
from mnemos.attention.softmax import SoftmaxAttention, attend
from mnemos.memory.branched import BranchedKeyValues
from mnemos.models.blocks import MLP
from mnemos.models.encoder_decoder import EncoderDecoder, EncoderDecoderState, visible_tokens
from mnemos.models.encoder_decoder_blocks import DecoderBlock
from mnemos.types import Output

from .packed import packed

Map = Callable[[Tensor], Tensor]


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

    tokens [R, 1]. Branched rows of a decoder with softmax attention (`step.fast`) take the short way; everything else
    is computed by the model with packed matrices. Modules, settings and large weights are read when the step is made
    and first used: make a new one after changing them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = packed(model)
        self.fast = isinstance(model, EncoderDecoder) and _plain(model)
        if isinstance(self.model, EncoderDecoder) and self.fast:
            self.pre = self.model.config.norm == "pre"
            self.layers = [_layer(block) for block in self.model.decoder]
            self.final = _norm(self.model.decoder_norm) if self.pre else None
            self.heads = self.model.config.num_heads

    def __call__(self, x: Tensor, state: Any) -> Output:
        """See the class."""
        if not self.fast or x.shape[1] != 1 or not isinstance(state, EncoderDecoderState):
            return self.model(x, state)
        if not all(isinstance(layer, BranchedKeyValues) for layer in state.layers):
            return self.model(x, state)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or len(x) != len(state.seen):
            return self.model(x, state)
        return self._step(x, state)

    def _step(self, x: Tensor, state: EncoderDecoderState) -> Output:
        assert isinstance(self.model, EncoderDecoder)
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


def _plain(model: EncoderDecoder) -> bool:
    """Whether all modules of the decoder are as the model builds them, without hooks, and its attention is softmax."""
    if type(model) is not EncoderDecoder or model.training or has_global_forward_hooks():
        return False
    for block in model.decoder:
        attention = block.attention
        if type(attention) is not SoftmaxAttention or attention.window is not None or attention.rotary:
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
