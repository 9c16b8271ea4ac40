"""Was the memory used? Later segments of rows, read with the state as carried, emptied, exchanged and frozen."""

import math

import numpy as np

from mnemos.lab.compare.significance import Difference
from mnemos.lab.evaluate.recorded import ControlledMemory, StateControls
from mnemos.types import JSONObject

from .charts import Axis, Chart, arm, chart_figure
from .curves import extent
from .markup import decimal, escape, listed, missing, paragraph, plural, short, table
from .read import Results
from .run_records import RunRecord
from .style import variant_name

WORDS = {
    "emptied": "emptied",
    "exchanged": "exchanged with another row's",
    "frozen": "frozen after the first segment",
}
Scored = dict[str, list[tuple[RunRecord, StateControls]]]  # by variant: the runs that recorded controls
_BETTER = {True: "higher", False: "lower"}
_COLOURS = dict(zip(WORDS, (1, 2, 3), strict=True))  # indices into the palette
_SAYS = (
    "A control that makes the score worse shows that the trained model depends on what its memory holds, and nothing "
    "more: a model can depend on a memory that does not help. What the memory adds is the difference to its "
    "never-written baseline."
)


def section(results: Results) -> str:
    """What each variant's memory is used for, a figure by segment and a table; "" where no run recorded controls.

    The controls of caches that a model stores are in the results.
    """
    scored = {name: runs for name in results.names if (runs := results.state_controls(name))}
    whys = _not_scored({name: why for name in results.names if (why := results.uncontrolled(name))}, results)
    if not scored:
        return "" if results.controls else "\n".join(whys)
    shown = [_drawing(results, scored), _table(results, scored)]
    return "\n".join(filter(None, [paragraph(_SAYS), *shown, *whys]))


def _not_scored(reasons: dict[str, str], results: Results) -> list[str]:
    """One line per reason why the state of some variants was not controlled."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    lines = [f"{listed(names)}: {reason}, so no control of a state was run." for reason, names in by_reason.items()]
    if any(control.name in reasons for control in results.controls):
        lines.append("The controls of caches that the model stores are in the table of controls above.")
    return [missing(line) for line in lines]


def _memories(results: Results, name: str) -> dict[str, ControlledMemory]:
    """The memories of a variant, by name, from the first run that has each."""
    known = [one for _, one in results.state_controls(name)]
    return {memory.name: memory for one in reversed(known) for memory in one.memories}


def _rounded(value: float) -> str:
    """A change with its sign; what is smaller than 0.00005 is a rounding error."""
    return decimal(0.0 if abs(value) < 0.00005 else value, signed=True)


def _metric(results: Results, name: str) -> str:
    known = results.state_controls(name)[0][1]
    return results.metric if results.metric in known.carried.scores else known.metric


def _drawing(results: Results, scored: Scored) -> str:
    """The change of the metric by segment, one panel per memory of each variant's first run; "" for single segments."""
    charts, sources = [], []
    for name, runs in scored.items():
        run, known = runs[0]
        if len(known.segments) < 2:
            continue
        index = results.names.index(name)
        courses = [change for memory in known.memories for change in _changes(known, memory).values()]
        for place, memory in enumerate(known.memories):
            changes = _changes(known, memory)
            chart = Chart(
                f"memory-{index}-{place}",
                f"{short(name)}: {memory.name}",
                f"change of {known.metric}",
                [arm(WORDS[kind], _COLOURS[kind]) for kind in changes],
                [run.label],
                [Axis("segment", ",.0f")],
                references=[("as carried", 0.0)],
                limits=extent(np.concatenate([np.zeros(1), *courses]), 0.02),  # rounding errors are not magnified
                label=f"Change of the test {known.metric} of {name} by segment, with its {memory.name} changed",
            )
            for place, change in enumerate(changes.values()):
                for segment, value in zip(known.segments, change, strict=True):
                    chart.add(place, 0, float(value), float(segment))
            charts.append(chart)
        sources.append(f"{name}: {_read(known)} From {run.label}/explain.json.")
    caption = (
        "Change of the test metric by segment of a row, against the state as carried; panels of one variant have one "
        "scale. The memory is replaced before each segment after the first, which reads none. Emptied: by that of a "
        "new row. Exchanged: by that which another row has at this segment. Frozen: by the row's own after its first "
        f"segment. {' '.join(sources)}"
    )
    return chart_figure(charts, caption)


def _read(known: StateControls) -> str:
    rows, targets = plural(known.rows, "row"), plural(known.targets, "target")
    how = "" if known.cut is None else f"Rows are cut into segments of {known.cut} tokens for this. "
    return f"{how}{rows} at once, {targets} in {plural(len(known.segments), 'segment')}."


