"""Long ListOps (Long Range Arena): classify an expression of nested list operations by its value, a digit.

A tree is drawn from the root (depth 1) downwards: a node above the deepest level is a digit with probability p, else an
operator with 2 to `max_arguments` arguments. All trees of a block grow together with numpy, and are dropped as soon as
they are too long, which does not change the distribution. Block b is a pure function of (rules, seed, b): raw bits of
PCG64, whose stream numpy guarantees, and integer arithmetic.
"""

import hashlib
import itertools
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.registry import register
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .batch import IGNORE, Batch
from .metrics import ANSWER
from .task import DataConfig, Split

VOCABULARY = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # token id -> text; 0 is padding
ZERO, MIN, MAX, MED, SM, CLOSE = 1, 11, 12, 13, 14, 15
EQUALS = len(VOCABULARY)  # the token "="
PATIENCE = 256  # blocks in a row (up to a million draws) without one new sample before giving up


@dataclass(frozen=True)
class Rules(DataConfig):
    """The distribution of expressions, with the defaults of Long Range Arena (see the module)."""

    name: ClassVar[str] = "listops"

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    digit_probability: float = 0.75  # of the nodes above the deepest level

    @property
    def longest(self) -> int:
        """The length of the longest tree, or `max_length` if that is less."""
        length = 1
        for _ in range(self.max_depth - 1):
            length = min(2 + self.max_arguments * length, self.max_length)
        return length

    @property
    def rules(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Rules)}


@register
@dataclass(frozen=True)
class ListOpsConfig(Rules):
    """Long ListOps, generated from `seed`.

    A sample is a random tree of at most `max_depth` levels, the root included, with min_length < length < max_length,
    counted in digits, operators and closing brackets. An operator has 2 to `max_arguments` arguments, above the deepest
    level each a digit with `digit_probability`. All samples are distinct. They come from one stream in the order test,
    validation, training, so a larger training split does not change the other two.

    `bucketed`: rows of similar length share a batch, which reduces padding from 45% to 4% on average.
    """

    name: ClassVar[str] = "listops"

    train_size: int = 96_000
    valid_size: int = 2_000
    test_size: int = 2_000
    seed: int = 0
    bucketed: bool = True

    def build(self) -> ArrayTask:
        """10 classes and 16 token ids: 0 padding, 1–10 digits, 11–14 operators, 15 the closing bracket."""
        longest = self.max_length - 1
        return ArrayTask(self.generate(), len(VOCABULARY), classes=10, max_length=longest, bucketed=self.bucketed)

    def files(self) -> tuple[()]:
        return ()

    def generate(self) -> dict[Split, Rows]:
        self.require("train_size >= 1", "valid_size >= 1", "test_size >= 1", "seed >= 0")
        bounds = self.test_size, self.test_size + self.valid_size, self.test_size + self.valid_size + self.train_size
        rows = generate(Rules(**self.rules), self.seed, bounds[2])
        return {"train": rows.part(*bounds[1:]), "valid": rows.part(*bounds[:2]), "test": rows.part(0, bounds[0])}


@register
@dataclass(frozen=True)
class ListOpsAnswersConfig(Rules):
    """Long ListOps with its value as an answer: the tokens of an expression, then "=", where a digit is predicted.

    The expressions are those of `ListOpsConfig` with the same settings: `examples` for training, `rows` in each
    held-out split, all distinct and drawn from `seed`. Rows of similar length share a batch, padded behind "=".
    """

    name: ClassVar[str] = "listops-answers"

    examples: int = 96_000
    rows: int = 2_000
    seed: int = 0

    def build(self) -> "ListOpsAnswers":
        self.require("examples >= 1", "rows >= 1")
        expressions = ListOpsConfig(
            **self.rules, train_size=self.examples, valid_size=self.rows, test_size=self.rows, seed=self.seed
        )
        return ListOpsAnswers(expressions.generate(), self.max_length)

    def files(self) -> tuple[()]:
        return ()


