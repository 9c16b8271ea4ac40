"""Sums beside which lies what they had no digits for: token by token, for as long as you like, in float32.

A float32 sum of n tokens, one after the other, has lost about √n/2 times its last digit. Kahan's remedy is to keep of
each sum x what was rounded away, and to add it to what comes next:

    x' = fl(x + d)    low' = d − (x' − x)    with d = low + (what comes)

A backend that does so by itself has `compensated`; for any other, `carry` sums the call's φ(k)·vᵀ once more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .feature_maps import FeatureMap

BLOCK = 256  # tokens of one plain sum


class CompensatedState(NamedTuple):
    """A `LinearState` and what its numbers had no digits for: s + s_low and z + z_low are the sums.

    s, s_low [B, H, D', M] and z, z_low [B, H, D']. Zeros are a fresh row here too. The gradient of the sums is that of
    s and z: none flows through s_low and z_low, which are constants.
    """

    s: Tensor
    z: Tensor
    s_low: Tensor
    z_low: Tensor


def carry(
    before: CompensatedState,
    after: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    phi: FeatureMap | None,
) -> CompensatedState:
    """The state after a call of k [B, T, H, D], v [B, T, H, M] that took s and z to `after`, whose gradient it keeps.

    phi is still to be applied to k, or None.

    Cost: O(B·T·H·D'·M) once more, in blocks of BLOCK tokens.
    """
    with torch.no_grad():
        s, z, s_low, z_low = before
        for a in range(0, k.shape[1], BLOCK):
            here = slice(a, a + BLOCK)
            keys, values = k[:, here].to(s.dtype), v[:, here].to(s.dtype)
            keys = keys if phi is None else phi(keys)
            if mask is not None:
                hidden = ~mask[:, here, None, None]
                keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
            s, s_low = add(s, s_low + torch.einsum("bthd,bthm->bhdm", keys, values))
            z, z_low = add(z, z_low + keys.sum(1))
    # Two numbers this near have an exact difference: the value is s, the gradient that of `after`.
    s, z = (end + (x - end).detach() for end, x in zip(after, (s, z), strict=True))
    return CompensatedState(s, z, s_low, z_low)


def add(x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """x + more and what it had no digits for, exactly where |x| ≥ |more|."""
    new = x + more
    return new, more - (new - x)
