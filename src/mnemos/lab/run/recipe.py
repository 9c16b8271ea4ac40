"""Recipes: all settings of a run in one frozen dataclass. A named recipe is a function that returns one."""

import contextlib
import functools
import inspect
import json
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, overload

from mnemos import registry
from mnemos.config import ModelConfig, from_dict, mapped, to_dict
from mnemos.errors import printable
from mnemos.lab.run.written import stop_writing
from mnemos.lab.tasks.task import DataConfig
from mnemos.memory.gated_cache import GRC
from mnemos.types import JSON, InputError, JSONObject

OWN = "own"  # the name, in a recipe, of a model and data that were passed to mnemos.fit
FROM_DATA = 0  # a size of a recipe's model that a run takes from its data; no model has a size of 0
# The fields of models that may be `FROM_DATA`. Tasks of other packages may give others too (`Task.sizes`).
SIZES = ("vocab_size", "max_length", "classes", "image", "channels", "bands")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate at step s = 1, 2, … as a factor of `OptimConfig.lr`, after a linear warm-up.

    Attributes:
        name: constant: 1. cosine: half a cosine from 1 to `floor`. inverse_sqrt: √(warmup/s), as fairseq. lra:
            min(1, s/warmup)/√max(s, warmup), as Long Range Arena. step: 1, times `floor` after each of the `drop_at`
            steps. trapezoid: 1, then in a straight line to `floor` over the last `fall` of the steps; the checkpoint
            before is kept, and a run that is trained for longer goes on from it. plateau: 1, halved after `patience`
            evaluations without a lower validation loss, but not below `floor`.
        warmup: the length of the warm-up in steps or, below 1, as a share of the run's steps (`warmup_steps`).
        floor: the least factor of cosine, trapezoid and plateau, and the factor of each drop of step.
        drop_at: the step, or steps, after which the schedule "step" drops by the factor `floor`.
        start: the factor at which the warm-up starts.
        patience: plateau: successive evaluations (`TrainConfig.eval_every`) without a lower validation loss.
        fall: trapezoid: the share of the steps at the end in which the factor falls.
    """

    name: Literal["constant", "cosine", "inverse_sqrt", "lra", "step", "trapezoid", "plateau"] = "constant"
    warmup: int | float = 0
    floor: float = 0.0
    drop_at: int | tuple[int, ...] = 0
    start: float = 0.0
    patience: int = 2
    fall: float = 0.2

    @property
    def drops(self) -> tuple[int, ...]:
        return (self.drop_at,) if isinstance(self.drop_at, int) else self.drop_at

    def last_constant(self, steps: int) -> int:
        """The last of so many steps whose checkpoint is one of a longer run too: before a trapezoid falls."""
        return steps - int(self.fall * steps) if self.name == "trapezoid" else steps

    def warmup_steps(self, steps: int) -> int:
        """The length of the warm-up of a run of so many steps, in steps: a share is at least one of them."""
        return max(1, round(self.warmup * steps)) if 0 < self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser's settings.

    Attributes:
        name: the optimiser.
        lr: the learning rate where the schedule's factor is 1.
        betas: the decay rates of the running means of the gradient and of its square.
        eps: added to the root of the mean square.
        weight_decay: decoupled, and applied to matrices only, not to biases, norms or λ; adam has none.
        grad_clip: the greatest norm of the gradient; 0: no clipping.
        gate_lr_scale: factor of the learning rate for the λ of gated caches, which mix cache and attention.
        schedule: the learning rate over the steps.
    """

    name: Literal["adamw", "radam", "adam"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    gate_lr_scale: float = 1.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True)
