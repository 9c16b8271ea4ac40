"""The random generators of a process: seeded, taken down and put back, all of them together."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """Seed PyTorch (CPU and every GPU), Python's and NumPy's generators, so that what follows is reproducible."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  # the legacy generator is the one that others draw from


def seed_process(value: int, rank: int) -> None:
    """Seed the generators of one process of several: far apart for every (seed, rank)."""
    seed(int(np.random.SeedSequence((value, rank)).generate_state(1)[0]))


def take() -> dict[str, Any]:
    """Where every generator stands, as tensors and plain values that a checkpoint can hold."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, gauss),
    }


def put(taken: dict[str, Any]) -> None:
    """Put every generator back where `take` found it (GPUs: as many as there were and still are)."""
    torch.set_rng_state(taken["torch"])
    for device, state in enumerate(taken["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
    random.setstate(taken["python"])
    kind, keys, *rest = taken["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))  # noqa: NPY002


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace: looking at a model must not change its training."""
    taken = take()
    try:
        yield
    finally:
        put(taken)
