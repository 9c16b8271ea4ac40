from dataclasses import dataclass, field, replace

import pytest
from refusals import refuses
from torch import nn

from mnemos import registry
from mnemos.config import ModelConfig
from mnemos.lab.compare.baselines import (
    equal_parameters,
    parameters,
    roles_of,
    with_baselines,
    with_unwritten,
)
from mnemos.lab.compare.compare import compare
from mnemos.lab.papers.baselines.bigbird import DENSE
from mnemos.memory.gated_cache import GRC
from mnemos.models.transformer import TransformerConfig

SIZES = {
    "short-listops-cached": {"vocab_size": 16, "max_length": 25},
    "mnist-vit-cached": {"image": 28, "channels": 1, "classes": 10},
    "cifar-pvt-cached": {"image": 32, "channels": 3, "classes": 10},
    "cifar-swin-cached": {"image": 32, "channels": 3, "classes": 10},
}
ATTENTIONS = {"": "softmax", "-bigbird": "block-sparse", "-reformer": "reformer", "-linear": "linear"}


def load(name: str, **sizes):
    """A recipe whose model has the sizes that its data would give it."""
    recipe = registry.load("recipe", name)()
    return replace(recipe, model=replace(recipe.model, **sizes))


@pytest.mark.parametrize("name", SIZES)
def test_a_baseline_of_equal_parameters_has_no_cache(name):
    recipe = load(name, **SIZES[name])
    made = equal_parameters(recipe)
    assert (made.name, made.model.cache) == (f"{name}-wider", None)
    assert (made.data, made.optim, made.train) == (recipe.data, recipe.optim, recipe.train)
    share = 0.03 if "pvt" in name else 0.005
    assert parameters(made.model) == pytest.approx(parameters(recipe.model), rel=share)


def test_baselines_follow_each_recipe_with_a_cache():
    demo, cached = load("short-listops"), load("short-listops-cached", **SIZES["short-listops-cached"])
    names = [recipe.name for recipe in with_baselines([demo, cached])]
    assert names == [f"short-listops{end}" for end in ("", "-cached", "-cached-unwritten", "-cached-wider")]
    named = replace(demo, name="short-listops-cached-wider")  # the user's own
    assert [recipe.name for recipe in with_baselines([named, cached])] == [names[3], *names[1:3]]
    longer = replace(cached, name="longer", model=replace(cached.model, cache=GRC(length=50)))
    made = with_baselines([cached, longer])
    assert [recipe.name for recipe in made] == [*names[1:], "longer", "longer-unwritten"]
    ends = [recipe.about.endswith("with it; also the baseline of longer") for recipe in made]
    assert ends == [recipe.name == "short-listops-cached-wider" for recipe in made]
    assert with_baselines([named, cached])[0] == named, "the user's own recipe keeps its description"
    refuses("--baselines: expected a recipe with a cache or slots", with_baselines, [demo])


def test_whose_baseline_a_recipe_is_follows_from_its_settings():
    cached = load("short-listops-cached")

    def other(name, **switches):
        return replace(cached, name=name, model=replace(cached.model, cache=replace(cached.model.cache, **switches)))

    shared, frozen = other("shared", read="mean"), other("frozen", inference="frozen")
    never = other("never", write=False)  # the same switches as in `unwritten`, not spelt out

    def baselines(*recipes):
        return {name: role.baseline_of for name, role in roles_of(recipes).items() if role.baseline_of}

    own = {"short-listops-cached-unwritten": ("short-listops-cached",), "frozen-constant": ("frozen",)}
    assert baselines(*with_unwritten([cached, shared, frozen])) == {**own, "shared-unwritten": ("shared",)}
    assert baselines(shared, cached, never) == {"never": ("short-listops-cached",)}
    assert baselines(shared, cached, other("mean", write=False, read="mean")) == {"mean": ("shared",)}
    assert baselines(cached, other("long", length=50, write=False), other("c", write=False, inference="frozen")) == {}
    assert baselines(frozen, replace(never, train=replace(never.train, steps=7))) == {}


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("short-listops", None),
        ("short-listops-cached", "cache"),
        ("demo-memformer", "slots"),
        ("text-rmt", "memory tokens"),
    ],
)
def test_the_memory_that_a_recipe_writes_has_a_name(name, memory):
    recipe = load(name)
    never = [one for one in with_unwritten([recipe]) if one != recipe] if memory else []
    assert [role.memory for role in roles_of([recipe, *never]).values()] == [memory, *(None for _ in never)]