class RolloutConfig:
    """How one update reads a long sequence: in segments that pass their state on. Evaluation reads the same segments.

    Attributes:
        segment_length: tokens per segment into which rows [B, T] are split; 0: the whole row is one segment.
        segments: for tasks that carry their state from batch to batch, the number of successive batches per update.
        slide: with `segments`, the number of batches by which the next update starts later. 0: all of them, so that
            updates share no batch. Less: a sliding window, as in Algorithm 1 of Memformer (slide 1); a batch is read by
            segments/slide updates, and the next update starts from the state after `slide` batches, without gradient.
        horizon: the number of segments through which the gradient flows back; 0: all.
        replay: use memory replay (`mnemos.replay`), which keeps the activations of one segment at a time and costs a
            second forward. Without it, plain back-propagation through time keeps those of a whole horizon. The
            gradients are the same.
        checkpoints: the number of states that memory replay keeps at a time: "all", "sqrt" (the root of the number of
            segments), or a number; it recomputes the others. See `mnemos.replay`.
        offload: memory replay keeps these states in the CPU's memory.
        verify: compare what memory replay computes again with its first pass, in the first update of a process. See
            `mnemos.replay`.
    """

    segment_length: int = 0
    segments: int = 1
    slide: int = 0
    horizon: int = 0
    replay: bool = True
    checkpoints: Literal["all", "sqrt"] | int = "all"
    offload: bool = False
    verify: bool = True

    @property
    def stride(self) -> int:
        """The number of batches that an update reads for the first time."""
        return self.slide or self.segments

    def count(self, length: int) -> int:
        return -(-length // self.segment_length) if self.segment_length else self.segments


@dataclass(frozen=True)
class TrainConfig:
    """The training run: its length in steps (updates), batches, device, and how often it logs, evaluates and saves.

    Attributes:
        steps: the number of updates.
        batch_size: rows per update, in all processes and micro-batches together.
        accumulate: the number of micro-batches into which a process splits its rows of an update, to save memory.
        seed: of the weights, the order of the data, dropout and augmentation.
        precision: of the weights and of the arithmetic, as Lightning Fabric names them: "bf16-mixed" has float32
            weights and bfloat16 arithmetic, "bf16-true" has bfloat16 weights and optimiser state too.
        compile: compile the model with torch.compile for training.
        log_every: steps between two lines of training metrics.
        log: send the lines of metrics.jsonl to TensorBoard (files in RUN/tensorboard), Weights & Biases or MLflow as
            well.
        eval_every: steps between two evaluations on the validation split.
        valid_rows: the number of rows of the validation split that are scored, rounded up to whole batches of
            `batch_size` rows; 0: all; -1: as many as cost no more than the updates (`scored_batches.limited`). The same
            rows are scored at every evaluation, with every seed and by every recipe of a comparison.
        test_rows: the same for the test split, rounded up alike, and for the controls of the memory.
        checkpoint_every: steps between two checkpoints.
        keep: the number of newest checkpoints that are kept.
        keep_best: keep the weights of the best evaluation on the validation split, by the task's first metric. The
            run's model and its test scores are those of these weights.
        average: the number of newest checkpoints whose averaged weights are the run's model at its end, with their test
            scores; as many are kept. Those of `checkpoint_every` and of the end count, not those of interruptions. 0:
            the weights of the last step.
        patience: stop after this many successive evaluations without a better one; 0: train all steps.
        init_from: the folder of a run whose weights the model starts with, where names and shapes agree; or, for the
            models that `--model` chooses, hf:NAME, timm:NAME or the folder of a saved model of Hugging Face.
        accelerator: "auto", "cpu", "cuda" or "mps"; "auto" takes a GPU if there is one.
        devices: the number of processes per machine, one per device.
        num_nodes: the number of machines, each with as many devices.
        strategy: "ddp": every process holds the model. "fsdp": the processes hold shards of it. "auto": "ddp" for
            several devices.
        threads: threads within operations on the CPU; 0: as PyTorch chooses, by default the number of cores, or
            OMP_NUM_THREADS. A resumed run gives the same numbers with the same threads only.
        rollout: how one update reads a long sequence.
    """

    steps: int = 1000
    batch_size: int = 32
    accumulate: int = 1
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true"] = "32-true"
    compile: bool = False
    log_every: int = 50
    log: Literal["none", "tensorboard", "wandb", "mlflow"] = "none"
    eval_every: int = 500
    valid_rows: int = 0
    test_rows: int = 0
    checkpoint_every: int = 500
    keep: int = 2
    keep_best: bool = False
    average: int = 0
    patience: int = 0
    init_from: str | None = None
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    threads: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    @property
    def processes(self) -> int:
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Recipe:
    """A model, its data, an optimiser and a training run: what `mnemos train NAME` runs.

    The decorator `recipe` sets `name` and `about` of registered recipes.
    """

    name: str = field(default="", kw_only=True)
    about: str = field(default="", kw_only=True)  # one line for `mnemos list`
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if {"/", "\\"} & {*self.name} or self.name in (".", ".."):  # its runs are in a folder of this name
            raise InputError(f"name: expected a name without / and \\, found {self.name!r}; change it")
        if "\n" in self.name or printable(self.name) != self.name:  # it is printed to terminals
            raise InputError(f"name: expected a name without control characters, found {self.name!r}; change it")

    def to_continue(self, folder: Path) -> str:
        """What continues a run of the recipe in a folder: a call of `mnemos.fit`, or a command."""
        if self.model.name == OWN:
            return f"mnemos.fit(..., out={str(folder)!r}, steps={self.train.steps}, resume=True)"
        return f"mnemos train --resume {shlex.quote(str(folder))}"

    def from_data(self, names: Collection[str] = SIZES) -> list[str]:
        """Those of the model's fields, among these names, that a run takes from its data (`FROM_DATA`)."""
        known = {f.name: getattr(self.model, f.name) for f in fields(self.model) if f.name in names}
        return [name for name, value in known.items() if type(value) is int and value == FROM_DATA]


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
            return replace(mnemos.registry.load("recipe", "text")(), model=...)

    The default name is the function's, with - for _; the docstring's first line becomes `about`. The function must not
    build data or a model. Raises InputError if it needs arguments, has no docstring, or its name is taken.
    """
    if isinstance(function, str):
        return functools.partial(_register, function)
    return _register(registry.default_name(function.__name__), function)


def _register(name: str, function: Made) -> Made:
    about = registry.first_line(function.__doc__)
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if needed or not about:
        wrong = f"required arguments ({', '.join(needed)}); give them defaults" if needed else "no docstring; add one"
        raise InputError(
            f"recipe {name!r}: expected a function with docstring and no required arguments, found {wrong}"
        )

    @functools.wraps(function)
    def made(*args: object, **kwargs: object) -> Recipe:
        found = function(*args, **kwargs)
        if not isinstance(found, Recipe):
            raise InputError(f"recipe {name!r}: expected a Recipe from its function, found {found!r:.40}; return one")
        return replace(found, name=name, about=about)

    registry.add("recipe", name, made)
    return made


def unwritten(recipe: Recipe) -> Recipe | None:
    """The never-written baseline of a recipe with a gated cache, slots or memory tokens, named NAME-unwritten.

    It reads as the recipe does, and never writes (`GRC.unwritten`); slots and tokens keep their start values, and
    associations stay empty, without the writer's parameters. A cache that is read as stored at inference
    (preset="paper") is a learned constant, named NAME-constant. None for a recipe without a memory that is written.
    """
    constants: list[GRC] = []

    def stop(cache: GRC) -> GRC:
        found = cache.unwritten() if cache.write else cache
        constants.extend([found] if found.constant else [])
        return found

    model = stop_writing(mapped(recipe.model, GRC, stop))
    if model == recipe.model:
        return None
    if constants:
        about = f"{recipe.name} with a learned constant in place of the written cache, read in the same way"
        return replace(recipe, name=f"{recipe.name}-constant", about=about, model=model)
    about = f"{recipe.name} with a memory that is never written, but read in the same way"
    return replace(recipe, name=f"{recipe.name}-unwritten", about=about, model=model)


def as_written(saved: JSONObject) -> JSONObject:
    """A recipe.json in the form of `as_json`, with defaults of fields that it lacks; unreadable parts stay."""
    found = dict(saved)
    parts = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}
    for name, cls in parts.items():
        with contextlib.suppress(InputError):
            found[name] = as_json(from_dict(cls, saved.get(name)))
    return found


def as_json(recipe: object) -> JSON:
    """A recipe, or the dictionary of one, in the form of recipe.json, for comparison with that of a run's folder."""
    return json.loads(json.dumps(to_dict(recipe)))


def differing(left: object, right: object, where: str = "") -> str | None:
    """The first field where two recipes differ, with both values; None if they are equal, `about` aside."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(k for k in right if k not in left)]:
            if key == "about" and not where:  # a description, which may be reworded while runs wait to be continued
                continue
            if found := differing(left.get(key), right.get(key), f"{where}.{key}".lstrip(".")):
                return found
        return None
    return None if left == right else f"{where} ({left!r}, not {right!r})"
