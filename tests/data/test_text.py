import gzip
from pathlib import Path

import numpy as np
import pytest

from mnemos import config
from mnemos.data.text import TextConfig, read_documents
from mnemos.types import InputError

BOOKS = Path(__file__).parents[2] / "../shared/data/books/train"


def write(folder, count=40):
    for i in range(count):
        file = folder / f"part{i % 3}" / f"{i:02d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([65 + i]) * (10 + i))
    return folder


def texts(task, split):
    """The documents of a split, put together from what is predicted in evaluation."""
    found, rows = [], {}
    for batch in task.batches(split, 3):
        for row, (targets, reset) in enumerate(zip(batch.targets, batch.reset, strict=True)):
            data = bytes(targets[targets >= 0].tolist())
            if reset:
                rows[row] = []
                found.append(rows[row])
            rows[row].append(data)
    return {b"".join(pieces) for pieces in found} - {b""}


def test_a_folder(tmp_path):
    settings = TextConfig(str(write(tmp_path)), segment=8, held_out=0.1)
    task = settings.build()
    assert (task.vocab_size, task.max_length, task.carries_state) == (256, 8, True)
    valid, test = texts(task, "valid"), texts(task, "test")
    assert (len(valid), len(test)) == (4, 4)
    everything = {bytes([65 + i]) * (10 + i) for i in range(40)}
    assert valid | test < everything
    assert not valid & test
    assert task.size("train") == sum(map(len, everything - valid - test))
    again = settings.build()
    assert (texts(again, "valid"), texts(again, "test")) == (valid, test)
    assert config.from_dict(config.DataConfig, config.to_dict(settings)) == settings


def test_documents_have_names_and_need_not_be_unpacked(tmp_path):
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "a").write_bytes(b"plain")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"x")
    found = read_documents(tmp_path)
    assert {name: data.tobytes() for name, data in found.items()} == {"a": b"plain", "b.gz": b"packed"}
    assert list(read_documents(tmp_path / "b.gz")) == ["b.gz"]


def test_one_document_is_cut(tmp_path):
    data = bytes(np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8))
    (tmp_path / "one").write_bytes(data)
    task = TextConfig(str(tmp_path / "one"), segment=64, held_out=0.1).build()
    assert [task.size(split) for split in ("train", "valid", "test")] == [800, 100, 100]
    assert (texts(task, "valid"), texts(task, "test")) == ({data[800:900]}, {data[900:]})


def test_a_long_document_goes_on_afresh(tmp_path):
    data = bytes(np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8))
    (tmp_path / "one").write_bytes(data)
    task = TextConfig(str(tmp_path / "one"), segment=64, held_out=0.1, longest=70).build()
    assert texts(task, "valid") == {data[800:870], data[870:900]}
    assert task.size("train") == 800


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_very_short_document_is_cut_all_the_same(tmp_path, size):
    (tmp_path / "one").write_bytes(b"abcde"[:size])
    task = TextConfig(str(tmp_path), held_out=0.49).build()
    assert sum(task.size(split) for split in ("train", "valid", "test")) == size


def test_the_standard_library():
    task = TextConfig(segment=256).build()
    sizes = [task.size(split) for split in ("train", "valid", "test")]
    assert sizes[0] > 5e6
    assert min(sizes) > 1e4
    names = list(read_documents(None))
    assert "argparse.py" in names
    assert names == sorted(names)
    assert not [
        name for name in names if not name.endswith(".py") or {"test", "tests", "site-packages"} & {*name.split("/")}
    ]
    batch = task.train_batch(0, 4, 0)
    assert batch.inputs.shape == (4, 256)
    assert (batch.inputs[:, 0] == 0).all()


@pytest.mark.skipif(not BOOKS.is_dir(), reason="the books are not here")
def test_real_books():
    task = TextConfig(str(BOOKS), segment=512).build()
    assert sum(task.size(split) for split in ("train", "valid", "test")) == sum(
        len(gzip.decompress(file.read_bytes())) for file in BOOKS.iterdir()
    )
    assert min(task.size("valid"), task.size("test")) > 10**6


@pytest.mark.parametrize(
    ("files", "change", "words"),
    [
        (None, {}, "text: .*data.path"),
        ({}, {}, "found 0 files"),
        ({"a": b"", "b": b""}, {}, "found 2 files"),
        ({"a": b"ab"}, {}, "a: .*3 bytes.*found 2"),
        ({"a.gz": gzip.compress(b"text" * 99)[:-9]}, {}, r"a.gz: .*gzip.*offset \d+"),
        ({"a": b"abc"}, {"segment": 0}, "data.segment .*found 0"),
        ({"a": b"abc"}, {"longest": 0}, "data.longest .*found 0"),
        ({"a": b"abc"}, {"held_out": 0.5}, "data.held_out .*found 0.5"),
    ],
)
def test_wrong_text(tmp_path, files, change, words):
    folder = tmp_path / "text"
    if files is not None:
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
    with pytest.raises(InputError, match=words) as error:
        TextConfig(str(folder), **change).build()
    assert "\n" not in str(error.value)
