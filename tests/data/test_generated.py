"""The copy task, associative recall, and what they share."""

import math

import numpy as np
import pytest
import torch

from mnemos import config, registry
from mnemos.data.batch import IGNORE
from mnemos.data.copying import CopyConfig
from mnemos.data.recall import RecallConfig
from mnemos.types import InputError

CONFIGS = [
    CopyConfig(rows=40),
    CopyConfig(length=7, symbols=3, rows=40),
    RecallConfig(rows=40),
    RecallConfig(3, 5, 2, 4, 40),
]


@pytest.mark.parametrize("settings", CONFIGS)
def test_a_pure_function_of_its_arguments(settings):
    task, again = settings.build(), settings.build()
    batch = task.train_batch(5, 8, 2)
    assert torch.equal(batch.inputs, again.train_batch(5, 8, 2).inputs)
    assert torch.equal(batch.targets, again.train_batch(5, 8, 2).targets)
    for other in (task.train_batch(6, 8, 2), task.train_batch(5, 8, 3)):
        assert not torch.equal(batch.inputs, other.inputs)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.shape == batch.targets.shape == (8, task.max_length)
    assert batch.inputs.min() >= 0
    assert batch.inputs.max() < task.vocab_size
    assert (task.kind, task.classes, task.majority, task.carries_state) == ("language", 0, None, False)
    assert config.from_dict(config.DataConfig, config.to_dict(settings)) == settings
    assert registry.load("data", settings.name) is type(settings)


@pytest.mark.parametrize("settings", CONFIGS)
def test_held_out_splits(settings):
    task = settings.build()
    whole = {split: torch.cat([b.inputs for b in task.batches(split, 40)]) for split in ("valid", "test")}
    assert whole["valid"].shape == (40, task.max_length)
    assert torch.equal(whole["test"], torch.cat([b.inputs for b in task.batches("test", 7)]))
    assert not torch.equal(whole["valid"], whole["test"])
    assert task.size("test") == sum(int((b.targets != IGNORE).sum()) for b in task.batches("test", 7))
    assert task.size("train") == 0


@pytest.mark.parametrize(("length", "shortest", "longest"), [(128, 32, 63), (7, 1, 2), (4, 1, 1), (40, 10, 19)])
def test_copy(length, shortest, longest):
    task = CopyConfig(length=length, rows=4000).build()
    batch = next(task.batches("test", 4000))
    seen = set()
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        n = inputs.index(0)
        seen.add(n)
        word = inputs[:n]
        assert inputs == [*word, 0, *word] + [0] * (length - 2 * n - 1)
        assert targets == [IGNORE] * n + word + [IGNORE] * (length - 2 * n)
    assert seen == set(range(shortest, longest + 1))
    assert task.vocab_size == 11


def test_copy_draws_lengths_and_symbols_evenly():
    batch = next(CopyConfig(rows=8000).build().batches("test", 8000))
    lengths = np.bincount((batch.targets != IGNORE).sum(1).numpy())[32:]
    symbols = np.bincount(batch.targets[batch.targets != IGNORE].numpy())[1:]
    for counts in (lengths, symbols):
        expected = counts.sum() / len(counts)
        freedom = len(counts) - 1
        assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "settings", [RecallConfig(rows=200), RecallConfig(4, 4, 4, 0, 200), RecallConfig(3, 9, 1, 5, 200)]
)
def test_recall(settings):
    task = settings.build()
    pairs, symbols = settings.pairs, settings.symbols
    batch = next(task.batches("test", 200))
    assert batch.inputs.shape[1] == task.max_length == 2 * pairs + settings.gap + 2 * settings.queries - 1
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        keys, values = inputs[0 : 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
        told = dict(zip(keys, values, strict=True))
        assert len(told) == pairs
        assert all(1 <= key <= symbols < value <= 2 * symbols for key, value in told.items())
        start = 2 * pairs + settings.gap
        assert inputs[2 * pairs : start] == [0] * settings.gap
        queries = inputs[start::2]
        assert len(set(queries)) == settings.queries
        answers = [told[query] for query in queries]
        assert inputs[start + 1 :: 2] == answers[:-1]
        assert targets[start::2] == answers
        assert [x for i, x in enumerate(targets) if i < start or (i - start) % 2] == [IGNORE] * (
            len(targets) - len(answers)
        )
    assert task.size("test") == 200 * settings.queries


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (CopyConfig(length=3), "length >= 4"),
        (CopyConfig(symbols=0), "symbols >= 1"),
        (CopyConfig(rows=0), "at least one held-out sequence"),
        (CopyConfig(seed=-1), "seed: expected"),
        (RecallConfig(pairs=40), "queries <= pairs <= symbols"),
        (RecallConfig(queries=0), "1 <= queries"),
        (RecallConfig(gap=-1), "gap >= 0"),
    ],
)
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(InputError, match=words) as error:
        settings.build()
    assert "\n" not in str(error.value)
