"""Reformer attention (Kitaev et al. 2020) as published: in chunks of the tokens sorted by hash. See README.md."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mnemos.ops.checks import check_dropout
from mnemos.ops.precision import full_precision
from mnemos.types import Device, InputError, check_mask

from .chunked import attend_in_chunks

__all__ = ["bucket_factors", "check_settings", "draw_rotations", "reformer_attention", "unit"]


def reformer_attention(
    qk: Tensor,
    v: Tensor,
    rotations: Tensor | Sequence[Tensor],
    chunk: int = 32,
    causal: bool = True,
    mask: Tensor | None = None,
    look_back: int = 1,
    look_ahead: int = 0,
    dropout: float = 0.0,
    last: int | None = None,
) -> Tensor:
    """y_i = Σ_r exp(z_i^r − z_i)·o_i^r, z_i = log Σ_r exp z_i^r: attention in chunks, combined over rounds.

    In round r the tokens are sorted by (bucket, position), where a token's bucket is argmax([xR; −xR]), and cut into
    chunks of c. o_i^r is softmax attention of token i over its own chunk and its neighbours, and z_i^r the logarithm
    of its normaliser. The scores are q_i·k_j with keys of length one, k = q/|q|. A token reads itself only if it can
    read no other token. Causal: only tokens at earlier positions. The chunks of all rounds form one circle: the first
    chunk of a round looks back to the last chunk of the round before. README.md says why.

    qk [B, T, H, D], v [B, T, H, M]. rotations [R, H or 1, D, n/2], or several of these, whose hashes are combined
    (`draw_rotations`): R rounds. mask [B, T] bool, True = valid: an invalid token is read by no other, is sorted to the
    end of every round, and has the result 0. look_back, look_ahead: the numbers of neighbouring chunks. dropout: the
    fraction of the weights dropped. last: compute only the outputs of the last so many tokens. -> y [B, T or last, H,
    M] in v's dtype, computed in float32 (float64 for float64).

    T ≥ 0, of any divisibility. At T ≤ c there is one chunk and no hash: y is softmax attention. Later tokens enter no
    earlier output, but they move the borders of chunks, and so decide which earlier tokens are read.
    Hashing has no gradient; qk gets the gradients of queries and of keys.
    Cost: O(T·R·W·c·(D + M)·H) time for W = 1 + look_back + look_ahead chunks, and O(T·R·(D + M)·H) memory.
    Raises InputError for shapes, dtypes, chunk or dropout that do not fit.
    """
    given = (rotations,) if isinstance(rotations, Tensor) else tuple(rotations)
    _check(qk, v, given, mask, dropout, last)
    check_settings(len(given[0]), chunk, 2 * given[0].shape[-1], look_back, look_ahead)
    b, t, h, _ = qk.shape
    keep = t if last is None else last
    if mask is not None:
        qk, v = (x.masked_fill(~mask[..., None, None], 0) for x in (qk, v))
    if not keep or not b:
        return v[:, t - keep :]
    wide = torch.float64 if torch.float64 in (qk.dtype, v.dtype) else torch.float32
    with full_precision(v.device.type):
        bucket = None
        if t > chunk:
            with torch.no_grad():
                bucket = hashed(qk, given).flatten(0, 1)
        q, k, values = (x.to(wide).transpose(1, 2).flatten(0, 1) for x in (qk, unit(qk), v))
        valid = None if mask is None else mask.repeat_interleave(h, 0)
        window = range(-look_back, look_ahead + 1)
        y = attend_in_chunks(q, k, values, bucket, valid, chunk, window, causal, dropout, keep)
    y = y.unflatten(0, (b, h)).transpose(1, 2).to(v.dtype)
    return y if mask is None else y.masked_fill(~mask[:, t - keep :, None, None], 0)


def unit(x: Tensor) -> Tensor:
    """x/√(|x|² + D·10⁻⁶) over the last axis, in float32 at least: length one, with a bounded derivative at 0."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6 * x.shape[-1])


