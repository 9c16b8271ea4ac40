"""Random rotations for Reformer attention: how many buckets a sequence needs, and one draw for them."""

import torch
from torch import Tensor

from mnemos.ops.rotation_hash import rotation_hash
from mnemos.types import Device, InputError

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
