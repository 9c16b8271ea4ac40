import itertools
import os

import pytest

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import REAL, write_photos

from mnemos.lab.tasks.photos import PhotosConfig, read_layout, scan
from mnemos.types import InputError


def paths(part, folder):
    return [os.path.relpath(part.files.paths[row], folder) for row in part.rows]


def layout(folder, held_out=0.1):
    return {split: paths(part, folder) for split, part in read_layout(folder, held_out).items()}


def test_a_folder_a_class(tmp_path):
    write_photos(tmp_path, {"b": 20, "a": 7, "c": 3, "d": 1})
    parts = read_layout(tmp_path, 0.1)
    assert parts["train"].files.classes == ("a", "b", "c", "d")
    found = {split: paths(part, tmp_path) for split, part in parts.items()}
    everything = sorted(itertools.chain(*found.values()))
    assert everything == sorted(os.path.relpath(p, tmp_path) for p in tmp_path.glob("*/*.png"))
    assert len(set(everything)) == 31, "disjoint"
    # A tenth of each, at least one of three or more: 1, 2, 1, and none of the only one.
    for split in ("valid", "test"):
        assert [sum(p.startswith(name) for p in found[split]) for name in "abcd"] == [1, 2, 1, 0]
    for part in parts.values():
        names = [parts["train"].files.classes[part.files.labels[row]] for row in part.rows]
        assert names == [p.split("/")[0] for p in paths(part, tmp_path)]
    assert layout(tmp_path) == found
    assert [len(rows) for rows in layout(tmp_path, 0.3).values()] == [13, 9, 9]


def test_an_image_keeps_its_split_when_others_come(tmp_path):
    write_photos(tmp_path, {"a": 20, "b": 20})
    before = layout(tmp_path)
    write_photos(tmp_path, {"a": 22, "b": 21, "z": 4})
    after = layout(tmp_path)
    assert sum(p in after["test"] for p in before["test"]) >= 3  # of four: a newcomer may take a place
    assert not {*before["train"]} & {*after["valid"], *after["test"]}


@pytest.mark.parametrize("valid", ["val", "validation", "valid"])
def test_train_with_a_validation_folder(tmp_path, valid):
    """ImageNet's layout: what there is to evaluate on is the test split."""
    write_photos(tmp_path / "train", {"a": 20, "b": 10})
    write_photos(tmp_path / valid, {"a": 2, "b": 3}, seed=1)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "unlabelled.jpg").touch()
    found = layout(tmp_path)
    assert [len(found[split]) for split in ("train", "valid", "test")] == [27, 3, 5]
    assert all(p.startswith("train/") for p in found["train"] + found["valid"])
    assert all(p.startswith(valid) for p in found["test"])
    assert len({*found["train"], *found["valid"]}) == 30


def test_all_three_folders_and_train_with_test(tmp_path):
    write_photos(tmp_path / "train", {"a": 20, "b": 10})
    write_photos(tmp_path / "test", {"a": 2, "b": 3})
    found = layout(tmp_path)
    assert [len(found[split]) for split in ("train", "valid", "test")] == [27, 3, 5]
    write_photos(tmp_path / "val", {"b": 4})  # of one class alone
    parts = read_layout(tmp_path, 0.1)
    assert [len(parts[split].rows) for split in ("train", "valid", "test")] == [30, 4, 5]
    assert parts["valid"].files.labels.tolist() == [1] * 4


def test_train_alone_is_split_in_three(tmp_path):
    write_photos(tmp_path / "train", {"a": 20, "b": 10})
    assert [len(rows) for rows in layout(tmp_path).values()] == [24, 3, 3]


def test_a_class_may_be_called_train(tmp_path):
    write_photos(tmp_path, {"car": 5, "train": 5, "test": 3})
    assert read_layout(tmp_path, 0.1)["train"].files.classes == ("car", "test", "train")


def test_what_is_an_image(tmp_path):
    write_photos(tmp_path, {"a": 1, "b": 1})
    for name in ("B.JPG", "c.JpEg", "d.webp", "e.tif", "f.PPM", "g.bmp", ".h.jpg", "notes.txt", "jpg", "i.png.tmp"):
        (tmp_path / "a" / name).touch()
    (tmp_path / "a" / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "inner" / "deep" / "j.png").touch()
    (tmp_path / "a" / ".git").mkdir()
    (tmp_path / "a" / ".git" / "k.png").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "README.md").touch()
    (tmp_path / "a" / "ü.png").touch()
    files = scan(str(tmp_path))
    names = ["000.png", "B.JPG", "c.JpEg", "d.webp", "e.tif", "f.PPM", "g.bmp", "ü.png", "inner/deep/j.png"]
    assert files.paths == [*(str(tmp_path / "a" / n) for n in names), str(tmp_path / "b/000.png")]
    assert files.labels.tolist() == [0] * 9 + [1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: None, r"none: .*\(No such file"),
        (lambda f: f.touch(), r"none: .*\(Not a directory"),
        (lambda f: f.mkdir(), "none: .*class folders.*found none"),
        (lambda f: write_photos(f, {"cat": 5}), "class folders.*found one, 'cat'"),
        (lambda f: (write_photos(f, {"a": 5}), (f / "b").mkdir()), r"none/b: .*\(\.jpg .*\), found none"),
        (lambda f: write_photos(f, {"a": 2, "b": 2}), "none: .*at least 3 images"),
        (lambda f: write_photos(f / "val", {"a": 2, "b": 2}), "none/val: .*folder train"),
        (
            lambda f: (write_photos(f / "train", {"a": 5, "b": 5}), write_photos(f / "val", {"a": 1, "x": 1})),
            "none/val/x: .*train.*'x'",
        ),
        (
            lambda f: (write_photos(f / "train", {"a": 5, "b": 5}), (f / "val" / "a").mkdir(parents=True)),
            "none/val/a: .*images",
        ),
    ],
)
def test_wrong_folders(tmp_path, make, words):
    make(tmp_path / "none")
    with pytest.raises(InputError, match=words) as error:
        read_layout(tmp_path / "none", 0.1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.5, -1.0, float("nan")])
def test_wrong_shares(tmp_path, share):
    with pytest.raises(InputError, match=r"data.held_out.*found"):
        PhotosConfig(str(write_photos(tmp_path, {"a": 5, "b": 5})), held_out=share).build()


@pytest.mark.skipif(not (REAL / "clothing-photos").is_dir(), reason="the photos are not here")
def test_real_photos():
    parts = read_layout(REAL / "clothing-photos", 0.1)
    assert [len(parts[split].rows) for split in ("train", "valid", "test")] == [540, 60, 186]
    assert parts["train"].files.classes[:2] == ("dress", "hat")
    assert len(parts["train"].files.classes) == 10


def test_a_validation_folder_is_not_left_out_in_silence(tmp_path):
    write_photos(tmp_path / "train", {"a": 4, "b": 4})
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "1.jpg").touch()
    with pytest.raises(InputError, match=r"val: expected class folders as in train, found none"):
        read_layout(tmp_path, 0.1)
    (tmp_path / "val" / "1.jpg").unlink()
    for name in ("val", "valid"):
        write_photos(tmp_path / name, {"a": 2})
    with pytest.raises(InputError, match=r"expected one valid split, found .*val and .*valid"):
        read_layout(tmp_path, 0.1)


def test_a_folder_that_a_link_leads_to_again_is_refused(tmp_path):
    """Otherwise the photos of a class would be those of another one too."""
    write_photos(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "b" / "again").symlink_to(tmp_path / "a")
    with pytest.raises(InputError, match=r"b/again: expected each folder once"):
        scan(str(tmp_path))
