"""Results computed in advance by worker processes: the same values in the same order as without workers."""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from mnemos._compat import end_workers
from mnemos.types import InputError

Key = TypeVar("Key")
Result = TypeVar("Result")


def ahead(make: Callable[[Key], Result], keys: Iterable[Key], workers: int) -> Iterator[Result]:
    """Yield make(key) for every key, in order. `workers` processes compute up to two results each in advance.

    `make` must be a pure function. On systems that do not fork processes (macOS, Windows) it must also be picklable.
    The processes end with the iterator: when it is exhausted, closed or garbage-collected. With 0 workers, `make` is
    called in this process. Raises InputError if `make` does, or if a worker process dies.
    """
    if not workers:
        yield from map(make, keys)
        return
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*suggested max number of worker.*")  # the user chose the number
        loader: Any = DataLoader(
            _CallsAsDataset(make),  # type: ignore[arg-type]
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=_ignore_interrupt,
            generator=torch.Generator(),  # the default would draw from the training's generator
        )
        results = iter(loader)
    try:
        for result in results:
            if isinstance(result, InputError):
                raise result
            yield result
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise InputError(f"data.workers: a process that reads data died ({problem}); set fewer workers, or 0") from None
    finally:
        end_workers(results)


class _CallsAsDataset:
    """The function as a map-style data set: dataset[key] is make(key).

    An InputError is returned as a result. If it were raised, the DataLoader would replace its one line by a traceback.
    """

    def __init__(self, make: Callable[[Any], object]) -> None:
        self.make = make

    def __getitem__(self, key: object) -> object:
        try:
            return self.make(key)
        except InputError as error:
            return error


def _unchanged(value: object) -> object:
    return value


def _ignore_interrupt(_: int) -> None:
    """Ignore SIGINT: a terminal sends Ctrl-C to all processes, and the parent process ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
