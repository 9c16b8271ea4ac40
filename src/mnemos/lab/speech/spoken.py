"""Speech recognition of strings of words, made from real recordings of single words; its `mnemos predict`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.generators import ORDER, TEST, TRAIN, VALID, generator
from mnemos.lab.tasks.batch import IGNORE, Batch, each, to_model
from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.metrics import ACCURACY, TOKEN_ERROR_RATE
from mnemos.lab.tasks.preprocessing import Predicted, Preprocessing
from mnemos.lab.tasks.row_order import POOL
from mnemos.lab.tasks.task import DataConfig, HeldOut, Split, Task
from mnemos.modes import evaluating
from mnemos.registry import register
from mnemos.types import InputError, JSONObject

from .audio import Recordings, filterbanks, frames, normalise, read_recordings, read_wav, recording_files
from .ctc import Transcriber

_STEP = np.float32(32768)  # 16-bit samples are divided by it
_USES = {"train": TRAIN, "valid": VALID, "test": TEST}  # of random numbers
_SHOWN = 8  # strings


@register
@dataclass(frozen=True)
class SpokenConfig(DataConfig):
    """Strings of `shortest` to `longest` recorded words of one speaker, for example digits.

    `path`: a folder with files `{label}_{speaker}_{take}.wav`, or with .tar.gz archives of them, such as the Free
    Spoken Digit Dataset. No recording is in two splits: takes 0 … `test_takes` − 1 are for testing (the data set's own
    split), the next `valid_takes` for validation, all others for training.
    """

    name: ClassVar[str] = "spoken"

    path: str = "fsdd"
    shortest: int = 1
    longest: int = 5
    silence: float = 0.2  # seconds at most, before, between and after the words
    bands: int = 40  # log-mel filterbanks every 10 ms, normalised over a string
    test_takes: int = 5
    valid_takes: int = 5
    rows: int = 256  # strings of the validation and of the test split
    seed: int = 0  # of these

    def files(self) -> list[Path]:
        return recording_files(self.path)

    def build(self) -> "SpokenTask":
        """The task; every recording is read. Raises InputError for settings out of range and wrong files."""
        self.require(
            *(f"{name} >= 1" for name in ("shortest", "bands", "test_takes", "valid_takes", "rows")),
            "longest >= shortest",
            "0 <= silence <= 10",
        )
        return SpokenTask(read_recordings(self.path), self)


class SpokenTask(Task):
    """A transcription `Task`: inputs [B, T, bands] float32, targets [B, L] word indices, padded with IGNORE.

    String i of a split is a pure function of (seed, i). Its speaker, number of words, words and silences are uniform
    draws. Training uses the strings 0, 1, 2, … without end: each group of `POOL` batches is sorted by length and cut
    into batches, and these are shuffled. An epoch has as many words as there are training recordings.
    Raises InputError for a split without recordings.
    """

    inputs: Literal["frames"] = "frames"
    metrics = (
        TOKEN_ERROR_RATE,
        replace(ACCURACY, about="1 − token error rate: below 0 for more edits than tokens.", bounds=(-math.inf, 1.0)),
    )

    def __init__(self, recordings: Recordings, config: SpokenConfig) -> None:
        self.recordings, self.config = recordings, config
        self.names, self.vocab_size = list(recordings.words), len(recordings.words)
        self._preprocessing = SpeechPreprocessing(recordings.rate, config.bands, names=recordings.words)

        # --- the recordings of each split, an array per speaker who has some ---
        takes, edge = recordings.takes, config.test_takes + config.valid_takes
        inside = {"test": takes < config.test_takes, "train": takes >= edge}
        inside["valid"] = ~(inside["test"] | inside["train"])
        self._rows: dict[str, list[NDArray[np.int64]]] = {}
        for split, mask in inside.items():
            if not mask.any():
                raise InputError(
                    f"{split} split: expected recordings, found none in {config.path} (test: takes below "
                    f"{config.test_takes}, validation: the next {config.valid_takes}, training: the rest); change "
                    "data.test_takes or valid_takes"
                )
            speakers = np.unique(recordings.speakers[mask])
            self._rows[split] = [np.flatnonzero(mask & (recordings.speakers == speaker)) for speaker in speakers]

        # --- the longest string, and the order of strings ---
        longest = int(np.diff(recordings.starts).max())
        self._gap = round(config.silence * recordings.rate)
        self.max_length = frames(config.longest * longest + (config.longest + 1) * self._gap, recordings.rate)
        every = range(config.rows)
        self._held_out = {split: self._sort(split, every, config.seed) for split in ("valid", "test")}
        self._pools = lru_cache(maxsize=4)(self._pool)

    def _sort(self, split: str, strings: range, seed: int) -> NDArray[np.int64]:
        """Strings of a split, shortest first, so that batches need little padding."""
        lengths = [self._plan(split, i, seed).samples for i in strings]
        return strings.start + np.argsort(lengths, kind="stable")

    def _plan(self, split: str, index: int, seed: int) -> "_Plan":
        c, speakers = self.config, self._rows[split]
        random = generator(seed, _USES[split], index)
        words = random.integers(c.shortest, c.longest, endpoint=True)
        rows = random.choice(speakers[random.integers(len(speakers))], words)
        gaps = random.integers(0, self._gap, words + 1, endpoint=True)
        starts = self.recordings.starts
        return _Plan(rows, gaps, int(gaps.sum() + (starts[rows + 1] - starts[rows]).sum()), random)

    def string(self, split: str, index: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """String `index` of a split: samples [n] in [-1, 1] and word indices [L]."""
        plan = self._plan(split, index, seed)
        # Noise of one quantisation step, so that silence has no value of its own; `SpeechPreprocessing` adds it too.
        samples = plan.random.standard_normal(plan.samples, np.float32)
        end = 0
        for gap, row in zip(plan.gaps, plan.rows, strict=False):  # the last gap follows the last word
            one = self.recordings.wave(row)
            end += gap + len(one)
            samples[end - len(one) : end] += one
        return samples / _STEP, self.recordings.labels[plan.rows]

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Training batch `index`. Cost: O(B·T), about 0.5 ms per row."""
        pool, number = divmod(index, POOL)
        return self._batch("train", self._pools(pool, batch_size, seed)[number], seed)

    def _pool(self, pool: int, batch_size: int, seed: int) -> NDArray[np.int64]:
        """The strings [POOL, B] of a pool's batches."""
        first = pool * POOL * batch_size
        batches = self._sort("train", range(first, first + POOL * batch_size), seed).reshape(POOL, batch_size)
        return batches[generator(seed, ORDER, pool).permutation(POOL)]

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        order = self._held_out[split]  # shortest first
        for first in range(0, len(order), batch_size):
            yield self._batch(split, order[first : first + batch_size], self.config.seed)

    def _batch(self, split: str, chosen: NDArray[np.int64], seed: int) -> Batch:
        strings = [self.string(split, i, seed) for i in chosen.tolist()]
        rows = [self._preprocessing.features(samples) for samples, _ in strings]
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return Batch(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            torch.nn.utils.rnn.pad_sequence([torch.from_numpy(y) for _, y in strings], True, IGNORE),
            None if bool(mask.all()) else mask,
        )

    def size(self, split: Split) -> int:
        if split == "train":
            return sum(map(len, self._rows["train"]))
        return sum(len(self._plan(split, i, self.config.seed).rows) for i in range(self.config.rows))

    def epoch(self, batch_size: int) -> float:
        """The updates whose strings have as many words as there are training recordings."""
        return self.size("train") / (batch_size * (self.config.shortest + self.config.longest) / 2)

    def example(self) -> Batch:
        row = torch.zeros(1, self.max_length, self.config.bands)
        return Batch(row, row)

    @property
    def sizes(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "bands": self.config.bands, "max_length": self.max_length}

    def preprocessing(self) -> "SpeechPreprocessing":
        return self._preprocessing

    def artifacts(self, model: nn.Module, folder: Path, split: HeldOut) -> JSONObject:
        """Some strings of the split: what was said, and what the model heard."""
        heard = self._transcriptions(model, split)
        about = {
            "title": "What was heard",
            "given": "said",
            "found": "heard",
            "about": "Some strings of the test split, from the shortest to the longest.",
        }
        return {"transcriptions": heard, "examples": {"transcriptions": about}} if heard else {}

    def show(self, model: nn.Module, split: HeldOut) -> list[str]:
        rows = self._transcriptions(model, split)
        return [f"  said   {one['said']}\n  heard  {one['heard'] or '(nothing)'}" for one in rows]

    def _transcriptions(self, model: nn.Module, split: HeldOut) -> list[dict[str, str]]:
        """[{"said": spoken, "heard": transcribed words}] of the first row of up to `_SHOWN` batches of equal size."""
        rows: list[dict[str, str]] = []
        if not isinstance(model, Transcriber):
            return rows
        with evaluating(model):
            for batch in self.batches(split, -(-self.config.rows // _SHOWN)):
                one = to_model(each(batch, lambda x: x[:1]), model)
                heard = model.transcribe(one.inputs, one.mask)[0]
                said = [token for token in one.targets[0].tolist() if token >= 0]
                rows.append({key: " ".join(self.names[t] for t in x) for key, x in (("said", said), ("heard", heard))})
        return rows


class _Plan(NamedTuple):
    """A string of L words before it is built."""

    rows: NDArray[np.int64]  # [L], of the recordings
    gaps: NDArray[np.int64]  # [L + 1], samples of silence
    samples: int  # of words and silence
    random: np.random.Generator  # for the noise


@register
@dataclass(frozen=True)
class SpeechPreprocessing(Preprocessing):
    """The words that are heard in wav files; a folder stands for the wav files in it."""

    name: ClassVar[str] = "recordings"
    endings = (".wav",)
    files = "recordings"

    rate: int  # samples per second of the recordings that the model was trained on; files must have it
    bands: int  # log-mel filterbanks per frame

    def reader(self, model: Any) -> Transcriber:
        if not isinstance(model, Transcriber):
            raise InputError(f"expected a model that transcribes, found {type(model).__name__}; use a recipe of speech")
        return model

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
        samples, rate = read_wav(read_bytes(path), str(path))
        if rate != self.rate:
            raise InputError(f"{path}: expected {self.rate} Hz as in training, found {rate} Hz; resample it")
        noise = np.random.default_rng(0).standard_normal(len(samples), np.float32)
        heard = reader.transcribe(self.features((noise + samples) / _STEP)[None])[0]
        return Predicted(str(path), " ".join(self.names[token] for token in heard))

    def features(self, samples: NDArray[np.float32]) -> Tensor:
        """The frames [T, bands] of a recording's samples [n] in [-1, 1], which have the noise of training."""
        return normalise(filterbanks(torch.from_numpy(samples), self.rate, self.bands))
