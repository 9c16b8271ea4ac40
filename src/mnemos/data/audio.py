"""Recordings of single words, from a folder of wav files or archives of them, held as samples in memory."""

import gzip
import io
import os
import re
import tarfile
import wave
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .files import read_bytes

RATES = 8_000, 16_000
SHORTEST, LONGEST = 0.025, 60.0  # seconds of one recording
MOST = 2**30  # bytes of samples: nine hours at 16 kHz, eighteen at 8
_NAME = re.compile(r"(?P<label>[^_]+)_(?P<speaker>.+)_(?P<take>\d+)\.wav", re.IGNORECASE)
_ARCHIVES = (".tar.gz", ".tgz", ".tar")


@dataclass(frozen=True, eq=False)
class Recordings:
    """N recordings, one after the other: samples [total] int16, starts [N + 1]; label, speaker and take [N] of each.

    labels and speakers are places in `words` and `people`, which are sorted. rate: samples a second, of all.
    """

    samples: NDArray[np.int16]
    starts: NDArray[np.int64]
    labels: NDArray[np.int64]
    speakers: NDArray[np.int64]
    takes: NDArray[np.int64]
    words: tuple[str, ...]
    people: tuple[str, ...]
    rate: int

    def __len__(self) -> int:
        return len(self.labels)

    def wave(self, index: int) -> NDArray[np.int16]:
        """The samples of a recording, as a view."""
        return self.samples[self.starts[index] : self.starts[index + 1]]


def read_recordings(path: str | Path) -> Recordings:
    """All `{label}_{speaker}_{take}.wav` of a folder (searched through) and of the .tar.gz in it, or of one archive.

    Mono, 16 bits, all at 8 or all at 16 kHz. Hidden files, and files that are neither, are left alone.
    Cost: every file is read once; two bytes a sample are held, no more than `MOST`. Raises InputError, naming the
    file, for anything else.
    """
    found: dict[tuple[str, str, int], tuple[str, NDArray[np.int16]]] = {}
    rate, held = 0, 0
    for name, data in _wavs(Path(path)):
        parts = _NAME.fullmatch(os.path.basename(name))
        if parts is None:
            raise InputError(f"{name}: expected a file called LABEL_SPEAKER_TAKE.wav, as 7_george_12.wav; rename it")
        samples, its_rate = read_wav(data, name)
        if rate not in (0, its_rate):
            raise InputError(f"{name}: expected {rate} samples a second like the others, found {its_rate}; resample it")
        key, rate, held = (parts["label"], parts["speaker"], int(parts["take"])), its_rate, held + samples.nbytes
        if key in found:
            raise InputError(f"{name}: expected each recording once, found {found[key][0]} too; remove one")
        if held > MOST:
            raise InputError(f"{path}: expected at most {MOST >> 20} MiB of samples, found more; give fewer recordings")
        found[key] = name, samples
    if not found:
        raise InputError(
            f"{path}: expected recordings called LABEL_SPEAKER_TAKE.wav, or a .tar.gz of them, found none; "
            "name their folder with --data.path"
        )
    keys = sorted(found)
    words, people = tuple(sorted({word for word, _, _ in keys})), tuple(sorted({who for _, who, _ in keys}))
    waves = [found[key][1] for key in keys]
    return Recordings(
        np.concatenate(waves),
        np.concatenate([[0], np.cumsum([len(one) for one in waves])]).astype(np.int64),
        np.array([words.index(key[0]) for key in keys]),
        np.array([people.index(key[1]) for key in keys]),
        np.array([key[2] for key in keys]),
        words,
        people,
        rate,
    )


def read_wav(data: bytes, name: str) -> tuple[NDArray[np.int16], int]:
    """(samples [n], samples a second) of a wav file's bytes; `name` is for the error."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate, promised = file.getparams()[:4]
            content = file.readframes(promised)
    except (wave.Error, EOFError, RuntimeError) as error:  # the last for chunks whose lengths are wrong
        raise InputError(f"{name}: expected a wav file of PCM, cannot be read ({error}); convert it") from None
    if (channels, width) != (1, 2) or rate not in RATES:
        found = f"{channels} channel(s) of {8 * width} bits at {rate} Hz"
        raise InputError(f"{name}: expected 1 channel of 16 bits at 8000 or 16000 Hz, found {found}; convert it")
    if len(content) != 2 * promised:
        raise InputError(f"{name}: expected {promised} samples, found {len(content) // 2}; the file is cut short")
    if not SHORTEST <= promised / rate <= LONGEST:
        raise InputError(
            f"{name}: expected {SHORTEST:g} to {LONGEST:g} seconds, found {promised / rate:.3g}; cut or remove it"
        )
    return np.frombuffer(content, "<i2").astype(np.int16), rate


def _wavs(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every wav file, archives opened."""
    if not path.exists():
        raise InputError(f"{path}: expected a folder of wav files, found nothing there; name it with --data.path")
    files = [path] if path.is_file() else sorted(_below(path))
    for file in files:
        if file.name.lower().endswith(_ARCHIVES):
            yield from _unpacked(file)
        elif file.name.lower().endswith(".wav"):
            yield str(file), read_bytes(file)


def _below(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _unpacked(archive: Path) -> Iterator[tuple[str, bytes]]:
    limit = int(2 * max(RATES) * LONGEST) + 2**16  # a member says how large it is before it is unpacked
    try:
        with tarfile.open(archive) as file:
            for member in file:
                hidden = os.path.basename(member.name).startswith(".")
                if not member.isfile() or hidden or not member.name.lower().endswith(".wav"):
                    continue
                name = f"{archive}: {member.name}"
                if member.size > limit:
                    raise InputError(f"{name}: expected at most {LONGEST:g} seconds, found {member.size} bytes; cut it")
                content = file.extractfile(member)
                assert content is not None
                yield name, content.read()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, OSError, RuntimeError) as error:
        raise InputError(f"{archive}: expected a tar archive, cannot be read ({error}); fetch it again") from None
