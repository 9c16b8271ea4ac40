"""Dropout (Srivastava et al. 2014) with cheaper random numbers on the CPU, as a function and as a module."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import _compat
from mnemos.modes import in_graph

_STEPS = 1 << 16  # the values of a random 16-bit number
_PER_DRAW = 4  # of these in one draw of the generator, which has 64 bits


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """x with each element zero with probability p, and the others divided by 1 − p; x itself without training.

    x: any shape. The generator is PyTorch's, so seeds and exact resume hold. On the CPU one draw of 64 bits decides
    about four elements: p is rounded to a multiple of 2⁻¹⁶, and the division is by what is left after that rounding,
    so the mean is kept. With the backward pass that takes less than half of the time of `F.dropout`, which draws a
    number per element. Elsewhere, in graphs and under function transforms it is `F.dropout`.
    """
    dropped = round(p * _STEPS)
    if not training or not 0 < dropped < _STEPS or not _draws(x):
        return F.dropout(x, p, training)
    draws = torch.empty(-(-x.numel() // _PER_DRAW), dtype=torch.int64, device=x.device)
    draws.random_(torch.iinfo(torch.int64).min, None)
    kept = draws.view(torch.int16)[: x.numel()] >= dropped - _STEPS // 2
    return x * kept.view(x.shape).to(x.dtype).mul_(_STEPS / (_STEPS - dropped))


def _draws(x: Tensor) -> bool:
    # A traced program has one number of draws.
    return x.device.type == "cpu" and not in_graph() and not _compat.transformed(x)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` by `dropout`: x of any shape -> the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        """See `dropout`; the module's `inplace` does not change the result."""
        return dropout(x, self.p, self.training)

    if TYPE_CHECKING:
        __call__ = forward
