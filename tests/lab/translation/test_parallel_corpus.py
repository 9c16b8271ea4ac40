"""Batches by tokens: every row once per epoch, within the limits, as a pure function of the index and the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from mnemos.lab.translation.parallel_corpus import FEWEST, TokenBatches


def lengths(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 40, (rows, 2)).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(40, 900), st.integers(1, 64), st.integers(0, 3), st.integers(0, 3))
def test_every_row_once_an_epoch_within_the_limits(rows, tokens, most, seed, epoch):
    sizes = lengths(rows, seed)
    batches = TokenBatches(sizes, tokens, most)
    found = [batches.batch(epoch * len(batches) + i, seed) for i in range(len(batches))]
    assert sorted(np.concatenate(found)) == list(range(rows)) == sorted(np.concatenate(list(batches.once())))
    for batch in found:
        assert len(batch) * sizes[batch].max() <= tokens
        assert len(batch) <= most
    few = min(FEWEST, most, rows, tokens // 40) // 2  # the last two batches share their rows
    assert min(map(len, found)) >= few


def test_a_pure_function_of_index_and_seed_and_other_batches_in_each_epoch():
    sizes = lengths(2000)
    one, other = TokenBatches(sizes, 400, 100), TokenBatches(sizes, 400, 100)
    in_order = [one.batch(i, 3).tolist() for i in range(3 * len(one))]
    for i in (len(one) + 7, 2, 2 * len(one), 3 * len(one) - 1, 0):
        assert other.batch(i, 3).tolist() == in_order[i]
    sets = [{tuple(sorted(batch)) for batch in in_order[e * len(one) : (e + 1) * len(one)]} for e in range(3)]
    assert len(sets[0] & sets[1]) < len(one) / 2  # also which rows share a batch changes, not their order alone
    assert one.batch(0, 4).tolist() != in_order[0]


def test_rows_of_similar_length_share_a_batch():
    sizes = lengths(4000)
    batches = TokenBatches(sizes, 1000, 1000)
    padded = sum(2 * len(b) * sizes[b].max() for b in map(lambda i: batches.batch(i, 0), range(len(batches))))
    random = sum(2 * 25 * sizes[i : i + 25].max() for i in range(0, 4000, 25))
    assert padded < 0.8 * random


def test_a_sentence_longer_than_a_batch_is_an_error():
    refuses(r"data\.batch_tokens: expected at least 39", TokenBatches, lengths(200), 38, 8)
    assert len(TokenBatches(lengths(200), 39, 8))


@pytest.mark.parametrize(
    ("rows", "most", "sizes"),
    [(29, 10, [8, 8, 7, 6]), (20, 10, [8, 6, 6]), (16, 9, [8, 8]), (12, 8, [6, 6]), (11, 7, [6, 5]), (3, 9, [3])],
)
def test_a_last_batch_shares_the_rows_of_the_one_before_it(rows, most, sizes):
    short = np.arange(rows) % 3 * 5
    batches = TokenBatches(np.stack([np.full(rows, 10), short], 1).astype(np.int32), 100, most)
    found = list(batches.once())
    assert [len(batch) for batch in found] == sizes
    assert batches.fewest == min(sizes)
    assert np.concatenate(found).tolist() == sorted(range(rows), key=lambda row: -(row % 3)), "longest first"
    assert all((np.diff(short[batches.batch(i, 0)]) <= 0).all() for i in range(len(batches)))
