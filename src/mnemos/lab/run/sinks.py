"""Where the lines of metrics.jsonl go as well: `train.log` names TensorBoard, Weights & Biases or MLflow.

A sink holds each number once, also after a run was killed and goes on. Only the library that is named is imported.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mnemos import libraries
from mnemos.atomic import parse, read_text, write_json
from mnemos.errors import InputError, one_line
from mnemos.lab.evaluate.records import flat

from .files import Measurement

_ID = "log.json"  # in the folder of a run: its id in the log of a library that keeps many runs


def open_sink(log: str, folder: Path, step: int) -> "Sink":
    """The sink of a run that continues after the checkpoint of `step` (0: that starts); metrics.jsonl is trimmed to it.

    Raises InputError with the install command if the library is missing, and with its own reason if it refuses.
    """
    sinks: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
    try:
        return sinks[log](folder, step)
    except InputError:
        raise
    except Exception as error:  # the libraries raise errors of their own
        raise InputError(
            f"train.log: expected {log} to take the run, found {type(error).__name__}: {one_line(error)}; set it up "
            "and resume the run, or start one without it"
        ) from error


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, step: int) -> None:
        libraries.tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what earlier files have from purge_step on, also the line of that step, which was kept.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        if (folder / Measurement.FILE).exists():
            self.write([line for line in Measurement.read_all(folder) if line.step >= step])

    def write(self, lines: Sequence[Measurement]) -> None:
        for line in lines:
            for name, value in scalars(line.values, line.kind):
                self._writer.add_scalar(name, value, line.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, with files in RUN/wandb; WANDB_PROJECT names its project, by default mnemos."""

    def __init__(self, folder: Path, step: int) -> None:
        wandb, known = libraries.wandb(), _read_id(folder, "wandb")
        project = os.environ.get("WANDB_PROJECT", "mnemos")
        settings = parse(read_text(folder / "recipe.json"))
        # An offline run has no server to resume from: its files are then those of each process, with one id.
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder), config=settings, id=known, resume="allow"
        )
        write_json(folder / _ID, {"wandb": self._run.id})

    def write(self, lines: Sequence[Measurement]) -> None:
        for line in lines:
            if line.step >= self._run.step:  # what a killed process has logged is there, and equal
                self._run.log(dict(scalars(line.values, line.kind)), step=line.step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, in the experiment MLFLOW_EXPERIMENT_NAME, by default mnemos."""

    def __init__(self, folder: Path, step: int) -> None:
        mlflow, known = libraries.mlflow(), _read_id(folder, "mlflow")
        self._client = mlflow.MlflowClient()
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mnemos")
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            known = self._client.create_run(number, run_name=folder.name).info.run_id
            write_json(folder / _ID, {"mlflow": known})
            for name, value in flat(parse(read_text(folder / "recipe.json"))).items():
                self._client.log_param(known, name, value)
        self._id: str = known
        names = self._client.get_run(known).data.metrics
        # MLflow adds a number to those of its step: what a killed process has logged is there, and equal.
        self._there = {(name, one.step) for name in names for one in self._client.get_metric_history(known, name)}

    def write(self, lines: Sequence[Measurement]) -> None:
        for line in lines:
            for name, value in scalars(line.values, line.kind):
                if (name, line.step) not in self._there:
                    self._client.log_metric(self._id, name, value, step=line.step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


Sink = TensorBoard | WandB | MLflow


def _read_id(folder: Path, log: str) -> str | None:
    path = folder / _ID
    return parse(read_text(path)).get(log) if path.exists() else None


def scalars(value: object, name: str) -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl with names such as train/loss, or gates/blocks.0.attention/mix/0."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from scalars(part, f"{name}/{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            own = part.get("name") if isinstance(part, dict) else None
            yield from scalars(part, f"{name}/{own or i}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
