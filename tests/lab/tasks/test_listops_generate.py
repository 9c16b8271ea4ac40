"""The vectorised generator against a naive recursive one, exact probabilities, and the evaluator of its text."""

import hashlib
import math
import random

import numpy as np
import pytest
from listops_oracle import evaluate, to_text

from mnemos.lab.tasks.listops import CLOSE, MIN, Rules, draws, generate, generate_block

SHORT = Rules(4, 25, 3, 4, 0.5)
LONG = Rules()


def samples(rules, blocks, seed=0):
    made = [generate_block(rules, seed, block) for block in range(blocks)]
    return np.concatenate([b.lengths for b in made]), np.concatenate([b.labels for b in made])


def naive(rules, source, depth=1):
    """A tree as the specification describes it, by recursion: its words, and nothing shared with the package."""
    if depth == rules.max_depth or source.random() < rules.digit_probability:
        return [str(source.randrange(10))]
    words = [source.choice(["[MIN", "[MAX", "[MED", "[SM"])]
    for _ in range(source.randint(2, rules.max_arguments)):
        words += naive(rules, source, depth + 1)
    return [*words, "]"]


def exact_lengths(rules):
    """P(length) of a draw for every length below max_length, by convolution from the deepest level up."""
    below = np.zeros(rules.max_length)
    below[1] = 1.0
    for _ in range(rules.max_depth - 1):
        power, total = below, np.zeros(rules.max_length)
        for _ in range(2, rules.max_arguments + 1):
            size = 2 * rules.max_length
            power = np.fft.irfft(np.fft.rfft(power, size) * np.fft.rfft(below, size), size)[: rules.max_length]
            total += power / (rules.max_arguments - 1)
        below = np.zeros(rules.max_length)
        below[1] = rules.digit_probability
        below[2:] += (1 - rules.digit_probability) * total[:-2]
    return below


def too_unlikely(statistic, freedom):
    """Whether χ² lies more than five standard deviations above its mean (seeds are fixed: it never flickers)."""
    return statistic > freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "rules", [SHORT, Rules(0, 40, 4, 3, 0.3), Rules(9, 60, 5, 10, 0.75), Rules(500, 2000), Rules(0, 2), Rules(2, 9, 2)]
)
def test_labels_and_lengths_are_those_of_the_text(rules):
    block = generate_block(rules, 3, 1)
    assert len(block.lengths) == len(block.labels) > 0
    assert block.lengths.sum() == len(block.tokens)
    ends = np.cumsum(block.lengths)
    for end, length, label in zip(ends, block.lengths, block.labels, strict=True):
        text = to_text(block.tokens[end - length : end])
        assert rules.min_length < length < rules.max_length
        assert length == sum(word not in "()" for word in text.split())
        assert evaluate(text) == label


@pytest.mark.parametrize("rules", [SHORT, Rules(9, 60, 5, 10, 0.75)])
def test_depth_and_number_of_arguments(rules):
    block = generate_block(rules, 0, 0)
    deepest, counts = 0, set()
    open_lists: list[int] = []
    for token in block.tokens:
        if token == CLOSE:
            counts.add(open_lists.pop())
        elif open_lists:
            open_lists[-1] += 1
        if MIN <= token < CLOSE:
            open_lists.append(0)
        deepest = max(deepest, len(open_lists))
    assert deepest == rules.max_depth - 1  # operators reach the last level but one
    assert counts == set(range(2, rules.max_arguments + 1))


@pytest.mark.slow
def test_distribution_equals_the_naive_generators():
    lengths, labels = samples(SHORT, 30)
    source, expected = random.Random(0), []
    while len(expected) < len(lengths):
        words = naive(SHORT, source)
        if SHORT.min_length < len(words) < SHORT.max_length:
            expected.append(10 * len(words) + evaluate(" ".join(words)))
    ours = np.bincount(10 * lengths + labels, minlength=260)
    theirs = np.bincount(expected, minlength=260)
    cells = ours + theirs >= 10
    statistic = ((ours - theirs)[cells] ** 2 / (ours + theirs)[cells]).sum()
    assert cells.sum() > 150
    assert not too_unlikely(statistic, cells.sum() - 1)


@pytest.mark.parametrize(("rules", "blocks", "bins"), [(Rules(0, 40, 4, 3, 0.3), 60, 39), (LONG, 20, 30)])
def test_lengths_have_their_exact_probabilities(rules, blocks, bins):
    lengths, _ = samples(rules, blocks, seed=1)
    exact = exact_lengths(rules)
    exact[: rules.min_length + 1] = 0
    drawn = blocks * draws(rules)
    edges = np.linspace(rules.min_length + 1, rules.max_length, bins + 1).astype(int)
    probability = np.add.reduceat(exact, edges[:-1])
    observed = np.add.reduceat(np.bincount(lengths, minlength=rules.max_length), edges[:-1])
    used = probability > 0
    assert observed[~used].sum() == 0
    expected = drawn * probability[used]
    rejected = drawn - len(lengths), drawn * (1 - exact.sum())
    statistic = ((observed[used] - expected) ** 2 / expected).sum() + (rejected[0] - rejected[1]) ** 2 / rejected[1]
    assert not too_unlikely(statistic, used.sum())


def test_operators_digits_and_arities_are_uniform():
    block = generate_block(Rules(0, 200, 2, 10, 0.0), 5, 0)  # one operator over digits alone
    roots = block.tokens[np.cumsum(block.lengths) - block.lengths]
    digits = block.tokens[block.tokens < MIN]
    for counts in (np.bincount(roots)[MIN:], np.bincount(digits)[1:], np.bincount(block.lengths)[4:]):
        expected = counts.sum() / len(counts)
        assert not too_unlikely(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)
    assert [len(np.unique(x)) for x in (roots, digits, block.lengths)] == [4, 10, 9]


def test_blocks_are_pure_functions_of_seed_and_number():
    first, again = generate_block(SHORT, 1, 2), generate_block(SHORT, 1, 2)
    assert all(np.array_equal(a, b) for a, b in zip(vars(first).values(), vars(again).values(), strict=True))
    assert not np.array_equal(first.tokens, generate_block(SHORT, 1, 3).tokens)
    assert not np.array_equal(first.tokens, generate_block(SHORT, 2, 2).tokens)


def test_the_samples_of_a_seed_never_change():
    """Stored values: a data set named by its seed is the same on every machine and in every version."""
    rows = generate(SHORT, 0, 3)
    assert [(to_text(rows.row(i), parentheses=False), rows.labels[i]) for i in range(3)] == [
        ("[MAX [MED 2 8 9 3 ] [SM 8 6 ] 0 [MED 9 3 0 ] ]", 5),
        ("[MAX [MED 4 8 9 7 ] [MIN 9 1 ] [SM 6 7 2 ] [SM 2 0 0 5 ] ]", 7),
        ("[MIN [MIN 0 6 1 3 ] 6 6 [MAX 2 5 3 4 ] ]", 0),
    ]
    rows = generate(LONG, 0, 1000)
    digest = hashlib.sha256(rows.tokens.tobytes() + rows.labels.tobytes()).hexdigest()
    assert digest == "d8dc86be3ca7474040a8dad4249219336cffa86ef8615f0d785c7c9e6b0b5a69"
