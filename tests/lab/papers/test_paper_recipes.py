"""The recipes of images and the families of recipes: the paper's settings, and variants that differ in memory alone."""

import dataclasses
import json
import operator

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="images are read by Pillow")

from PIL import Image
from refusals import refuses

from mnemos import InputError, registry
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.recipes.family import altered, family, variant
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.session import run
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.memory.gated_cache import GRC

HOSTS = ("vit", "pvt", "swin")
NAMES = [
    name
    for name in registry.names("recipe")
    if name.startswith("imagenet-") or (any(f"-{host}" in name for host in HOSTS) and not name.startswith("coco"))
]
BASES = sorted(name.removesuffix("-cached") for name in NAMES if name.endswith("-cached"))
SMALL = [name for name in BASES if not name.startswith("imagenet")]


def load(name: str) -> Recipe:
    return registry.load("recipe", name)()


# ---- images ----


@pytest.mark.parametrize("name", BASES)
def test_variants_differ_in_their_memory_alone(name):
    base = load(name)
    assert base.model.cache is None
    kinds = {"-cached": GRC, "-cached-unwritten": GRC, "-attention-cache": AttentionCache, "-wider": None}
    for ending, kind in kinds.items():
        if name + ending in NAMES:
            other = load(name + ending)
            assert (other.data, other.optim, other.train) == (base.data, base.optim, base.train)
            changed = {f for f, v in to_dict(other.model).items() if v != to_dict(base.model)[f]}
            assert changed in ([{"mlp_ratio"}, {"mlp_ratios"}] if kind is None else [{"cache"}])
            assert kind is None or isinstance(other.model.cache, kind)


@pytest.mark.parametrize("name", SMALL)
def test_the_wider_variant_has_the_cached_ones_parameters(name):
    def parameters(ending: str) -> int:
        side, channels = {"digits": (8, 1), "mnist": (28, 1), "cifar": (32, 3), "photos": (64, 3)}[name.split("-")[0]]
        model = dataclasses.replace(load(name + ending).model, classes=10, image=side, channels=channels)
        return sum(p.numel() for p in model.build().parameters())

    assert parameters("-wider") == pytest.approx(parameters("-cached"), rel=0.01)
    assert parameters("-cached") > 1.1 * parameters("")


def trained(epochs: float, warmup: float, rows: int, batch_size: int) -> dict:
    """The updates of so many epochs, of which the first warm up."""
    return {
        "train.steps": pytest.approx(epochs * rows / batch_size, rel=1e-3),
        "optim.schedule.warmup": pytest.approx(warmup * rows / batch_size, rel=1e-3),
        "train.batch_size": batch_size,
    }


IMAGENET = {
    **{"model.image": 224, "model.channels": 3, "model.classes": 1000, "data.size": 224},
    **{
        "optim.name": "adamw",
        "optim.weight_decay": 0.05,
        "optim.lr": 5e-4 * 1024 / 512,
        "optim.schedule.name": "cosine",
    },
    **{"data.augment.policy": "timm", "data.augment.operations": "rand-m9-mstd0.5-inc1"},
    **{"data.augment.force_color_jitter": True, "data.augment.mixup": 0.8, "data.augment.cutmix": 1.0},
    **{"data.augment.smoothing": 0.1, "data.augment.erasing": 0.25},
    **trained(300, 5, 1_281_167, 1024),
}
CACHED = {"model.cache": GRC(preset="paper", ratio=0.5, length="paper", mix="heads", convolution=True)}
MEMFORMER = {"model.memory.radius": 1, "model.cls": 2, "model.decoder_reads": False}  # as resolved
PIXELS = {  # 250 epochs of the pictures that are not held out
    **{"train.steps": 250 * 5_500, "train.eval_every": 5_500, "data.images.valid_size": 5_000, "train.batch_size": 10},
    **{"optim.name": "radam", "optim.lr": 1e-4, "optim.grad_clip": 0.0},
}
PAPERS = {
    **{
        n: IMAGENET | (CACHED if n.endswith("cached") else {})
        for n in NAMES
        if n.startswith("imagenet-") and "22k" not in n
    },
    "imagenet-22k-swin-t-cached": {
        **{"model.classes": 21_841, "optim.lr": pytest.approx(1e-3), "optim.schedule.floor": pytest.approx(0.01)},
        **trained(90, 5, 14_197_122, 4096),
    },
    "mnist-memformer": {
        **{"model.encoder_layers": 4, "model.decoder_layers": 8, "model.memory.slots": 64, **MEMFORMER},
        **{"train.steps": 10_000, "train.batch_size": 256, "optim.lr": 1e-3, "optim.grad_clip": 1.0},
    },
    "wikitext-memformer": {
        **{"model.dim": 512, "model.mlp": 2048, "model.memory.slots": 1024, "data.segment": 128, **MEMFORMER},
        **{"data.tokens": "words", "model.tied": True, "model.cutoffs": (20_000, 40_000, 200_000)},
        **{"train.steps": 150_000, "train.batch_size": 128, "train.rollout.segments": 8, "train.rollout.slide": 1},
    },
    "wikitext-compressive": {
        **{"model.attention.memory": 512, "model.attention.compressed": 512, "model.attention.ratio": 4},
        "model.attention.compression": "convolution",
    },
    "wikitext-xl": {"model.layers": 16, "model.attention.memory": 1024},
    **{name: PIXELS for name in ("mnist-pixels", "mnist-pixels-softmax")},
    **{n: {"optim.grad_clip": 0.0} for n in ("copy", *(f"speech-{x}" for x in ("softmax", "linear", "lsh", "bilstm")))},
}


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_are_at_the_papers_settings(name):
    recipe = load(name)
    if hasattr(recipe.model, "preset"):
        recipe = dataclasses.replace(recipe, model=recipe.model.resolved())
    assert {path: operator.attrgetter(path)(recipe) for path in PAPERS[name]} == PAPERS[name]


