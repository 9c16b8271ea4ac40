"""Measurements of a benchmark's trained runs: bytes of state, scores beyond training, and controls of the memory."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mnemos.atomic import write_json
from mnemos.lab.compare.comparison import spread
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.evaluate.state_controls import STATE_CONTROLS
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.weights import trained_model
from mnemos.lab.tasks.task import Task
from mnemos.types import JSONObject, State

from .tasks import Benchmark

BEYOND, STATE = "beyond.json", "state.json"  # in the folder of a run
ROWS = 200  # of a longer test


def measured(runs: Sequence[Path], benchmark: Benchmark) -> JSONObject:
    """{"state_bytes", "segment_state_bytes", "beyond": [{"at", "mean", "std"}], "controls"}.

    "state_bytes" is what one row must keep between two tokens, at most within a row of the training length that is
    read token by token; "segment_state_bytes" is the same between two segments, or after the row where the memory
    reads it in one call. The first place of "beyond" is the training length. "controls": {name: mean score} with the
    whole state emptied, exchanged or frozen (`state_controls`), from the runs' explain.json, or {"left": reason}. What
    was measured before is read from the runs' folders.
    """
    found = [_run(run, benchmark) for run in runs]
    beyond = []
    for i, settings in enumerate([{}, *benchmark.beyond]):
        values = [one["beyond"][i] for one in found]
        score = spread(values)
        beyond.append({"at": benchmark.at(settings), "mean": score["mean"], "std": score["std"]})
    return {**_state(runs[0]), "beyond": beyond, "controls": _controls(runs)}


def _run(folder: Path, benchmark: Benchmark) -> JSONObject:
    """The scores of one run beyond training, which are kept in its folder."""
    path = folder / BEYOND
    wanted = [list(settings.items()) for settings in benchmark.beyond]
    if path.is_file():
        kept: JSONObject = json.loads(path.read_text())
        if kept["settings"] == json.loads(json.dumps(wanted)):
            return kept
    recipe = read_recipe(folder)
    model, segment = trained_model(folder, recipe), recipe.train.rollout.segment_length
    scores = []
    for settings in ({}, *benchmark.beyond):
        data: Any = benchmark.data
        task = replace(data, **{**settings, "rows": min(data.rows, ROWS)} if settings else {}).build()
        scores.append(evaluate(model, _segments(task, segment), task)[task.metrics[0].name])
    result = {"settings": wanted, "beyond": scores}
    write_json(path, result)
    return result


def _state(folder: Path) -> JSONObject:
    """The bytes of state of one run, which are kept in its folder.

    They follow from the run's recipe alone, which never changes, so they are kept without settings of the benchmark.
    """
    path = folder / STATE
    if path.is_file():
        kept: JSONObject = json.loads(path.read_text())
        return kept
    recipe = read_recipe(folder)
    task = recipe.data.build()
    model, segment = trained_model(folder, recipe), recipe.train.rollout.segment_length
    result = {
        "state_bytes": most_bytes(model, task, 1),
        "segment_state_bytes": most_bytes(model, task, segment),
    }
    write_json(path, result)
    return result


def _segments(task: Task, length: int) -> Any:
    for batch in task.batches("test", 50):
        yield from task.segments(batch, length)


@torch.no_grad()
def most_bytes(model: torch.nn.Module, task: Task, length: int) -> int:
    """The most bytes of state between calls of `length` tokens of the task's example, and at its end; 0: one call."""
    most = 0
    state: State = None
    for part in task.segments(task.example(), length):
        _, state = task.forward(model, part, state)
        most = max(most, state_bytes(state))
    return most


def _controls(runs: Sequence[Path]) -> JSONObject:
    """The mean over runs of the scored segments as carried and under each control of the whole state."""
    found = [
        json.loads((run / "explain.json").read_text())["memory"] for run in runs if (run / "explain.json").is_file()
    ]
    known = [one for one in found if one and one["left"] is None]
    if not known:
        return {"left": found[0]["left"] if found and found[0] else "not recorded"}
    metric = known[0]["metric"]
    parts = {"carried": [one["carried"]["scores"][metric] for one in known]}
    for control in STATE_CONTROLS:
        values = [one["memories"][0][control] for one in known]
        if all("left" not in value for value in values):
            parts[control] = [value["scores"][metric] for value in values]
    return {name: statistics.fmean(values) for name, values in parts.items()}
