"""Long ListOps (Long Range Arena): classify an expression of nested list operations by its value, a digit.

`listops_generate` draws the expressions; here are the tasks, the stream of distinct expressions, and their text.

The files of Long Range Arena are tab-separated, with the header "Source<TAB>Target" and lines that end in CR LF, as
Python's csv module writes them. They apply operators to one argument at a time, each application in parentheses:
[MAX 2 9 ] is written "( ( ( [MAX 2 ) 9 ) ] )". Parentheses have no meaning and are dropped when a file is read.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.atomic import replacing
from mnemos.config import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from . import listops_generate
from .arrays import ArrayTask, Rows
from .batch import IGNORE, Batch
from .files import special
from .generated import GeneratedConfig
from .listops_generate import CLOSE, MIN, VOCABULARY, ZERO, Rules, SampleBlock, generate_block, read_block
from .row_order import Order
from .token_task import AnsweringTask

FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}  # Long Range Arena's names
EQUALS = len(VOCABULARY)  # the token "="
PATIENCE = 256  # blocks in a row (up to a million draws) without one new sample before giving up
HEADER = "Source\tTarget"
_IDS = {text.encode(): token for token, text in enumerate(VOCABULARY) if token}
_SPACES = bytes.maketrans(b"()", b"  ")
_DEPTH = np.array([0] * MIN + [1] * (CLOSE - MIN) + [-1], np.int32)  # how a token changes the nesting depth


@register
@dataclass(frozen=True)
class ListOpsConfig(DataConfig):
    """Long ListOps, generated from `seed`, or read from the three files of Long Range Arena in the folder `path`.

    A sample is a random tree (see `listops_generate`) with min_length < length < max_length, counted in digits,
    operators and closing brackets. It has at most `max_depth` levels, the root included. An operator has 2 to
    `max_arguments` arguments; an argument above the last level is a digit with `digit_probability`. All samples are
    distinct, also between splits. They come from one stream in the order test, validation, training, so a larger
    training split does not change the other two. With `path`, the files are used whole and the sizes and rules are
    ignored.

    `workers`: processes that generate samples; 0 uses one per core for large data sets. It does not change the samples.
    `bucketed`: rows of similar length share a batch, which reduces padding from 45% to 4% on average.
    """

    name: ClassVar[str] = "listops"

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    digit_probability: float = 0.75
    train_size: int = 96_000
    valid_size: int = 2_000
    test_size: int = 2_000
    seed: int = 0
    path: str | None = None
    workers: int = 0
    bucketed: bool = True

    def build(self) -> ArrayTask:
        """The task: 10 classes and 16 token ids: 0 padding, 1–10 digits, 11–14 operators, 15 the closing bracket.

        Raises InputError for settings that no sample can meet, and for missing or malformed files.
        """
        if self.path is None:
            splits = self.generate()
            longest = self.max_length - 1
        else:
            splits = {split: read_tsv(Path(self.path) / file) for split, file in FILES.items()}
            longest = max(int(rows.lengths.max()) for rows in splits.values())
        return ArrayTask(**splits, vocab_size=len(VOCABULARY), classes=10, max_length=longest, bucketed=self.bucketed)

    def files(self) -> tuple[Path, ...]:
        """The three files in `path`; empty if the samples are generated."""
        return () if self.path is None else tuple(Path(self.path) / file for file in FILES.values())

    def generate(self) -> dict[str, Rows]:
        """Generate the samples of the three splits."""
        sizes = {"test": self.test_size, "valid": self.valid_size, "train": self.train_size}
        for split, size in sizes.items():
            if size < 1:
                raise InputError(f"data.{split}_size must be at least 1, found {size}")
        rules = Rules(self.min_length, self.max_length, self.max_depth, self.max_arguments, self.digit_probability)
        rows = _generate(rules, self.seed, sum(sizes.values()), self.workers)
        splits, first = {}, 0
        for split, size in sizes.items():
            splits[split] = rows.part(first, first + size)
            first += size
        return splits

    def export(self, folder: str | Path) -> None:
        """Write the generated splits to `folder` as the three files of Long Range Arena."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for split, rows in self.generate().items():
            write_tsv(Path(folder) / FILES[split], rows)


