"""Generate Long ListOps in blocks of trees with numpy: a vectorised form of Long Range Arena's generator.

A tree is drawn from the root (depth 1) downwards. A node above the deepest level is a digit with probability p, and
otherwise an operator with 2 to `max_arguments` arguments. At the deepest level every node is a digit. The length of a
tree is its number of digits, operators and closing brackets, without parentheses. A tree is accepted if
min_length < length < max_length.

All trees of a block grow together, one level at a time. A tree is dropped as soon as its nodes so far make it too
long. This does not change the distribution of accepted trees, because trees are independent and a length only grows.
Values, positions and tokens are then computed for the accepted trees, again one level at a time.
Cost: a few tens of nanoseconds per node.

Block b is a pure function of (rules, seed, b), with its own child of the seed. It uses the raw bits of PCG64, whose
stream numpy guarantees, and integer arithmetic, so the samples are the same on every machine.

This file imports numpy only, because worker processes run it as a program.
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
    """The distribution of samples. `digit_probability` applies to the nodes above the level `max_depth`."""

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    digit_probability: float = 0.75


class SampleBlock(NamedTuple):
    """Accepted samples: concatenated tokens [total] uint8, lengths [N] int64, labels [N] uint8 from 0 to 9."""

    tokens: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    labels: NDArray[np.uint8]


class _Level(NamedTuple):
    """The nodes of one depth, sorted by tree: `tokens` [N] and the index `tree` [N] of each node's tree.

    `operators` [P] are the indices of the nodes that are operators; `arity` [P] are their numbers of arguments.
    """

    tokens: NDArray[np.uint8]
    operators: NDArray[np.int64]
    arity: NDArray[np.int64]
    tree: NDArray[np.int64]


def draws(rules: Rules) -> int:
    """The number of trees drawn per block: enough for vectorisation, and few enough to bound a block's memory."""
    return max(16, min(4096, 2**22 // rules.max_length))


def generate_block(rules: Rules, seed: int, block: int) -> SampleBlock:
    """The accepted samples of one block, in the order drawn. They may contain duplicates."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(block,)))
    levels, lengths = _grow(rules, bits, draws(rules))
    levels = _accepted_only(levels, (lengths > rules.min_length) & (lengths < rules.max_length))
    return _lay_out(levels)


def _grow(rules: Rules, bits: np.random.PCG64, count: int) -> tuple[list[_Level], NDArray[np.int64]]:
    """Draw `count` trees: returns their levels and lengths. The length of a dropped tree is at least max_length."""
    threshold = np.uint64(round(rules.digit_probability * 2**32))
    choices = np.uint64(4 * (rules.max_arguments - 1))
    lengths = np.zeros(count, np.int64)
    tree = np.arange(count)
    levels = []
    for depth in range(1, rules.max_depth + 1):
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
    """Remove the nodes of trees that were not accepted."""
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
    """Evaluate the trees from the leaves up, then write each node at its position in the text, from the root down."""
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
        before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]  # tokens of all earlier nodes at that level
        first = np.cumsum(arity) - arity
        place = np.repeat(start + 1 - before[first], arity) + before
    return SampleBlock(text, size, value.astype(np.uint8))


def _apply(
    operators: NDArray[np.uint8], arity: NDArray[np.int64], first: NDArray[np.int64], values: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The values of operators [P]; the arguments of operator i are values[first[i] : first[i] + arity[i]]."""
    # One sort by (operator, value) yields minimum, maximum and median of every run of arguments.
    ordered = np.sort(np.repeat(np.arange(len(arity)) * 16, arity) + values) & 15
    low, high = ordered[first + (arity - 1) // 2], ordered[first + arity // 2]
    return np.choose(
        operators - MIN,
        [ordered[first], ordered[first + arity - 1], (low + high) // 2, np.add.reduceat(values, first) % 10],
    )


def write_block(stream: IO[bytes], block: SampleBlock) -> None:
    """Write a block to a pipe, in the form that `read_block` reads."""
    stream.write(HEADER.pack(len(block.lengths), len(block.tokens)))
    for array in block:
        stream.write(array.tobytes())
    stream.flush()


def read_block(stream: IO[bytes]) -> SampleBlock:
    """Read a block that `write_block` wrote. Raises EOFError if the writing process has died."""

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
    """Run a worker: write blocks first, first + step, … to standard output until the reader closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt: it closes the pipe
    for block in itertools.count(int(first), int(step)):
        made = generate_block(Rules(*json.loads(rules)), int(seed), block)
        try:
            write_block(sys.stdout.buffer, made)
        except OSError:
            os._exit(0)  # an ordinary exit would flush to the closed pipe again and print an error


if __name__ == "__main__":
    main(*sys.argv[1:])
