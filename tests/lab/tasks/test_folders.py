import itertools
import os
from dataclasses import replace

import pytest
import torch
from refusals import refuses

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import write_photos

from mnemos.lab.tasks.photos import PhotosConfig, read_layout, scan

HALF = (0.5,) * 3, (0.5,) * 3


def paths(photos, folder):
    return [os.path.relpath(path, folder) for path in photos.paths]


def layout(folder, held_out=0.1):
    return {split: paths(part, folder) for split, part in read_layout(folder, held_out).items()}


def test_a_folder_a_class(tmp_path):
    write_photos(tmp_path, {"b": 20, "a": 7, "c": 3, "d": 1})
    parts = read_layout(tmp_path, 0.1)
    assert parts["train"].classes == ("a", "b", "c", "d")
    found = {split: paths(part, tmp_path) for split, part in parts.items()}
    everything = sorted(itertools.chain(*found.values()))
    assert everything == sorted(os.path.relpath(p, tmp_path) for p in tmp_path.glob("*/*.png"))
    assert len(set(everything)) == 31, "disjoint"
    # A tenth of each, at least one of three or more: 1, 2, 1, and none of the only one.
    for split in ("valid", "test"):
        assert [sum(p.startswith(name) for p in found[split]) for name in "abcd"] == [1, 2, 1, 0]
    for part in parts.values():
        names = [part.classes[label] for label in part.labels]
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


@pytest.mark.parametrize(
    ("folders", "sizes"),
    [
        (("train",), [24, 3, 3]),
        (("train", "validation"), [27, 3, 5]),  # ImageNet's layout: what there is to evaluate on is the test split
        (("train", "test"), [27, 3, 5]),
        (("train", "val", "test"), [30, 4, 5]),
    ],
)
def test_folders_of_splits(tmp_path, folders, sizes):
    counts = {"train": {"a": 20, "b": 10}, "test": {"a": 2, "b": 3}, "val": {"b": 4}, "validation": {"a": 2, "b": 3}}
    for name in folders:
        write_photos(tmp_path / name, counts[name], seed=len(name))
    if "test" not in folders:
        (tmp_path / "test").mkdir()
        (tmp_path / "test" / "unlabelled.jpg").touch()
    found = layout(tmp_path)
    assert [len(found[split]) for split in ("train", "valid", "test")] == sizes
    assert len({*found["train"], *found["valid"], *found["test"]}) == sum(sizes)
    source = {split: {path.split("/")[0] for path in paths} for split, paths in found.items()}
    assert source["train"] == {"train"}
    assert source["test"] == {folders[-1]}
    assert source["valid"] == {"val" if "val" in folders else "train"}
    if "val" in folders:
        assert read_layout(tmp_path, 0.1)["valid"].labels.tolist() == [1] * 4, "the class's number in train"


def test_photos_that_lack_a_class_are_scored_with_the_classes_of_the_run(tmp_path):
    run = PhotosConfig(str(write_photos(tmp_path / "run", {"a": 5, "b": 5, "c": 5})), size=8).build().preprocessing()
    other = PhotosConfig(str(write_photos(tmp_path / "other", {"c": 2, "a": 1})), size=8)
    scored = other.build_to_score("test", run)
    assert run.difference(scored.preprocessing()) is None
    assert sorted(next(scored.batches("test", 3)).targets.tolist()) == [0, 2, 2]


