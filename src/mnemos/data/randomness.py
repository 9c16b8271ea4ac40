"""Random numbers as a function of where they are used: one seed, and a path of integers below it."""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from mnemos.types import InputError

# The first step of a path, so that no two uses share numbers.
TRAIN, VALID, TEST, ORDER, SPLIT, AUGMENT = range(6)


def generator(seed: int, *path: int) -> np.random.Generator:
    """The generator at `path` below `seed`, the same whenever it is asked for. Raises InputError for a seed < 0."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, path)))


@contextlib.contextmanager
def global_generators() -> Iterator[Callable[..., None]]:
    """For libraries that draw from the generators everybody shares: Python's, NumPy's and PyTorch's of the CPU.

    Inside, `seed(seed, *path)` seeds all three, each time it is called; after it, they stand where they stood.
    """
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def seed(seed: int, *path: int) -> None:
        numbers = _sequence(seed, path).generate_state(3)
        random.seed(int(numbers[0]))
        np.random.seed(numbers[1])  # noqa: NPY002
        torch.default_generator.manual_seed(int(numbers[2]))  # torch.manual_seed would seed the GPUs too

    try:
        yield seed
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(cpu)


def _sequence(seed: int, path: tuple[int, ...]) -> np.random.SeedSequence:
    if seed < 0:
        raise InputError(f"seed: expected an integer of 0 or more, found {seed}; give a positive one")
    return np.random.SeedSequence(seed, spawn_key=path)
