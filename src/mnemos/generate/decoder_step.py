"""The step of a model in a search: a fused kernel for few rows, the model with packed matrices for many.

With few rows a token costs as much for starting operations and calling modules as for the arithmetic, and the kernel
does neither. With many rows the products of packed matrices are faster than the kernel's.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import is_plain, packed_products, with_children
from mnemos.types import Output, State

from .fused import ROWS, fused_step

FEW = 100  # rows up to which the kernel of softmax attention is faster than products of packed matrices
LEAST = 200_000  # weights of a matrix from which on packing saves time; smaller ones stay in the caches

DecodeStep = Callable[[Tensor, State], Output]  # tokens [R, 1] and a state -> outputs [R, 1, V] and the new state


class DecoderStep:
    """`logits, state = DecoderStep(model)(tokens, state)`, to rounding the model's, without gradient, in eval mode.

    tokens [R, 1]. Modules, settings and large weights are read when the step is made and first used: make a new one
    after changing them. A search makes its own. Searches by a model whose weights do not change can share one, which
    is packed only once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kernel = fused_step(model)
        self.few = FEW if self.kernel.fused and self.kernel.plan.attention else ROWS

    @functools.cached_property
    def packed(self) -> nn.Module:
        """The model with packed matrices."""
        return pack(self.kernel.model)

    def __call__(self, x: Tensor, state: State) -> Output:
        """See the class."""
        if self.kernel.fused and x.shape[1] == 1 and len(x) <= self.few:
            return self.kernel(x, state)
        found: Output = self.packed(x, state)
        return found


def pack(model: nn.Module) -> nn.Module:
    """The model for decoding without gradient: `logits, state = pack(model)(x, state)`, to rounding the model's.

    Linear layers in float32 on a CPU with at least `LEAST` weights use a copy of their matrix in the order in which
    oneDNN reads it: with 5 rows they take a third of the time, with 160 two thirds. All else is shared with the model.
    A copy is made at the first use, of the weight as it is then: make a new packed model after weights change. A write
    could not be noticed, because PyTorch does not count those of its fused optimisers. Modules with hooks stay as they
    are. Cost: the copies are as large as the matrices, and take about as long to make as to read and write them.
    """
    if packed_products() is None:
        return model
    return _pack(model)


def _pack(module: nn.Module) -> nn.Module:
    if type(module) is nn.Linear:
        return PackedLinear(module) if _fits(module) else module
    children = {name: _pack(child) for name, child in module.named_children()}
    if all(child is children[name] for name, child in module.named_children()):
        return module
    return with_children(module, children)


def _fits(layer: nn.Linear) -> bool:
    weight = layer.weight
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.numel() >= LEAST and is_plain(layer)


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
