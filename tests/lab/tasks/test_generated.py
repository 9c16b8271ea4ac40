"""The copy task, associative recall, and what they share."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_memory_tasks import drawn_as

from mnemos import DataConfig, config, registry
from mnemos.lab.tasks import generated, mad
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.generated import CopyConfig, distinct, smallest
from mnemos.lab.tasks.recall import MQARConfig, RecallConfig

CONFIGS = [
    CopyConfig(rows=40),
    RecallConfig(rows=40),
    RecallConfig(3, 5, 2, 40, distance=30, shortest=2, distractors=4),
    MQARConfig(32, 4, 64, rows=40),
    MQARConfig(32, 4, 64, rewritten=2, counted="old", rows=40),
    MQARConfig(32, 4, 64, rows=40, key_tokens=2),
    mad.MADRecallConfig(32, noise=0.3, examples=0, rows=40),
    mad.MADFuzzyRecallConfig(40, examples=0, rows=40),
    mad.MADCopyingConfig(40, 8, 5, examples=0, rows=40),
    mad.MADCompressionConfig(examples=0, rows=40),
    mad.MADMemorisationConfig(examples=0, rows=40),
]


@pytest.mark.parametrize("settings", CONFIGS)
def test_batches_are_pure_functions_and_held_out_splits_are_kept_apart(settings):
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
    assert (task.metrics[0].name, task.classes, task.splits_rows, task.carries_state) == ("accuracy", 0, True, False)
    assert config.from_dict(DataConfig, config.to_dict(settings)) == settings
    assert registry.load("data", settings.name) is type(settings)
    whole = {split: torch.cat([b.inputs for b in task.batches(split, 40)]) for split in ("valid", "test")}
    assert whole["valid"].shape == (40, task.max_length)
    assert torch.equal(whole["test"], torch.cat([b.inputs for b in task.batches("test", 7)]))
    assert not torch.equal(whole["valid"], whole["test"])
    assert task.size("test") == sum(int((b.targets != IGNORE).sum()) for b in task.batches("test", 7))
    assert task.size("train") == 0


@pytest.mark.parametrize(("length", "shortest", "longest"), [(128, 32, 63), (7, 1, 2), (4, 1, 1)])
def test_copy(length, shortest, longest):
    task = CopyConfig(length=length, rows=800).build()
    batch = next(task.batches("test", 800))
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
        assert drawn_as(counts, np.ones(len(counts))) < 5


def far(batch: Batch, settings: RecallConfig) -> list[int]:
    """How many distractors each row has between fact and questions; what is no distractor is checked."""
    symbols, fact, questions = settings.symbols, 2 * settings.pairs, 2 * settings.queries - 1
    found = []
    for row, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        hidden = [token > 2 * symbols for token in row]
        assert sum(hidden) == settings.distance
        start = hidden.index(False)
        told = dict(zip(row[start : start + fact : 2], row[start + 1 : start + fact : 2], strict=True))
        assert len(told) == settings.pairs
        assert all(1 <= key <= symbols < value <= 2 * symbols for key, value in told.items())
        queries = row[-questions::2]
        assert len({*queries}) == settings.queries
        answers = [told[query] for query in queries]
        assert row[-questions + 1 :: 2][: len(answers) - 1] == answers[:-1]
        assert targets[-questions::2] == answers
        assert sum(target != IGNORE for target in targets) == len(answers)
        found.append(len(row) - questions - start - fact)
    return found


@pytest.mark.parametrize("settings", [RecallConfig(rows=200), RecallConfig(4, 4, 4, 200), RecallConfig(3, 9, 1, 200)])
def test_recall(settings):
    task = settings.build()
    batch = next(task.batches("test", 200))
    assert batch.inputs.shape[1] == task.max_length == 2 * settings.pairs + 2 * settings.queries - 1
    assert far(batch, settings) == [0] * 200
    assert task.size("test") == 200 * settings.queries


@pytest.mark.parametrize("shortest", [0, 1, 4])
def test_recall_over_distractors(shortest):
    settings = RecallConfig(2, 5, 2, 200, distance=100, shortest=shortest, distractors=7)
    task = settings.build()
    assert task.vocab_size == 18
    assert task.max_length == settings.length == 2 * 2 + 100 + 3
    for split in ("valid", "test"):
        assert far(next(task.batches(split, 200)), settings) == [100] * 200
    batch = task.train_batch(0, 2500, 0)
    distances = np.array(far(batch, settings))
    if not shortest:
        assert (distances == 100).all()
        return
    assert (distances.min(), distances.max()) == (shortest, 100)
    # As many rows in every octave.
    counts, _ = np.histogram(distances, shortest * (101 / shortest) ** np.linspace(0, 1, 4))
    assert (abs(counts / 2500 - 1 / 3) < 0.1).all()
    noise = batch.inputs[batch.inputs > 10].numpy() - 11
    assert np.bincount(noise).min() > 0.9 * len(noise) / 7


def test_recall_grows_from_near_to_far():
    settings = RecallConfig(2, 5, 2, 8, distance=100, shortest=4, grow=10, distractors=7)
    task = settings.build()
    lengths = [task.train_batch(i, 64, 0).inputs.shape[1] for i in range(12)]
    assert lengths[0] == settings.length - 96
    assert lengths[10] == lengths[11] == settings.length
    assert lengths == sorted(lengths)
    assert lengths[5] == settings.length - 80, "half-way there in the logarithm: 4·√25 of 100"
    distances = far(task.train_batch(5, 64, 0), replace(settings, distance=20))
    assert min(distances) == 4
    assert max(distances) == 20
    assert set(far(task.train_batch(10, 64, 0), settings)) == {100}


def test_recall_without_distance_is_what_it_was():
    batch = RecallConfig(2, 4, 1, 2).build().train_batch(0, 2, 0)
    assert batch.inputs.tolist() == [[3, 6, 1, 8, 3], [4, 7, 1, 5, 1]]
    plain, same = RecallConfig().build(), RecallConfig(distractors=3).build()
    assert (plain.vocab_size, plain.max_length) == (same.vocab_size, same.max_length)
    assert torch.equal(plain.train_batch(3, 2, 1).inputs, same.train_batch(3, 2, 1).inputs)


@pytest.mark.parametrize("few", [False, True])
def test_distinct_numbers_are_uniform(few, monkeypatch):
    if few:  # independent draws, of which repeated numbers are left out: here most rows draw again
        monkeypatch.setattr(generated, "MANY", 5)
        monkeypatch.setattr(generated, "FEW", 1)
    drawn = distinct(np.random.default_rng(3), 12_000, 5, 3)
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(found) == 5 * 4 * 3
    assert all(len({*one}) == 3 for one in found.tolist())
    assert drawn_as(counts, np.ones(60)) < 5


def test_distinct_numbers_are_the_same_in_blocks(monkeypatch):
    whole = smallest(np.random.default_rng(3).random((7, 10)), 4)
    monkeypatch.setattr(generated, "BLOCK", 30)
    assert np.array_equal(distinct(np.random.default_rng(3), 7, 10, 4), whole)
