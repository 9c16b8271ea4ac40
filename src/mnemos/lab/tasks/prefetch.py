"""Batches that PyTorch's DataLoader computes in advance: the same values in the same order as without workers."""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mnemos._compat import end_workers, name_worker_dataset
from mnemos.types import InputError

Key = TypeVar("Key")
Result = TypeVar("Result")
BatchNumber = tuple[int, int, int]  # index, batch size, seed


class Loader(NamedTuple):
    """What the DataLoader of a user says of its worker processes.

    dataset: what `get_worker_info()` names. begin: its worker_init_fn. options: other arguments of DataLoader.
    """

    dataset: Any = None
    begin: Callable[[int], None] | None = None
    options: Mapping[str, Any] = {}


def prefetch(
    make: Callable[[Key], Result], keys: Iterable[Key], workers: int, loader: Loader | None = None
) -> Iterator[Result]:
    """Yield make(key) for every key, in order; `workers` processes compute up to two results each in advance.

    `make` must be a pure function, and picklable where processes are not forked (macOS, Windows). loader: how the
    processes begin. They end with the iterator: when it is exhausted, closed or garbage-collected.
    """
    if not workers:
        yield from map(make, keys)
        return
    from torch.utils.data import DataLoader

    loader, results = loader or Loader(), None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*suggested max number of worker.*")  # the user chose the number
            results = iter(
                DataLoader(
                    _Calls(make),  # type: ignore[arg-type]
                    batch_size=None,
                    sampler=keys,
                    num_workers=workers,
                    collate_fn=_unchanged,
                    worker_init_fn=partial(_begin, loader),
                    generator=torch.Generator(),  # the default would draw from the training's generator
                    **loader.options,
                )
            )
        for result in results:
            if isinstance(result, InputError):
                raise result
            yield result
    except RuntimeError as error:
        if str(error).startswith("Caught "):  # of what reads the data, as without workers
            raise
        problem = " ".join(str(error).split())
        raise InputError(f"data.workers: a process that reads data died ({problem}); set fewer workers") from None
    finally:
        if results is not None:
            end_workers(results)


class _Calls:
    def __init__(self, make: Callable[[Any], object]) -> None:
        self.make = make

    def __getitem__(self, key: object) -> object:
        try:
            return self.make(key)
        except InputError as error:
            return error  # raised here, the DataLoader would replace its one line by a traceback


def _unchanged(value: object) -> object:
    return value  # the default would make tensors of arrays


def _begin(loader: Loader, worker: int) -> None:
    # A terminal sends Ctrl-C to all processes, and the parent process ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if loader.dataset is not None:
        name_worker_dataset(loader.dataset)
    if loader.begin is not None:
        loader.begin(worker)


class Prefetched(Generic[Key, Result]):
    """Training batches, by (index, batch size, seed), that `workers` processes make in advance.

    A batch that does not follow the previous one is made in this process, or, with a loader, by new processes: its data
    may be usable there alone. keys(number): the keys of that batch and of all later ones; it must hold no reference to
    the owner of this object, so that the processes end when the owner is garbage-collected.
    """

    def __init__(
        self,
        make: Callable[[Key], Result],
        keys: Callable[[BatchNumber], Iterator[Key]],
        workers: int,
        loader: Loader | None = None,
    ) -> None:
        if workers < 0:
            raise InputError(f"data.workers: expected at least 0, found {workers}; raise it")
        self._make, self._keys, self._workers, self._loader = make, keys, workers, loader
        self._stream: Any = None  # yields batch `_next` and the batches after it
        self._next: BatchNumber | None = None
        self._after: BatchNumber | None = None  # the one after the batch that was asked for last
        self._last: tuple[BatchNumber, Result] | None = None  # with a loader

    def batch(self, index: int, batch_size: int, seed: int) -> Result:
        number, follower = (index, batch_size, seed), (index + 1, batch_size, seed)
        if self._last is not None and self._last[0] == number:  # what a training begins with was read to see its form
            return self._last[1]
        follows = number == self._after or self._loader is not None  # a second one in sequence: more will follow
        if self._workers and follows and number != self._next:
            self.close()
            self._stream = prefetch(self._make, self._keys(number), self._workers, self._loader)
            self._next = number
        self._after = follower
        if self._stream is None or number != self._next:
            return self._make(next(self._keys(number)))
        self._next = follower
        try:
            result = next(self._stream)
        except BaseException:
            self.close()
            raise
        if self._loader is not None:
            self._last = number, result
        return result

    def close(self) -> None:
        """End the worker processes. Batches can still be asked for."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._next = self._after = self._last = None
