"""Names: which there are, what they load, how other packages add theirs, and what a listing costs."""

import importlib
import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import pytest
from refusals import refuses

import mnemos
from mnemos import registry
from mnemos.attention.linear import LinearConfig
from mnemos.config import AttentionConfig, ModelConfig, from_dict, to_dict
from mnemos.lab.recipes.small_tasks import short_listops
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig, recipe, unwritten
from mnemos.memory.gated_cache import GRC

SOURCE = Path(registry.__file__).parent


def test_the_table_names_what_is_registered():
    """Every file with a decorator is imported; what it registers, and nothing else, stands in the table."""
    decorated = re.compile(r"^@(register|recipe|family)\b", re.MULTILINE)
    for path in SOURCE.rglob("*.py"):
        if decorated.search(path.read_text()):
            importlib.import_module(".".join(("mnemos", *path.relative_to(SOURCE).with_suffix("").parts)))
    for kind in registry.KINDS:
        registered = {name: entry.definition for name, entry in registry._registered[kind].items()}
        found, listed = (
            {name: place for name, place in places.items() if place.module.startswith("mnemos.")}
            for places in (registered, registry.definitions(kind))
        )
        assert found == listed


def test_every_name_loads_what_its_description_says(monkeypatch):
    every = {(kind, name): registry.load(kind, name) for kind in registry.KINDS for name in registry.names(kind)}
    recipes = {name: found() for (kind, name), found in every.items() if kind == "recipe"}  # one may load another
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry.KINDS})  # as before an import
    for (kind, name), found in every.items():
        about = registry.first_line(found.__doc__)
        assert about
        if kind == "recipe":
            made = recipes[name]
            assert isinstance(made, Recipe)
            assert (made.name, made.about) == (name, about)
        else:
            assert registry.about(kind, name) == about
            assert (found.kind, found.name) == (kind, name)


def test_a_missing_folder_is_named_without_the_laboratory(monkeypatch):
    """Recipes need its libraries; mnemos.load of a wrong path does not ask for them."""
    monkeypatch.setattr(registry, "find_missing", list)
    monkeypatch.setattr(registry, "names", lambda kind: pytest.fail("recipes were imported"))
    with pytest.raises(mnemos.InputError, match="no such folder; check the path"):
        mnemos.load("nowhere")


def test_attentions_memories_and_models_are_set_up_from_the_top_level():
    for room in (mnemos.attention, mnemos.memory, mnemos.models):
        for name in (name for name in room.__all__ if name.endswith("Config")):
            assert getattr(mnemos, name) is getattr(room, name)
    for name in (name.removesuffix("Config") for name in mnemos.models.__all__):
        if f"{name}Config" in mnemos.models.__all__ and name != "Head":
            assert getattr(mnemos, name) is getattr(mnemos.models, name)


def test_a_never_written_baseline_is_what_compare_makes():
    baselines = [name for name in registry.names("recipe") if name.endswith("-unwritten")]
    assert len(baselines) == 14
    for name in baselines:
        cached = registry.load("recipe", name.removesuffix("-unwritten"))()
        made = unwritten(cached)
        assert made is not None
        assert replace(made, about="") == replace(registry.load("recipe", name)(), about="")


def test_a_cache_is_found_wherever_the_model_holds_it():
    @dataclass(frozen=True)
    class Stage:
        memory: GRC | None = None

    @dataclass(frozen=True)
    class Staged(ModelConfig):
        name: ClassVar[str] = "staged"
        stages: tuple[Stage, ...] = ()

    base = replace(short_listops(), model=Staged((Stage(), Stage(GRC(length=4)), Stage(GRC().unwritten()))))
    made = unwritten(base)
    assert made.model.stages == (Stage(), Stage(GRC(length=4).unwritten()), Stage(GRC().unwritten()))
    assert unwritten(made) is None


@dataclass(frozen=True)
class DecayConfig(LinearConfig):
    """Linear attention that forgets."""

    name: ClassVar[str] = "decay"


@pytest.fixture
def decay():
    yield registry.register(DecayConfig)
    registry.remove("attention", "decay")


def test_a_class_from_outside_is_known_by_its_name(decay):
    assert registry.load("attention", "decay") is DecayConfig
    assert registry.about("attention", "decay") == "Linear attention that forgets"
    written = json.loads(json.dumps(to_dict(DecayConfig(eps=1e-3))))
    assert from_dict(AttentionConfig, written) == DecayConfig(eps=1e-3)
    registry.register(DecayConfig)  # again, as when its module is reloaded


def test_a_name_is_given_once(decay, monkeypatch):
    other = dataclass(frozen=True)(type("Other", (DecayConfig,), {"__module__": "elsewhere", "__doc__": "Other."}))
    refuses(r"elsewhere:Other.*'decay'.*test_registry:DecayConfig", registry.register, other)
    other.name = "softmax"
    refuses(r"elsewhere:Other.*'softmax'.*mnemos\.attention\.softmax:SoftmaxConfig", registry.register, other)

    def mine() -> Recipe:
        """Mine."""
        return short_listops()

    refuses(r"mine.*'short-listops'.*mnemos\.lab\.recipes\.small_tasks:short_listops", recipe("short-listops"), mine)
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry.KINDS})  # ours before it is imported
    other.name = "block-sparse"
    refuses(r"elsewhere:Other.*'block-sparse'.*bigbird:BlockSparseConfig", registry.register, other)


def test_a_recipe_from_outside():
    @recipe
    def my_listops(steps: int = 7) -> Recipe:
        """Short ListOps, shorter."""
        return replace(short_listops(), train=replace(short_listops().train, steps=steps))

    try:
        found = registry.load("recipe", "my-listops")()
        assert (found.name, found.about, found.train.steps) == ("my-listops", "Short ListOps, shorter", 7)
        assert found.model == short_listops().model
    finally:
        registry.remove("recipe", "my-listops")
    refuses("'my-listops'", registry.load, "recipe", "my-listops")


def test_a_recipe_names_the_sizes_that_it_leaves_to_the_data():
    model = replace(short_listops().model, vocab_size=0, max_length=7, layers=0)
    assert replace(short_listops(), model=model).from_data() == ["vocab_size"]
    assert registry.load("recipe", "recall")().from_data() == ["vocab_size", "max_length"]
    assert sorted(registry.load("recipe", "cifar-pvt-cached")().from_data()) == ["channels", "classes", "image"]


def test_what_cannot_be_registered_is_refused():
    def needs(steps: int) -> Recipe:
        """With an argument."""
        return short_listops()

    def silent() -> Recipe:
        return short_listops()

    for function, found in ((needs, "steps"), (silent, "no docstring")):
        refuses(found, recipe, function)
    for wrong in (int, short_listops, type("Nameless", (AttentionConfig,), {})):
        refuses("class variable `name`", registry.register, wrong)
    for name in ("demo", "nothing"):  # ours stays; there is no such
        refuses(name, registry.remove, "recipe", name)
    refuses("attention, model, data, recipe", registry.names, "models")


@pytest.mark.parametrize(
    "cls",
    [
        *(registry.load("attention", name) for name in registry.names("attention")),
        *(GRC, OptimConfig, RolloutConfig, ScheduleConfig, TrainConfig),
    ],
)
def test_the_docstring_of_a_configuration_explains_every_field(cls):
    explained = re.findall(r"^        (\w+): \S", cls.__doc__.partition("Attributes:\n")[2], re.MULTILINE)
    assert explained == [field.name for field in fields(cls)]
