"""`mnemos.fit`: train your own model on your own data in Python, without a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import nn

from mnemos import generators
from mnemos.config import ModelConfig
from mnemos.errors import near_arguments
from mnemos.lab.tasks.metrics import Metric, find_metrics
from mnemos.lab.tasks.task import DataConfig, Task
from mnemos.lab.tasks.user_data import Loss, OwnTask, rows_in_a_batch, source
from mnemos.modes import in_mode, plain_module
from mnemos.types import InputError, JSONObject

from .checks import ANY
from .files import read_object
from .recipe import OWN, OptimConfig, Recipe, TrainConfig
from .run import Run
from .session import carry_out, run_name


@dataclass(frozen=True)
class OwnModel(ModelConfig):
    """The entry in a run's recipe for a model that was passed to `fit`, which the recipe cannot build again."""

    name: ClassVar[str] = OWN
    inputs: ClassVar[str] = ANY

    of: str = ""
    parameters: int = 0


@dataclass(frozen=True)
class OwnData(DataConfig):
    """The entry in a run's recipe for data that were passed to `fit`."""

    name: ClassVar[str] = OWN

    train: str = ""
    valid: str = ""


@near_arguments
def fit(
    model: nn.Module,
    train_data: object,
    valid_data: object = None,
    out: str | Path | None = None,
    steps: int = 1000,
    lr: float = 1e-3,
    loss: Loss | None = None,
    metrics: Sequence[Metric | str] = (),
    optim: OptimConfig | None = None,
    train: TrainConfig | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> JSONObject:
    """Train `model` in place on your own data, write a run folder, and return the content of its result.json.

        result = mnemos.fit(model, train_loader, valid_loader, out="runs/mine", steps=1000, lr=1e-3)

    train_data, valid_data: a DataLoader, a map-style data set, or an iterable of batches; a batch is (inputs, targets),
    {"inputs", "targets", "mask", "reset"}, a `Batch`, or {"input_ids", "labels", …} for a model of Transformers, whose
    own loss is trained; micro-batches and validation batches count by their labels that are not −100. For batches of
    any other kind pass a `Task` as train_data.
    model: called as model(inputs). If its `forward` has arguments `state` and `mask` they are passed too; with `state`
    it must return (outputs, state). loss(outputs, targets): returns the mean over rows or one value per row. The
    default is cross-entropy of logits [B, C] or [B, T, C], with accuracy as the metric. metrics: objects, or names of
    those in `mnemos.lab.tasks.metrics`, such as "accuracy"; comparisons use the first. Of a model that is trained by
    its own loss, objects read all outputs, and names the `logits`: for labels [B, T] the loss alone. out: the run's
    folder, by default a new one in runs/. optim, train: all other settings; `steps` and `lr` override theirs; a
    compiled model is trained with train.compile. quiet: print no progress and no summary. Result: {"valid": scores on
    valid_data at the end, "seconds", …}, see `mnemos.lab.run.files.Result`. Only a `Task` with a test split gives
    "test".

    resume: continue the run in `out` from its newest checkpoint, up to `steps`, which may be more than before: the rate
    of the further updates is the schedule's over all of them. Pass the same model class, data and settings. For a
    map-style data set (also inside a DataLoader, shuffled or not) the order is a function of the seed, so resuming is
    exact, bit for bit, and has no cost. Any other iterable is read again up to the position of the run, from its start,
    or from the start of the current pass if it has a `len`; this is exact if the iterable repeats the same batches.

    Gradients that the model has are cleared; the process's random generators are afterwards as they were. With several
    processes (train.devices) a program trains once: the first of them scores the model alone, and the others go on.

    Raises InputError for data, settings or folders that do not fit, TrainingFailed for a loss that is not finite, and
    Interrupted after SIGINT or SIGTERM, with a checkpoint saved.
    """
    if resume and out is None:
        raise InputError("fit: expected `out` with resume=True, found none; pass the folder of the run to continue")
    settings = replace(train or TrainConfig(), steps=steps)
    if (plain := plain_module(model, "fit")) is not model:
        # The trainer compiles it, and writes the model's own names.
        model, settings = plain, replace(settings, compile=True)
    if settings.strategy == "fsdp":  # the model is assessed after training, by the first process alone
        raise InputError("fit: expected train.strategy 'auto' or 'ddp', found 'fsdp'; train a recipe to shard a model")
    if isinstance(train_data, Task):
        if valid_data is not None or loss is not None or metrics:
            raise InputError("fit: expected a Task alone, found valid_data, loss or metrics too; define them in it")
        task: Task = train_data
        data = OwnData(train=f"{type(task).__module__}.{type(task).__qualname__}")
    else:
        if valid_data is None:
            raise InputError("fit: expected valid_data, found none; pass a DataLoader or a data set to evaluate on")
        chosen = find_metrics(metrics)
        training, validation = source(train_data), source(valid_data)
        data = OwnData(train=training.described(), valid=validation.described())
        settings = replace(settings, batch_size=rows_in_a_batch(training, settings.seed) or settings.batch_size)
        task = OwnTask(model, training, validation, settings.batch_size, loss, chosen, settings.seed)
    about = OwnModel(f"{type(model).__module__}.{type(model).__qualname__}", sum(p.numel() for p in model.parameters()))
    recipe = Recipe(
        model=about,
        data=data,
        optim=replace(optim or OptimConfig(), lr=lr),
        train=settings,
        name=type(model).__name__.lower(),
        about="a model trained by mnemos.fit",
    )
    folder = Path(out) if out is not None else Path("runs") / run_name(recipe)
    longer = False
    if resume and (folder / "recipe.json").is_file():
        before = read_object(folder / "recipe.json", {"train": dict})["train"].get("steps")
        longer = isinstance(before, int) and before < steps
    with generators.preserve(), in_mode(model, training=True):  # afterwards as before, with the mode of every module
        opened = Run.open(recipe, folder, resume, steps=steps if longer else None, task=task, model=model, quiet=quiet)
        return carry_out(opened, count_flops=False).to_json()  # the data are read for updates alone
