"""Read run folders and comparison folders; refuse what is missing or malformed, naming file and line."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mnemos.config import from_dict
from mnemos.json_text import parse
from mnemos.lab.compare.baselines import baselines_of
from mnemos.lab.compare.budgets import FILE as BUDGET
from mnemos.lab.compare.budgets import budget_options, budget_text
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.run_files import checked_about
from mnemos.lab.tasks.metrics import MAJORITY, description
from mnemos.types import InputError, JSONObject

from .detections import read_detected
from .image_grids import read_written
from .read_explained import read_explained
from .read_metrics import number, read_metrics
from .read_write_attention import read_write_attention
from .results import Comparison, Control, Row, RunRecord, spread
from .tasks import TaskKey, differences, grouped, task_key

COSTS = ("parameters", "flops", "state_bytes", "seconds", "peak_bytes")


def read(folders: Sequence[Path]) -> Comparison:
    """The comparison of runs of one task, as `read_tasks` reads it. Raises InputError if there are several tasks."""
    found = read_tasks(folders)
    if len(found) > 1:
        raise InputError(
            f"expected runs of one task, found {len(found)}: {differences(found)}; name the runs of one of them"
        )
    return found[0]


def read_tasks(folders: Sequence[Path]) -> list[Comparison]:
    """One comparison for each task (`tasks.task_key`) of any number of run folders and comparison folders.

    Runs that are not part of a comparison of their task become additional variants of it. Runs whose recipes differ
    only in the seed are one variant, and its numbers are computed from their results. Raises InputError, also for two
    comparisons of one task.
    """
    if not folders:
        raise InputError("report: expected at least one run folder or comparison folder, found none; name one")
    comparisons: list[Comparison] = []
    keys: list[TaskKey | None] = []
    runs: list[RunRecord] = []
    for folder in dict.fromkeys(Path(f).resolve() for f in folders):
        if (folder / "comparison.json").is_file():
            found = read_comparison(folder)
            members = found.all_runs()
            key = task_key(members[0], found.metric) if members else None
            if key is not None and key in keys:
                raise InputError(
                    f"{folder}: expected one comparison of this task, found a second; make a report for each"
                )
            comparisons.append(found)
            keys.append(key)
        elif (folder / "recipe.json").is_file():
            runs.append(read_run(folder, folder.name))
        else:
            raise InputError(
                f"{folder}: expected a run folder (with recipe.json) or a comparison folder (with comparison.json), "
                f"found {_instead(folder)}"
            )
    known = {run.folder for comparison in comparisons for run in comparison.all_runs()}
    groups = grouped([run for run in runs if run.folder not in known], keys)
    joined = [_joined(one, extra) for one, extra in zip(comparisons, groups, strict=False)]
    return [_with_baselines(one) for one in (*joined, *(compare(extra) for extra in groups[len(comparisons) :]))]


def _with_baselines(comparison: Comparison) -> Comparison:
    """The comparison with what single runs, and comparisons of older versions, do not say: whose baseline each row is.

    Their recipes say it, if all of them can be read. A budget or a sweep gives each recipe steps or a learning rate of
    its own: where these differ, only a baseline that is found is known.
    """
    if all(row.baseline_of is not None for row in comparison.rows) or not all(comparison.runs.values()):
        return comparison
    try:
        recipes = [replace(from_dict(Recipe, runs[0].recipe), name=name) for name, runs in comparison.runs.items()]
    except InputError:
        return comparison
    found = baselines_of(recipes)
    alike = len({(recipe.train.steps, recipe.optim.lr) for recipe in recipes}) == 1
    of = {recipe.name: tuple(found.get(recipe.name, ())) or (() if alike else None) for recipe in recipes}
    rows = [replace(row, baseline_of=of.get(row.name)) if row.baseline_of is None else row for row in comparison.rows]
    return replace(comparison, rows=tuple(rows))


def _instead(folder: Path) -> str:
    """What a folder is that is neither a run nor a comparison, and what to do."""
    if not folder.is_dir():
        return "no such folder; check the path"
    if (folder / "benchmarks.json").is_file():
        return "the results of bench-memory, whose page is benchmarks.html; name the folder of a task in it"
    if (folder / BUDGET).is_file() or any(any(folder.glob(f"{part}seed-*/recipe.json")) for part in ("*/", "*/*/")):
        return "a comparison that is not finished; continue it with the command that began it, or name single runs"
    return "neither file; name the folder that a run wrote"


def read_run(folder: Path, label: str) -> RunRecord:
    """One run folder. recipe.json and metrics.jsonl are required; other missing files become None."""
    train, valid, gates = read_metrics(folder / "metrics.jsonl")
    about = _json(folder / "run.json", required=False)
    result = _json(folder / "result.json", required=False)
    if result is not None:
        where = str(folder / "result.json")
        for part in ("test", "valid"):
            _numbers(result.get(part) or {}, where, part)
        for name, control in _object(result.get("controls") or {}, where, "controls").items():
            _numbers(control, where, f"controls.{name}")
        for name in (*COSTS, "majority", "steps"):
            number(result.get(name), where, name)
        if not isinstance(result.get("metric", ""), str):
            raise InputError(f'{where}: expected "metric" to be a name, found {result["metric"]!r}; repair the file')
    return RunRecord(
        folder=folder,
        label=label,
        recipe=_json(folder / "recipe.json") or {},
        provenance=None if about is None else checked_about(folder / "run.json", about),
        train=train,
        valid=valid,
        gates=gates,
        result=result,
        caches=_caches(folder / "caches.safetensors"),
        explained=read_explained(folder),
        written=read_written(folder),
        write_attention=read_write_attention(folder),
        detected=read_detected(folder),
    )


def read_comparison(folder: Path) -> Comparison:
    """A comparison folder: comparison.json and the runs that it names, with paths relative to it."""
    path = folder / "comparison.json"
    where = str(path)
    found = _json(path) or {}
    if not isinstance(found.get("metric"), str):
        raise InputError(f'{where}: expected "metric" to be a name, found {found.get("metric")!r}; compare again')
    if "higher_is_better" not in found:
        found |= description({}, found["metric"], where)
    if not isinstance(found["higher_is_better"], bool):
        raise InputError(f'{where}: expected "higher_is_better" to be true or false; compare again')
    if not isinstance(found.get("rows"), list) or not found["rows"]:
        raise InputError(
            f'{where}: expected "rows" to be a list of variants, found {found.get("rows")!r}; compare again'
        )
    rows = tuple(_row(row, f"{where}, row {i}") for i, row in enumerate(found["rows"], start=1))
    controls = found.get("controls") or []
    if not isinstance(controls, list):
        raise InputError(f'{where}: expected "controls" to be a list, found {controls!r}; compare again')
    runs = {}
    for name, places in _object(found.get("runs") or {}, where, "runs").items():
        if not isinstance(places, list) or not all(isinstance(p, str) for p in places):
            raise InputError(f'{where}: expected "runs" to name folders, found {places!r} for {name!r}; compare again')
        for place in places:
            if not (folder / place / "recipe.json").is_file():
                raise InputError(f"{where}: expected the run {place!r} beside it, found none; move it back")
        runs[name] = tuple(read_run((folder / place).resolve(), place) for place in places)
    majority = number(found.get("majority"), where, "majority")
    return Comparison(
        metric=found["metric"],
        higher_is_better=found["higher_is_better"],
        majority=majority if math.isfinite(majority) else None,
        rows=rows,
        controls=tuple(_control(c, f"{where}, control {i}") for i, c in enumerate(controls, start=1)),
        runs=runs,
        source=f"{folder.name}/comparison.json",
        about=str(found.get("about") or ""),
        provenance=_object(found.get("provenance") or {}, where, "provenance"),
        against=_against(found.get("against"), rows, where),
        reference=_reference(
            [found, *((run.result or {}) for every in runs.values() for run in every)], found["metric"]
        ),
        **_equal(found.get("equal"), where),
    )


def _reference(known: Sequence[JSONObject], metric: str) -> dict[str, float]:
    """The scores without learning of the first of a comparison and of results in the metric that has them."""
    named: object = next(
        (one["reference"] for one in known if one.get("reference") and one.get("metric") == metric), {}
    )
    given = {name: number(value, "reference", name) for name, value in _object(named, "a result", "reference").items()}
    return {name: value for name, value in given.items() if name != MAJORITY and math.isfinite(value)}


def _against(name: object, rows: Sequence[Row], where: str) -> str:
    """The row that the others are tested against; the first in files of older versions."""
    if name is None:
        return rows[0].name
    if name not in [row.name for row in rows]:
        raise InputError(f'{where}: expected "against" to name a row, found {name!r}; compare again')
    return str(name)


def _equal(value: object, where: str) -> JSONObject:
    """What was made equal, in words and as options; {} in files of older versions."""
    if value is None:
        return {}
    try:
        made = _object(value, where, "equal")
        return {"equal": budget_text(made), "budget": budget_options(made)}
    except (KeyError, TypeError, ValueError):
        raise InputError(f'{where}: expected "equal" to say what is, found {value!r:.60}; compare again') from None


def compare(runs: Sequence[RunRecord], metric: str | None = None) -> Comparison:
    """A comparison computed from runs of one task: by its first metric, or by the loss if a result lacks that."""
    if metric is None:
        finished = [run for run in runs if run.result]
        metric = next(((run.result or {}).get("metric", "loss") for run in finished), "loss")
        if not all(math.isfinite(run.tested(metric)) for run in finished):
            metric = "loss"
    described = _described(runs, metric)
    variants: dict[str, list[RunRecord]] = {}
    for run in runs:
        variants.setdefault(_recipe_key(run.recipe), []).append(run)
    names: dict[str, tuple[RunRecord, ...]] = {}
    for alike in variants.values():
        base = str(alike[0].recipe.get("name", alike[0].label))
        name = base if base not in names else f"{base} ({sum(n.split(' (')[0] == base for n in names) + 1})"
        names[name] = tuple(alike)
    rows, controls = [], []
    for name, members in names.items():
        costs: JSONObject = {
            c: spread([number((r.result or {}).get(c), r.label, c) for r in members])[0] for c in COSTS
        }
        rows.append(Row(name, *spread([run.tested(metric) for run in members]), **costs, baseline_of=None))
        kinds = dict.fromkeys(kind for run in members for kind in (run.result or {}).get("controls") or {})
        controls += [Control(name, kind, *spread([run.tested(metric, kind) for run in members])) for kind in kinds]
    majority = spread([number((run.result or {}).get("majority"), run.label, "majority") for run in runs])[0]
    judged = all((run.result or {}).get("metric", metric) == metric for run in runs)  # not by the loss instead
    return Comparison(
        metric=metric,
        higher_is_better=described.get("higher_is_better") is True,
        about=str(described.get("about") or ""),
        majority=majority if judged and math.isfinite(majority) else None,
        reference=_reference([run.result or {} for run in runs], metric),
        rows=tuple(rows),
        controls=tuple(controls),
        runs=names,
        source="the runs' result.json",
    )


def _described(runs: Sequence[RunRecord], metric: str) -> JSONObject:
    """The description of a metric in the first finished run's result; {} for the loss, for which lower is better."""
    first = next((run for run in runs if run.result), None)
    if first is None or first.result is None or metric == "loss":
        return {}
    return description(first.result, metric, str(first.folder / "result.json"))