@register
@dataclass(frozen=True)
class ListOpsAnswersConfig(GeneratedConfig):
    """Long ListOps with its value as an answer: the tokens of an expression, then "=", where a digit is predicted.

    The expressions are those of `ListOpsConfig` with the same settings: min_length < length < max_length tokens of
    digits, operators and brackets, at most `max_depth` levels, 2 to `max_arguments` arguments, and digits above the
    last level with `digit_probability`. The defaults are those of Long Range Arena. `examples`: training expressions.
    The validation and the test split have `rows` expressions each. All are distinct, and drawn from `seed`.

    Shorter rows of a batch are padded behind "=", so the padding changes no prediction of a causal model. Rows of
    similar length share a batch.
    """

    name: ClassVar[str] = "listops-answers"

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    digit_probability: float = 0.75
    examples: int = 96_000
    rows: int = 2_000
    seed: int = 0

    def build(self) -> "ListOpsAnswers":
        """The task: 17 tokens, those of `listops` and "=", and T = max_length. Raises InputError as `listops` does."""
        for name in ("examples", "rows"):
            if getattr(self, name) < 1:
                raise InputError(f"data.{name}: expected at least 1 expression, found {getattr(self, name)}; raise it")
        rules = (self.min_length, self.max_length, self.max_depth, self.max_arguments, self.digit_probability)
        expressions = ListOpsConfig(*rules, self.examples, self.rows, self.rows, self.seed)
        return ListOpsAnswers(expressions.generate(), self.max_length)


class ListOpsAnswers(AnsweringTask):
    """The task of `ListOpsAnswersConfig` over the three splits: one counted target per row."""

    def __init__(self, splits: dict[str, Rows], max_length: int) -> None:
        self.vocab_size, self.max_length = EQUALS + 1, max_length
        self._splits = splits
        self._order = Order(len(splits["train"]), splits["train"].lengths)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Training batch `index`, in the endless order that `seed` determines. T is that of its longest row."""
        return _answer_batch(self._splits["train"], self._order.batch(index, batch_size, seed))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Batches that hold every row of a held-out split once, in the order of their lengths."""
        rows = self._splits[split]
        order = np.argsort(rows.lengths, kind="stable")
        for first in range(0, len(rows), batch_size):
            yield _answer_batch(rows, order[first : first + batch_size])

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """The number of rows in a split, which is that of its answers."""
        return len(self._splits[split])

    def epoch(self, batch_size: int) -> float:
        """The number of updates in one epoch: every training row is used once."""
        return self.size("train") / batch_size

    def written(self, row: Sequence[int]) -> str:
        """The text of tokens; padding is not written."""
        return " ".join([*VOCABULARY, "="][token] for token in row if token)


def _answer_batch(rows: Rows, chosen: NDArray[np.int64]) -> Batch:
    """Inputs and targets [B, T] of the chosen rows."""
    batch = rows.batch(chosen)
    inputs = torch.nn.functional.pad(batch.inputs, (0, 1))
    targets = torch.full_like(inputs, IGNORE)
    last = torch.from_numpy(rows.lengths[chosen])[:, None]
    inputs.scatter_(1, last, EQUALS)
    targets.scatter_(1, last, batch.targets[:, None] + ZERO)
    return Batch(inputs, targets)


class Position(NamedTuple):
    """A position in a stream: the next unread sample, and the 16-byte digests of all samples returned so far."""

    block: int = 0
    row: int = 0
    seen: bytes = b""


