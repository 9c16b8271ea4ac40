"""Random numbers as a function of where they are used: one seed, and a path of integers below it."""

import numpy as np

from mnemos.types import InputError

TRAIN, VALID, TEST, ORDER, SPLIT = range(5)  # the first step of a path, so that no two uses share numbers


def generator(seed: int, *path: int) -> np.random.Generator:
    """The generator at `path` below `seed`, the same whenever it is asked for. Raises InputError for a seed < 0."""
    if seed < 0:
        raise InputError(f"seed: expected an integer of 0 or more, found {seed}; give a positive one")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=path)))