def test_an_imagenet_recipe_starts_on_photos(tmp_path):
    """Three kinds of four, of many sizes. Its heads are narrower and its stages shallower, its windows are not."""
    random = np.random.default_rng(0)
    for kind in ("dress", "hat", "shoes"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for i in range(4):
            colours = random.integers(0, 256, (3, 4, 3)).astype(np.uint8)
            size = tuple(random.integers(60, 300, 2).tolist())
            image = Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR)
            image.save(tmp_path / "photos" / kind / f"{i}.jpg")
    torch.set_num_threads(1)
    sizes = {"dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 4)}
    recipe = altered(
        load("imagenet-swin-t-cached"),
        model={"classes": 0, "image": 64, **sizes},  # as many classes as the folder has
        data={"folder": str(tmp_path / "photos"), "workers": 0, "held_out": 0.1, "size": 64},
        train={"steps": 2, "batch_size": 2, "accelerator": "cpu"},
    )
    result = run(recipe, tmp_path / "run", quiet=True)
    assert np.isfinite([result["test"]["loss"], result["valid"]["loss"]]).all()
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["model"]["classes"] == 3


# ---- families ----


@pytest.fixture
def removed():
    """What a test registers is removed after it."""
    before = set(registry.names("recipe"))
    yield
    for name in set(registry.names("recipe")) - before:
        registry.remove("recipe", name)


def listops(slots: str, memory: str) -> Recipe | None:
    """short-listops with caches of several lengths."""
    if (slots, memory) == ("2+2", "unwritten"):
        return None
    cache = GRC(length=sum(map(int, slots.split("+"))))
    about = f"short-listops, {slots} slots {memory}".strip()
    return variant(load("short-listops"), about, cache=cache.unwritten() if memory else cache)


def test_each_combination_of_values_is_a_recipe(removed, capsys):
    made = family("some-{slots}-slots-{memory}", slots={"8": None, "2+2": None}, memory=("", "unwritten"))(listops)
    names = ["some-8-slots", "some-8-slots-unwritten", "some-2+2-slots"]
    assert [name for name in registry.names("recipe") if name.startswith("some-")] == names
    for name, length in zip(names, (8, 8, 4), strict=True):
        recipe = load(name)
        assert (recipe.name, recipe.model.cache.length) == (name, length)
        assert recipe.about == registry.about("recipe", name)
    assert made() == load("some-8-slots"), "the first values"
    assert made("8", memory="unwritten").model.cache == GRC(length=8).unwritten()
    refuses(r"2\+2", made, "2+2", "unwritten")
    for wrong in ({"memmory": "unwritten"}, {"slots": "8"}):
        with pytest.raises(TypeError):
            made("8", **wrong)
    assert main(["list", "listops"]) == 0
    said = capsys.readouterr().out
    assert all(f"    {name} " in said for name in names)
    with pytest.raises(InputError, match=r"'small-images'.*mnemos list small-images"):
        load("small-images")  # a family is no recipe


def test_a_family_does_not_take_a_name(removed):
    with pytest.raises(InputError, match="'short-listops-wider'"):
        family("short-listops-{memory}", memory=("wider",))(lambda memory: listops("8", memory))


def test_parts_of_a_recipe_are_altered_by_name():
    base = load("text-memformer")
    found = altered(base, name="other", model={"dim": 32, "memory": {"slots": 3}}, train={"steps": 7})
    assert (found.name, found.model.dim, found.model.memory.slots, found.train.steps) == ("other", 32, 3, 7)
    assert altered(found, name=base.name, model=base.model, train=base.train) == base
    with pytest.raises(TypeError):
        altered(base, model={"dims": 32})
