"""Every registered recipe fits together, and those small enough learn something in a few updates."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pairwise import cover
from PIL import Image
from spoken_standins import write_recordings
from translation_standins import write_pairs

from mnemos import registry
from mnemos.config import from_dict, to_dict
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.run.checks import check_settings, check_task, complete
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.speech.spoken import SpokenConfig
from mnemos.lab.tasks.images import CIFARConfig, MNISTConfig
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.pixels import PixelsConfig
from mnemos.lab.tasks.series import SeriesConfig
from mnemos.lab.tasks.task import DataConfig, Task
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.tasks.text_classes import TextClassesConfig
from mnemos.lab.translation.translation import TranslationConfig
from mnemos.lab.vision.detection.coco import COCOConfig
from mnemos.lab.vision.detection.shapes import ShapesConfig

SHARED = Path(__file__).parents[3] / "../shared/data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Photos and texts in class folders, CIFAR's files in cifar/, recordings in spoken/."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for kind in ("hats", "shoes"):
        (folder / "photos" / kind).mkdir(parents=True)
        for i in range(4):
            pixels = random.integers(0, 256, (5, 4, 3)).astype(np.uint8)
            Image.fromarray(pixels).resize((90, 70)).save(folder / "photos" / kind / f"{i}.jpg")
    for kind in ("letters", "verses"):
        (folder / "texts" / kind).mkdir(parents=True)
        (folder / "texts" / kind / "one.txt").write_text(f"{kind} of some words. " * 400)
    write_recordings(folder / "spoken")
    write_pairs(folder / "pairs", rows=40)
    words = " ".join(f"w{i}" for i in range(210_000))  # more than the cut-offs of WikiText-103
    (folder / "words.txt").write_text("\n".join([words, *["of the end"] * 2000, ""]))
    _write_coco(folder / "coco")
    (folder / "series.csv").write_text("a,b\n" + "".join(f"{i % 7},{i % 5}\n" for i in range(200)))
    for split, count in (("train", 5), ("test", 1)):
        for kind in range(10):
            (folder / "cifar" / split / f"kind{kind}").mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "cifar" / split / f"kind{kind}" / f"{i}.png")
    return folder


def _write_coco(folder: Path) -> None:
    """One photo with one object in each split."""
    (folder / "annotations").mkdir(parents=True)
    polygon = [[5, 5, 60, 5, 60, 40, 5, 40]]
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 90, "height": 70}],
        "categories": [{"id": 7, "name": "hat"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 7, "bbox": [5, 5, 55, 35], "area": 1925, "iscrowd": 0}
            | {"segmentation": polygon}
        ],
    }
    for split in ("train2017", "val2017"):
        (folder / split).mkdir()
        Image.new("RGB", (90, 70)).save(folder / split / "a.jpg")
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def small(name: str, folder: Path) -> Recipe:
    """The recipe with its data cut down to what a test can wait for; its model as it is, for as many classes."""
    recipe = registry.load("recipe", name)()
    if isinstance(recipe.data, PhotosConfig | COCOConfig):
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, classes=0))
    recipe = dataclasses.replace(recipe, data=_cut(recipe.data, folder))
    return complete(recipe, opened(recipe.data))


@functools.cache
def opened(data: DataConfig) -> Task:
    """The task of some data, which is read once for all recipes of it."""
    return data.build()


def _cut(data: DataConfig, folder: Path) -> DataConfig:
    if isinstance(data, MNISTConfig) and not (SHARED / "mnist").is_dir():
        pytest.skip("MNIST's files are not here")
    words = isinstance(data, TextConfig) and data.tokens == "words"
    pairs = {"source": "en", "target": "de", "valid": "", "test": "", "held_out": 0, "subwords": 80}
    for kind, fields in (
        (PixelsConfig, lambda: {"images": _cut(data.images, folder)}),
        (ListOpsConfig, lambda: {"train_size": 64, "valid_size": 8, "test_size": 8}),
        (MNISTConfig, lambda: {"path": str(SHARED / "mnist")}),
        (CIFARConfig, lambda: {"folder": str(folder / "cifar"), "valid_size": 10}),
        (PhotosConfig, lambda: {"folder": str(folder / "photos"), "workers": 0}),
        (COCOConfig, lambda: {"folder": str(folder / "coco")}),
        (ShapesConfig, lambda: {"train": 4, "valid": 1, "test": 1}),
        (TextClassesConfig, lambda: {"path": str(folder / "texts")}),
        (TextConfig, lambda: {"path": str(folder / "words.txt"), "held_out": 0.01, "segment": 64} if words else {}),
        (TranslationConfig, lambda: {"path": str(folder / "pairs"), **pairs}),
        (SeriesConfig, lambda: {"path": str(folder / "series.csv"), "segment": 8}),
        (SpokenConfig, lambda: {"path": str(folder / "spoken"), "test_takes": 1, "valid_takes": 1, "rows": 4}),
    ):
        if isinstance(data, kind):
            return dataclasses.replace(data, **fields())
    return data


def _names() -> list:
    """All recipes. By default every part of their names, as "cifar" and "paper", is in one.

    Larger hosts, further languages, ablations and never-written baselines are left out then.
    """

    like_others = (
        "imagenet-pvt-small", "imagenet-pvt-medium", "imagenet-pvt-v2-b3", "imagenet-pvt-v2-b4", "imagenet-22k",
        "iwslt14-es-", "iwslt14-en-", "iwslt15-", "wikitext-xl-large", "wikitext-mt", "wikitext-bytes-",
        "mnist-memformer-", "text-state-",  # the latter are tested by themselves below
    )  # fmt: skip
    names, baselines = registry.names("recipe"), ("-unwritten", "-attention-cache")
    usual = [name for name in names if not (name.startswith(like_others) or name.endswith(baselines))]
    usual = {usual[number] for number in cover([name.split("-") for name in usual], pairs=False)}

    def marks(name: str) -> list:
        return [pytest.mark.exhaustive] * (name not in usual) + [pytest.mark.slow] * name.startswith("imagenet")

    return [pytest.param(name, marks=marks(name)) for name in names]


def test_every_recipe_reads_back_and_has_settings_that_fit():
    for name in registry.names("recipe"):
        recipe = registry.load("recipe", name)()
        assert from_dict(Recipe, json.loads(json.dumps(to_dict(recipe)))) == recipe
        check_settings(recipe, processes=1)


@pytest.mark.parametrize("name", _names())
def test_model_and_task_fit(name, folder):
    recipe = small(name, folder)
    assert recipe.name == name
    task = opened(recipe.data)
    check_task(recipe, task)
    batch = task.train_batch(0, 2, 0)
    if task.inputs == "frames":  # recurrent ones look at lengths, which shapes do not tell
        logits, _ = (model := recipe.model.build().eval())(batch.inputs, None, batch.mask)
        assert logits.shape[-1] == recipe.model.vocab_size + 1
        assert model.right(logits, batch.targets, batch.mask)[1] == (batch.targets >= 0).sum()
        return
    if task.inputs == "pairs":  # the encoder-decoder checks the tokens, which shapes have not
        model = recipe.model.build().eval()
        logits, _ = task.forward(model, batch, None)
        assert logits.shape == (*batch.targets.shape, task.vocab_size)
        return
    if task.inputs == "photos":  # tests/lab/papers/test_reproduce.py builds the paper's sizes
        if isinstance(recipe.data, ShapesConfig):
            outputs, _ = task.forward(model := recipe.model.build(), batch, None)
            assert task.loss(model, outputs, batch).isfinite()
        return
    if isinstance(recipe.data, TextClassesConfig):  # a model of Transformers reads the mask's values
        logits, _ = task.forward(recipe.model.build().eval(), batch, None)
        assert logits.shape == (len(batch.targets), 2)
        return
    with torch.device("meta"):  # shapes alone: the paper's size takes seconds
        model = recipe.model.build()
    if batch.targets.shape == batch.inputs.shape and batch.mask is None:  # a few tokens: an LSTM takes them one by one
        batch = batch._replace(inputs=batch.inputs[:, :9], targets=batch.targets[:, :9])
    inputs, mask = batch.inputs.to("meta"), None if batch.mask is None else batch.mask.to("meta")
    logits, _ = model.eval()(inputs, None, mask)
    soft = batch.targets.is_floating_point()  # mixed images have a mixture of classes
    assert (logits.shape if soft else logits.shape[:-1]) == batch.targets.shape


def test_memories_of_equal_state_have_equal_bytes_and_data():
    """Two recipes differ by design: the LSTM's state is smaller, and that of attention to the whole document grows."""
    names = [name for name in registry.names("recipe") if name.startswith("text-state-")]
    recipes = {name: registry.load("recipe", name)() for name in names}
    first = recipes["text-state-xl"]
    assert {one.data for one in recipes.values()} == {first.data}
    assert {one.train for one in recipes.values()} == {first.train}, "other batches would be scored on other bytes"
    sizes = {}
    for name, one in recipes.items():
        sized = {"vocab_size": 256} | ({"max_length": first.data.segment} if hasattr(one.model, "max_length") else {})
        model, state = dataclasses.replace(one.model, **sized).build().eval(), None
        for _ in range(3):
            _, state = model(torch.ones(1, first.data.segment, dtype=torch.int64), state)
        sizes[name] = state_bytes(state)
    assert sizes.pop("text-state-lstm") < 2**12
    assert sizes.pop("text-state-full") > 3 * 64 * 2**12
    assert len(sizes) == 15
    for name, size in sizes.items():
        assert size == pytest.approx(2**15, rel=0.1), name
