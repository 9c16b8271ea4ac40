"""Families: which recipes a function of axes makes, their names, and how `mnemos list` shows those of a package."""

import pytest

from mnemos import InputError, registry
from mnemos.lab.cli import main
from mnemos.lab.recipes.family import family, variant
from mnemos.lab.run.recipe import Recipe
from mnemos.memory.gated_cache import GRC


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
    base = registry.load("recipe", "short-listops")()
    return variant(base, f"short-listops, {slots} slots {memory}".strip(), cache=cache.unwritten() if memory else cache)


def test_each_combination_of_values_is_a_recipe(removed, capsys):
    made = family("some-{slots}-slots-{memory}", slots={"8": None, "2+2": None}, memory=("", "unwritten"))(listops)
    names = ["some-8-slots", "some-8-slots-unwritten", "some-2+2-slots"]
    assert [name for name in registry.names("recipe") if name.startswith("some-")] == names
    for name, length in zip(names, (8, 8, 4), strict=True):
        recipe = registry.load("recipe", name)()
        assert (recipe.name, recipe.model.cache.length) == (name, length)
        assert recipe.about == registry.about("recipe", name)
    assert made() == registry.load("recipe", "some-8-slots")(), "the first values"
    assert made("8", memory="unwritten").model.cache == GRC(length=8).unwritten()
    with pytest.raises(InputError, match=r"2\+2"):
        made("2+2", "unwritten")
    with pytest.raises(InputError, match="'16'"):
        made("16")
    for wrong in ({"memmory": "unwritten"}, {"slots": "8"}):
        with pytest.raises(TypeError):
            made("8", **wrong)
    assert main(["list", "listops"]) == 0
    said = capsys.readouterr().out
    assert "  listops: short-listops with caches of several lengths\n    some-8-slots " in said
    assert all(f"    {name} " in said for name in names)


def test_a_family_is_no_recipe():
    with pytest.raises(InputError, match=r"'small-images'.*mnemos list small-images"):
        registry.load("recipe", "small-images")


def test_what_is_no_family_is_refused(removed):
    def silent(memory: str) -> Recipe:
        """A family whose recipes say nothing of themselves."""
        return Recipe(listops("8", "").model, listops("8", "").data)

    with pytest.raises(InputError, match="'some-silent'"):
        family("some-{memory}", memory=("silent",))(silent)
    with pytest.raises(InputError, match=r"'some-8': .*another.*'unwritten'.*name every axis"):
        family("some-{slots}", slots=("8",), memory=("", "unwritten"))(listops)
    with pytest.raises(InputError, match="'short-listops-wider'"):
        family("short-listops-{memory}", memory=("wider",))(lambda memory: listops("8", memory))