class ListOpsAnswers(ArrayTask):
    """The task of `ListOpsAnswersConfig`, of 17 tokens: those of `listops` and "=". One counted target per row."""

    metrics = ANSWER
    splits_rows = True

    def __init__(self, splits: dict[Split, Rows], max_length: int) -> None:
        super().__init__(splits, EQUALS + 1, classes=0, max_length=max_length, bucketed=True)

    def read(self, rows: Rows, chosen: NDArray[np.int64]) -> Batch:
        """Inputs and targets [B, T] of the chosen rows; T is one more than the length of the longest."""
        batch = rows.batch(chosen)
        inputs = torch.nn.functional.pad(batch.inputs, (0, 1))
        targets = torch.full_like(inputs, IGNORE)
        last = torch.from_numpy(rows.lengths[chosen])[:, None]
        inputs.scatter_(1, last, EQUALS)
        targets.scatter_(1, last, batch.targets[:, None] + ZERO)
        return Batch(inputs, targets)


# Runs that are compared build the same task one after the other. Keeping 100 MB saves seconds for each.
@lru_cache(maxsize=1)
def generate(rules: Rules, seed: int, count: int) -> Rows:
    """The first `count` distinct samples of (rules, seed), in an order that depends on these two alone.

    Cost: 65 µs per sample of Long Range Arena's lengths.
    """
    rules.require(
        "0 <= min_length <= max_length - 2",
        "max_depth >= 1",
        "max_arguments >= 2",
        "0 <= digit_probability <= 1",
    )
    if rules.min_length >= rules.longest:
        raise InputError(
            f"data.min_length: expected less than {rules.longest}, the greatest length of trees of {rules.max_depth} "
            f"levels and {rules.max_arguments} arguments, found {rules.min_length}; lower it, or raise data.max_depth "
            "or data.max_arguments"
        )
    # --- blocks, without the samples that were seen before ---
    parts: list[Rows] = []
    seen: set[bytes] = set()  # digests of the samples so far
    numbers, blocks_without_new = itertools.count(), 0
    while len(seen) < count:
        block = generate_block(rules, seed, next(numbers))
        text, new = block.tokens.tobytes(), np.zeros(len(block), bool)
        for row, (start, end) in enumerate(itertools.pairwise(block.starts.tolist())):
            digest = hashlib.blake2b(text[start:end], digest_size=16).digest()
            if digest not in seen and len(seen) < count:
                seen.add(digest)
                new[row] = True
        parts.append(Rows.ragged(block.tokens[np.repeat(new, block.lengths)], block.lengths[new], block.labels[new]))
        blocks_without_new = 0 if new.any() else blocks_without_new + 1
        if blocks_without_new > PATIENCE:
            raise InputError(
                f"listops: expected {count} distinct samples, found {len(seen)}, then none in {PATIENCE} blocks; "
                "reduce the split sizes, or widen min_length to max_length"
            )
    return Rows.joined(parts)


