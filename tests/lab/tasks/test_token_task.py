import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.task import SPLITS
from mnemos.lab.tasks.token_task import SegmentedTask

START = 1


def documents(lengths):
    """Documents whose tokens tell them apart: document d is the numbers 1000·(d + 1) + 0, 1, 2, …"""
    return [1000 * (d + 1) + np.arange(n) for d, n in enumerate(lengths)]


def task(lengths, segment, held_out=(5, 9)):
    splits = dict.fromkeys(SPLITS, documents(held_out)) | {"train": documents(lengths)}
    return SegmentedTask(splits, vocab_size=10**6, segment=segment, start=START)


def read(batches):
    """Follow every row through the batches: the documents read, as (step begun, row, [targets]), in that order.

    On the way every input is checked to be the target before it, or the start token behind a reset.
    """
    begun, current = [], {}
    for step, batch in enumerate(batches):
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.mask is None or not batch.mask.all()
        mask = torch.ones_like(batch.inputs, dtype=torch.bool) if batch.mask is None else batch.mask
        for row in range(len(batch.inputs)):
            valid = int(mask[row].sum())
            assert mask[row, :valid].all()
            assert valid > 0
            inputs, targets = batch.inputs[row].tolist(), batch.targets[row].tolist()
            assert targets[valid:] == [IGNORE] * (len(targets) - valid)
            if batch.reset[row]:
                current[row] = (step, row, [])
                begun.append(current[row])
            if targets[0] == IGNORE:  # an idle row: the start token of an empty document
                assert (batch.reset[row], valid, inputs[0]) == (True, 1, START)
                begun.pop()
                continue
            seen = current[row][2]
            expected = [seen[-1] if seen else START, *targets[: valid - 1]]
            assert inputs[:valid] == expected
            seen += targets[:valid]
    return begun


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 7), st.integers(0, 3))
def test_training_reads_every_document_once_an_epoch(lengths, segment, batch_size, seed):
    made = task(lengths, segment)
    steps = 3 * sum(-(-n // segment) for n in lengths)
    batches = [made.train_batch(i, batch_size, seed) for i in range(steps)]
    assert batches[0].reset.all()
    assert all((batch.targets[:, 0] != IGNORE).all() for batch in batches), "no row is idle"
    begun = read(batches)
    whole = {document[0]: document.tolist() for document in documents(lengths)}
    numbers = []
    for start, _, tokens in sorted(begun, key=lambda item: item[:2]):
        complete = whole[tokens[0]]
        assert tokens == complete[: len(tokens)]
        if len(tokens) < len(complete):  # only where the streams were left
            assert start + -(-len(complete) // segment) > steps
        numbers.append(tokens[0])
    epochs = [sorted(numbers[i : i + len(lengths)]) for i in range(0, len(numbers) - len(lengths) + 1, len(lengths))]
    assert epochs
    assert all(epoch == sorted(whole) for epoch in epochs)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 7))
def test_evaluation_reads_every_document_once(lengths, segment, batch_size):
    made = task([3], segment, held_out=lengths)
    batches = list(made.batches("valid", batch_size))
    assert {len(batch.inputs) for batch in batches} == {min(batch_size, len(lengths))}
    found = sorted(tokens for _, _, tokens in read(batches))
    assert found == sorted(document.tolist() for document in documents(lengths))
    predicted = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
    assert predicted == made.size("valid") == sum(lengths)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=10), st.integers(1, 5))
def test_train_batches_are_pure_functions_of_the_index(indices, batch_size):
    lengths = [7, 1, 30, 12, 5, 5]
    in_order = [task(lengths, 4).train_batch(i, batch_size, 1) for i in range(61)]
    made = task(lengths, 4)
    for i in indices:
        for a, b in zip(made.train_batch(i, batch_size, 1), in_order[i], strict=True):
            assert (a is b is None) or torch.equal(a, b)
        made.train_batch(3, batch_size + 1, 2)  # another order asked for in between changes nothing


def test_seeds_and_epochs_give_other_orders():
    lengths = [1] * 12
    made = task(lengths, 4)
    orders = {
        tuple(int(made.train_batch(12 * epoch + i, 1, seed).targets[0, 0]) for i in range(12))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_wrong_documents():
    refuses("train .*document.*found none", task, [], 4)
    refuses("train .*document.*empty", task, [1, 0], 4)


def test_a_batch_is_no_longer_than_the_longest_document():
    """A segment of 10⁶ tokens would otherwise be a batch of 10⁶, nearly all of it padding."""
    made = task([3, 7], 10**6)
    assert (made.metrics[0].name, made.carries_state, made.max_length, made.reference) == ("loss", True, 10**6, {})
    assert made.example().inputs.shape == (1, 9)
    assert made.train_batch(0, 2, 0).inputs.shape == (2, 9)
    whole = list(made.batches("test", 2))
    assert [batch.inputs.shape for batch in whole] == [(2, 9)]
    assert sorted(targets for _, _, targets in read(whole)) == [one.tolist() for one in documents([5, 9])]
