"""How much a decoder attends to each token of its source, for one pair of sentences."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.attention.cross import CrossAttention
from mnemos.models.encoder_decoder import Pair
from mnemos.modes import evaluating


def source_attention(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """The weights of the last decoder layer's attention to the source, the mean over heads: [T, S], rows add up to 1.

    source [1, S], target [1, T] int64: one pair, without padding; target: what the decoder reads. The weights are
    softmax(q·kᵀ/√d) of each head, computed beside the forward, whose kernels do not return them. Raises ValueError for
    a model without a `CrossAttention`.
    """
    layers = [module for module in model.modules() if isinstance(module, CrossAttention)]
    if not layers:
        raise ValueError(f"expected a model with attention to a source, found {type(model).__name__} without one")
    found: list[Tensor] = []

    def record(layer: Any, given: tuple[Any, ...], _: object) -> None:
        q = layer.query(given[0]).unflatten(-1, (layer.num_heads, -1))
        scores = torch.einsum("bthd,bshd->bhts", q, given[1][0]) / q.shape[-1] ** 0.5
        found.append(scores.softmax(-1).mean(1)[0])

    hook = layers[-1].register_forward_hook(record)
    try:
        with torch.no_grad(), evaluating(model):
            model(Pair(source, target, None))
    finally:
        hook.remove()
    return found[-1]