def draws(rules: Rules) -> int:
    """Trees per block: enough for vectorisation, and few enough to bound a block's memory."""
    return max(16, min(4096, 2**22 // rules.max_length))


def generate_block(rules: Rules, seed: int, block: int) -> Rows:
    """The accepted samples of one block, in the order drawn, with labels from 0 to 9. They may contain duplicates."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(block,)))
    levels, lengths = _grow(rules, bits, draws(rules))
    return _lay_out(_accepted_only(levels, (lengths > rules.min_length) & (lengths < rules.max_length)))


class _Level(NamedTuple):
    """The nodes of one depth, sorted by tree. operators, arity [P]: those that are operators, and their arguments."""

    tokens: NDArray[np.uint8]
    operators: NDArray[np.int64]
    arity: NDArray[np.int64]
    tree: NDArray[np.int64]


def _grow(rules: Rules, bits: np.random.PCG64, count: int) -> tuple[list[_Level], NDArray[np.int64]]:
    """Draw `count` trees: returns their levels and lengths. The length of a dropped tree is at least max_length."""
    threshold = np.uint64(round(rules.digit_probability * 2**32))
    choices = np.uint64(4 * (rules.max_arguments - 1))
    lengths = np.zeros(count, np.int64)
    tree = np.arange(count)
    levels = []
    for depth in range(1, rules.max_depth + 1):
        # --- the nodes of this level ---
        raw = bits.random_raw(len(tree))
        low = raw & np.uint64(0xFFFFFFFF)  # the high half decides digit or operator, the low half which one
        tokens = (ZERO + (low * np.uint64(10) >> np.uint64(32))).astype(np.uint8)
        if depth < rules.max_depth:
            operators = np.flatnonzero(raw >> np.uint64(32) >= threshold)
        else:
            operators = np.empty(0, np.int64)
        choice = (low[operators] * choices >> np.uint64(32)).astype(np.int64)
        arity = 2 + choice // 4
        tokens[operators] = MIN + choice % 4
        levels.append(_Level(tokens, operators, arity, tree))

        # --- the trees of the nodes below it ---
        owner = tree[operators]
        lengths += np.bincount(tree, minlength=count) + np.bincount(owner, minlength=count)
        children = np.bincount(owner, arity, count).astype(np.int64)
        lengths[lengths + children >= rules.max_length] = rules.max_length  # too long, whatever is drawn below
        alive = lengths[owner] < rules.max_length
        tree = np.repeat(owner[alive], arity[alive])
        if not len(tree):
            break
    return levels, lengths


def _accepted_only(levels: list[_Level], accepted: NDArray[np.bool_]) -> list[_Level]:
    rest = []
    for level in levels:
        nodes = accepted[level.tree]
        tokens = level.tokens[nodes]
        arity = level.arity[nodes[level.operators]]
        rest.append(_Level(tokens, np.flatnonzero(tokens >= MIN), arity, level.tree[nodes]))
        if not len(arity):
            break
    return rest


def _lay_out(levels: list[_Level]) -> Rows:
    # --- values and sizes, from the leaves up ---
    sizes: list[NDArray[np.int64]] = []
    size = value = np.empty(0, np.int64)
    for level in reversed(levels):
        children, child_value = size, value
        size = np.ones(len(level.tokens), np.int64)
        value = level.tokens.astype(np.int64) - ZERO
        if len(level.operators):
            first = np.cumsum(level.arity) - level.arity
            size[level.operators] = 2 + np.add.reduceat(children, first)
            value[level.operators] = _apply(level.tokens[level.operators], level.arity, first, child_value)
        sizes.insert(0, size)
    # --- each node at its position in the text, from the root down ---
    text = np.empty(int(size.sum()), np.uint8)
    position = np.cumsum(size) - size
    for depth, level in enumerate(levels):
        text[position] = level.tokens
        start, arity = position[level.operators], level.arity
        if not len(start):
            break
        text[start + sizes[depth][level.operators] - 1] = CLOSE
        before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]  # tokens of all earlier nodes at that level
        first = np.cumsum(arity) - arity
        position = np.repeat(start + 1 - before[first], arity) + before
    return Rows.ragged(text, size, value.astype(np.uint8))


def _apply(
    operators: NDArray[np.uint8], arity: NDArray[np.int64], first: NDArray[np.int64], values: NDArray[np.int64]
) -> NDArray[np.int64]:
    # The arguments of operator i are values[first[i] : first[i] + arity[i]].
    # One sort by (operator, value) yields minimum, maximum and median of every run of arguments.
    ordered = np.sort(np.repeat(np.arange(len(arity)) * 16, arity) + values) & 15
    low, high = ordered[first + (arity - 1) // 2], ordered[first + arity // 2]
    return np.choose(
        operators - MIN,
        [ordered[first], ordered[first + arity - 1], (low + high) // 2, np.add.reduceat(values, first) % 10],
    )
