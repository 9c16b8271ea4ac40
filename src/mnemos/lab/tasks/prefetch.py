"""Batches that PyTorch's DataLoader computes in advance: the same values in the same order as without workers."""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from mnemos._compat import end_workers
from mnemos.errors import one_line
from mnemos.types import InputError

Key = TypeVar("Key")
Result = TypeVar("Result")
BatchNumber = tuple[int, int, int]  # index, batch size, seed
_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


def prefetch(
    make: Callable[[Key], Result], keys: Iterable[Key], workers: int, options: Mapping[str, Any] = _DEFAULTS
) -> Iterator[Result]:
    """Yield make(key) for every key, in order; `workers` processes compute up to two results each in advance.

    `make` must be a pure function, and picklable where processes are not forked (macOS, Windows). options: arguments
    of DataLoader. The processes end with the iterator: when it is exhausted, closed or garbage-collected.
    """
    if not workers:
        yield from map(make, keys)
        return
    from torch.utils.data import DataLoader

    results = None
    options = {**options, "worker_init_fn": partial(_begin, options.get("worker_init_fn"))}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*suggested max number of worker.*")  # the user chose the number
            loader: Any = DataLoader(
                _Calls(make),  # type: ignore[arg-type]
                batch_size=None,
                sampler=keys,
                num_workers=workers,
                collate_fn=_unchanged,
                generator=torch.Generator(),  # the default would draw from the training's generator
                **options,
            )
            results = iter(loader)
        for result in results:
            if isinstance(result, InputError):
                raise result
            yield result
    except RuntimeError as error:
        if str(error).startswith("Caught "):  # of what reads the data, as without workers
            raise
        problem = one_line(error)
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


def _begin(begin: Callable[[int], None] | None, worker: int) -> None:
    # A terminal sends Ctrl-C to all processes, and the parent process ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if begin is not None:
        begin(worker)


class Prefetched(Generic[Key, Result]):
    """Training batches, by (index, batch size, seed), that `workers` processes make in advance, one after the other.

    For a batch that does not follow the one before, the processes begin anew: the data may be usable there alone.
    keys(number): the keys of that batch and of all later ones; it must hold no reference to the owner of this object,
    so that the processes end when the owner is garbage-collected.
    """

    def __init__(
        self,
        make: Callable[[Key], Result],
        keys: Callable[[BatchNumber], Iterator[Key]],
        workers: int,
        options: Mapping[str, Any] = _DEFAULTS,
    ) -> None:
        if workers < 0:
            raise InputError(f"data.workers: expected at least 0, found {workers}; raise it")
        self._make, self._keys, self._workers, self._options = make, keys, workers, options
        self._stream: Any = None  # yields batch `_next` and the batches after it
        self._next: BatchNumber | None = None
        self._last: tuple[BatchNumber, Result] | None = None

    def batch(self, index: int, batch_size: int, seed: int) -> Result:
        number = (index, batch_size, seed)
        if not self._workers:
            return self._make(next(self._keys(number)))
        if self._last is not None and self._last[0] == number:  # what a training begins with was read to see its form
            return self._last[1]
        if number != self._next:
            self.close()
            self._stream = prefetch(self._make, self._keys(number), self._workers, self._options)
        try:
            result = next(self._stream)
        except BaseException:
            self.close()
            raise
        self._next, self._last = (index + 1, batch_size, seed), (number, result)
        return result

    def close(self) -> None:
        """End the worker processes. Batches can still be asked for."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._next = self._last = None
