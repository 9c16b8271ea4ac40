"""A recipe: everything that decides a run, as one frozen dataclass. A named recipe is a function that returns one."""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, overload

from mnemos import registry
from mnemos.config import DataConfig, ModelConfig, to_dict
from mnemos.memory.grc import GRC
from mnemos.types import InputError

# Fields of models that depend on the data. A recipe leaves them 0 where every data set of its task must fit.
SIZES = ("vocab_size", "max_length", "classes", "image", "channels", "bands")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate by update s = 1, 2, …, as a factor of `OptimConfig.lr`, after a linear warm-up from `start`.

    constant: 1. cosine: half a cosine from 1 to `floor`. inverse_sqrt: √(warmup/s) (fairseq's). lra:
    min(1, s/warmup)/√max(s, warmup) (Long Range Arena's, which multiplies the rate itself). step: 1, then
    `floor` after `drop_at` updates. plateau: 1, halved whenever `patience` looks at the validation split in a row
    (`TrainConfig.eval_every`) have found no lower loss, down to `floor`.
    """

    name: Literal["constant", "cosine", "inverse_sqrt", "lra", "step", "plateau"] = "constant"
    warmup: int = 0
    floor: float = 0.0
    drop_at: int = 0
    start: float = 0.0
    patience: int = 2


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser: `lr` at the top of the schedule; decoupled `weight_decay` on matrices alone (no biases, norms, λ).

    The λ of gated caches, which say how much of the cache is mixed in, learn at `gate_lr_scale` times the others' rate.
    """

    name: Literal["adamw", "radam", "adam"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float = 1.0  # largest norm of the gradient; 0 = do not clip
    gate_lr_scale: float = 1.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True)
class RolloutConfig:
    """How one update reads sequences that are longer than one forward: in segments that pass their state on.

    A task with rows [B, T] is cut into segments of `segment_length` tokens (0: the row is one segment). A task that
    carries its state from batch to batch gives `segments` successive batches to one update. The gradient flows back
    through `horizon` segments and is cut there (0: through all). With `replay`, the activations of one segment are in
    memory at a time, at the cost of a second forward: `mnemos.replay`, which `checkpoints` and `offload` are passed
    to. Without it, the activations of a whole horizon are: plain back-propagation through time, with the same
    gradients. Evaluation reads rows in the same segments.
    """

    segment_length: int = 0
    segments: int = 1
    horizon: int = 0
    replay: bool = True
    checkpoints: Literal["all", "sqrt"] | int = "all"
    offload: bool = False

    def count(self, length: int) -> int:
        """Steps of an update over rows of `length` tokens."""
        return -(-length // self.segment_length) if self.segment_length else self.segments


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large, where, and how often to look, all counted in updates."""

    steps: int = 1000
    batch_size: int = 32
    accumulate: int = 1  # micro-batches an update; the batch is split, not multiplied
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = "32-true"
    compile: bool = False
    log_every: int = 50
    eval_every: int = 500
    checkpoint_every: int = 500
    keep: int = 2  # checkpoints kept, newest first
    accelerator: str = "auto"
    devices: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True)
class Recipe:
    """A model, a task, an optimiser and a schedule of work: what `mnemos train NAME` runs.

    Of registered recipes, the decorator `recipe` sets `name` and `about`.
    """

    name: str = field(default="", kw_only=True)
    about: str = field(default="", kw_only=True)  # one line for `mnemos list`
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def from_data(self) -> list[str]:
        """The sizes of the model that are 0, which a run takes from the data."""
        return [f.name for f in fields(self.model) if f.name in SIZES and getattr(self.model, f.name) == 0]


Made = Callable[[], Recipe]


@overload
def recipe(function: Made) -> Made: ...


@overload
def recipe(function: str) -> Callable[[Made], Made]: ...


def recipe(function: Made | str) -> Made | Callable[[Made], Made]:
    """Register a function that returns a `Recipe`: decorate it with `@recipe` or `@recipe("its-name")`.

        @mnemos.recipe
        def my_text() -> Recipe:
            \"""Bytes of my files with a cache: what `mnemos list` shows.\"""
            return replace(text(), model=...)

    The name is the function's with - for _ where none is given. The decorated function sets the recipe's `name`, and
    its `about` to the first line of the docstring. The function must build no data and no model, and is called without
    arguments. Raises InputError where it needs arguments, has no docstring, or where its name is taken.
    """
    if isinstance(function, str):
        return functools.partial(_register, function)
    return _register(registry.default_name(function.__name__), function)


def _register(name: str, function: Made) -> Made:
    about = registry.first_line(function.__doc__)
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if needed or not about:
        wrong = f"required arguments ({', '.join(needed)})" if needed else "no docstring"
        raise InputError(
            f"recipe {name!r}: expected a function with a docstring and without required arguments, found {wrong}"
        )

    @functools.wraps(function)
    def made(*args: object, **kwargs: object) -> Recipe:
        return replace(function(*args, **kwargs), name=name, about=about)

    registry.add("recipe", name, made)
    return made


def unwritten(recipe: Recipe) -> Recipe | None:
    """The baseline of a recipe with a gated cache: the same, named NAME-unwritten, whose cache is never written.

    Parameters and reading are equal (`GRC.unwritten`), so what the recipe reaches beyond it is what its memory adds.
    None for a recipe without a gated cache, or whose cache is never written already.
    """
    cache = getattr(recipe.model, "cache", None)
    if not isinstance(cache, GRC) or not cache.write:
        return None
    model: Any = recipe.model
    about = f"{recipe.name} with a cache that is never written: what the branch gives without a memory"
    model = replace(model, cache=cache.unwritten())
    return replace(recipe, name=f"{recipe.name}-unwritten", about=about, model=model)


def as_json(recipe: object) -> Any:
    """A recipe, or the dictionary of one, as recipe.json has it: for comparison with what a run's folder says."""
    return json.loads(json.dumps(to_dict(recipe)))
