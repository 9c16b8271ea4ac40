"""Long ListOps, drawn a block of trees at a time with numpy: the generator of Long Range Arena, vectorised.

A tree is drawn from the root (depth 1) down. A node above the deepest level is a digit with probability p,
else an operator with 2 to `max_arguments` arguments; at the deepest level it is always a digit. Its length
counts digits, operators and closing brackets, no parentheses, and it is accepted if
min_length < length < max_length, both strictly.

Here all the trees of a block grow together, one level at a time; a tree whose nodes drawn so far already
make it too long is dropped at once, which changes nothing in the distribution of those accepted, since the
trees are independent and a length only grows. Values, places and tokens are then computed for the accepted
trees alone, again a level at a time. Cost: a few tens of nanoseconds a node.

SampleBlock b is a pure function of (rules, seed, b): it has its own child of the seed. It is made of the raw bits
of PCG64, whose stream numpy promises not to change, and of integer arithmetic, so it is the same everywhere.

This file imports numpy alone because it is also the program that worker processes run.
"""

import itertools
import json
import os
import signal
import struct
import sys
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

VOCABULARY = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # token id -> text; 0 is padding
ZERO, MIN, MAX, MED, SM, CLOSE = 1, 11, 12, 13, 14, 15
HEADER = struct.Struct("<qq")  # samples, tokens


class Rules(NamedTuple):
    """What decides the distribution of the samples; `digit_probability` is that of a node above `max_depth`."""

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    digit_probability: float = 0.75


class SampleBlock(NamedTuple):
    """Accepted samples: tokens [total] uint8 one after the other, lengths [N] int64, labels [N] uint8 (0 to 9)."""

    tokens: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    labels: NDArray[np.uint8]


class _Level(NamedTuple):
    """The nodes of one depth, tree by tree: tokens [N]; `operators` [P] are indices, `arity` [P] their arguments."""

    tokens: NDArray[np.uint8]
    operators: NDArray[np.int64]
    arity: NDArray[np.int64]
    tree: NDArray[np.int64]


def draws(rules: Rules) -> int:
    """Trees drawn for a block: as many as keep numpy busy and a block of the longest trees within memory."""
    return max(16, min(4096, 2**22 // rules.max_length))


def generate_block(rules: Rules, seed: int, block: int) -> SampleBlock:
    """The accepted samples of one block, in the order drawn; duplicates are not looked for here."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(block,)))
    levels, lengths = _grow(rules, bits, draws(rules))
    levels = _keep(levels, (lengths > rules.min_length) & (lengths < rules.max_length))
    return _lay_out(levels)


def _grow(rules: Rules, bits: np.random.PCG64, count: int) -> tuple[list[_Level], NDArray[np.int64]]:
    """Draw `count` trees; returns their levels and lengths (of a tree dropped on the way: at least max_length)."""
    threshold = np.uint64(round(rules.digit_probability * 2**32))
    choices = np.uint64(4 * (rules.max_arguments - 1))
    lengths = np.zeros(count, np.int64)
    tree = np.arange(count)
    levels = []
    for depth in range(1, rules.max_depth + 1):
        raw = bits.random_raw(len(tree))
        low = raw & np.uint64(0xFFFFFFFF)  # the high half says digit or operator, the low half which
        tokens = (ZERO + (low * np.uint64(10) >> np.uint64(32))).astype(np.uint8)
        if depth < rules.max_depth:
            operators = np.flatnonzero(raw >> np.uint64(32) >= threshold)
        else:
            operators = np.empty(0, np.int64)
        choice = (low[operators] * choices >> np.uint64(32)).astype(np.int64)
        arity = 2 + choice // 4
        tokens[operators] = MIN + choice % 4
        levels.append(_Level(tokens, operators, arity, tree))

        owner = tree[operators]
        lengths += np.bincount(tree, minlength=count) + np.bincount(owner, minlength=count)
        children = np.bincount(owner, arity, count).astype(np.int64)
        lengths[lengths + children >= rules.max_length] = rules.max_length  # too long whatever follows
        alive = lengths[owner] < rules.max_length
        tree = np.repeat(owner[alive], arity[alive])
        if not len(tree):
            break
    return levels, lengths


def _keep(levels: list[_Level], accepted: NDArray[np.bool_]) -> list[_Level]:
    """The levels without the trees that were not accepted."""
    kept = []
    for level in levels:
        nodes = accepted[level.tree]
        tokens = level.tokens[nodes]
        arity = level.arity[nodes[level.operators]]
        kept.append(_Level(tokens, np.flatnonzero(tokens >= MIN), arity, level.tree[nodes]))
        if not len(arity):
            break
    return kept


def _lay_out(levels: list[_Level]) -> SampleBlock:
    """Evaluate the trees from the leaves up, then write each node where its text has it, from the root down."""
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
        sizes.append(size)
    sizes.reverse()

    text = np.empty(int(size.sum()), np.uint8)
    place = np.cumsum(size) - size
    for depth, level in enumerate(levels):
        text[place] = level.tokens
        start, arity = place[level.operators], level.arity
        if not len(start):
            break
        text[start + sizes[depth][level.operators] - 1] = CLOSE
        before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]  # the text of all earlier nodes of that level
        first = np.cumsum(arity) - arity
        place = np.repeat(start + 1 - before[first], arity) + before
    return SampleBlock(text, size, value.astype(np.uint8))


def _apply(
    operators: NDArray[np.uint8], arity: NDArray[np.int64], first: NDArray[np.int64], values: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The values of operators [P] whose arguments are `values`, in runs of `arity` that start at `first`."""
    # One sort by (operator, value) gives the least, the greatest and the middle of every run.
    ordered = np.sort(np.repeat(np.arange(len(arity)) * 16, arity) + values) & 15
    low, high = ordered[first + (arity - 1) // 2], ordered[first + arity // 2]
    return np.choose(
        operators - MIN,
        [ordered[first], ordered[first + arity - 1], (low + high) // 2, np.add.reduceat(values, first) % 10],
    )


def write_block(stream: IO[bytes], block: SampleBlock) -> None:
    """Write a block to a pipe; `read_block` reads it."""
    stream.write(HEADER.pack(len(block.lengths), len(block.tokens)))
    for array in block:
        stream.write(array.tobytes())
    stream.flush()


def read_block(stream: IO[bytes]) -> SampleBlock:
    """Read what `write_block` wrote. Raises EOFError where the writer has died."""

    def exactly(size: int) -> bytes:
        data = stream.read(size)
        if len(data) < size:
            raise EOFError("the generator's worker process ended early")
        return data

    samples, tokens = HEADER.unpack(exactly(HEADER.size))
    return SampleBlock(
        np.frombuffer(exactly(tokens), np.uint8),
        np.frombuffer(exactly(8 * samples), np.int64),
        np.frombuffer(exactly(samples), np.uint8),
    )


def main(rules: str, seed: str, first: str, step: str) -> None:
    """A worker: write blocks first, first + step, … to standard output until the reader closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle: it closes the pipe
    for block in itertools.count(int(first), int(step)):
        made = generate_block(Rules(*json.loads(rules)), int(seed), block)
        try:
            write_block(sys.stdout.buffer, made)
        except OSError:
            os._exit(0)  # an ordinary exit would flush to the closed pipe once more, and complain


if __name__ == "__main__":
    main(*sys.argv[1:])
