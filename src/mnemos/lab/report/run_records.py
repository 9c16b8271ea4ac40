"""One run folder as numbers: recipe, provenance, curves, gates, result, and what was recorded of its model."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mnemos.atomic import parse, read_bytes, read_text
from mnemos.lab.evaluate.gates import Gates
from mnemos.lab.evaluate.recorded import Explanation, read_explanation
from mnemos.lab.evaluate.records import from_json, number, read_object
from mnemos.lab.run.files import Measurement, Provenance, Result
from mnemos.types import InputError, JSONObject

Columns = dict[str, np.ndarray]  # "step" [S] and one float64 array [S] per quantity; NaN where a record lacks it
# Measured by the trainer itself; every other number in a line of metrics.jsonl is a metric of the task.
OWN = ("loss", "auxiliary_loss", "lr", "grad_norm", "seconds", "tokens")
GATES = ("update.mean", "update.saturated", "reset.mean", "reset.saturated", "cache.rms", "cache.rank")
DETECTIONS = "detections"  # folder of a run: photos with annotations on the left and detections on the right


@dataclass(frozen=True)
class GateCurves:
    """The gates over training: `mix` is σ(λ) [S, L, H]; `values` has [S, L] per quantity, as "update.mean"."""

    step: np.ndarray
    layers: tuple[str, ...]
    mix: np.ndarray
    values: Columns


@dataclass(frozen=True)
class Generated:
    """Pictures that a model generated, or completed below the upper about["given"] rows of originals."""

    samples: np.ndarray | None  # [N, H, W, C]
    originals: np.ndarray | None  # [K, H, W, C]
    completions: np.ndarray | None  # [K, ways, H, W, C]
    about: JSONObject


@dataclass(frozen=True)
class RunRecord:
    """One run folder. None: it has no such file."""

    folder: Path
    label: str  # its name in the report: a path relative to the folder that was given
    recipe: JSONObject
    provenance: Provenance | None
    train: Columns
    valid: Columns
    gates: GateCurves | None
    result: Result | None
    explained: Explanation | None = None
    generated: Generated | None = None
    detected: tuple[tuple[str, bytes], ...] = ()  # (name, bytes) of the JPEGs that a detector's run has drawn

    @property
    def seed(self) -> object:
        """The seed from the result, the recipe or the provenance, in this order; "?" if none has it."""
        training = self.recipe.get("train")
        of_recipe = training.get("seed") if isinstance(training, dict) else None
        seeds = (self.result and self.result.seed, of_recipe, self.provenance and self.provenance.seed)
        return next((seed for seed in seeds if seed is not None), "?")

    def tested(self, metric: str, control: str | None = None) -> float:
        """The test metric (without a test split that of validation), also under a control; NaN if not measured."""
        return math.nan if self.result is None else self.result.score(metric, control)

    def cost(self, name: str) -> float:
        """A number of the result, such as "steps"; NaN if the run is not finished or does not have it."""
        value = None if self.result is None else getattr(self.result, name)
        return math.nan if value is None else float(value)

    @property
    def artifacts(self) -> JSONObject:
        return {} if self.result is None else self.result.artifacts


def read_run(folder: Path, label: str) -> RunRecord:
    """One run folder. recipe.json and metrics.jsonl are required; other missing files become None."""
    train, valid, gates = read_metrics(folder)
    photos = sorted((folder / DETECTIONS).glob("*.jpg"), key=lambda file: (len(file.stem.split("-")[0]), file.stem))
    return RunRecord(
        folder=folder,
        label=label,
        recipe=read_object(folder / "recipe.json", "repair the file"),
        provenance=Provenance.read(folder) if Provenance.exists(folder) else None,
        train=train,
        valid=valid,
        gates=gates,
        result=Result.read(folder) if Result.exists(folder) else None,
        explained=read_explanation(folder),
        generated=read_generated(folder),
        detected=tuple((file.name, read_bytes(file)) for file in photos),
    )


def read_metrics(folder: Path) -> tuple[Columns, Columns, GateCurves | None]:
    """The training, validation and gate records of a run, by step; of two with one kind and step the later counts.

    Raises InputError naming file and line.
    """
    records: dict[str, dict[int, Measurement]] = {"train": {}, "valid": {}, "gates": {}}
    for line in Measurement.read_all(folder):
        if line.kind in records:
            records[line.kind][line.step] = line

    # --- a column for each quantity in any line, and one for each in `OWN` ---
    columns: list[Columns] = []
    for split in ("train", "valid"):
        lines = [records[split][step] for step in sorted(records[split])]
        names = dict.fromkeys([*OWN, *(name for line in lines for name in line.values)])
        values = {n: np.array([number(line.values.get(n), line.where, n) for line in lines]) for n in names}
        columns.append({"step": np.array([line.step for line in lines], dtype=np.int64), **values})

    # --- the gates, by layer and head ---
    lines = [records["gates"][step] for step in sorted(records["gates"])]
    gates = [from_json(Gates, line.values, line.where, "repair or delete the line") for line in lines]
    layers = tuple(dict.fromkeys(layer.name for one in gates for layer in one.layers))
    if not layers:
        return columns[0], columns[1], None
    heads = max(len(layer.mix) for one in gates for layer in one.layers)
    mix = np.full((len(gates), len(layers), heads), math.nan)
    activity = {key: np.full((len(gates), len(layers)), math.nan) for key in GATES}
    for s, one in enumerate(gates):
        for layer in one.layers:
            at = (s, layers.index(layer.name))
            mix[at][: len(layer.mix)] = layer.mix
            for key in GATES:
                part, quantity = key.split(".")
                activity[key][at] = getattr(getattr(layer, part), quantity)
    curves = GateCurves(np.array([line.step for line in lines], dtype=np.int64), layers, mix, activity)
    return columns[0], columns[1], curves


def read_generated(folder: Path) -> Generated | None:
    """The content of a run's samples.json and samples.safetensors; None if there are none. Raises InputError."""
    path = folder / "samples.json"
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        about = parse(read_text(path))
        arrays = load_file(folder / "samples.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"{path}: expected samples and samples.safetensors, found {error}; run mnemos sample on it again"
        ) from None
    return Generated(arrays.get("samples"), arrays.get("originals"), arrays.get("completions"), about)
