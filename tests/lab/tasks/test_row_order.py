import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mnemos.lab.tasks.row_order import POOL, Order


def orders(rows, bucketed):
    lengths = np.random.default_rng(rows).integers(1, 50, rows) if bucketed else None
    return Order(rows, lengths)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 9), st.booleans(), st.integers(0, 5))
def test_every_row_once_an_epoch_in_full_batches(rows, batch_size, seed, bucketed, epoch):
    order = orders(rows, bucketed)
    first, last = epoch * rows // batch_size, -(-(epoch + 1) * rows // batch_size)
    batches = [order.batch(i, batch_size, seed) for i in range(first, last)]
    assert {len(batch) for batch in batches} == {batch_size}
    start = epoch * rows - first * batch_size
    assert sorted(np.concatenate(batches)[start : start + rows]) == list(range(rows))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_pure_function_of_the_index(indices, bucketed):
    asked, fresh = orders(37, bucketed), orders(37, bucketed)
    in_order = [fresh.batch(i, 8, 3) for i in range(61)]
    for i in indices:
        assert np.array_equal(asked.batch(i, 8, 3), in_order[i])


def test_batches_of_similar_lengths_come_in_mixed_order():
    lengths = np.random.default_rng(0).permutation(np.arange(4 * POOL * 8))
    order = Order(len(lengths), lengths)
    means = [lengths[order.batch(i, 8, 0)].mean() for i in range(4 * POOL)]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.2


def test_batches_hold_similar_lengths_in_every_epoch_for_every_batch_size():
    lengths = np.random.default_rng(0).permutation(1000)
    order = Order(1000, lengths)
    for first in (0, 1001, 2002):  # 7 does not divide 1000: epochs begin in the middle of a batch
        spread = [np.ptp(lengths[order.batch(first // 7 + i, 7, 0)]) for i in range(140)]
        assert np.median(spread) < 150


@pytest.mark.parametrize(("pools", "least", "most"), [(1, 1.0, 1.0), (8, 0.0, 0.1)])
def test_pools_differ_between_epochs(pools, least, most):
    count = pools * POOL
    order = Order(8 * count, np.arange(8 * count))
    epochs = [[tuple(sorted(order.batch(e * count + i, 8, 0))) for i in range(count)] for e in range(2)]
    assert least <= len({*epochs[0]} & {*epochs[1]}) / count <= most
    assert epochs[0] != epochs[1]
