"""Recordings of single words, from wav files in folders or archives, and log-mel filterbanks, which a model reads."""

import functools
import io
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.lab.tasks.files import archive_members, read_bytes
from mnemos.lab.tasks.preprocessing import files_below
from mnemos.types import InputError

RATES = 8_000, 16_000
_NAME = re.compile(r"(?P<label>[^_]+)_(?P<speaker>.+)_(?P<take>\d+)\.wav", re.IGNORECASE)
_ARCHIVES = (".tar.gz", ".tgz", ".tar")
WINDOW, HOP = 0.025, 0.010  # seconds
_FLOOR = 1e-10  # minimum power of a band for samples in [-1, 1]: far below one quantisation step


@dataclass(frozen=True, eq=False)
class Recordings:
    """N recordings, one behind the other, each with a label, a speaker and the number of its take."""

    samples: NDArray[np.int16]  # of all
    starts: NDArray[np.int64]  # [N + 1], in them
    labels: NDArray[np.int64]  # [N], in `words`
    speakers: NDArray[np.int64]  # [N], numbers
    takes: NDArray[np.int64]  # [N]
    words: tuple[str, ...]  # sorted
    rate: int  # samples per second

    def __len__(self) -> int:
        return len(self.labels)

    def wave(self, index: int) -> NDArray[np.int16]:
        return self.samples[self.starts[index] : self.starts[index + 1]]


def read_recordings(path: str | Path) -> Recordings:
    """Read all files `{label}_{speaker}_{take}.wav` below a folder and in its tar archives, or in one archive.

    Files must be mono with 16 bits, all at 8 kHz or all at 16 kHz. Hidden files and files of other types are ignored;
    a recording that is there twice, such as packed and unpacked, counts once. Memory: two bytes per sample. Raises
    InputError, with the file's name, for a wav file with another name or format, and if there are no recordings.
    """
    takes: dict[tuple[str, str, int], NDArray[np.int16]] = {}  # samples by label, speaker, take
    rate = 0
    for name, data in _wavs(Path(path)):
        parts = _NAME.fullmatch(os.path.basename(name))
        if parts is None:
            raise InputError(
                f"{name}: expected a file name LABEL_SPEAKER_TAKE.wav, such as 7_george_12.wav; rename the file"
            )
        samples, file_rate = read_wav(data, name)
        if rate not in (0, file_rate):
            raise InputError(f"{name}: expected {rate} Hz like the files before it, found {file_rate} Hz; resample it")
        takes[parts["label"], parts["speaker"], int(parts["take"])], rate = samples, file_rate
    if not takes:
        raise InputError(f"{path}: expected recordings named LABEL_SPEAKER_TAKE.wav, found none; name another folder")
    keys = sorted(takes)
    waves = [takes[key] for key in keys]
    (words, labels), (_, speakers) = (np.unique([key[i] for key in keys], return_inverse=True) for i in (0, 1))
    starts = np.concatenate([[0], np.cumsum([len(one) for one in waves])])
    numbers = np.array([key[2] for key in keys])
    return Recordings(np.concatenate(waves), starts, labels, speakers, numbers, tuple(words.tolist()), rate)


def read_wav(data: bytes, name: str) -> tuple[NDArray[np.int16], int]:
    """The samples [n] in the bytes of a wav file, and their number per second. `name` is for error messages.

    Raises InputError unless it is PCM, mono, 16 bits, 8 or 16 kHz, complete and as long as a window.
    """
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Reached EOF")  # a truncated file
            warnings.filterwarnings("ignore", "Chunk")  # one that is no sound
            rate, samples = wavfile.read(io.BytesIO(data))
    except Exception as error:  # the reader raises any for a damaged file
        raise InputError(
            f"{name}: expected a whole wav file, but it cannot be read ({error}); convert it, or fetch it again"
        ) from None
    if samples.ndim != 1 or samples.dtype != np.int16 or rate not in RATES:
        form = f"{samples.shape[1] if samples.ndim > 1 else 1} channel(s) of {samples.dtype} at {rate} Hz"
        raise InputError(f"{name}: expected 1 channel of int16 at 8000 or 16000 Hz, found {form}; convert it")
    if len(samples) < WINDOW * rate:
        raise InputError(f"{name}: expected at least {WINDOW:g} seconds, found {len(samples) / rate:.3g}; remove it")
    return samples, rate


