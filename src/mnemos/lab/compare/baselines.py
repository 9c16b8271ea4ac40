"""The baselines of a recipe with a memory: the same model never written, and one of equal parameters without memory."""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mnemos.config import ModelConfig, mapped
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.recipe import unwritten as never_written
from mnemos.lab.run.written import SEGMENT_MEMORIES, remove_memories
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.memory.gated_cache import GRC
from mnemos.models.store import skeleton
from mnemos.types import InputError

NEAR = 0.05  # parameters that differ by no more than this share are equal
CACHE = "cache"  # the memory of a row with a gated cache
_ADAPTER = "adapter"  # the width of MLPs that are added, which may be 0
_WIDTHS = ("mlp", "mlp_ratio", "mlp_ratios", _ADAPTER)  # fields of models that set the width of their MLPs


def with_unwritten(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Insert after each recipe with a cache, slots or memory tokens its never-written baseline, unless it is there."""
    return _insert(recipes, [never_written], "--unwritten")


def with_baselines(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Insert after each recipe with a cache or slots its never-written baseline and the one of equal parameters.

    The sizes of the models must be known (`checks.complete`). Of baselines that are alike, as of two lengths of a
    cache, one is inserted, whose `about` names both recipes.
    """
    return _insert(recipes, [never_written, equal_parameters], "--baselines")


def _insert(
    recipes: Sequence[Recipe], makers: Sequence[Callable[[Recipe], Recipe | None]], option: str
) -> list[Recipe]:
    names = {recipe.name for recipe in recipes}
    inserted: dict[str, Recipe] = {}
    order: list[str] = []
    any_baseline = False
    for recipe in recipes:
        order.append(recipe.name)
        for baseline in filter(None, (make(recipe) for make in makers)):
            any_baseline = True
            settings = _without_name(baseline)
            if alike := next((one for one in inserted.values() if _without_name(one) == settings), None):
                about = f"{alike.about}; also the baseline of {recipe.name}"
                inserted[alike.name] = replace(alike, about=about)
            elif baseline.name not in names | inserted.keys() and settings not in map(_without_name, recipes):
                inserted[baseline.name] = baseline
                order.append(baseline.name)
    if not any_baseline:
        raise InputError(
            f"{option}: expected a recipe with a cache or slots that are written, found "
            f"{', '.join(recipe.name for recipe in recipes)}; leave the option out, or give a memory of your own its "
            "row in mnemos.lab.run.written.SEGMENT_MEMORIES"
        )
    whole = inserted | {recipe.name: recipe for recipe in recipes}
    return [whole[name] for name in order]


def _without_name(recipe: Recipe) -> Recipe:
    return replace(recipe, name="", about="")


class Role(NamedTuple):
    """What a recipe is in a comparison."""

    baseline_of: tuple[str, ...] = ()  # the recipes whose never-written baseline it is
    memory: str | None = None  # what its model writes: "cache", or the plural of a memory of segments, such as "slots"


def roles_of(recipes: Sequence[Recipe]) -> dict[str, Role]:
    """The role of each recipe by its name; baselines, which two recipes may share, are found by settings and not by
    names.

    The recipes are as they were before a budget or a choice of learning rates changed each in its own way.
    """

    def spell_out(recipe: Recipe) -> Recipe:
        model = mapped(recipe.model, GRC, GRC.resolved)
        return replace(_without_name(recipe), model=model, train=replace(recipe.train, seed=0))

    baselines = {one.name: spell_out(never) for one in recipes if (never := never_written(one)) is not None}
    roles = {}
    for one in recipes:
        settings, memory = spell_out(one), None
        if one.name in baselines:
            nouns = (about.noun for cls, about in SEGMENT_MEMORIES.items() if _has(one.model, cls, about.size))
            memory = next(nouns, CACHE)
        roles[one.name] = Role(tuple(name for name, baseline in baselines.items() if baseline == settings), memory)
    return roles


def _has(model: ModelConfig, cls: type, size: str) -> bool:
    sizes: list[int] = []

    def note_size(memory: Any) -> Any:
        sizes.append(getattr(memory, size))
        return memory

    mapped(model, cls, note_size)
    return any(sizes)


# --- equal parameters ---


def parameters(model: ModelConfig) -> int:
    """The number of parameters of the model that a configuration describes, which is built without values."""
    return sum(p.numel() for p in skeleton(model).parameters())


def equal_parameters(recipe: Recipe) -> Recipe | None:
    """The recipe without its caches or slots and with wider MLPs, so that it has as many parameters; named NAME-wider.

    None without such a memory, or if it has no parameters or is never written. Raises InputError as `with_parameters`.
    """

    def removed(cache: Any) -> Any:
        return None if isinstance(cache, AttentionCache) or cache.write else cache

    plain: Any = remove_memories(mapped(mapped(recipe.model, GRC, removed), AttentionCache, removed))
    if plain == recipe.model:
        return None
    wanted = parameters(recipe.model)
    if parameters(plain) == wanted:
        return None
    model = _widen(plain, wanted, f"--baselines: {recipe.name} without its memory")
    about = f"{recipe.name} without its memory and with wider MLPs: {parameters(model):,} parameters, of {wanted:,} "
    return replace(recipe, name=f"{recipe.name}-wider", about=f"{about}with it", model=model)


def with_parameters(recipe: Recipe, wanted: int, of: str) -> Recipe:
    """The recipe with MLPs of the width that gives it `wanted` parameters, those of the recipe named `of`, within 5 %.

    Raises InputError if the model has no field that sets the width of its MLPs, or if no width comes within 5 %.
    """
    if abs(parameters(recipe.model) / wanted - 1) <= NEAR:
        return recipe
    model = _widen(recipe.model, wanted, f"--equal parameters: {recipe.name}")
    about = f"{recipe.name} with MLPs that give it the parameters of {of}: {parameters(model):,}"
    return replace(recipe, about=about, model=model)


def _widen(model: ModelConfig, wanted: int, where: str) -> ModelConfig:
    widened = _nearest(model, wanted, where)
    count = parameters(widened)
    if abs(count / wanted - 1) > NEAR:
        raise InputError(
            f"{where}: expected a width of its MLPs that gives it {wanted:,} parameters, found {count:,} at the "
            "nearest; change its sizes, or write a recipe of that size"
        )
    return widened


def _nearest(model: ModelConfig, wanted: int, where: str) -> ModelConfig:
    """The model with the MLP widths, of a detector those of its backbone, whose parameters are nearest to `wanted`."""
    backbone = getattr(model, "backbone", None)
    if isinstance(backbone, ModelConfig):
        rest = parameters(model) - parameters(backbone)
        return replace(model, backbone=_nearest(backbone, wanted - rest, where))  # type: ignore[call-arg]
    name = next((name for name in _WIDTHS if hasattr(model, name)), None)
    value: Any = getattr(model, name or "", None)
    if name is None or (not value and name != _ADAPTER):
        raise InputError(
            f"{where}: expected a model with an MLP in one of the fields {', '.join(_WIDTHS)}, to make it wider, found "
            f"{model.name if name is None else f'{name} 0'}; write this baseline as a recipe"
        )
    start = parameters(model)

    # --- integer ratios ≥ 1, one per stage: of the nearest models the one with the smallest changes ---
    if isinstance(value, tuple):
        others = [tuple(ratio + (j == i) for j, ratio in enumerate(value)) for i in range(len(value))]
        slopes = [parameters(replace(model, **{name: other})) - start for other in others]
        sign = 1 if wanted >= start else -1
        most = [round(abs(wanted - start) / slope) + 1 for slope in slopes]
        if sign < 0:
            most = [min(count, ratio - 1) for count, ratio in zip(most, value, strict=True)]
        choices = itertools.product(*([sign * i for i in range(min(count, 12) + 1)] for count in most))

        def distance(more: tuple[int, ...]) -> tuple[int, int, int]:
            return abs(start + sum(map(operator.mul, more, slopes)) - wanted), max(map(abs, more)), abs(sum(more))

        best = min(choices, key=distance)
        return replace(model, **{name: tuple(map(sum, zip(value, best, strict=True)))})

    # --- one width: channels, or a ratio of the model's width, half a channel above because models round down ---
    unit = 1 if isinstance(value, int) else 1 / model.dim  # type: ignore[attr-defined]

    def width(channels: int) -> float:
        return channels if unit == 1 else (channels + 0.5) * unit

    channels = round(value / unit)
    slope = parameters(replace(model, **{name: width(2 * channels or 1)})) - start
    more = round((wanted - start) / (slope / (channels or 1)))
    return replace(model, **{name: width(max(1, channels + more))})
