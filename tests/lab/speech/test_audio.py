"""Reading recordings: what is read, and what is refused with one line that names the file."""

import tarfile

import numpy as np
import pytest
from spoken_standins import REAL, tone, wav, write_recordings

from mnemos.lab.speech import audio
from mnemos.lab.speech.audio import read_recordings, read_wav
from mnemos.types import InputError


def test_a_folder_is_read(tmp_path):
    found = read_recordings(write_recordings(tmp_path / "a", takes=3))
    assert (found.words, found.people, found.rate, len(found)) == (("high", "low"), ("ann", "bob"), 8000, 12)
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


def test_names_with_underscores_and_16_khz(tmp_path):
    (tmp_path / "yes_mary_ann_007.wav").write_bytes(wav(np.arange(800), 16000))
    found = read_recordings(tmp_path)
    assert (found.words, found.people, found.takes.tolist(), found.rate) == (("yes",), ("mary_ann",), [7], 16000)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (wav(np.arange(4000), channels=2), "2 channel.* 16 bits.* 8000 Hz"),
        (wav(np.arange(2000) % 200, width=1), "found .* 8 bits"),
        (wav(np.arange(2000), 44100), "found .* 44100 Hz"),
        (wav(np.arange(2000))[:-500], "2000 .*found 1750"),
        (wav(np.arange(199)), "0.025 to 60 seconds, found 0.0249"),
        (wav(np.zeros(8000 * 61)), "0.025 to 60 seconds, found 61"),
        (b"RIFF", "PCM"),
        (b"ID3 what is this", "PCM"),
    ],
)
def test_other_files_are_refused(content, problem):
    with pytest.raises(InputError, match=problem) as error:
        read_wav(content, "x_y_1.wav")
    assert str(error.value).startswith("x_y_1.wav: expected")
    assert "\n" not in str(error.value)


def test_wrong_folders_raise(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"--data\.path"):
        read_recordings(tmp_path / "none")
    with pytest.raises(InputError, match=r"LABEL_SPEAKER_TAKE.*--data\.path"):
        read_recordings(tmp_path)
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b\x08 no")
    with pytest.raises(InputError, match=r"broken\.tar\.gz: .*tar"):
        read_recordings(tmp_path)
    (tmp_path / "broken.tar.gz").unlink()
    folder = write_recordings(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(audio, "MAX_BYTES", 2**14)
        with pytest.raises(InputError, match=r"0\.015625 MiB"):
            read_recordings(folder)
    (tmp_path / "a" / "b").mkdir()
    (tmp_path / "a" / "b" / "low_ann_1.wav").write_bytes(wav(np.arange(800)))
    with pytest.raises(InputError, match=r"low_ann_1\.wav: .*low_ann_1\.wav"):
        read_recordings(folder)
    (tmp_path / "a" / "b" / "low_ann_1.wav").rename(tmp_path / "a" / "b" / "word.wav")
    with pytest.raises(InputError, match="LABEL_SPEAKER_TAKE"):
        read_recordings(folder)
    (tmp_path / "a" / "b" / "word.wav").unlink()
    (tmp_path / "a" / "b" / "low_ann_9.wav").write_bytes(wav(np.arange(800), 16000))
    with pytest.raises(InputError, match=r"\.wav: expected 16000 Hz .*found 8000 Hz"):
        read_recordings(folder)


@pytest.mark.skipif(not REAL.is_dir(), reason="the recordings are not here")
def test_the_real_recordings():
    found = read_recordings(REAL)
    assert (len(found), len(found.people), found.words, found.rate) == (2820, 6, tuple("0123456789"), 8000)
    assert 1234 < len(found.samples) / 8000 < 1237
