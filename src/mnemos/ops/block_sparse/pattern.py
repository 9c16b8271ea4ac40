"""Which blocks of keys each block of queries reads: the window's blocks, and the random ones, drawn from a seed."""

import functools
import random

import torch
from torch import Tensor

from mnemos._compat import constant
from mnemos.types import Device, InputError


def check_pattern(block: int, window: int, random_blocks: int, global_blocks: int) -> None:
    """Raise InputError for a pattern that does not exist."""
    if block < 1 or global_blocks < 1 or random_blocks < 0 or window < 1 or window % 2 == 0:
        raise InputError(
            f"block-sparse attention: expected block and global_blocks of at least 1, an odd window, and random_blocks "
            f"of at least 0, found {block}, {global_blocks}, {window} and {random_blocks}; change them"
        )


def is_dense(blocks: int, window: int, random_blocks: int, global_blocks: int) -> bool:
    """Whether a sequence has no more blocks than a query of the pattern reads, so that every query reads every key."""
    return blocks <= 2 * global_blocks + window + random_blocks


def window_of(row: int, blocks: int, window: int, global_blocks: int) -> range:
    """The blocks of the window of a block that is not global, without the global blocks."""
    half = window // 2
    return range(max(global_blocks, row - half), min(blocks - global_blocks, row + half + 1))


def draw_random_blocks(
    num_heads: int,
    blocks: int,
    random_blocks: int = 3,
    window: int = 3,
    global_blocks: int = 1,
    seed: int = 0,
    device: Device = None,
) -> Tensor:
    """The random blocks of each head and each block that is not global: [H, blocks − 2·global_blocks, random_blocks].

    They are distinct, and drawn uniformly from the blocks that are neither global nor in the window. Equal arguments
    give equal blocks, in every process and version: the draw uses only `random.Random(seed).random()`, whose sequence
    Python keeps. Where every query reads every key (`is_dense`) no block is drawn: [H, 0, random_blocks].
    Cost: O(H·blocks·random_blocks); the last draws are kept. Raises InputError for a pattern that does not exist.
    """
    check_pattern(1, window, random_blocks, global_blocks)
    if is_dense(blocks, window, random_blocks, global_blocks):
        return torch.empty(num_heads, 0, random_blocks, dtype=torch.int64, device=device)
    drawn = _constant(num_heads, blocks, random_blocks, window, global_blocks, seed)
    shape = num_heads, blocks - 2 * global_blocks, random_blocks
    return torch.tensor(drawn, dtype=torch.int64, device=device).view(shape)


@constant  # compilers cannot trace random.Random
def _constant(heads: int, blocks: int, count: int, window: int, ends: int, seed: int) -> tuple[int, ...]:
    return _drawn(heads, blocks, count, window, ends, seed)


@functools.lru_cache(maxsize=64)
def _drawn(heads: int, blocks: int, count: int, window: int, ends: int, seed: int) -> tuple[int, ...]:
    """Floyd's sampling without replacement, for each head and row in turn."""
    uniform = random.Random(seed).random
    found: list[int] = []
    for _ in range(heads):
        for row in range(ends, blocks - ends):
            near = window_of(row, blocks, window, ends)
            others = blocks - 2 * ends - len(near)
            chosen: list[int] = []
            for last in range(others - count, others):
                number = int(uniform() * (last + 1))
                chosen.append(last if number in chosen else number)
            found += (ends + number + (len(near) if ends + number >= near.start else 0) for number in chosen)
    return tuple(found)
