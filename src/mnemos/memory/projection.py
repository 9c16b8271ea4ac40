"""Linear maps whose weights are read directly: one for hosts, which no tool replaces, and a check of the others."""

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.types import InputError


class Projection(nn.Module):
    """y = x Wᵀ + b, x [..., in_features], with the weights and the initial values of `torch.nn.Linear`.

    It is no subclass of it. Tools that replace every Linear of a model (adapters as in LoRA, dynamic quantisation) make
    modules with other attributes, and the gates and the lift multiply by parts of their weights without calling the
    module: an adapter around them would get no gradient.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        linear = nn.Linear(in_features, out_features)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.linear(x, self.weight, self.bias)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        """Both widths."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def own_weight(module: nn.Linear | nn.LayerNorm | Projection) -> Tensor:
    """The weight of a linear map or a norm, for code that multiplies by it without calling the module.

    Raises InputError for an adapter around it (LoRA and others of PEFT), which would have no effect there, and for a
    quantised map, whose weight is no tensor.
    """
    if type(module) in (nn.Linear, Projection):
        return module.weight
    weight = module.weight
    if hasattr(module, "base_layer") or not isinstance(weight, Tensor):
        raise InputError(
            "expected a module whose weight is read directly, found an adapter or a quantised one "
            f"({type(module).__name__}), which would have no effect; leave it out of target_modules, and name the "
            "whole memory in modules_to_save"
        )
    return weight
