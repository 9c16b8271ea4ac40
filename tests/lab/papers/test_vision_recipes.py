"""The vision recipes: the paper's settings, variants that differ in memory alone, and first updates on photos."""

import dataclasses
import json

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="images are read by Pillow")

from PIL import Image

from mnemos import registry
from mnemos.config import to_dict
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.session import run
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.memory.gated_cache import GRC, stored

FILE = "mnemos.lab.papers.cached_transformers.image_recipes"
NAMES = [name for name, place in registry.definitions("recipe").items() if place.module == FILE]
BASES = sorted(name.removesuffix("-cached") for name in NAMES if name.endswith("-cached"))
SMALL = [name for name in BASES if not name.startswith("imagenet")]


def load(name: str) -> Recipe:
    return registry.load("recipe", name)()


@pytest.mark.parametrize("name", BASES)
def test_variants_differ_in_their_memory_alone(name):
    base = load(name)
    assert base.model.cache is None
    kinds = {"-cached": GRC, "-cached-unwritten": GRC, "-attention-cache": AttentionCache, "-wider": None}
    for variant, kind in kinds.items():
        if name + variant in NAMES:
            other = load(name + variant)
            assert (other.data, other.optim, other.train) == (base.data, base.optim, base.train)
            changed = {f for f, v in to_dict(other.model).items() if v != to_dict(base.model)[f]}
            if kind is None:
                assert changed in ({"mlp_ratio"}, {"mlp_ratios"})
            else:
                assert changed == {"cache"}
                assert isinstance(other.model.cache, kind)


@pytest.mark.parametrize("name", SMALL)
def test_the_wider_variant_has_the_cached_ones_parameters(name):
    def parameters(variant: str) -> int:
        model = load(name + variant).model
        side, channels = {"digits": (8, 1), "mnist": (28, 1), "cifar": (32, 3), "photos": (64, 3)}[name.split("-")[0]]
        model = dataclasses.replace(model, classes=10, image=side, channels=channels)
        return sum(p.numel() for p in model.build().parameters())

    assert parameters("-wider") == pytest.approx(parameters("-cached"), rel=0.01)
    assert parameters("-cached") > 1.1 * parameters("")


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("imagenet-") and "22k" not in n])
def test_imagenet_is_at_the_papers_settings(name):
    recipe = load(name)
    model, data, optim, train = recipe.model, recipe.data, recipe.optim, recipe.train
    assert (model.image, model.channels, model.classes, data.size) == (224, 3, 1000, 224)
    assert (optim.name, optim.weight_decay, train.batch_size) == ("adamw", 0.05, 1024)
    assert optim.lr == 5e-4 * 1024 / 512
    assert optim.schedule.name == "cosine"
    assert train.steps * 1024 / 1_281_167 == pytest.approx(300, rel=1e-3)
    assert optim.schedule.warmup * 1024 / 1_281_167 == pytest.approx(5, rel=1e-3)
    augment = data.augment
    assert (augment.policy, augment.operations) == ("timm", "rand-m9-mstd0.5-inc1")
    assert augment.force_color_jitter
    assert (augment.mixup, augment.cutmix, augment.smoothing, augment.erasing) == (0.8, 1.0, 0.1, 0.25)
    if isinstance(model.cache, GRC):
        assert model.cache == GRC(preset="paper", ratio=0.5, length="paper", mix="heads", convolution=True)


def test_imagenet_22k_is_at_swins_settings():
    recipe = load("imagenet-22k-swin-t-cached")
    assert recipe.model.classes == 21_841
    assert recipe.optim.lr == pytest.approx(1.25e-4 * 4096 / 512)
    assert recipe.optim.lr * recipe.optim.schedule.floor == pytest.approx(1.25e-6 * 4096 / 512)
    assert recipe.train.steps * 4096 / 14_197_122 == pytest.approx(90, rel=1e-3)
    assert recipe.optim.schedule.warmup / recipe.train.steps == pytest.approx(5 / 90)


@pytest.fixture
def photos(tmp_path):
    """Three kinds of photos: four each, of many sizes."""
    random = np.random.default_rng(0)
    for kind in ("dress", "hat", "shoes"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for i in range(4):
            size = tuple(random.integers(60, 300, 2).tolist())
            colours = random.integers(0, 256, (3, 4, 3)).astype(np.uint8)
            image = Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR)
            image.save(tmp_path / "photos" / kind / f"{i}.jpg")
    return tmp_path / "photos"


def started(name: str, photos, out, steps: int, batch: int, side: int, **sizes) -> dict:
    """A few updates of a recipe on a folder of photos of side × side pixels; all else is the recipe's own."""
    torch.set_num_threads(1)
    recipe = load(name)
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, classes=0, image=side, **sizes),  # as many classes as the folder has
        data=dataclasses.replace(recipe.data, folder=str(photos), workers=0, held_out=0.1, size=side),
        train=dataclasses.replace(recipe.train, steps=steps, batch_size=batch, accelerator="cpu"),
    )
    result = run(recipe, out, quiet=True)
    assert np.isfinite([result["test"]["loss"], result["valid"]["loss"]]).all()
    written = json.loads((out / "recipe.json").read_text())
    assert written["model"]["classes"] == 3
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("imagenet-vit-s-cached", {}, marks=pytest.mark.exhaustive),
        pytest.param("imagenet-pvt-tiny-cached", {}, marks=pytest.mark.exhaustive),
        pytest.param("imagenet-pvt-tiny-attention-cache", {}, marks=pytest.mark.exhaustive),
        pytest.param("imagenet-swin-t-cached", {}, marks=pytest.mark.exhaustive),
        ("imagenet-swin-t-cached", {"dim": 24, "depths": (2, 2, 2, 2)}),  # its heads are narrower, its windows are not
    ],
)
def test_imagenet_recipes_start_on_photos(name, sizes, photos, tmp_path):
    started(name, photos, tmp_path / "run", steps=2, batch=2, side=64, **sizes)  # at 224: four times as long


@pytest.mark.parametrize("variant", ["", "-cached", "-attention-cache"])
def test_photos_of_any_kind(variant, photos, tmp_path):
    result = started(f"photos-vit{variant}", photos, tmp_path / "run", steps=3, batch=4, side=64)
    assert ("controls" in result) == (variant == "-cached")
    if variant:
        model = load(f"photos-vit{variant}").model
        assert len(stored(dataclasses.replace(model, classes=3, image=64, channels=3).build())) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "digits-pvt-cached",
        "digits-vit-attention-cache",
        "digits-swin",
    ],
)
def test_small_recipes_learn(name, tmp_path):
    torch.set_num_threads(1)
    recipe = load(name)
    schedule = dataclasses.replace(recipe.optim.schedule, warmup=20)
    recipe = dataclasses.replace(
        recipe,
        optim=dataclasses.replace(recipe.optim, schedule=schedule),
        train=dataclasses.replace(recipe.train, steps=150, accelerator="cpu"),
    )
    result = run(recipe, tmp_path / "run", quiet=True)
    assert result["test"]["accuracy"] > 3 * result["majority"]
