"""Kahan-compensated sums: a float32 state that stays accurate over any number of tokens.

A float32 sum of n numbers has a rounding error of about √n/2 units in the last place. Kahan's method stores the
rounding error `low` of each sum x, and adds it to the next number:

    x' = fl(x + d)    low' = d − (x' − x)    with d = low + (next number)

A backend may have a function `compensated` for it; for the others `carry` sums the φ(k)·vᵀ of a call a second time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable

from .feature_maps import FeatureMap

RUN = 256  # tokens that are summed without compensation


@exportable
class CompensatedState(NamedTuple):
    """A `LinearState` and its rounding errors: the sums are s + s_low and z + z_low.

    s, s_low [B, H, D', M] and z, z_low [B, H, D']. A row of zeros is a new sequence. Gradients flow through s and z;
    s_low and z_low are constants.
    """

    s: Tensor
    z: Tensor
    s_low: Tensor
    z_low: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "sums"


def carry(
    before: CompensatedState,
    after: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    phi: FeatureMap | None,
) -> CompensatedState:
    """The compensated state after a call with k [B, T, H, D], v [B, T, H, M] and phi, to be applied to k, or None.

    after: (s, z) as the backend returned them; the gradients of the new state are theirs. Cost: O(B·T·H·D'·M), in
    runs of RUN tokens.
    """
    with torch.no_grad():
        s, z, s_low, z_low = before
        for a in range(0, k.shape[1], RUN):
            here = slice(a, a + RUN)
            keys, values = k[:, here].to(s.dtype), v[:, here].to(s.dtype)
            keys = keys if phi is None else phi(keys)
            if mask is not None:
                hidden = ~mask[:, here, None, None]
                keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
            s, s_low = add(s, s_low + torch.einsum("bthd,bthm->bhdm", keys, values))
            z, z_low = add(z, z_low + keys.sum(1))
    # The difference of two numbers this close is exact: the value is s, and the gradient is that of `after`.
    s, z = (end + (x - end).detach() for end, x in zip(after, (s, z), strict=True))
    return CompensatedState(s, z, s_low, z_low)


def add(x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """x + more and its rounding error, which is exact if |x| ≥ |more|."""
    new = x + more
    return new, more - (new - x)
