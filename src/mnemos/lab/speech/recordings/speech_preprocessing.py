"""`mnemos predict` for speech recognition: the words in wav files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.lab.speech.models.ctc import Transcriber
from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.preprocessing import Predicted, Preprocessing, files_below
from mnemos.registry import register
from mnemos.types import InputError

from .audio import read_wav
from .filterbanks import filterbanks, normalised

_STEP = np.float32(32768)  # 16-bit samples are divided by it


@register
@dataclass(frozen=True)
class SpeechPreprocessing(Preprocessing):
    """The words that are heard in wav files; a folder stands for the wav files in it.

    Attributes:
        rate: samples per second of the recordings that the model was trained on; files must have it.
        bands: log-mel filterbanks per frame (`mnemos.lab.speech.recordings.filterbanks`).
    """

    name: ClassVar[str] = "recordings"

    rate: int
    bands: int

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        """The most likely words of each file, as evaluation decodes them."""
        if not isinstance(model, Transcriber):
            raise InputError(f"expected a model that transcribes, found {type(model).__name__}; use a recipe of speech")
        for path in files_below(files, (".wav",), "recordings"):
            try:
                samples = self._samples(path)
            except InputError as error:
                yield Predicted(str(path), "", problem=str(error))
                continue
            noise = np.random.default_rng(0).standard_normal(len(samples), np.float32)
            with torch.no_grad():
                heard = model.transcribe(self.features((noise + samples) / _STEP)[None])[0]
            yield Predicted(str(path), " ".join(self.names[token] for token in heard))

    def _samples(self, path: Path) -> NDArray[np.int16]:
        """The samples [n] of a file. Raises InputError for a file that is no recording of the rate."""
        samples, rate = read_wav(read_bytes(path), str(path))
        if rate != self.rate:
            raise InputError(f"{path}: expected {self.rate} Hz as in training, found {rate} Hz; resample it")
        return samples

    def features(self, samples: NDArray[np.float32]) -> Tensor:
        """The model's input for samples [n] in [-1, 1]: frames [T, bands], normalised over the recording.

        The samples must have noise of one quantisation step, as the training data have, so that silence has no unique
        value.
        """
        return normalised(filterbanks(torch.from_numpy(samples), self.rate, self.bands))
