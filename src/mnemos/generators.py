"""Random numbers: the generators of a process, and numbers as a function of a seed and of their use.

The generators of a process are PyTorch's (of the CPU and of every accelerator in use) and the global ones of Python
and NumPy; they are seeded, recorded and restored together.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import InputError

# The first element of a path of `generator`. It keeps the random numbers of different uses apart.
TRAIN, VALID, TEST, ORDER, SPLIT, AUGMENT = range(6)

Snapshot = dict[str, Any]  # by generator: tensors and plain values, which a checkpoint can store
Access = tuple[Callable[[], Any], Callable[[Any], Any]]  # what reads and what sets the state of a generator


def seed(value: int) -> None:
    """Seed the generators of PyTorch (CPU and accelerators), Python and NumPy, so later draws are reproducible."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  # the global generator, which libraries draw from


def seed_process(value: int, rank: int) -> None:
    """Seed the generators of one of several processes. Seeds for different (value, rank) are unrelated."""
    seed(int(np.random.SeedSequence((value, rank)).generate_state(1)[0]))


def accesses() -> dict[str, Access]:
    """The generators of the process by name; those of an accelerator if this process has initialised it."""
    every: dict[str, Access] = {
        "cpu": (torch.get_rng_state, torch.set_rng_state),
        "python": (random.getstate, random.setstate),
        "numpy": (lambda: np.random.get_state(legacy=False), np.random.set_state),  # noqa: NPY002
    }
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        initialised = getattr(module, "is_initialized", lambda: True)()
        for index in range(torch.accelerator.device_count() if initialised else 0):
            # MPS has one device, and its functions take no device.
            where = {} if accelerator.type == "mps" else {"device": torch.device(accelerator.type, index)}
            access = functools.partial(module.get_rng_state, **where), functools.partial(module.set_rng_state, **where)
            every[f"{accelerator.type}:{index}"] = access
    return every


def take() -> Snapshot:
    """The states of all generators."""
    return {name: _plain(read()) for name, (read, _) in accesses().items()}


def put(snapshot: Snapshot) -> None:
    """Set every generator to its state in `snapshot`. States of accelerators that this machine lacks are ignored."""
    for name, (_, write) in accesses().items():
        if name in snapshot:
            write(_numpy(snapshot[name]) if name == "numpy" else snapshot[name])


@contextlib.contextmanager
def preserve() -> Iterator[None]:
    """Restore the generators after the block, so that an evaluation does not change the training that follows it."""
    snapshot = take()
    try:
        yield
    finally:
        put(snapshot)


def _plain(value: object) -> Any:
    """NumPy arrays as tensors of signed integers with the same bits, because PyTorch cannot pickle unsigned tensors."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(f"i{value.itemsize}"))
    return value.item() if isinstance(value, np.generic) else value


def _numpy(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _numpy(child) for key, child in value.items()}
    return value.numpy().view(f"u{value.element_size()}") if isinstance(value, Tensor) else value


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

    with preserve():
        yield set_seed


def _sequence(seed: int, path: tuple[int, ...]) -> np.random.SeedSequence:
    if seed < 0:
        raise InputError(f"seed: expected an integer of at least 0, found {seed}; set another seed")
    return np.random.SeedSequence(seed, spawn_key=path)
