"""Distinct ListOps samples as one endless stream: parallel, resumable, the same whatever the number of workers."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mnemos.types import InputError

from . import listops_generate
from .arrays import Rows
from .listops_generate import Rules, SampleBlock, generate_block, read_block

PATIENCE = 256  # blocks in a row (up to a million draws) without one new sample before giving up


class Position(NamedTuple):
    """Where a stream stands: the next sample not looked at, and the 16-byte digests of all that it has given."""

    block: int = 0
    row: int = 0
    seen: bytes = b""


class SampleStream:
    """The distinct samples of (rules, seed), in one order that depends on nothing else.

    Blocks are made in the order of their numbers, by this process (`workers` = 1) or by as many others, dealt round
    robin and read back in order; a sample equal to an earlier one is left out. `position` is a value that can be
    stored; a stream started from it goes on with exactly the samples that this one would have given next.
    Close it, or use it in a `with`. Memory: 16 bytes and a set's entry for every sample given.
    """

    def __init__(self, rules: Rules, seed: int, workers: int = 1, position: Position | None = None):
        _check(rules)
        if seed < 0 or workers < 1:
            raise InputError(f"listops: expected seed >= 0 and workers >= 1, found {seed} and {workers}")
        position = position or Position()
        self._next, self._row = position.block, position.row
        self._seen = dict.fromkeys(position.seen[i : i + 16] for i in range(0, len(position.seen), 16))
        self._workers: list[subprocess.Popen[bytes]] = []
        if workers == 1:
            self._blocks: Iterator[SampleBlock] = (
                generate_block(rules, seed, block) for block in itertools.count(position.block)
            )
        else:
            self._workers = [_start(rules, seed, position.block + i, workers) for i in range(workers)]
            self._blocks = self._deal()
        self._block: SampleBlock | None = None

    @property
    def position(self) -> Position:
        """Where the stream stands now."""
        return Position(self._next, self._row, b"".join(self._seen))

    def take(self, count: int) -> Rows:
        """The next `count` samples (at least one). Raises InputError where the rules seem to have no more."""
        found: list[Rows] = []
        missing, barren = count, 0
        while missing:
            if self._block is None:
                self._block = next(self._blocks)
            new = self._unseen(self._block, missing)
            found.append(new)
            missing -= len(new)
            barren = 0 if len(new) else barren + 1
            if barren > PATIENCE:
                raise InputError(
                    f"listops: expected {count} more distinct samples, found {count - missing} and then none in "
                    f"{PATIENCE} blocks of draws; ask for fewer or allow more lengths"
                )
        return Rows.joined(found)

    def _unseen(self, block: SampleBlock, limit: int) -> Rows:
        """Up to `limit` new samples of a block, from the row where the stream stands; moves the stream on."""
        text = block.tokens.tobytes()
        ends = np.cumsum(block.lengths).tolist()
        chosen = np.zeros(len(ends), bool)
        row, left = self._row, limit
        start = ends[row - 1] if row else 0
        while row < len(ends) and left:
            digest = hashlib.blake2b(text[start : ends[row]], digest_size=16).digest()
            if digest not in self._seen:
                self._seen[digest] = None
                chosen[row] = True
                left -= 1
            start = ends[row]
            row += 1
        self._row = row
        if row == len(ends):
            self._next, self._row, self._block = self._next + 1, 0, None
        tokens = block.tokens[np.repeat(chosen, block.lengths)]
        return Rows.ragged(tokens, block.lengths[chosen], block.labels[chosen])

    def _deal(self) -> Iterator[SampleBlock]:
        while True:
            for worker in self._workers:
                assert worker.stdout is not None
                yield read_block(worker.stdout)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            assert worker.stdout is not None
            worker.kill()
            worker.stdout.close()
            worker.wait()
        self._workers = []

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def generate(rules: Rules, seed: int, count: int, workers: int = 0) -> Rows:
    """The first `count` samples of the stream; `workers` = 0 takes one a core where there is work for them.

    Shows its progress if it takes more than two seconds. Cost: 65 µs a sample of Long Range Arena's
    lengths on one core.
    """
    if not workers:
        heavy = count * max(1, rules.min_length) > 10**7  # below, one core is done about as soon as workers start
        workers = min(16, os.cpu_count() or 1) if heavy else 1
    pieces = []
    with SampleStream(rules, seed, workers) as stream, _Progress("ListOps samples", count) as progress:
        while count:
            pieces.append(stream.take(min(count, 2000)))
            count -= len(pieces[-1])
            progress.advance(len(pieces[-1]))
    return Rows.joined(pieces)


class _Progress:
    """A progress bar on standard error that appears after two seconds, and goes away at the end."""

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, total, 0
        self._shown_from = time.monotonic() + 2
        self._bar: Any = None

    def __enter__(self) -> "_Progress":
        return self

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is None and time.monotonic() > self._shown_from:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(self._title, total=self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


def _start(rules: Rules, seed: int, first: int, step: int) -> "subprocess.Popen[bytes]":
    # A program of its own, not multiprocessing: it loads numpy alone, and a caller's script needs no main guard.
    # -P keeps this folder out of its path, where a file of ours could stand before one of Python's.
    program = [sys.executable, "-P", listops_generate.__file__]
    return subprocess.Popen([*program, json.dumps(rules), str(seed), str(first), str(step)], stdout=subprocess.PIPE)


def _check(rules: Rules) -> None:
    """Raise InputError for rules that no sample can meet."""
    low, high = rules.min_length, rules.max_length
    if low < 0 or high < low + 2:
        raise InputError(f"listops: expected 0 <= min_length < length < max_length, found {low} and {high}")
    if rules.max_depth < 1 or rules.max_arguments < 2:
        raise InputError(
            "listops: expected max_depth >= 1 and max_arguments >= 2, "
            f"found {rules.max_depth} and {rules.max_arguments}"
        )
    if not 0 <= rules.digit_probability <= 1:
        raise InputError(f"listops: expected digit_probability between 0 and 1, found {rules.digit_probability}")
    longest = 1
    for _ in range(rules.max_depth - 1):
        longest = min(2 + rules.max_arguments * longest, high)
    if longest <= low:
        raise InputError(
            f"listops: no sample of depth {rules.max_depth} with up to {rules.max_arguments} arguments is longer than "
            f"{longest} tokens, but min_length is {low}; lower it or allow deeper trees"
        )
