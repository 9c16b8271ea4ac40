import bz2
import gzip
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses

from mnemos import Transformer
from mnemos.attention import SoftmaxConfig
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.text import GIVEN, TEXTS, WRITTEN, TextConfig, TextPreprocessing, written_texts
from mnemos.lab.tasks.text_files import find_text, read_documents, split_documents
from mnemos.lab.tasks.vocabulary import Bytes
from mnemos.models.transformer import HeadConfig

CYRILLIC = "Привет, мир. "  # two bytes for most characters


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
    folder = corpus(tmp_path, *(f"part{i % 3}/{i:02d}.txt" for i in range(40)))
    settings = TextConfig(str(folder), segment=64, held_out=0.1)
    task = settings.build()
    assert (task.vocab_size, task.max_length, task.carries_state) == (256, 64, True)
    valid, test = texts(task, "valid"), texts(task, "test")
    assert (len(valid), len(test)) == (4, 4)
    everything = {bytes([65 + i]) * 2000 for i in range(40)}
    assert valid | test < everything
    assert not valid & test
    assert task.size("train") == sum(map(len, everything - valid - test))
    again = settings.build()
    assert (texts(again, "valid"), texts(again, "test")) == (valid, test)


NO_TEXT = {
    "notepad.txt": "text".encode("utf-16"),
    "rows.pkl": pickle.dumps(["text"] * 9),
    "photo.txt": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "corpus.txt.bz2": bz2.compress(random.Random(0).randbytes(2000)),
    "letter.txt": rb"{\rtf1\ansi text}",
    "rows.CSV": b"id,text\n1,a\n",
    "packed.gz": gzip.compress(b"a\0b"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_plainly_no_text_is_refused_and_left_out_of_a_folder(name, tmp_path):
    (tmp_path / name).write_bytes(NO_TEXT[name])
    refuses("expected text, found", find_text, tmp_path / name)
    (tmp_path / "a.txt").write_bytes("é, latin or UTF-8".encode("latin-1"))
    assert find_text(tmp_path).read == [tmp_path / "a.txt"]
    (about,) = TextPreprocessing(8).predict(None, [tmp_path / name], {"length": 1})
    assert "expected text, found" in about.problem


def test_documents_have_names_and_need_not_be_unpacked(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"plain")
    (tmp_path / "a-b.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"x")
    found = read_documents(find_text(tmp_path))
    named = [(name, data.tobytes()) for name, data in found.items()]
    assert named == [("a-b.gz", b"packed"), ("a/b", b"plain")], "sorted by name, which paths are not"
    assert list(read_documents(find_text(tmp_path / "a-b.gz"))) == ["a-b.gz"]


def test_a_document_has_a_byte_in_every_split(tmp_path):
    (tmp_path / "train").mkdir()
    for name, data in {"a": b"abc", "b": b"x" * 2000}.items():
        (tmp_path / "train" / name).write_bytes(data)
    found = split_documents(find_text(tmp_path), 0.4)
    assert [next(iter(found[split].values())).tobytes() for split in ("train", "valid", "test")] == [b"a", b"b", b"c"]


def test_one_document_is_cut_and_a_long_one_goes_on_afresh(tmp_path):
    data = bytes(np.random.default_rng(0).integers(1, 256, 10_000).astype(np.uint8))
    (tmp_path / "one").write_bytes(data)
    task = TextConfig(str(tmp_path / "one"), segment=64, held_out=0.1, longest=700).build()
    assert texts(task, "valid") == {data[8000:8700], data[8700:9000]}
    assert [task.size(split) for split in ("train", "valid", "test")] == [8000, 1000, 1000]
    whole = TextConfig(str(tmp_path / "one"), segment=64, held_out=0.1).build()
    assert (texts(whole, "valid"), texts(whole, "test")) == ({data[8000:9000]}, {data[9000:]})


def test_a_text_without_a_line_or_a_word_is_cut_between_characters(tmp_path):
    """Each is three bytes; half of the text, less a byte, begins inside one."""
    (tmp_path / "one.txt").write_text("字" * 41, encoding="utf-8")
    for share in (0.1, 0.2, 0.3, 0.4):
        parts = split_documents(find_text(tmp_path), share, characters=True)
        texts = [one.tobytes().decode() for part in parts.values() for one in part.values()]
        assert sum(map(len, texts)) == 41
        assert all(texts)


def test_text_is_scored_by_the_split_that_its_folder_gives(tmp_path):
    folder = corpus(tmp_path / "two", "train.txt", "valid.txt")
    task = TextConfig(str(folder)).build_to_score("valid")
    assert (texts(task, "valid"), task.whole, task.fitted) == ({b"B" * 2000}, False, False)
    for other, words in (
        (TextConfig(str(folder)), "two: expected a test split, found the splits train and valid; choose one with"),
        (TextConfig(str(folder), held_out=0.5), "0 < held_out < 0.5, found held_out 0.5"),
        (TextConfig(str(folder), tokens="words", words=2), "words >= 3 .*found words 2"),
    ):
        refuses(words, other.build_to_score, "test")
    assert TextConfig(str(folder), tokens="words", words=3).build_to_score("valid").vocab_size == 3
    whole = TextConfig(str(folder / "train.txt")).build_to_score("test")
    assert (texts(whole, "test"), whole.whole) == ({b"A" * 2000}, True)
    assert whole.encode(b"ab", "x") == [0, 97, 98], "after the start token"


def test_a_folder_of_texts_is_predicted_from(tmp_path):
    about = TextPreprocessing(8)
    folder = corpus(tmp_path / "some", "a.txt", "b.txt", "c.jpg")
    assert about.paths([folder, Path("-")]) == [folder / "a.txt", folder / "b.txt", Path("-")]
    refuses(r"pictures: expected text.*, found 1 pictures", about.paths, [corpus(tmp_path / "pictures", "c.jpg")])
    (tmp_path / "none.txt").touch()
    (none,) = about.predict(None, [tmp_path / "none.txt"], {"length": 1})
    assert "none.txt: expected text that the model continues, found 0 bytes" in none.problem
    assert "classes of the run" in about.difference(Preprocessing(names=("a",)))


def corpus(folder: Path, *names: str) -> Path:
    """A folder of texts, each of its own byte; pictures and the like hold what such files hold."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture = name.endswith((".jpg", ".png"))
        (folder / name).write_bytes(b"\xff\xd8\0\0" * 300 if picture else bytes([65 + i]) * 2000)
    return folder


BESIDE = ("README.md", "SHA256SUMS", "LICENSE", "BOOKS-LICENSE.txt", "a.sha256", "cover.jpg")


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train.txt", "dev.txt", "test.txt"),
        ("train/a.txt", "validation/b.txt", "test/c.txt"),
        ("corpus/train/a.txt", "corpus/val/b.txt", "corpus/test/c.txt"),
    ],
)
def test_the_splits_of_a_folder_are_the_splits(tmp_path, names):
    folder = corpus(tmp_path, *names, "notes.txt", *BESIDE)
    task = TextConfig(str(folder), segment=64).build()
    assert texts(task, "valid") == {b"B" * 2000}
    assert texts(task, "test") == {b"C" * 2000}
    assert task.size("train") == 2000
    assert [line.split()[-1] for line in task.about[:3]] == [*names]
    assert "2,000 bytes" in task.about[0]
    assert "README.md" in task.about[3]
    assert [file.relative_to(folder).as_posix() for file in TextConfig(str(folder)).files()] == sorted(names)


def test_a_split_that_is_missing_is_a_share_of_train(tmp_path):
    folder = corpus(tmp_path / "one", "wiki.train.tokens", "wiki.valid.tokens", "README.md")
    (folder / "wiki.train.tokens").write_bytes(b"a" * 18_000 + b"b" * 2_000)
    task = TextConfig(str(folder), held_out=0.1).build()
    assert (task.size("train"), texts(task, "valid"), texts(task, "test")) == (18_000, {b"B" * 2000}, {b"b" * 2000})
    assert "test   1 file, 2,000 bytes, a share of train: wiki.train.tokens" in task.about
    names = "train/a", "train/b", "train/c", "test/d"
    task = TextConfig(str(corpus(tmp_path / "many", *names))).build()
    assert (task.size("train"), texts(task, "test")) == (4000, {b"D" * 2000})
    assert texts(task, "valid") < {b"A" * 2000, b"B" * 2000, b"C" * 2000}


def test_what_lies_beside_texts_is_not_text(tmp_path):
    folder = corpus(tmp_path, "a.txt", "b.md", "part/c", "part/README.md", *BESIDE)
    chosen = [file.relative_to(folder).as_posix() for file in find_text(folder).read]
    assert chosen == ["a.txt", "b.md", "part/README.md", "part/c"]
    folder = corpus(tmp_path / "parts", "train-00.txt", "train-01.txt", "train-notes.txt", "valid-00.txt")
    given = {split: [file.name for file in files] for split, files in find_text(folder).splits.items()}
    assert given == {"train": ["train-00.txt", "train-01.txt"], "valid": ["valid-00.txt"]}
    # Files that are not read give no splits: checksums of splits, tokens as binary numbers.
    folder = corpus(tmp_path / "sums", "train.txt", "test.txt", "train.txt.md5", "test.txt.md5", "notes.md", "news.md")
    assert [file.name for file in find_text(folder).read] == ["test.txt", "train.txt"]
    folder = corpus(tmp_path / "binary", "train.png", "valid.png", "input.txt")
    assert (find_text(folder).splits, [file.name for file in find_text(folder).read]) == ({}, ["input.txt"])
    # A test folder of a program's source, or a file about trains, is not a split.
    folder = corpus(tmp_path / "code", "src/train.py", "train.md", "test/check.py")
    assert find_text(folder).splits == {}
    # Photos beside a text give no splits of it; several corpora in a folder are joined.
    folder = corpus(tmp_path / "photos", "photos/train/a.jpg", "photos/test/b.jpg", "book.txt")
    assert (find_text(folder).splits, [file.name for file in find_text(folder).read]) == ({}, ["book.txt"])
    folder = corpus(tmp_path / "two", "a/train.txt", "a/test.txt", "b/train.txt", "b/valid.txt", "c/train.txt", "d.txt")
    given = {split: [file.parent for file in files] for split, files in find_text(folder).splits.items()}
    assert given == {"train": [folder / "a", folder / "b"], "test": [folder / "a"], "valid": [folder / "b"]}


def test_the_standard_library():
    task = TextConfig(segment=256).build()
    assert task.size("train") > 5e6
    assert min(task.size("valid"), task.size("test")) > 1e4
    assert "the default: --data.path" in task.about[0]
    found = find_text(None)
    names = [found.name(file) for file in found.read]
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not {"test", "tests", "site-packages"} & {part for name in names for part in name.split("/")}


@pytest.mark.parametrize(
    ("files", "change", "words"),
    [
        (None, {}, "text: .*found nothing; check data.path"),
        ({"a": b"ab"}, {}, "a: .*3 bytes.*found 2"),
        ({"a": b"ab" * 9000}, {}, "valid split of at least 1,000 bytes.*found 900; .*data.held_out"),
        ({"train.txt": b"a" * 9999, "test.txt": b"a" * 999}, {"held_out": 0.2}, "test split .*found 999; add text to"),
        ({"train.txt": b"a", "test.txt": b"a" * 9999, "valid.txt": b""}, {}, "valid split: expected documents .* none"),
        ({"train.txt": b"a", "val.txt": b"a", "dev.txt": b"a"}, {}, "one valid split, found dev.txt and val.txt"),
        ({"a.txt": b"ab" * 9000 + b"\0" + b"ab" * 9000}, {}, "a.txt: expected text, found a byte 0 at offset 18,000"),
        ({"a.jpg": b"\xff\0", "b.jpg": b"\xff\0"}, {}, "2 pictures among 2 files; .*photos-vit"),
        ({"train/a.jpg": b"\xff\0", "val/b.txt": b"b"}, {}, "text for the train split, found 1 pictures"),
        ({"a.gz": gzip.compress(b"text" * 99)[:-9]}, {}, "a.gz: .*gzip.*damaged"),
    ],
)
def test_wrong_text(tmp_path, files, change, words):
    folder = tmp_path / "text"
    if files is not None:
        folder.mkdir()
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
    refuses(words, TextConfig(str(folder), **change).build)


def test_a_report_gets_text_that_the_model_wrote_after_validation_documents(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} \x01 {CYRILLIC * 300}", encoding="utf-8")
    task = TextConfig(str(tmp_path), segment=32, longest=1500).build()
    torch.manual_seed(0)
    model = Transformer(dim=8, layers=1, num_heads=2, mlp=8, max_length=32, attention=SoftmaxConfig(window=16)).train()
    random = torch.get_rng_state()
    found = task.artifacts(model, tmp_path, "test")
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert found == task.artifacts(model, tmp_path, "test"), "the same weights write the same text"
    assert found["examples"]["texts"]["exact"] is False
    assert len(found["texts"]) == TEXTS
    given = [one["given"] for one in found["texts"]]
    assert all(len(text.encode()) <= GIVEN + 2 and "\ufffd" not in text for text in given), "no character is cut"
    assert all(0 < len(one["wrote"]) <= WRITTEN + 1 for one in found["texts"])


def test_what_the_model_writes_is_its_own():
    """A model that always predicts the byte after the last one writes the alphabet on."""

    read = []

    class Counter(Transformer):
        def forward(self, x, state=None, mask=None):
            read.extend(x.flatten().tolist())
            _, state = super().forward(x, state, mask)
            return torch.nn.functional.one_hot((x + 1) % 256, 256).float() * 1000, state

    model = Counter(dim=8, layers=1, num_heads=2, mlp=8, max_length=32, attention=SoftmaxConfig(window=4))
    text, _ = written_texts(model, [b"." * (GIVEN - 1) + b"A", b"too short", b"A line\n" * GIVEN], Bytes())
    assert text["given"].endswith(".A")
    assert text["wrote"].startswith("BCDEFGHIJKLMNOPQRSTUVWXYZ[")
    assert text["wrote"].count("\ufffd") > 100, "bytes that are no character are shown as such"
    assert read[:2] == [0, ord(".")], "a document begins with the start token"
    classifier = Transformer(dim=8, layers=1, num_heads=2, mlp=8, causal=False, head=HeadConfig(classes=2))
    assert written_texts(classifier, [b"x" * GIVEN], Bytes()) == []


def test_a_text_in_two_splits_is_said(tmp_path):
    for split, names in {"train": ("a", "b"), "test": ("c", "d")}.items():
        (tmp_path / split).mkdir()
        for name in names:
            (tmp_path / split / f"{name}.txt").write_text(f"{'a' if name == 'c' else name} and so on\n" * 100)
    about = str(TextConfig(path=str(tmp_path)).build().about)
    assert "warning: the same data in two splits: test/c.txt (test) and train/a.txt (train); remove one" in about
    (tmp_path / "test" / "c.txt").write_text("another text\n" * 100)
    assert "the same data" not in str(TextConfig(path=str(tmp_path)).build().about)
