"""Associative memory (ARMT, Rodkin et al. 2024): a matrix, written by a delta rule. See README.md and reference.py."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.errors import InputError
from mnemos.ops.precision import full_precision
from mnemos.ops.signature import Signature

__all__ = ["associative_read", "associative_write", "dpfp"]

GUARD = 1e-5  # bounded=False: added to every zᵀφ, so that an empty memory reads as 0
CHECK_READ = Signature("associative_read", matrix="B F M", normaliser="B F", q="B T F")
CHECK_WRITE = Signature("associative_write", matrix="B F M", normaliser="B F", k="B T F", v="B T M", beta="B T")


def dpfp(x: Tensor, nu: int = 3) -> Tensor:
    """Deterministic parameter-free projection (Schlag et al. 2021), of length 1: x [.., d] to φ(x) [.., 2·nu·d].

        r = [max(x, 0) ; max(−x, 0)]     φ_j = r ⊙ roll(r, j), j = 1 … nu     φ = [φ_1 ; … ; φ_nu]/‖·‖

    roll(r, j)_i = r_(i−j), cyclically: each feature is the product of two entries, so that vectors of different
    directions have nearly orthogonal features. φ is 0 where all products are. Computed in float32 at least.
    Cost: O(nu·d) per row. Raises InputError for nu below 1.
    """
    if nu < 1:
        raise InputError(f"dpfp: expected nu of at least 1, found {nu}; raise it")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    both = torch.cat([F.relu(wide), F.relu(-wide)], -1)
    return F.normalize(torch.cat([both * both.roll(j, -1) for j in range(1, nu + 1)], -1), dim=-1)


def associative_read(matrix: Tensor, normaliser: Tensor, q: Tensor, bounded: bool = True) -> Tensor:
    """What a memory A with normaliser z holds for features φ(q): y = Aᵀφ(q)/max(zᵀφ(q), 1).

    bounded=False: the published y = Aᵀφ(q)/(zᵀφ(q) + 10⁻⁵), for a memory that was written so. matrix [B, F, M],
    normaliser [B, F], q [B, T, F], all φ of `dpfp` -> [B, T, M] in the matrix's dtype. An empty memory (zeros) reads as
    0. Cost: O(B·T·F·M). Raises InputError for shapes that do not fit.
    """
    CHECK_READ(matrix=matrix, normaliser=normaliser, q=q)
    with full_precision(matrix.device.type):
        q = q.to(matrix.dtype)
        return (q @ matrix) / _weight(q @ normaliser[..., None], bounded)


def associative_write(
    matrix: Tensor, normaliser: Tensor, k: Tensor, v: Tensor, beta: Tensor, bounded: bool = True
) -> tuple[Tensor, Tensor]:
    """The memory after a delta rule has written T pairs of features φ(k_i) and values v_i, all at once:

        γ_i = 1 − zᵀφ_i/‖φ_i‖², 0 to 1     z' = z + Σ_i γ_i·φ_i     w_i = max(z'ᵀφ_i, 1)
        n_i = max(Σ_j φ_jᵀφ_i, 1)          s_i = min(w_i/n_i, 1)     A' = A + Σ_i β_i·s_i·φ_i·(v_i − Aᵀφ_i/w_i)ᵀ

    n_i counts the keys of this call that are like key i: in an empty memory, T equal pairs read afterwards as one. What
    was held is multiplied by a matrix with eigenvalues in 0 … 1, and Σ β_i·‖v_i‖ at most is added. bounded=False: the
    published write, s_i = 1 and w_i = zᵀφ_i + 10⁻⁵, whose eigenvalues have no bound. A key that the memory holds
    already has γ = 0: its value is replaced and the normaliser stays. Every pair is compared with the matrix before the
    call, not with the other pairs.

    matrix [B, F, M], normaliser [B, F], k [B, T, F] not negative and of length 1 or 0, v [B, T, M], beta [B, T] from 0
    to 1 -> the new matrix and normaliser. Cost: O(B·T·F·M). Raises InputError for shapes that do not fit.
    """
    CHECK_WRITE(matrix=matrix, normaliser=normaliser, k=k, v=v, beta=beta)
    with full_precision(matrix.device.type):
        k, v, beta = k.to(matrix.dtype), v.to(matrix.dtype), beta.to(matrix.dtype)
        before = k @ normaliser[..., None]
        new = (1 - before).clamp(0, 1)  # ‖φ‖ is 1, or φ is 0 and adds nothing
        after = normaliser + (new * k).sum(1)
        weight = _weight(k @ after[..., None] if bounded else before, bounded)
        change = beta[..., None] * (v - (k @ matrix) / weight)
        if bounded:
            alike = (k @ k.sum(1)[..., None]).clamp(min=1)
            change = change * (weight / alike).clamp(max=1)
        return matrix + k.mT @ change, after


def _weight(product: Tensor, bounded: bool) -> Tensor:
    """The denominator from zᵀφ."""
    return product.clamp(min=1) if bounded else product + GUARD
