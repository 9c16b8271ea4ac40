"""Spoken strings: what they are made of, that nothing leaks between splits, and that position is everything."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from spoken_standins import tone, wav, write_recordings

from mnemos.lab.speech.audio import filterbanks, frames, normalise
from mnemos.lab.speech.models import BiLSTM, BiLSTMConfig
from mnemos.lab.speech.spoken import SpokenConfig, SpokenTask
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.row_order import POOL


@pytest.fixture
def config(tmp_path) -> SpokenConfig:
    folder = write_recordings(tmp_path / "spoken", takes=5)
    return SpokenConfig(path=str(folder), longest=3, test_takes=1, valid_takes=2, rows=7)


@pytest.fixture
def task(config) -> SpokenTask:
    return config.build()


@pytest.mark.parametrize(("split", "takes"), [("test", [0]), ("valid", [1, 2]), ("train", [3, 4])])
def test_a_string_is_words_of_one_speaker_from_takes_of_its_split_in_noise_of_one_step(config, split, takes):
    for label, word in enumerate(("low", "high")):  # a third speaker
        for take in range(5):
            (Path(config.path) / f"{word}_cat_{take}.wav").write_bytes(wav(tone(label, 2, take)))
    task, quiet = (dataclasses.replace(config, silence=silence).build() for silence in (0.2, 0.0))
    every = task.recordings
    gaps, lengths = [], set()
    for index in range(20):
        samples, words = quiet.string(split, index, 3)
        noises = []
        for speaker in range(3):
            mine = np.isin(every.takes, takes) & (every.speakers == speaker)
            for rows in itertools.product(*(np.flatnonzero(mine & (every.labels == word)) for word in words)):
                said = np.concatenate([every.wave(row) for row in rows])
                noises += [32768 * samples - said] if len(said) == len(samples) else []
        noise = min(noises, key=lambda one: np.abs(one).max())
        assert np.abs(noise).max() < 6
        assert noise.std() == pytest.approx(1, abs=0.1)
        longer, again = task.string(split, index, 3)
        assert again.tolist() == words.tolist()
        lengths.add(len(words))
        gaps.append((len(longer) - len(samples)) / (len(words) + 1) / 1600)
    assert lengths == {1, 2, 3}
    assert 0 < min(gaps) < 0.5 < max(gaps) < 1


def test_some_strings_are_shown_with_what_is_heard(config):
    task = dataclasses.replace(config, rows=18).build()

    class Parrot(BiLSTM):
        def transcribe(self, frames, mask=None):
            return [heard(frames.shape[1] if mask is None else int(mask.sum()))] * len(frames)

    def heard(length):
        return [length % 2] * (length % 3)

    model = Parrot(BiLSTMConfig(dim=2, layers=1))
    every = list(task.batches("valid", 1))[::3]  # eight at most: the first of each three
    said = [" ".join(task.names[word] for word in one.targets[0].tolist()) for one in every]
    found = task.artifacts(model, None, "valid")
    assert [one["said"] for one in found["transcriptions"]] == said
    words = [" ".join(task.names[word] for word in heard(one.inputs.shape[1])) for one in every]
    assert [one["heard"] for one in found["transcriptions"]] == words
    assert found["examples"]["transcriptions"]["given"] == "said"
    lines = [f"  said   {one}\n  heard  {two or '(nothing)'}" for one, two in zip(said, words, strict=True)]
    assert task.show(model, "valid") == lines
    assert task.artifacts(torch.nn.Linear(1, 1), None, "valid") == {}
    about, file = task.preprocessing(), Path(config.path) / "low_ann_0.wav"
    words = [task.names[word] for word in heard(frames(len(tone(0, 0, 0)), 8000))]
    assert [one.text for one in about.predict(model, [file], {})] == [" ".join(words)]
    refuses("expected a model that transcribes, found Linear", list, about.predict(torch.nn.Linear(1, 1), [file], {}))
    (fast,) = dataclasses.replace(about, rate=16000).predict(model, [file], {})
    assert "low_ann_0.wav: expected 16000 Hz as in training, found 8000 Hz" in fast.problem


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


def test_wrong_settings_raise(config):
    refuses("data.longest: .*found longest 0, shortest 1", dataclasses.replace(config, longest=0).build)
    refuses("train .*data.test_takes", dataclasses.replace(config, test_takes=5).build)
