"""Spoken strings, made of real recordings of single words: speech to be written down."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.config import DataConfig
from mnemos.types import InputError

from .audio import Recordings, read_recordings
from .batch import IGNORE, Batch, Metric
from .buckets import POOL
from .filterbanks import filterbanks, frames, normalised
from .randomness import ORDER, TEST, TRAIN, VALID, generator

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class SpokenConfig(DataConfig):
    """Strings of `shortest` to `longest` words that one speaker said one by one, digits for example.

    `path`: a folder of `{label}_{speaker}_{take}.wav`, or of .tar.gz of such (the Free Spoken Digit Dataset as it is).
    No recording is in two splits: the takes 0 … `test_takes` − 1 are the test split's (as that data set has it), the
    next `valid_takes` the validation split's, all others are trained on. `rows` strings, drawn from `seed`, are held
    out for each of validation and test. Before, between and after words is silence of 0 to `silence` seconds.
    The model is given `bands` log-mel filterbanks each 10 ms, normalised within a string.
    """

    name: ClassVar[str] = "spoken"

    path: str = "fsdd"
    shortest: int = 1
    longest: int = 5
    silence: float = 0.2
    bands: int = 40
    test_takes: int = 5
    valid_takes: int = 5
    rows: int = 256
    seed: int = 0

    def build(self) -> "SpokenTask":
        """The task; every recording is read."""
        for name, least in (("shortest", 1), ("bands", 1), ("test_takes", 1), ("valid_takes", 1), ("rows", 1)):
            if getattr(self, name) < least:
                raise InputError(f"data.{name} must be at least {least}, found {getattr(self, name)}")
        if self.longest < self.shortest:
            raise InputError(f"data.longest must be at least data.shortest {self.shortest}, found {self.longest}")
        if not 0 <= self.silence <= 10:
            raise InputError(f"data.silence must be 0 to 10 seconds, found {self.silence}")
        return SpokenTask(read_recordings(self.path), self)


class _Plan(NamedTuple):
    """What a string is made of: recordings [L], samples of silence [L + 1], samples in all; what draws the noise."""

    rows: NDArray[np.int64]
    gaps: NDArray[np.int64]
    samples: int
    random: np.random.Generator


class SpokenTask:
    """A transcription `Task`: inputs [B, T, bands] float32, targets [B, L] the words' numbers, IGNORE behind them.

    String i of a split is a pure function of (seed, i): one speaker, so many words, which ones, and the silences, each
    drawn evenly. Over all lies noise of one quantisation step, so that silence is no number of its own. Training takes
    strings 0, 1, 2, … without an end: `POOL` batches' worth at a time, sorted by length and cut into batches, which
    come in a drawn order. An epoch is as many words as there are recordings to train on.
    Raises InputError for a split without recordings.
    """

    kind: Literal["transcription"] = "transcription"
    inputs: Literal["frames"] = "frames"
    metric: Metric = "token error rate"
    classes = 0
    carries_state = False
    majority = None

    def __init__(self, recordings: Recordings, config: SpokenConfig) -> None:
        self.recordings, self.config = recordings, config
        self.names, self.vocab_size = list(recordings.words), len(recordings.words)
        takes, edge = recordings.takes, config.test_takes + config.valid_takes
        inside = {"test": takes < config.test_takes, "train": takes >= edge}
        inside["valid"] = ~(inside["test"] | inside["train"])
        self._rows = {split: self._by_speaker(split, mask) for split, mask in inside.items()}
        known = set(recordings.labels[inside["train"]].tolist())
        for split in ("valid", "test"):
            for word in set(recordings.labels[inside[split]].tolist()) - known:
                raise InputError(
                    f"{split} split: the word {self.names[word]!r} has no recording to train on; give it more takes"
                )
        longest = int(np.diff(recordings.starts).max())
        self._gap = round(config.silence * recordings.rate)
        self.max_length = frames(config.longest * longest + (config.longest + 1) * self._gap, recordings.rate)
        every = range(config.rows)
        self._held_out: dict[Split, NDArray[np.int64]] = {
            "valid": self._sorted("valid", every, config.seed),
            "test": self._sorted("test", every, config.seed),
        }
        self._pools = lru_cache(maxsize=4)(self._pool)

    def _by_speaker(self, split: str, mask: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
        """The recordings of a split, a list for each speaker who has any."""
        if not mask.any():
            c = self.config
            raise InputError(
                f"{split} split: expected recordings, found none in {c.path} (test: takes below {c.test_takes}, "
                f"validation: the next {c.valid_takes}, training: the rest); change data.test_takes or valid_takes"
            )
        speakers = [np.flatnonzero(mask & (self.recordings.speakers == s)) for s in range(len(self.recordings.people))]
        return [rows for rows in speakers if len(rows)]

    def _sorted(self, split: Split, indices: range, seed: int) -> NDArray[np.int64]:
        """Some strings of a split, shortest first: little padding in a batch."""
        lengths = [self._plan(split, i, seed).samples for i in indices]
        return indices.start + np.argsort(lengths, kind="stable")

    def _plan(self, split: Split, index: int, seed: int) -> "_Plan":
        c, speakers = self.config, self._rows[split]
        random = generator(seed, {"train": TRAIN, "valid": VALID, "test": TEST}[split], index)
        words = random.integers(c.shortest, c.longest, endpoint=True)
        rows = random.choice(speakers[random.integers(len(speakers))], words)
        gaps = random.integers(0, self._gap, words + 1, endpoint=True)
        starts = self.recordings.starts
        return _Plan(rows, gaps, int(gaps.sum() + (starts[rows + 1] - starts[rows]).sum()), random)

    def string(self, split: Split, index: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """String `index` of a split: samples [n] in [-1, 1] and the words' numbers [L]."""
        plan = self._plan(split, index, seed)
        samples = plan.random.standard_normal(plan.samples, np.float32)
        place = 0
        for gap, row in zip(plan.gaps, plan.rows, strict=False):  # the last gap stands behind them
            one = self.recordings.wave(row)
            place += gap + len(one)
            samples[place - len(one) : place] += one
        return samples / np.float32(32768), self.recordings.labels[plan.rows]

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Batch `index` of the endless training set that `seed` gives. Cost: O(B·T), about half a millisecond a row."""
        pool, place = divmod(index, POOL)
        return self._batch("train", self._pools(pool, batch_size, seed)[place], seed)

    def _pool(self, pool: int, batch_size: int, seed: int) -> NDArray[np.int64]:
        """Which strings make the batches of a pool, [POOL, B]."""
        first = pool * POOL * batch_size
        batches = self._sorted("train", range(first, first + POOL * batch_size), seed).reshape(POOL, batch_size)
        return batches[generator(seed, ORDER, pool).permutation(POOL)]

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """The held-out strings of a split, each once, shortest first."""
        order = self._held_out[split]
        for first in range(0, len(order), batch_size):
            yield self._batch(split, order[first : first + batch_size], self.config.seed)

    def _batch(self, split: Split, indices: NDArray[np.int64], seed: int) -> Batch:
        strings = [self.string(split, i, seed) for i in indices.tolist()]
        rate, bands = self.recordings.rate, self.config.bands
        rows = [normalised(filterbanks(torch.from_numpy(samples), rate, bands)) for samples, _ in strings]
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return Batch(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            torch.nn.utils.rnn.pad_sequence([torch.from_numpy(y) for _, y in strings], True, IGNORE),
            None if bool(mask.all()) else mask,
        )

    def size(self, split: Split) -> int:
        """Words: of the recordings that are trained on, or of a held-out split's strings."""
        if split == "train":
            return sum(map(len, self._rows["train"]))
        return sum(len(self._plan(split, i, self.config.seed).rows) for i in range(self.config.rows))

    def epoch(self, batch_size: int) -> float:
        """Updates in which as many words are heard as there are recordings to train on."""
        return self.size("train") / (batch_size * (self.config.shortest + self.config.longest) / 2)

    def sample(self) -> Tensor:
        """One row of zeros [1, T, bands], float32, as long as any string may be."""
        return torch.zeros(1, self.max_length, self.config.bands)

    def close(self) -> None:
        """Nothing to end."""