def _check(
    qk: Tensor, v: Tensor, rotations: tuple[Tensor, ...], mask: Tensor | None, dropout: float, last: int | None
) -> None:
    if not (qk.dim() == v.dim() == 4 and qk.is_floating_point() and v.is_floating_point()) or (
        qk.shape[:3] != v.shape[:3]
    ):
        raise InputError(
            f"expected floating qk [B, T, H, D] and v [B, T, H, M], found {qk.dtype} {tuple(qk.shape)} and "
            f"{v.dtype} {tuple(v.shape)}"
        )
    b, t, h, d = qk.shape
    shapes = [tuple(rotation.shape) for rotation in rotations]
    fits = [len(shape) == 4 and shape[1] in (1, h) and shape[2] == d and shape[3] > 0 for shape in shapes]
    if not fits or not all(fits) or len({shape[0] for shape in shapes}) > 1:
        raise InputError(
            f"expected rotations [rounds, {h} or 1, {d}, buckets/2] of one number of rounds for qk {tuple(qk.shape)}, "
            f"found {shapes}; draw them with draw_rotations"
        )
    check_mask(mask, (b, t))
    check_dropout(dropout)
    if last is not None and not 0 <= last <= t:
        raise InputError(f"last: expected 0 to {t} tokens, found {last}; use None for all")


ONE_HASH = 128  # more buckets are the pairs of two hashes: one hash alone costs O(T·buckets), quadratic at T/c buckets


def bucket_factors(length: int, chunk: int, buckets: int | None = None) -> tuple[int, ...]:
    """The numbers of buckets of the hashes whose combination a round uses: even numbers.

    buckets None: twice the number of chunks, 2·⌈length/chunk⌉, as the paper recommends. More than 128 buckets are the
    pairs of two hashes of about √buckets buckets each; there are then at least `buckets` pairs.
    """
    wanted = 2 * -(-length // chunk) if buckets is None else buckets
    if wanted <= ONE_HASH:
        return (wanted,)
    first = _even(wanted**0.5)
    return first, _even(wanted / first)


def draw_rotations(
    rounds: int,
    heads: int,
    width: int,
    factors: tuple[int, ...],
    generator: torch.Generator | None = None,
    device: Device = None,
) -> tuple[Tensor, ...]:
    """Standard normal numbers [rounds, heads, width, n/2] for each hash of n buckets, drawn from `generator`.

    None: PyTorch's default generator. A generator draws on its own device, so that equal seeds give equal rotations.
    """
    source = device if generator is None else generator.device
    shapes = [(rounds, heads, width, n // 2) for n in factors]
    return tuple(torch.randn(*shape, generator=generator, device=source).to(device) for shape in shapes)


def hashed(qk: Tensor, rotations: tuple[Tensor, ...]) -> Tensor:
    """The bucket of every token in every round, [B, H, R, T]: h₁ + n₁·h₂ + n₁·n₂·h₃ … of the hashes of each factor."""
    found, size = rotation_hash(qk, rotations[0]), 2 * rotations[0].shape[-1]
    for rotation in rotations[1:]:
        found = found + size * rotation_hash(qk, rotation)
        size *= 2 * rotation.shape[-1]
    return found


def rotation_hash(x: Tensor, rotations: Tensor) -> Tensor:
    """argmax([xR; −xR]) in every round: x [B, T, H, D], rotations [R, H or 1, D, n/2] -> buckets [B, H, R, T] below n.

    Computed in float32 (float64 for float64), because lower precision would put similar tokens into different buckets.
    No gradient. Cost: O(T·H·R·D·n/2) multiply-adds, one round in memory at a time.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, buckets = x.detach().transpose(1, 2).to(wide), []
    for rotation in rotations.to(wide):
        turned = x @ rotation
        buckets.append(torch.cat([turned, -turned], -1).argmax(-1))
    return torch.stack(buckets, 2)


def check_settings(rounds: int, chunk: int, buckets: int | None, look_back: int, look_ahead: int) -> None:
    """Raise InputError for impossible numbers of rounds, tokens per chunk, buckets or neighbouring chunks."""
    if rounds < 1 or chunk < 1 or (buckets is not None and (buckets < 2 or buckets % 2)):
        raise InputError(
            "expected at least one round, one token per chunk and an even number of buckets (or None), found "
            f"{rounds=}, {chunk=}, {buckets=}; change them"
        )
    if look_back < 0 or look_ahead < 0:
        raise InputError(f"expected at least 0 neighbouring chunks, found {look_back=}, {look_ahead=}; use 0 for none")


def _even(x: float) -> int:
    """The least even number of at least x."""
    return 2 * -(-int(-(-x // 1)) // 2)