def test_photos_are_normalised_as_the_settings_say(tmp_path):
    settings = PhotosConfig(str(write_photos(tmp_path, {"a": 4, "b": 4})), size=8)
    tasks = [replace(settings, mean=mean, std=std).build() for mean, std in (((0.0,) * 3, (1.0,) * 3), HALF)]
    plain, half = (next(task.batches("valid", 2)).inputs for task in tasks)
    torch.testing.assert_close(half, 2 * plain - 1)
    about = tasks[1].preprocessing()  # for `mnemos predict`
    assert (about.mean, about.std) == HALF
    refuses("== 3", replace(settings, mean=(0.5,)).build)


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
    assert sorted(map(os.path.basename, files.left_out)) == ["i.png.tmp", "jpg", "notes.txt"]
    write_photos(tmp_path / "phone", {"a": 4, "b": 4})
    (tmp_path / "phone" / "b" / "c.heic").touch()
    assert f"left out: {os.path.join('b', 'c.heic')}" in PhotosConfig(str(tmp_path / "phone"), size=8).build().about
    write_photos(tmp_path / "kinds", {"car": 5, "train": 5, "test": 3})
    assert read_layout(tmp_path / "kinds", 0.1)["train"].classes == ("car", "test", "train"), "train is a class"
    for name in ("val", "valid"):
        write_photos(tmp_path / "kinds" / name, {".": 5, "deeper": 1})
    assert read_layout(tmp_path / "kinds", 0.1)["train"].classes == ("car", "test", "train", "val", "valid")
    write_photos(tmp_path / "linked" / "train", {"a": 5, "b": 5})
    write_photos(tmp_path / "linked" / "valid", {"a": 5, "b": 5}, seed=2)
    (tmp_path / "linked" / "val").mkdir()
    (tmp_path / "linked" / "validation").symlink_to("valid")
    assert len(read_layout(tmp_path / "linked", 0.1)["test"].paths) == 10, "one folder with two names"


def split_in_two(folder, **classes):
    """Photos for training, and others in the folders of these names."""
    write_photos(folder / "train", {"a": 5, "b": 5})
    for name, counts in classes.items():
        write_photos(folder / name, counts)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: None, r"none: .*\(No such file"),
        (lambda f: write_photos(f, {"cat": 5}), "class folders.*found one, 'cat'"),
        (lambda f: (write_photos(f, {"a": 5}), (f / "b").mkdir()), r"none/b: .*\(\.jpg .*\), found none"),
        (lambda f: write_photos(f, {"a": 2, "b": 2}), "none: .*at least 3 images"),
        (lambda f: write_photos(f / "val", {"a": 2, "b": 2}), "none/val: .*folder train"),
        (lambda f: split_in_two(f, val={"a": 1, "x": 1}), "none/val/x: .*train.*'x'"),
        (
            lambda f: (split_in_two(f, valid={"a": 1}, val={"b": 1}), (f / "validation").mkdir()),
            "none: .*one folder for the valid.*val and valid;",
        ),
        (lambda f: (split_in_two(f), (f / "val" / "a").mkdir(parents=True)), "none/val/a: .*images"),
        (lambda f: (split_in_two(f), (f / "val").mkdir()), "none/val: expected class folders as in train, found none"),
        (lambda f: (f.mkdir(), (f / "a.jpg").touch()), "found images and no folder; name the folder above"),
        (lambda f: f.mkdir(), "none: expected class folders with images, found none; check the path"),
    ],
)
def test_wrong_folders(tmp_path, make, words):
    make(tmp_path / "none")
    refuses(words, PhotosConfig(str(tmp_path / "none")).build)


def test_a_photo_in_two_splits_is_said(tmp_path):
    for split, counts in (("train", {"a": 4, "b": 4}), ("test", {"a": 2, "b": 2})):
        write_photos(tmp_path / split, counts)
    photo = next((tmp_path / "train" / "a").glob("*.png"))
    for path in (tmp_path / "test" / "a").glob("*.png"):
        path.write_bytes(path.read_bytes() + b"other")
    assert not [line for line in PhotosConfig(str(tmp_path), size=8).build().about if "a/copy.png" in line]
    (tmp_path / "test" / "a" / "copy.png").write_bytes(photo.read_bytes())
    said = [line for line in PhotosConfig(str(tmp_path), size=8).build().about if "warning: the same data" in line]
    assert [line.count("test/a/copy.png") for line in said] == [1]