def _joined(comparison: Comparison, extra: list[RunRecord]) -> Comparison:
    """The comparison with further runs added as variants."""
    if not extra:
        return comparison
    more = compare(extra, comparison.metric)
    for name in more.variants:
        if name in comparison.variants:
            raise InputError(
                f"{comparison.source}: expected new variants beside it, found {name!r} twice; compare them again"
            )
    return replace(
        comparison,
        rows=comparison.rows + more.rows,
        controls=comparison.controls + more.controls,
        runs={**comparison.runs, **more.runs},
        source=f"{comparison.source} and {more.source}",
        equal="",
    )


def _recipe_key(recipe: JSONObject) -> str:
    training = recipe.get("train")
    training = {k: v for k, v in training.items() if k != "seed"} if isinstance(training, dict) else training
    return json.dumps({**recipe, "train": training}, sort_keys=True)


def _json(path: Path, required: bool = True) -> JSONObject | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not required:
            return None
        raise InputError(f"{path}: expected a JSON file, found none; name a folder that a run wrote") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a JSON file, found {error}; repair it") from None
    try:
        value = parse(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: expected JSON, found {error.msg}; repair the file") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}, line 1: expected a JSON object, found {type(value).__name__}; repair the file")
    return value


def _object(value: object, where: str, name: str) -> JSONObject:
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected "{name}" to be an object, found {value!r}; repair the file')
    return value