class SampleStream:
    """The distinct samples of (rules, seed), in an order that depends on these two alone.

    Blocks are generated by this process (`workers` = 1) or by `workers` other processes in turn, and read in the order
    of their numbers. A sample equal to an earlier one is skipped. `position` can be stored: a stream that starts from
    it continues with exactly the samples that follow. Close the stream, or use it in a `with` statement.
    Memory: 16 bytes and a dict entry for every sample returned.
    Raises InputError for a seed below 0, no workers, or rules that no sample can meet.
    """

    def __init__(self, rules: Rules, seed: int, workers: int = 1, position: Position | None = None):
        _check_rules(rules)
        if seed < 0 or workers < 1:
            raise InputError(
                f"data.seed, data.workers: expected seed >= 0 and workers >= 1, found {seed} and {workers}"
            )
        position = position or Position()
        self._next, self._row = position.block, position.row
        self._seen = dict.fromkeys(position.seen[i : i + 16] for i in range(0, len(position.seen), 16))
        self._workers: list[subprocess.Popen[bytes]] = []
        if workers == 1:
            self._blocks: Iterator[SampleBlock] = (
                generate_block(rules, seed, block) for block in itertools.count(position.block)
            )
        else:
            self._workers = [_start_worker(rules, seed, position.block + i, workers) for i in range(workers)]
            self._blocks = self._read_in_turn()
        self._block: SampleBlock | None = None

    @property
    def position(self) -> Position:
        """The current position, from which a new stream can continue."""
        return Position(self._next, self._row, b"".join(self._seen))

    def take(self, count: int) -> Rows:
        """The next `count` ≥ 1 samples. Raises InputError after `PATIENCE` blocks in a row without a new sample."""
        found: list[Rows] = []
        missing, blocks_without_new = count, 0
        while missing:
            if self._block is None:
                self._block = next(self._blocks)
            new = self._unseen(self._block, missing)
            found.append(new)
            missing -= len(new)
            blocks_without_new = 0 if len(new) else blocks_without_new + 1
            if blocks_without_new > PATIENCE:
                raise InputError(
                    f"listops: expected {count} more distinct samples, found {count - missing}, then none in "
                    f"{PATIENCE} blocks; reduce the split sizes, or widen min_length to max_length"
                )
        return Rows.joined(found)

    def _unseen(self, block: SampleBlock, limit: int) -> Rows:
        """Return up to `limit` new samples of a block, from the current row on, and advance the position."""
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

    def _read_in_turn(self) -> Iterator[SampleBlock]:
        while True:
            for worker in self._workers:
                assert worker.stdout is not None
                yield read_block(worker.stdout)

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            assert worker.stdout is not None
            worker.kill()
            worker.stdout.close()
            worker.wait()
        self._workers = []

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def generate(rules: Rules, seed: int, count: int, workers: int = 0) -> Rows:
    """The first `count` samples of the stream. `workers` = 0 uses one process per core if the work is large enough.

    Shows a progress bar if it takes more than two seconds. Cost: 65 µs per sample of Long Range Arena's lengths on
    one core.
    """
    if not workers:
        heavy = count * max(1, rules.min_length) > 10**7  # below, one core finishes about when workers have started
        workers = min(16, os.cpu_count() or 1) if heavy else 1
    pieces = []
    with SampleStream(rules, seed, workers) as stream, _Progress("ListOps samples", count) as progress:
        while count:
            pieces.append(stream.take(min(count, 2000)))
            count -= len(pieces[-1])
            progress.advance(len(pieces[-1]))
    return Rows.joined(pieces)


# Runs that are compared build the same task one after the other. Keeping 100 MB saves seconds for each.
_generate = lru_cache(maxsize=1)(generate)


class _Progress:
    """A progress bar on standard error that appears after two seconds and is removed at the end."""

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

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _start_worker(rules: Rules, seed: int, first: int, step: int) -> "subprocess.Popen[bytes]":
    # A separate program instead of multiprocessing: it loads numpy only, and a caller's script needs no main guard.
    # -P keeps this folder out of its module path, where our files could hide modules of Python.
    program = [sys.executable, "-P", listops_generate.__file__]
    return subprocess.Popen([*program, json.dumps(rules), str(seed), str(first), str(step)], stdout=subprocess.PIPE)


def _check_rules(rules: Rules) -> None:
    """Raise InputError for rules that no sample can meet."""
    low, high = rules.min_length, rules.max_length
    if low < 0 or high < low + 2:
        raise InputError(
            f"listops: expected 0 <= min_length < length < max_length, found min_length {low} and max_length {high}"
        )
    if rules.max_depth < 1 or rules.max_arguments < 2:
        raise InputError(
            f"listops: expected max_depth >= 1 and max_arguments >= 2, found max_depth {rules.max_depth} and "
            f"max_arguments {rules.max_arguments}"
        )
    if not 0 <= rules.digit_probability <= 1:
        raise InputError(f"listops: expected digit_probability between 0 and 1, found {rules.digit_probability}")
    longest = 1
    for _ in range(rules.max_depth - 1):
        longest = min(2 + rules.max_arguments * longest, high)
    if longest <= low:
        raise InputError(
            f"listops: expected min_length below {longest}, the longest sample with max_depth {rules.max_depth} and "
            f"max_arguments {rules.max_arguments}, found {low}; lower min_length or raise max_depth"
        )


def evaluate(source: str) -> int:
    """The value (0 to 9) of a ListOps text, with or without parentheses. Raises InputError if it is malformed.

    It shares no code with the generator, so that tests can compare its values with the generator's labels.
    """
    open_lists: list[list[str]] = []
    value: str | None = None  # of the whole expression, once it is complete
    for place, word in enumerate(source.replace("(", " ").replace(")", " ").split()):
        if value is not None:
            raise InputError(
                f"listops: word {place}: expected the end after a complete expression, found {word!r}; remove it"
            )
        if word in ("[MIN", "[MAX", "[MED", "[SM"):
            open_lists.append([word])
            continue
        if word == "]":
            if not open_lists or len(open_lists[-1]) < 2:
                raise InputError(
                    f"listops: word {place}: expected an operator with arguments before ']', found none; remove it"
                )
            operator, *arguments = open_lists.pop()
            word = str(_apply(operator, sorted(map(int, arguments))))
        elif len(word) != 1 or word not in "0123456789":
            raise InputError(
                f"listops: word {place}: expected a digit, ], [MIN, [MAX, [MED or [SM, found {word!r}; correct it"
            )
        if open_lists:
            open_lists[-1].append(word)
        else:
            value = word
    if value is None:
        raise InputError(
            f"listops: expected a complete expression, found {len(open_lists)} operators not closed; complete the text"
        )
    return int(value)


