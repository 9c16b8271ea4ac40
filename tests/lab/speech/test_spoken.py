"""Spoken strings: what they are made of, that nothing leaks between splits, and that position is everything."""

import dataclasses

import numpy as np
import pytest
import torch
from spoken_standins import write_recordings

from mnemos.lab.speech.audio import filterbanks, frames, normalise
from mnemos.lab.speech.spoken import SpokenConfig, SpokenTask
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.row_order import POOL
from mnemos.types import InputError


@pytest.fixture
def config(tmp_path) -> SpokenConfig:
    folder = write_recordings(tmp_path / "spoken", takes=5)
    return SpokenConfig(path=str(folder), longest=3, test_takes=1, valid_takes=2, rows=7)


@pytest.fixture
def task(config) -> SpokenTask:
    return config.build()


def taken(task: SpokenTask, samples: np.ndarray) -> set[int]:
    """The recordings that are in a string, found by looking for them."""
    found = set()
    for row in range(len(task.recordings)):
        one = task.recordings.wave(row).astype(np.float64)
        if len(one) <= len(samples):
            windows = np.lib.stride_tricks.sliding_window_view(32768 * samples, len(one))
            starts = np.flatnonzero(np.abs(windows[:, :40] - one[:40]).max(1) < 8)
            if any(np.abs(windows[start] - one).max() < 8 for start in starts):
                found.add(row)
    return found


def test_no_recording_is_in_two_splits_and_a_string_has_one_speaker(task):
    takes = {"test": {0}, "valid": {1, 2}, "train": {3, 4}}
    for split in ("train", "valid", "test"):
        for index in range(2):
            samples, words = task.string(split, index, seed=0)
            rows = taken(task, samples)
            assert rows
            assert {int(task.recordings.takes[row]) for row in rows} <= takes[split]
            assert len({int(task.recordings.speakers[row]) for row in rows}) == 1
            assert {int(task.recordings.labels[row]) for row in rows} == set(words.tolist())
            assert 1 <= len(words) <= 3


def test_strings_are_functions_of_seed_and_number(config):
    one, other = config.build(), config.build()
    other.train_batch(5, 2, 9)
    for index in (0, 3, 1000):
        for a, b in zip(one.string("train", index, 4), other.string("train", index, 4), strict=True):
            assert np.array_equal(a, b)
    a, b = one.train_batch(37, 3, 4), other.train_batch(37, 3, 4)
    assert torch.equal(a.inputs, b.inputs)
    assert torch.equal(a.targets, b.targets)
    assert not torch.equal(one.train_batch(37, 3, 5).inputs[:, :5], a.inputs[:, :5])
    assert not np.array_equal(one.string("train", 0, 0)[0][:50], one.string("valid", 0, 0)[0][:50])


def test_a_pool_of_batches_holds_every_string_once_with_little_padding(task):
    rows = np.concatenate([task._pools(pool, 2, 0).reshape(-1) for pool in (0, 1)])
    assert sorted(rows.tolist()) == list(range(2 * POOL * 2))
    lengths = [[int(m.sum()) for m in _mask(task.train_batch(i, 2, 0))] for i in range(POOL)]
    assert sum(max(row) - min(row) for row in lengths) < 0.1 * sum(map(sum, lengths))


def _mask(batch):
    return torch.ones(batch.inputs.shape[:2], dtype=torch.bool) if batch.mask is None else batch.mask


def test_what_the_model_is_given(task):
    batch = task.train_batch(0, 4, 0)
    assert batch.inputs.shape[::2] == (4, 40)
    assert batch.inputs.dtype == torch.float32
    for row, index in enumerate(task._pools(0, 4, 0)[0].tolist()):
        samples, words = task.string("train", index, 0)
        frames = normalise(filterbanks(torch.from_numpy(samples), 8000, 40))
        assert torch.equal(batch.inputs[row, : len(frames)], frames)
        assert not batch.inputs[row, len(frames) :].any()
        assert _mask(batch)[row].sum() == len(frames)
        assert batch.targets[row][batch.targets[row] != IGNORE].tolist() == words.tolist()


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_strings_do_not_depend_on_the_batch_size(task, split):
    for_one = [(b.targets[0].tolist(), b.inputs[0]) for b in task.batches(split, 1)]
    assert len(for_one) == 7
    assert sum(len(words) for words, _ in for_one) == task.size(split)
    rows = [
        (y[y != IGNORE].tolist(), x) for b in task.batches(split, 3) for x, y in zip(b.inputs, b.targets, strict=True)
    ]
    for (words, features), (others, padded) in zip(for_one, rows, strict=True):
        assert words == others
        assert torch.equal(features, padded[: len(features)])


def test_sizes(task, config):
    assert task.size("train") == 2 * 2 * 2
    assert task.epoch(2) == 8 / (2 * 2)
    assert task.example().inputs.shape == (1, task.max_length, 40)
    longest = max(len(task.recordings.wave(row)) for row in range(len(task.recordings)))
    gap = round(config.silence * task.recordings.rate)
    samples = 3 * longest + 4 * gap  # three words; silence before, between and after them
    assert task.max_length == frames(samples, task.recordings.rate)
    assert max(task.train_batch(i, 8, 0).inputs.shape[1] for i in range(20)) <= task.max_length
    assert task.names == ["high", "low"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"longest": 0}, "data.longest: .*found longest 0, shortest 1"),
        ({"test_takes": 5}, "train .*data.test_takes"),
    ],
)
def test_wrong_settings_raise(config, change, problem):
    with pytest.raises(InputError, match=problem):
        dataclasses.replace(config, **change).build()
