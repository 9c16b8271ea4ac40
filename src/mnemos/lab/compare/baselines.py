"""The baselines of a recipe with a memory: the same model never written, and one of equal parameters without memory."""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
    return _insert(recipes, [never_written], "--unwritten", "a gated cache or slots that are written")


def with_baselines(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Insert after each recipe with a cache or slots its never-written baseline and the one of equal parameters.

    The sizes of the models must be known (`checks.complete`). A baseline is not inserted if one of its name, or with
    equal settings, is in the list: two lengths of a cache have one baseline of equal parameters. Its `about`
    names both.
    """
    return _insert(recipes, [never_written, equal_parameters], "--baselines", "a cache or slots")


def _insert(
    recipes: Sequence[Recipe], makers: Sequence[Callable[[Recipe], Recipe | None]], option: str, needs: str
) -> list[Recipe]:
    names = {recipe.name for recipe in recipes}
    known = [_without_name(recipe) for recipe in recipes]
    found: list[Recipe] = []
    made_any = False
    for recipe in recipes:
        found.append(recipe)
        for baseline in filter(None, (make(recipe) for make in makers)):
            made_any = True
            if _without_name(baseline) in known:
                found = [_share(one, baseline, recipe) if one.name not in names else one for one in found]
            elif baseline.name not in names:
                found.append(baseline)
                known.append(_without_name(baseline))
    if not made_any:
        raise InputError(
            f"{option}: expected a recipe with {needs}, found {', '.join(recipe.name for recipe in recipes)}; leave "
            "the option out, or give a memory of your own its row in mnemos.lab.run.written.SEGMENT_MEMORIES"
        )
    return found


def _share(one: Recipe, baseline: Recipe, owner: Recipe) -> Recipe:
    """A baseline that was inserted before; if `owner` has the same, its description says so."""
    same = _without_name(one) == _without_name(baseline)
    return replace(one, about=f"{one.about}; also the baseline of {owner.name}") if same else one


class Role(NamedTuple):
    """What a recipe is in a comparison.

    baseline_of: the recipes whose never-written baseline it is. memory: what its model writes: "cache" or the plural of
    a memory of segments, such as "slots"; None for a model that writes none of these.
    """

    baseline_of: tuple[str, ...] = ()
    memory: str | None = None


def roles_of(recipes: Sequence[Recipe]) -> dict[str, Role]:
    """The role of each recipe by its name; baselines are found by settings and not by names.

    The recipes as they were before a budget or a choice of learning rates changed each in its own way. Two recipes may
    share a baseline, for example caches that differ in how rows are read together.
    """
    known = {one.name: _spell_out(one) for one in recipes}
    baselines = {one.name: baseline for one in recipes if (baseline := never_written(one)) is not None}
    found = {}
    for one in recipes:
        owners = (name for name, baseline in baselines.items() if _spell_out(baseline) == known[one.name])
        found[one.name] = Role(tuple(owners), written_memory(one.model) if one.name in baselines else None)
    return found


def _spell_out(recipe: Recipe) -> Recipe:
    """The recipe without name and seed, with every switch of its caches given."""
    model = mapped(recipe.model, GRC, GRC.resolved)
    return replace(_without_name(recipe), model=model, train=replace(recipe.train, seed=0))


def written_memory(model: ModelConfig) -> str:
    """What a model writes: the plural of its memory of segments, or "cache", a gated one."""
    for cls, kind in SEGMENT_MEMORIES.items():
        sizes: list[int] = []
        mapped(model, cls, partial(_keep_size, sizes=sizes, size=kind.size))
        if any(sizes):
            return kind.noun
    return CACHE


def _keep_size(memory: Any, sizes: list[int], size: str) -> Any:
    sizes.append(getattr(memory, size))
    return memory


def _without_name(recipe: Recipe) -> Recipe:
    return replace(recipe, name="", about="")


def equal_parameters(recipe: Recipe) -> Recipe | None:
    """The recipe without its caches or slots and with wider MLPs, so that it has as many parameters; named NAME-wider.

    The parameters are counted with models without values, which cost no memory. Returns None for a recipe without
    such a memory, with one that is never written, or with one that has no parameters. Raises InputError if the model
    has no field that sets the width of its MLPs, or if no width comes within 5 % of the parameters.
    """
    plain: Any = mapped(recipe.model, GRC, lambda cache: _none() if cache.write else cache)
    plain = mapped(plain, AttentionCache, lambda _: _none())
    plain = remove_memories(plain)
    if plain == recipe.model:
        return None
    wanted = parameters(recipe.model)
    if parameters(plain) == wanted:
        return None
    model = _widen(plain, wanted, "--baselines")
    found = parameters(model)
    if abs(found / wanted - 1) > NEAR:
        raise InputError(
            f"--baselines: expected a model of {wanted:,} parameters without the memory of {recipe.name}, found that "
            f"wider MLPs give {found:,} at the nearest; write this baseline as a recipe"
        )
    about = f"{recipe.name} without its memory and with wider MLPs: {found:,} parameters, of {wanted:,} with it"
    return replace(recipe, name=f"{recipe.name}-wider", about=about, model=model)


def with_parameters(recipe: Recipe, wanted: int, of: str) -> Recipe:
    """The recipe with MLPs of the width that gives it `wanted` parameters, those of the recipe named `of`.

    Parameters that differ by no more than 5 % are equal, and such a recipe stays as it is. Raises InputError if the
    model has no field that sets the width of its MLPs, or if no width comes within 5 %.
    """
    before = parameters(recipe.model)
    if abs(before / wanted - 1) <= NEAR:
        return recipe
    model = _widen(recipe.model, wanted, "--equal parameters")
    found = parameters(model)
    if abs(found / wanted - 1) > NEAR:
        raise InputError(
            f"--equal parameters: expected {wanted:,} parameters as of {of}, found {before:,} of {recipe.name}, and "
            f"that other widths of its MLPs give {found:,} at the nearest; change its sizes with --model.FIELD"
        )
    return replace(recipe, about=f"{recipe.name} with MLPs that give it the parameters of {of}", model=model)


def parameters(model: ModelConfig) -> int:
    """The number of parameters of the model that a configuration describes."""
    return sum(p.numel() for p in skeleton(model).parameters())


def _none() -> Any:
    return None


def _widen(model: ModelConfig, wanted: int, option: str) -> ModelConfig:
    """The model with the MLP widths whose number of parameters is nearest to `wanted`; the count is linear in them.

    Of a detector, the MLPs of its backbone.
    """
    backbone = getattr(model, "backbone", None)
    if isinstance(backbone, ModelConfig):
        rest = parameters(model) - parameters(backbone)
        return replace(model, backbone=_widen(backbone, wanted - rest, option))  # type: ignore[call-arg]
    name = next((name for name in _WIDTHS if hasattr(model, name)), None)
    if name is None:
        raise InputError(
            f"{option}: expected a model with one of the fields {', '.join(_WIDTHS)}, found {model.name}; write its "
            "baseline of equal parameters as a recipe"
        )
    value: Any = getattr(model, name)
    if isinstance(value, tuple):
        return _widen_stages(model, name, value, wanted)
    if not value and name != _ADAPTER:
        raise InputError(
            f"{option}: expected a model with an MLP, to make it wider, found {name} 0; write the "
            "baseline of equal parameters as a recipe"
        )
    unit = 1 if isinstance(value, int) else 1 / model.dim  # type: ignore[attr-defined]  # one hidden channel
    start, channels = parameters(model), round(value / unit)
    slope = parameters(replace(model, **{name: _width(2 * channels or 1, unit)})) - start
    more = round((wanted - start) / (slope / (channels or 1)))
    return replace(model, **{name: _width(max(1, channels + more), unit)})


def widths_text(before: ModelConfig, after: ModelConfig) -> str | None:
    """How the widths of the MLPs of two models differ: "mlp 384 instead of 512"; None if they do not."""
    widened, original = getattr(after, "backbone", after), getattr(before, "backbone", before)
    for name in _WIDTHS:
        old, new = getattr(original, name, None), getattr(widened, name, None)
        if old != new:
            return f"{name} {_text(new)} instead of {_text(old)}, {parameters(after):,} parameters"
    return None


def _text(width: Any) -> str:
    return f"{width:.4g}" if isinstance(width, float) else str(width)


def _width(channels: int, unit: float) -> float:
    """A field's value for a number of hidden channels. A ratio is half a channel above, as models round down."""
    return channels if unit == 1 else (channels + 0.5) * unit


def _widen_stages(model: ModelConfig, name: str, ratios: Sequence[int], wanted: int) -> ModelConfig:
    """The same for integer ratios ≥ 1, one per stage: of the nearest models the one with the smallest changes."""
    start = parameters(model)
    slopes = []
    for i in range(len(ratios)):
        other = tuple(ratio + (j == i) for j, ratio in enumerate(ratios))
        slopes.append(parameters(replace(model, **{name: other})) - start)
    sign = 1 if wanted >= start else -1
    most = [round(abs(wanted - start) / slope) + 1 for slope in slopes]
    if sign < 0:
        most = [min(count, ratio - 1) for count, ratio in zip(most, ratios, strict=True)]
    choices = itertools.product(*([sign * i for i in range(min(count, 12) + 1)] for count in most))

    def distance(more: tuple[int, ...]) -> tuple[int, int, int]:
        return abs(start + sum(map(operator.mul, more, slopes)) - wanted), max(map(abs, more)), abs(sum(more))

    best = min(choices, key=distance)
    return replace(model, **{name: tuple(map(sum, zip(ratios, best, strict=True)))})