def _numbers(value: object, where: str, name: str) -> None:
    for key, found in _object(value, where, name).items():
        number(found, where, f"{name}.{key}")


def _row(row: Any, where: str) -> Row:
    fields = _measured(row, where)
    of = row.get("baseline_of", ())
    named = [of] if isinstance(of, str) else of or []
    if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
        raise InputError(f'{where}: expected "baseline_of" to name rows, found {of!r}; compare again')
    fields["baseline_of"] = tuple(named) if "baseline_of" in row else None
    return Row(**fields | {name: number(row.get(name), where, name) for name in COSTS})


def _control(control: Any, where: str) -> Control:
    measured = _measured(control, where)
    if not isinstance(control.get("control"), str):
        raise InputError(f'{where}: expected "control" to be a name, found {control.get("control")!r}; compare again')
    return Control(**measured, control=control["control"])


def _measured(row: object, where: str) -> JSONObject:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise InputError(f'{where}: expected an object with a "name", found {row!r}; compare again')
    seeds = row.get("seeds", 1)
    seeds = len(seeds) if isinstance(seeds, list) else seeds
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 0:
        raise InputError(f'{where}: expected "seeds" to be a count or a list, found {seeds!r}; compare again')
    mean, std = number(row.get("mean"), where, "mean"), number(row.get("std"), where, "std")
    return {"name": row["name"], "mean": mean, "std": std if seeds > 1 else math.nan, "seeds": seeds}


def _caches(path: Path) -> dict[str, np.ndarray] | None:
    """The stored caches, layer -> [Tm, Dm]; None if there is no file."""
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{path}: expected safetensors, found {error}; train again to write it") from None
    for name, cache in found.items():
        if cache.ndim != 2 or not np.issubdtype(cache.dtype, np.floating):
            raise InputError(f"{path}: expected {name!r} as floats [Tm, Dm], found {cache.dtype} {list(cache.shape)}")
    return {name: found[name].astype(np.float64) for name in sorted(found, key=_natural)}


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts blocks.2 before blocks.10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