def test_shortened_listops_has_all_rows_and_stays_sparse():
    names = [f"listops-128{attention}{cached}" for attention in ATTENTIONS for cached in ("", "-cached")]
    recipes = [load(name, vocab_size=16, max_length=128) for name in names]
    assert [one.model.attention.name for one in recipes[::2]] == list(ATTENTIONS.values())
    made = with_baselines(recipes)
    endings = ("", "-cached", "-cached-constant", "-cached-wider")
    assert [one.name for one in made] == [f"listops-128{attention}{end}" for attention in ATTENTIONS for end in endings]
    assert {(one.data, one.optim, one.train) for one in made} == {(made[0].data, made[0].optim, made[0].train)}
    shortest = made[0].data.min_length + 1
    bigbird, reformer = recipes[2].model.attention, recipes[4].model.attention
    assert shortest // bigbird.block > DENSE
    assert reformer.rounds * 2 * reformer.chunk < shortest, "a token reads its chunk and the one before"


@pytest.mark.parametrize(
    ("name", "size"), [("text-memformer", "slots"), ("text-rmt", "tokens"), ("text-armt", "tokens")]
)
def test_memories_of_segments_have_baselines_too(name, size):
    recipe = load(name, vocab_size=256)
    _, never, wider = with_baselines([recipe])
    assert (never.name, never.model.memory) == (f"{name}-unwritten", replace(recipe.model.memory, write=False))
    assert (wider.name, getattr(wider.model.memory, size)) == (f"{name}-wider", 0)
    assert parameters(wider.model) == pytest.approx(parameters(recipe.model), rel=0.005)
    assert with_baselines([recipe, never, wider]) == [recipe, never, wider]


def test_detectors_have_wider_backbones():
    recipe = load("shapes-mask-rcnn-cached", classes=4)
    made = equal_parameters(recipe)
    assert parameters(made.model) == pytest.approx(parameters(recipe.model), rel=1e-3)
    assert made.model.backbone.cache is None
    plain = replace(recipe.model, backbone=replace(recipe.model.backbone, cache=None))
    assert made.model == replace(plain, backbone=made.model.backbone)
    assert made.model.backbone.mlp_ratios == (4, 6, 4, 6)


@dataclass(frozen=True)
class NoMLP(ModelConfig):
    name = "no-mlp"
    cache: GRC | None = field(default_factory=GRC)

    def build(self) -> nn.Module:
        return nn.Linear(8, 8, bias=self.cache is not None)


def test_a_model_without_mlps_is_refused_and_one_without_a_cache_has_no_baseline():
    recipe = load("short-listops-cached")
    refuses("one of the fields mlp, .*found no-mlp", equal_parameters, replace(recipe, model=NoMLP()))
    assert equal_parameters(replace(recipe, model=NoMLP(None))) is None
    narrow = TransformerConfig(vocab_size=16, max_length=9, dim=8, mlp=1, layers=1, cache=GRC(length=3, ratio=1.0))
    made = equal_parameters(replace(recipe, model=narrow))
    assert parameters(made.model) == pytest.approx(parameters(narrow), rel=0.02)
    refuses("found mlp 0", equal_parameters, replace(recipe, model=replace(narrow, mlp=0)))


def test_recipes_with_other_data_are_refused_before_their_baselines_are_made(tmp_path):
    recipes = [load(name) for name in ("short-listops-cached", "digits-vit-cached")]
    refuses("equal data settings", compare, recipes, tmp_path / "run", baselines=True)
