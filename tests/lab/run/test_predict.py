"""`mnemos predict`: the classes of image files, as evaluation would find them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mnemos
from mnemos import InputError, registry
from mnemos.lab.cli import main
from mnemos.lab.evaluate.predict import predict
from mnemos.lab.run.session import run
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.libraries import timm


def photos(folder: Path, names: tuple[str, ...], seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    for i, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for k in range(6):
            pixels = random.integers(0, 255, (40, 30, 3)) // (i + 1)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{k}.png")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    timm()
    folder = tmp_path_factory.mktemp("predict")
    recipe = registry.load("recipe", "photos-vit-cached")()
    recipe = replace(
        recipe,
        model=replace(recipe.model, image=0, classes=0, patch=8, dim=16, depth=1, num_heads=2),
        data=replace(recipe.data, folder=str(photos(folder / "photos", ("cat", "dog", "emu"))), size=16, workers=0),
        train=replace(recipe.train, steps=2, batch_size=4, eval_every=2, accelerator="cpu"),
    )
    run(recipe, folder / "run", quiet=True)
    return folder / "run"


def test_files_have_the_classes_that_evaluation_finds(finished, capsys):
    recipe = json.loads((finished / "recipe.json").read_text())
    task = mnemos.config.from_dict(mnemos.DataConfig, recipe["data"]).build()
    (batch,) = task.batches("test", 99)
    logits, _ = mnemos.load(finished)(batch.inputs)
    wanted = {tuple(round(p, 4) for p in sorted(row, reverse=True)) for row in logits.softmax(-1).tolist()}
    found = list(predict(finished, [finished.parent / "photos"]))
    assert len(found) == 18
    given = {tuple(round(one["probability"], 4) for one in each.details["classes"]) for each in found}
    assert len(wanted & given) == len(wanted) == 3
    assert {one["name"] for one in found[0].details["classes"]} == {"cat", "dog", "emu"}
    file = finished.parent / "photos/dog/3.png"
    assert main(["predict", str(finished), str(file), "--top", "2"]) == 0
    assert re.fullmatch(rf"{file}: (cat|dog|emu) 0\.\d+  (cat|dog|emu) 0\.\d+\n", capsys.readouterr().out)
    (one,) = predict(finished / "model", [file], top=1)
    assert one.details["classes"][0]["probability"] > 1 / 3
    assert torch.is_grad_enabled()


def test_what_cannot_be_predicted_is_one_line(finished, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for run_folder, file, code, words in (
        (finished, tmp_path / "nowhere.png", 2, "nowhere.png: expected an image"),
        (finished, tmp_path / "broken.png", 2, "broken.png: expected an image, but it cannot be decoded"),
        (tmp_path, tmp_path / "broken.png", 2, "expected config.json and model.safetensors"),
    ):
        assert main(["predict", str(run_folder), str(file)]) == code
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    good = [str(finished.parent / f"photos/{name}.png") for name in ("cat/0", "dog/1")]
    assert main(["predict", str(finished), *good]) == 0
    alone = capsys.readouterr().out
    assert main(["predict", str(finished), good[0], str(tmp_path / "broken.png"), good[1]]) == 1
    said = capsys.readouterr()
    assert said.out == alone, "the photos of the batch that can be read"
    assert said.err.startswith(f"mnemos: {tmp_path}/broken.png: expected an image")
    assert said.err.count("\n") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: expected images .*found none"):
        list(predict(finished, [tmp_path / "empty"]))
    with pytest.raises(InputError, match=r"--length: expected --top for a model of images"):
        predict(finished, [], length=3)
    with pytest.raises(InputError, match=r"--top: expected at least 1, found 0"):
        predict(finished, [], top=0)
    saved = finished / "model/preprocessing.json"
    kept = saved.read_text()
    saved.write_text('{"names": ["cat"]}')  # of another version
    try:
        with pytest.raises(InputError, match=r"preprocessing.json: .*'is' is missing.*; train again"):
            predict(finished, [])
    finally:
        saved.write_text(kept)


def test_a_preprocessing_without_endings_reads_all_files_of_a_folder(tmp_path):
    with pytest.raises(InputError, match=r"expected files, found none"):
        Preprocessing().paths([tmp_path])
    for name in ("b.txt", "a", ".hidden"):
        (tmp_path / name).touch()
    assert [path.name for path in Preprocessing().paths([tmp_path])] == ["a", "b.txt"]


def test_a_file_that_is_no_image_is_found_before_training(finished, tmp_path, capsys):
    folder = photos(tmp_path / "photos", ("cat", "dog"))
    (folder / "dog/broken.jpg").write_bytes(b"no picture")
    (folder / "cat/empty.png").touch()
    words = ["train", "photos-vit", "--data.folder", str(folder), "--out", str(tmp_path / "run")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "empty.png: expected an image" in said
    assert "so are 1 more of the 14 files" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_damage_within_a_file_is_named_when_its_batch_comes(finished, tmp_path, capsys):
    """Beginning and end of the file are intact, so the check before training cannot find it."""
    folder = photos(tmp_path / "photos", ("cat", "dog"))
    broken = folder / "dog/3.png"
    data = bytearray(broken.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    broken.write_bytes(data)
    words = ["train", "photos-vit", "--data.folder", str(folder), "--data.size", "16"]
    words += ["--model.patch", "8", "--train.steps", "9", "--train.batch_size", "4", "--data.workers", "0"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith(f"mnemos: {broken}: expected an image, but it cannot be decoded")
    assert "Traceback" not in said


def test_other_photos_must_have_the_classes_of_the_run(finished, tmp_path, capsys):
    other = photos(tmp_path / "other", ("cat", "cow", "emu"))
    assert main(["eval", str(finished), "--data.folder", str(other)]) == 2
    assert "such as 'dog', found 'cow'" in capsys.readouterr().err
    assert (
        main(["eval", str(finished), "--data.folder", str(finished.parent / "photos"), "--data.held_out", "0.4"]) == 0
    )


def test_photos_say_what_their_splits_hold_and_others_are_scored_whole(finished, tmp_path, capsys):
    def said(folder: Path, *words: str) -> str:
        assert main(["eval", str(finished), "--data.folder", str(folder), *words]) == 0
        return capsys.readouterr().out

    other, splits = photos(tmp_path / "other", ("cat", "dog", "emu"), seed=1), tmp_path / "splits"
    assert said(other).splitlines()[0] == f"scored: all, 18 photos of 3 classes, 6 per class: {other}"
    shutil.copytree(other, splits / "val")
    assert f"scored: the test split, 18 photos of 3 classes, 6 per class: {splits}/val\n" in said(splits)
    (splits / "val").rename(splits / "test")
    assert f"6 per class: {splits}/test\n" in said(splits)
    assert main(["eval", str(finished), "--data.folder", str(splits), "--split", "valid"]) == 2
    assert "expected a folder for the valid split, found test; choose" in capsys.readouterr().err
    shutil.copytree(photos(tmp_path / "third", ("cat", "dog", "emu"), seed=2), splits / "train")
    (splits / "train/dog/0.png").unlink()
    assert PhotosConfig(str(splits), size=16).build().about == (
        "train  14 photos of 3 classes, 4 to 5 per class: cat, dog, emu",
        "valid  3 photos of 3 classes, 1 per class, a share of each class",
        f"test   18 photos of 3 classes, 6 per class: {splits}/test",
    )
