"""Work done ahead of time by other processes: the same results, in the same order, as if it were done here."""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from mnemos.types import InputError

Key = TypeVar("Key")
Made = TypeVar("Made")


def ahead(make: Callable[[Key], Made], keys: Iterable[Key], workers: int) -> Iterator[Made]:
    """make(key) for every key, in order; by `workers` processes, two results each before they are asked for.

    `make` must be a pure function; where processes are not forked (macOS, Windows) one that can be pickled. The
    processes end with the iterator: when it is through, closed or collected. With 0 workers everything is done here.
    Raises InputError where `make` does, or where a process dies.
    """
    if not workers:
        yield from map(make, keys)
        return
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*suggested max number of worker.*")  # as many as were asked for
        loader: Any = DataLoader(
            _Calls(make),  # type: ignore[arg-type]
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # or it would draw from the one that the training draws from
        )
        results = iter(loader)
    try:
        for result in results:
            if isinstance(result, InputError):
                raise result
            yield result
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise InputError(f"data.workers: a process that reads data died ({problem}); use fewer, or 0") from None
    finally:
        results._shutdown_workers()


class _Calls:
    """The function as something that is indexed; a wrong input is a result, as an error would lose its one line."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.make(key)
        except InputError as error:
            return error


def _as_it_is(value: Any) -> Any:
    return value


def _begin(_: int) -> None:
    """A terminal's Ctrl-C reaches every process; when these end, the one that started them decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
