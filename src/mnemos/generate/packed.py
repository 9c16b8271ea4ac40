"""A model with its large matrices packed for few rows: what decoding spends its time on."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import has_forward_hooks, has_global_forward_hooks, packed_products, with_children

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
