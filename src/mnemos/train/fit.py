"""`mnemos.fit`: train a model on data that exist in Python, without a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import nn

from mnemos.config import DataConfig, ModelConfig
from mnemos.data.metrics import Metric
from mnemos.data.own import Loss, OwnTask, described, rows_in_a_batch, source
from mnemos.data.task import Task
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject

from .checks import ANY
from .recipe import OptimConfig, Recipe, TrainConfig
from .session import OWN, run_name, train_and_assess


@dataclass(frozen=True)
class OwnModel(ModelConfig):
    """The recipe's description of a model that was given to `fit`; it cannot build the model."""

    name: ClassVar[str] = OWN
    inputs: ClassVar[str] = ANY

    of: str = ""
    parameters: int = 0


@dataclass(frozen=True)
class OwnData(DataConfig):
    """The recipe's description of data that were given to `fit`."""

    name: ClassVar[str] = OWN

    train: str = ""
    valid: str = ""


def fit(
    model: nn.Module,
    train_data: object,
    valid_data: object = None,
    out: str | Path | None = None,
    steps: int = 1000,
    lr: float = 1e-3,
    loss: Loss | None = None,
    metrics: Sequence[Metric] = (),
    optim: OptimConfig | None = None,
    train: TrainConfig | None = None,
    resume: bool = False,
) -> JSONObject:
    """Train `model` in place on your own data, in a run folder, and return what its result.json holds.

        result = mnemos.fit(model, train_loader, valid_loader, out="runs/mine", steps=1000, lr=1e-3)

    train_data, valid_data: each a DataLoader, a map-style data set, or an iterable of batches (inputs, targets),
    {"inputs", "targets", "mask", "reset"} or `Batch`; or one `Task` for both, whose batches may be of any kind. The
    model is called model(inputs). If its `forward` has arguments `state` and `mask` it is given them too, and with a
    `state` it returns (outputs, state). loss(outputs, targets) returns the mean over rows or a value per row; the
    default is cross-entropy of logits [B, C] or [B, T, C], with accuracy as the metric. metrics: runs are compared by
    the first. out: the run's folder; by default a new one in runs. optim, train: all other settings, except that
    `steps` and `lr` replace theirs, and a DataLoader's batch size the one in `train`.
    Result: {"test": the scores on valid_data at the end, "seconds", …}, see `mnemos.train.loop.train`.

    resume: continue in `out` from the newest checkpoint, with a model of the same class and the same data and settings.
    With a map-style data set, also inside a DataLoader that shuffles or not, the order is mnemos' own, a function of
    the seed: resuming is exact, bit for bit, and reads no data again. Any other iterable is read again up to the
    position of the run, from its start, or from the start of the current pass if it has a `len`: resuming is exact if
    it gives the same batches again, and costs the time to read them.

    Raises InputError for data, settings or folders that do not fit, TrainingFailed for a loss that is not finite, and
    Interrupted, with a checkpoint saved, after SIGINT or SIGTERM.
    """
    if resume and out is None:
        raise InputError("fit: expected `out` with resume, found none; name the folder of the run to go on with")
    settings = replace(train or TrainConfig(), steps=steps)
    if isinstance(train_data, Task):
        if valid_data is not None or loss is not None or metrics:
            raise InputError("fit: a Task has its own validation data, loss and metrics; give them to the task")
        task: Task = train_data
        data = OwnData(train=f"{type(task).__module__}.{type(task).__qualname__}")
    else:
        if valid_data is None:
            raise InputError("fit: expected validation data, found none; give a DataLoader or a data set to score on")
        data = OwnData(train=described(train_data), valid=described(valid_data))
        settings = replace(settings, batch_size=rows_in_a_batch(train_data) or settings.batch_size)
        task = OwnTask(model, source(train_data), source(valid_data), settings.batch_size, loss, metrics)
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
    with evaluating(model, training=model.training):  # every module is left in the mode it has
        return train_and_assess(recipe, task, folder, resume=resume, model=model)
