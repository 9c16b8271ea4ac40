"""Random numbers as a function of a seed and a path of integers that names their use."""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from mnemos.generators import kept
from mnemos.types import InputError

# The first element of a path. It keeps the random numbers of different uses apart.
TRAIN, VALID, TEST, ORDER, SPLIT, AUGMENT = range(6)


def generator(seed: int, *path: int) -> np.random.Generator:
    """The generator of (seed, path): each call returns the same numbers. Raises InputError for a seed below 0."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, path)))


@contextlib.contextmanager
def global_generators() -> Iterator[Callable[..., None]]:
    """Seed the global generators of Python, NumPy and PyTorch (CPU), for libraries that draw from them.

    The context yields `set_seed(seed, *path)`, which seeds all three generators at each call. When the context ends,
    their previous states are restored.
    """

    def set_seed(seed: int, *path: int) -> None:
        numbers = _sequence(seed, path).generate_state(3)
        random.seed(int(numbers[0]))
        np.random.seed(numbers[1])  # noqa: NPY002
        torch.default_generator.manual_seed(int(numbers[2]))  # torch.manual_seed would also seed the GPUs

    with kept():
        yield set_seed


def _sequence(seed: int, path: tuple[int, ...]) -> np.random.SeedSequence:
    if seed < 0:
        raise InputError(f"seed: expected an integer of at least 0, found {seed}; set another seed")
    return np.random.SeedSequence(seed, spawn_key=path)