def recording_files(path: str | Path) -> list[Path]:
    """The wav files and archives below a folder, sorted, or the one file; those that `read_recordings` reads."""
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"{path}: expected a folder of wav files, but the path does not exist; set --data.path to the folder"
        )
    return files_below([path], (*_ARCHIVES, ".wav"), "recordings")


def _wavs(path: Path) -> Iterator[tuple[str, bytes]]:
    """The name and bytes of every wav file, including those in archives."""

    def wanted(name: str) -> bool:
        return name.lower().endswith(".wav") and not os.path.basename(name).startswith(".")

    for file in recording_files(path):
        if file.name.lower().endswith(_ARCHIVES):
            yield from ((f"{file}: {name}", data) for name, data in archive_members(file, wanted))
        else:
            yield str(file), read_bytes(file)


def frames(samples: int, rate: int) -> int:
    """The number of whole windows in `samples` samples at `rate` samples per second."""
    window, hop = _sizes(rate)
    return max(0, 1 + (samples - window) // hop)


def filterbanks(wave: Tensor, rate: int, bands: int = 40) -> Tensor:
    """log Σ_f w_b(f)·|X_t(f)|² of samples [n] in [-1, 1], as [T, bands]: windows of 25 ms, one every 10 ms.

    X_t is the spectrum of window t, weighted by a Hann window and zero-padded to a power of two. w_b is a triangle of
    height 1; the corners of all triangles are equally spaced from 0 to rate/2 on the mel scale 2595·log₁₀(1 + f/700).
    There are no delta features. Only whole windows count: T = 1 + ⌊(n − 25 ms)/10 ms⌋.
    Cost: O(T·N·log N) for windows of N samples.
    """
    window, hop = _sizes(rate)
    shape, triangles = (one.to(wave) for one in _weights(rate, bands))
    size = 2 * (triangles.shape[0] - 1)
    spectrum = torch.fft.rfft(wave.unfold(0, window, hop) * shape, size)
    return ((spectrum.real.square() + spectrum.imag.square()) @ triangles).clamp(min=_FLOOR).log()


def normalise(rows: Tensor) -> Tensor:
    """Rows [T, bands] of one utterance with mean 0 and variance 1 in each band; a constant band becomes 0."""
    centred = rows - rows.mean(0)
    return centred / centred.square().mean(0).sqrt().clamp(min=1e-5)


def _sizes(rate: int) -> tuple[int, int]:
    return round(WINDOW * rate), round(HOP * rate)


@functools.cache
def _weights(rate: int, bands: int) -> tuple[Tensor, Tensor]:
    """The Hann window [N], and the triangles w_b [F, bands] at F frequencies from 0 to rate/2."""
    window, _ = _sizes(rate)
    size = 1 << (window - 1).bit_length()
    frequency = torch.linspace(0, rate / 2, size // 2 + 1, dtype=torch.float64)[:, None]
    top = torch.tensor(rate / 2, dtype=torch.float64)
    mel = torch.linspace(0, 1, bands + 2, dtype=torch.float64) * 2595 * torch.log10(1 + top / 700)
    corner = 700 * (10 ** (mel / 2595) - 1)
    low, middle, high = corner[:-2], corner[1:-1], corner[2:]
    triangles = torch.minimum((frequency - low) / (middle - low), (high - frequency) / (high - middle)).clamp(min=0)
    return torch.hann_window(window, periodic=True, dtype=torch.float64), triangles