def _changes(known: StateControls, memory: ControlledMemory) -> dict[str, np.ndarray]:
    """By control the change of the metric in each segment [S]."""
    return {kind: one.by_segment - known.carried.by_segment for kind, one in memory.scored().items()}


def _table(results: Results, scored: Scored) -> str:
    """A row for each memory of a variant, with the change that each control makes."""
    rows, whys, kinds, found = [], [], list(WORDS), []
    facts = {name: _facts(results, name, runs) for name, runs in scored.items()}
    first = next(iter(facts.values()))
    alike = {fact: value for fact, value in first.items() if all(one[fact] == value for one in facts.values())}
    apart = [fact for fact in first if fact not in alike]  # a column each
    for name, runs in scored.items():
        metric = _metric(results, name)
        carried = float(np.mean([known.carried.scores.get(metric, math.nan) for _, known in runs]))
        for memory in _memories(results, name).values():
            whys += [f"{name}, {memory.name} not {kind}: {why}." for kind, why in memory.unscored().items()]
            changes = [results.memory_effect(name, memory.name, kind) for kind in kinds]
            if (cut := _unread(runs, memory.name)) is not None:
                whys.append(
                    f"{name}, {memory.name} not tested: rows were cut into segments of {cut} tokens for the controls, "
                    "and no control changes the loss. The scored targets do not depend on what is carried over a cut, "
                    "as with a window that is shorter than a segment; inside of a segment the memory may be used."
                )
                changes = [None] * len(kinds)
            found += [change for change in changes if change is not None]
            own = [escape(str(facts[name][fact])) for fact in apart]
            cells = [escape(memory.name), *own, decimal(carried), *map(_change, changes)]
            rows.append([variant_name(results.names.index(name), name), *cells])
    caption = (
        f"Test {_direction(results, alike)} of the segments after a row's first, with the memory as carried, and its "
        "change where the memory is replaced before each of these segments: "
        f"{_spread_over(alike, found)}. Of {_size(alike)}. From the runs' explain.json."
    )
    head = ["variant", "memory", *apart, "as carried", *(WORDS[kind] for kind in kinds)]
    return table(caption, head, rows, "controls") + "\n".join(map(missing, whys))


def _unread(runs: list[tuple[RunRecord, StateControls]], name: str) -> int | None:
    """The tokens per segment, where rows were cut and in no run a control changed the loss; else None."""
    for _, known in runs:
        loss, by_segment = known.carried.scores.get("loss", math.nan), known.carried.by_segment
        scored = [one for memory in known.memories if memory.name == name for one in memory.scored().values()]
        same = [math.isclose(one.scores.get("loss", math.nan), loss, rel_tol=1e-6) for one in scored]
        same += [np.array_equal(one.by_segment, by_segment) for one in scored]
        if known.cut is None or not scored or not all(same):
            return None
    return runs[0][1].cut


def _facts(results: Results, name: str, runs: list[tuple[RunRecord, StateControls]]) -> JSONObject:
    """What the numbers of a variant are of: in the caption where it is alike for all, else in columns."""
    known = runs[0][1]
    return {"metric": _metric(results, name), "seeds": len(runs), "rows": known.rows, "targets": known.targets}


def _direction(results: Results, alike: JSONObject) -> str:
    if (metric := alike.get("metric")) is None:
        return "score"
    described = results.described(metric)
    return metric if described is None else f"{metric} ({_BETTER[described['higher_is_better']]} is better)"


def _spread_over(alike: JSONObject, found: list[Difference]) -> str:
    """What a number is over seeds, and whether an interval is below it."""
    seeds = alike.get("seeds")
    over = "mean over seeds" if seeds is None else "one seed" if seeds == 1 else f"mean over {seeds} seeds"
    known = [one.interval is not None for one in found]
    where = "" if all(known) else " where there is one"
    return f"{over}, below it the 95% interval{where}" if any(known) else over


def _size(alike: JSONObject) -> str:
    """The rows and targets that were scored, as far as they are alike."""
    sizes = [f"{plural(alike['rows'], 'row')} at once"] if "rows" in alike else []
    sizes += [plural(alike["targets"], "target")] if "targets" in alike else []
    return ", ".join(sizes) or "some rows"


def _change(found: Difference | None) -> str:
    if found is None:
        return "–"
    ends = "" if found.interval is None else f"<small>{' to '.join(map(_rounded, found.interval))}</small>"
    return f"{_rounded(found.difference)}{ends}"
