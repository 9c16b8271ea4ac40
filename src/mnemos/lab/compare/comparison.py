"""The content of comparison.json: the scores of finished runs, their spread over seeds, and their costs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from mnemos.lab.run.provenance import shared, trained
from mnemos.lab.run.run_files import COMPARED, final_scores, read_result
from mnemos.lab.tasks.metrics import description
from mnemos.types import JSONObject

from .significance import differences, interval

UNNAMED_UNIT = "tokens, images or frames"  # of what updates read, in results that do not name it


def summarise(
    runs: dict[str, list[Path]], folder: Path, against: str | None = None, baselines: Mapping[str, Sequence[str]] = {}
) -> JSONObject:
    """The content of comparison.json for finished runs: {name: run folders}. against: the reference row, or the first.

    baselines: see `baselines.baselines_of`. A row's "baseline_of" is the name of the row whose never-written baseline
    it is, a list of names if several share it, and null for any other row.
    Each row has "interval", the 95 % interval of its mean, and "against", its difference to the reference row
    (`significance.differences`); both are null for one seed and without a spread, and the second for the reference.
    "unit" names what "tokens" counts; null if the results are of an older version.
    """
    rows, controls = [], []
    against = against or next(iter(runs))
    place = next(iter(runs.values()))[0]
    first = read_result(place, COMPARED)
    metric = first["metric"]
    scores: dict[str, list[float]] = {}
    described = description(first, metric, str(place / "result.json"))
    for name, places in runs.items():
        results = [read_result(place, COMPARED) for place in places]
        scores[name] = [_score(final_scores(result)[1], metric) for result in results]
        spreads = spread(scores[name]) | {"interval": interval(scores[name])}
        cost = {key: results[0].get(key) for key in ("parameters", "flops", "state_bytes")}
        cost |= {key: statistics.fmean(result[key] for result in results) for key in ("seconds", "peak_bytes")}
        cost |= {key: _mean(results, key) for key in ("steps", "tokens")}
        cost["train_flops"] = _mean([{"train_flops": _train_flops(result)} for result in results], "train_flops")
        commits = [trained(place, str(place.relative_to(folder))) for place in places]
        owners = [owner for owner in baselines.get(name, ()) if owner in runs]
        of = (owners if len(owners) > 1 else owners[0]) if owners else None
        rows.append({"name": name, "baseline_of": of, **spreads, **cost, **_along(results), "runs": commits})
        for control in results[0].get("controls", {}):
            found = [_score(result["controls"][control], metric) for result in results]
            controls.append({"name": name, "control": control, **spread(found)})
    tests = differences(scores, against)
    for row in rows:
        row["against"] = tests[row["name"]]
    return {
        "metric": metric,
        "higher_is_better": described["higher_is_better"],
        "about": described["about"],
        "majority": first["majority"],
        "reference": {name: one for name, one in (first.get("reference") or {}).items() if one is not None},
        "against": against,
        "unit": first.get("unit"),
        "scored_rows": first.get("scored_rows") or {},
        "rows": rows,
        "controls": controls,
        "runs": {name: [str(place.relative_to(folder)) for place in places] for name, places in runs.items()},
        "provenance": shared([place for places in runs.values() for place in places]),
    }


def _train_flops(result: JSONObject) -> float | None:
    """FLOPs of all updates of a run; None in results of older versions, and of several processes."""
    return None if result.get("update_flops") is None else result["update_flops"] * result["steps"]


def _mean(results: Sequence[JSONObject], key: str) -> float | None:
    """The mean over runs; None if one of them does not have the number."""
    found = [result.get(key) for result in results]
    return None if None in found else statistics.fmean(value for value in found if value is not None)


def _score(scores: JSONObject, metric: str) -> float:
    """A score of a result; NaN where the run has none."""
    return math.nan if scores[metric] is None else scores[metric]


def spread(values: Sequence[float]) -> JSONObject:
    """{"mean", "std" (of the sample), "seeds"}; "std" is null for one value, and where a value is not finite."""
    finite = all(map(math.isfinite, values))
    mean = statistics.fmean(values) if finite else sum(values) / len(values)  # fmean refuses ∞ − ∞
    return {"mean": mean, "std": statistics.stdev(values) if finite and len(values) > 1 else None, "seeds": len(values)}


def _along(results: Sequence[JSONObject]) -> JSONObject:
    """{"along": the metric along an axis of the task, mean and spread over the seeds}; {} if no run measured one."""
    found = [result["along"] for result in results if "along" in result]
    if not found:
        return {}
    by_place: dict[float, list[float]] = {}
    for at, value in (pair for one in found for pair in one["values"]):
        by_place.setdefault(at, []).append(value)
    values = [{"x": at, **spread(by_place[at])} for at in sorted(by_place)]
    return {"along": {"metric": found[0].get("metric"), "x": found[0].get("x"), "values": values}}