def _apply(operator: str, ordered: list[int]) -> int:
    if operator == "[MIN":
        return ordered[0]
    if operator == "[MAX":
        return ordered[-1]
    if operator == "[SM":
        return sum(ordered) % 10
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def to_text(tokens: NDArray[np.uint8], parentheses: bool = True) -> str:
    """The text of one sample's tokens [T], with or without Long Range Arena's parentheses."""
    if not parentheses:
        return " ".join(VOCABULARY[token] for token in tokens)
    words: list[str] = []
    open_lists: list[list[int]] = []  # the operator's index in words, and its number of arguments so far
    for token in tokens.tolist():
        if MIN <= token < CLOSE:
            open_lists.append([len(words), 0])
            words.append(VOCABULARY[token])
            continue
        words.append(VOCABULARY[token])
        if token == CLOSE:
            place, arguments = open_lists.pop()
            words[place] = "( " * (arguments + 1) + words[place]
            words.append(")")
        if open_lists:
            open_lists[-1][1] += 1
            words.append(")")
    return " ".join(words)


def write_tsv(path: str | Path, rows: Rows) -> None:
    """Write samples in Long Range Arena's format. The file is written atomically."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        file.write(HEADER + "\r\n")
        for i in range(len(rows)):
            file.write(f"{to_text(rows.row(i))}\t{rows.labels[i]}\r\n")


def read_tsv(path: str | Path) -> Rows:
    """The samples of a Long Range Arena file, with or without parentheses.

    Raises InputError, with the line, for a file that is missing, empty, truncated or malformed, for a word that is
    not in the vocabulary and for a label that is not a digit. Labels are not checked against the text; see `evaluate`.
    Cost: about 60 µs per sample of 1,000 tokens.
    """
    path = Path(path)
    if kind := special(path):
        raise InputError(f"{path}: expected a ListOps file, found {kind}; write its content to a file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: expected a ListOps file, but it cannot be opened ({error.strerror}); check the path"
        ) from None
    samples: list[bytes] = []
    labels = bytearray()
    with file:
        header = file.readline().strip().decode(errors="replace")
        if header != HEADER:
            raise InputError(f"{path}: line 1: expected the header {HEADER!r}, found {header[:40]!r}; check the file")
        for number, line in enumerate(file, 2):
            where = f"{path}: line {number}"
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 2:
                raise InputError(
                    f"{where}: expected 2 fields, Source and Target, separated by a tab, found {len(fields)}; check "
                    "the file"
                )
            label = fields[1].strip()
            if len(label) != 1 or not label.isdigit():
                raise InputError(
                    f"{where}: expected a label from 0 to 9, found {label[:20].decode(errors='replace')!r}; correct it"
                )
            samples.append(_encode(fields[0], where))
            labels += label
    if not samples:
        raise InputError(f"{path}: expected samples after the header, found none; check the file")
    return Rows.ragged(
        np.frombuffer(b"".join(samples), np.uint8),
        np.array([len(sample) for sample in samples]),
        np.frombuffer(bytes(labels), np.uint8) - ord("0"),
    )


def _encode(source: bytes, where: str) -> bytes:
    """The tokens of a source, one byte each. Raises InputError unless they form one complete expression."""
    words = source.translate(_SPACES).split()
    try:
        encoded = bytes([_IDS[word] for word in words])
    except KeyError as error:
        word = error.args[0][:20].decode(errors="replace")
        raise InputError(f"{where}: expected digits, ], [MIN, [MAX, [MED or [SM, found {word!r}; correct it") from None
    if not encoded:
        raise InputError(f"{where}: expected an expression before the tab, found none; check the file")
    tokens = np.frombuffer(encoded, np.uint8)
    nesting = np.cumsum(_DEPTH[tokens])
    if nesting[-1] != 0 or (nesting[:-1] <= 0).any():
        raise InputError(f"{where}: expected one complete expression, found brackets that do not match; check the file")
    if ((tokens[:-1] >= MIN) & (tokens[:-1] < CLOSE) & (tokens[1:] == CLOSE)).any():
        raise InputError(f"{where}: expected an argument after every operator, found an empty list; check the file")
    return encoded
