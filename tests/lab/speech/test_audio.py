"""Recordings: what is read, what is refused with one line that names the file, and the filterbanks of a waveform."""

import math
import struct
import tarfile

import numpy as np
import pytest
import torch
from refusals import refuses
from spoken_standins import REAL, tone, wav, write_recordings

from mnemos.lab.speech.audio import filterbanks, frames, normalise, read_recordings, read_wav


def test_a_folder_is_read(tmp_path):
    found = read_recordings(write_recordings(tmp_path / "a", takes=3))
    assert (found.words, found.rate, len(found)) == (("high", "low"), 8000, 12)
    for i in range(len(found)):
        label = ("low", "high").index(found.words[found.labels[i]])
        assert np.array_equal(found.wave(i), tone(label, found.speakers[i], found.takes[i]))


def test_an_archive_is_read_like_its_folder(tmp_path):
    folder = write_recordings(tmp_path / "a")
    (folder / ".hidden_x_1.wav").write_bytes(b"")
    (folder / "README.md").write_text("words")
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b" / "all.tar.gz", "w:gz") as file:
        file.add(folder, "recordings")
    one = read_recordings(folder)
    for path in (tmp_path / "b", tmp_path / "b" / "all.tar.gz"):
        other = read_recordings(path)
        assert np.array_equal(one.samples, other.samples)
        assert np.array_equal(one.takes, other.takes)


def extensible(samples, subformat=1, before=b"", bits=16):
    """A wav file as Audacity, ffmpeg and Windows write it: WAVE_FORMAT_EXTENSIBLE, mono, 16 kHz."""
    data = np.asarray(samples, "<i2").tobytes()
    fmt = struct.pack("<HHIIHHHHIH", 0xFFFE, 1, 16000, 2000 * bits, bits // 8, bits, 22, bits, 4, subformat)
    fmt += bytes.fromhex("000000001000800000aa00389b71")
    chunks = before + b"fmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.filterwarnings("error")
def test_pcm_in_the_extensible_format_is_read():
    samples = np.arange(-400, 400)
    other = struct.pack("<I", 3) + b"abc\0"  # another chunk first, padded to an even length
    for before in (b"", b"LIST" + other, b"mine" + other):
        read, rate = read_wav(extensible(samples, before=before), "x.wav")
        assert (read.tolist(), rate) == (samples.tolist(), 16000)
    assert len(read_wav(wav(np.arange(200)), "x.wav")[0]) == 200, "as long as a window"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (extensible(range(1200), bits=24), "expected 1 channel of int16 .* found 1 .* of int32"),
        (wav(np.arange(4000), channels=2), "found 2 channel.* 8000 Hz"),
        (wav(np.arange(2000) % 200, width=1), "of uint8"),
        (wav(np.arange(2000), 44100), "44100 Hz"),
        (wav(np.arange(2000))[:-500], "expected a whole wav file"),
        (wav(np.arange(150)), "expected at least 0.025 seconds, found 0.0187"),
        (b"ID3 what is this", "expected a whole wav file"),
    ],
)
def test_other_files_are_refused(content, problem):
    refuses(f"x_y_1.wav: .*{problem}", read_wav, content, "x_y_1.wav")


def test_wrong_folders_raise(tmp_path):
    refuses(r"--data\.path", read_recordings, tmp_path / "none")
    refuses(r"expected recordings", read_recordings, tmp_path)
    with tarfile.open(tmp_path / "words.tar", "w") as file:
        file.add(__file__, "README.md")
    refuses(r"words.tar: .*LABEL_SPEAKER_TAKE.wav, found none", read_recordings, tmp_path / "words.tar")
    folder = write_recordings(tmp_path / "a", takes=1)
    for name, content, match in (
        ("word.wav", wav(np.arange(800)), "LABEL_SPEAKER_TAKE"),
        ("low_ann_9.wav", wav(np.arange(800), 16000), r"\.wav: expected (8000|16000) Hz"),
    ):
        other = folder / "b" / name
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(content)
        refuses(match, read_recordings, folder)
        other.unlink()


@pytest.mark.skipif(not REAL.is_dir(), reason="the recordings are not here")
def test_the_real_recordings():
    found = read_recordings(REAL)
    assert (len(found), len({*found.speakers}), found.words, found.rate) == (2820, 6, tuple("0123456789"), 8000)
    assert 1234 < len(found.samples) / 8000 < 1237


def oracle(wave: torch.Tensor, rate: int, bands: int) -> torch.Tensor:
    """Frame by frame and band by band: a Fourier sum of each windowed frame, and a triangle's share of each power."""
    window, hop = rate // 40, rate // 100
    size = 1
    while size < window:
        size *= 2
    top = 2595 * math.log10(1 + rate / 2 / 700)
    corner = [700 * (10 ** (top * i / (bands + 1) / 2595) - 1) for i in range(bands + 2)]
    rows = []
    for start in range(0, len(wave) - window + 1, hop):
        n = torch.arange(window, dtype=torch.float64)
        frame = wave[start : start + window].double() * (0.5 - 0.5 * torch.cos(2 * math.pi * n / window))
        power = []
        for k in range(size // 2 + 1):
            angle = 2 * math.pi * k * n / size
            power.append((frame * angle.cos()).sum() ** 2 + (frame * angle.sin()).sum() ** 2)
        row = []
        for b in range(bands):
            total = 0.0
            for k, p in enumerate(power):
                f = k * rate / size
                if corner[b] < f <= corner[b + 1]:
                    total += float(p) * (f - corner[b]) / (corner[b + 1] - corner[b])
                elif corner[b + 1] < f < corner[b + 2]:
                    total += float(p) * (corner[b + 2] - f) / (corner[b + 2] - corner[b + 1])
            row.append(math.log(max(total, 1e-10)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rate", "bands", "samples"), [(8000, 40, 531), (16000, 40, 1003), (8000, 7, 200), (2600, 5, 150)]
)
def test_every_band_of_every_frame(rate, bands, samples):
    wave = torch.randn(samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    expected = oracle(wave, rate, bands)
    found = filterbanks(wave, rate, bands)
    assert found.shape == (frames(samples, rate), bands) == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    every_other = torch.stack([wave, wave], 1).reshape(-1)[::2]
    torch.testing.assert_close(filterbanks(every_other, rate, bands), found)
    torch.testing.assert_close(filterbanks(wave.float(), rate, bands).double(), expected, rtol=1e-3, atol=1e-3)


def test_silence_is_finite_and_utterances_are_normalised():
    assert not normalise(filterbanks(torch.zeros(400), 8000)).any()
    rows = normalise(torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5)
    torch.testing.assert_close(rows.mean(0), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(rows.var(0, correction=0), torch.ones(6, dtype=torch.float64))
    assert [frames(n, 8000) for n in (0, 199, 200, 279, 280)] == [0, 0, 1, 1, 2]
