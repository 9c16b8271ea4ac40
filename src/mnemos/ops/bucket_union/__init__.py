"""Bucket-union attention: exactly causal attention within hash buckets, over the union of rounds. See README.md."""

import torch
from torch import Tensor

from mnemos.ops.checks import check_dropout, check_mask
from mnemos.ops.precision import full_precision
from mnemos.types import InputError

from .chunked import attend_in_windows
from .dense import attend_from_one, attend_to_all, places

__all__ = ["attend", "bucket_union_attention", "check_settings", "places", "unit"]


def bucket_union_attention(
    qk: Tensor,
    v: Tensor,
    rotations: Tensor,
    chunk: int = 32,
    causal: bool = True,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """y_i = Σ_j softmax_j(scale·q_i·k_j)·v_j over the keys j that token i can read in at least one round.

    Keys are normalised queries, k = q/|q|. In a round, token i reads the tokens of its own bucket, argmax([xR; −xR]),
    in its own chunk and the one before; the t-th valid token of a bucket, from 0, is in chunk ⌊t/c⌋. Causal: only
    tokens before i. A token does not read itself, unless it can read no other token in any round: then y_i = v_i.

    qk [B, T, H, D], v [B, T, H, M], rotations [R, H or 1, D, buckets/2]: R rounds, shared by the heads or per head.
    y [B, T, H, M] in v's dtype, computed in float32 (float64 for float64). mask [B, T] bool, True = valid: an invalid
    token is read by no other, takes no place in a chunk, and has the result 0. scale: None means 1/√D. dropout: the
    fraction of the weights dropped.

    T ≥ 0. Hashing has no gradient; qk gets the gradients of queries and of keys.
    Cost: O(T·R·c·(D + M)·H) time and O(T·(D + M + R)·H) memory; for T up to 3·R·c O(T²), which is faster there.
    Differentiable once. Raises InputError for shapes, dtypes, chunk or dropout that do not fit.
    """
    _check(qk, v, rotations, chunk, mask, dropout)
    if mask is not None:
        qk, v = (x.masked_fill(~mask[..., None, None], 0) for x in (qk, v))
    place, _ = places(qk, rotations, chunk, mask)
    return attend(qk, unit(qk), v, place, chunk, causal, scale, dropout)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Tensor,
    chunk: int,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the last T of N tokens: q [B, T, H, D], k [B, N, H, D], v [B, N, H, M] -> [B, T, H, M].

    place [B, N, H, R]: see `places`. k and v must be 0 where it is 0.
    """
    t, n, rounds = q.shape[1], k.shape[1], place.shape[3]
    wide = torch.float64 if torch.float64 in (q.dtype, v.dtype) else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with full_precision(v.device.type):
        given = q.to(wide), k.to(wide), v.to(wide), place
        if t == 1 and causal:
            return attend_from_one(*given, scale, dropout, (2 * chunk - 1) * rounds).to(v.dtype)
        if t <= dense_up_to(chunk, rounds):
            return attend_to_all(*given, causal, scale, dropout).to(v.dtype)
        q = torch.nn.functional.pad(given[0], (0, 0, 0, 0, n - t, 0))
        return attend_in_windows(q, *given[1:], chunk, causal, scale, dropout)[:, n - t :].to(v.dtype)


def dense_up_to(chunk: int, rounds: int) -> int:
    """The number of queries up to which all scores are computed. For more, windows of 3·chunk keys are fewer."""
    return 3 * chunk * rounds


def unit(x: Tensor) -> Tensor:
    """x/√(|x|² + 10⁻⁶) over the last axis, in float32 at least: length one, with a bounded derivative at 0."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def check_settings(rounds: int, buckets: int, chunk: int) -> None:
    """Raise InputError for impossible numbers of rounds, buckets or tokens per chunk."""
    if rounds < 1 or chunk < 1 or buckets < 2 or buckets % 2:
        raise InputError(
            "expected at least one round, one token per chunk and an even number of buckets, found "
            f"{rounds=}, {chunk=}, {buckets=}"
        )


def _check(qk: Tensor, v: Tensor, rotations: Tensor, chunk: int, mask: Tensor | None, dropout: float) -> None:
    if not (qk.dim() == v.dim() == 4 and qk.is_floating_point() and v.is_floating_point()) or (
        qk.shape[:3] != v.shape[:3]
    ):
        raise InputError(
            f"expected floating qk [B, T, H, D] and v [B, T, H, M], found {qk.dtype} {tuple(qk.shape)} and "
            f"{v.dtype} {tuple(v.shape)}"
        )
    b, t, h, d = qk.shape
    if rotations.dim() != 4 or rotations.shape[1] not in (1, h) or rotations.shape[2] != d:
        raise InputError(
            f"expected rotations [rounds, {h} or 1, {d}, buckets/2] for qk {tuple(qk.shape)}, found "
            f"{tuple(rotations.shape)}"
        )
    check_settings(rotations.shape[0], 2 * rotations.shape[3], chunk)
    check_mask(mask, (b, t))
    check_dropout(dropout)
