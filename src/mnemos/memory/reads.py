"""What earlier forwards read of a stored cache, so that activation checkpointing repeats them with the same content."""

import threading
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from mnemos._compat import backward_node_number, next_node_number, repeats_saved_tensors, to_be_repeated, write_count
from mnemos.types import InputError

_CONTENTS = 8  # that are kept: the forwards before one backward


@dataclass
class _Read:
    """Reads of one content: the number of autograd's next node at the first and at the last of them."""

    content: Tensor
    writes: int | None  # to the cache before
    thread: int
    first: int
    last: int
    repeated: bool = False


class Reads:
    """The contents of one cache that forwards read which may be repeated in a backward pass.

    A repeated forward finds its first one by the numbers of autograd's nodes, which count in the order of the forward:
    non-reentrant checkpointing repeats for a node that was added after the read, reentrant checkpointing for a node
    that was added before it. Memory: a copy of the cache for every forward under checkpointing before its backward, 8
    at most; none without checkpointing. Copies and pickles of a model start without reads.
    """

    def __init__(self) -> None:
        self._kept: list[_Read] = []
        self._forgotten = -1  # the last read of the contents that were dropped

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()

    def add(self, cache: Tensor, content: Tensor) -> None:
        """Keep `content`, a copy of `cache`, if this forward may be repeated. Drops what was repeated since."""
        if any(read.repeated for read in self._kept):
            self._drop([read for read in self._kept if read.repeated])
        if to_be_repeated():
            self._append(content, _writes(cache))

    def again(self, cache: Tensor) -> Tensor:
        """The content that the forward read which is being repeated; a copy of `cache` if no forward was kept.

        Raises InputError if it is not known which.
        """
        if not self._kept and self._forgotten < 0:
            return cache.clone()
        read = self._first_time()
        read.repeated = True
        if to_be_repeated():  # checkpointing inside checkpointing
            self._append(read.content, None)
            self._kept[-1].repeated = True
        return read.content

    def _first_time(self) -> _Read:
        kept, number = self._kept, backward_node_number()
        contents = {id(read.content) for read in kept}
        found = None
        if number is not None and len({read.thread for read in kept}) == 1:
            if repeats_saved_tensors():
                found = next((read for read in reversed(kept) if read.first <= number), None)
            elif number >= self._forgotten:
                found = next((read for read in kept if read.last > number), None)
        elif len(contents) == 1:
            found = kept[0]
        if found is None:
            raise InputError(
                "a stored cache: expected to know what the forward read that activation checkpointing repeats, found "
                f"{len(contents)} contents; run the backward after each forward, or all forwards inside "
                "accumulate_caches(model)"
            )
        return found

    def _append(self, content: Tensor, writes: int | None) -> None:
        now, thread = next_node_number(), threading.get_ident()
        last = self._kept[-1] if self._kept else None
        if last is not None and (last.writes, last.thread) == (writes, thread) and writes is not None:
            last.last = now
            return
        self._kept.append(_Read(content, writes, thread, now, now))
        if len({id(read.content) for read in self._kept}) > _CONTENTS:
            self._drop(self._kept[:1])

    def _drop(self, reads: list[_Read]) -> None:
        self._forgotten = max(self._forgotten, *(read.last for read in reads))
        self._kept = [read for read in self._kept if not any(read is one for one in reads)]


def _writes(cache: Tensor) -> int | None:
    """The number of writes to a cache; None in inference mode, which has no backward."""
    try:
        return write_count(cache)
    except RuntimeError:
        return None
