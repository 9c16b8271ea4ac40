"""Was the memory used? Later segments of rows, read with the state as carried, emptied, exchanged and frozen."""

import math

import numpy as np

from mnemos.errors import plural
from mnemos.lab.evaluate.recorded import ControlledMemory, StateControls

from .charts import WHOLE, Axis, Chart, chart_figure, variant
from .markup import decimal, escape, missing, paragraph, short, table
from .read import Results
from .shell import variant_name

WORDS = {"emptied": "emptied", "exchanged": "exchanged with another row's", "frozen": "frozen after the first segment"}
_COLOURS = dict(zip(WORDS, (1, 2, 3), strict=True))  # indices into the palette
_SAYS = (
    "A control that makes the score worse shows that the trained model depends on what its memory holds, and nothing "
    "more: a model can depend on a memory that does not help. What the memory adds is the difference to its "
    "never-written baseline."
)


def section(results: Results) -> str:
    """A figure by segment and a table of controls of a state; "" where no run recorded them."""
    scored = [name for name in results.names if results.state_controls(name)]
    if not scored:
        return ""
    return "\n".join(filter(None, [paragraph(_SAYS), _by_segment(results, scored), _table(results, scored)]))


def _by_segment(results: Results, scored: list[str]) -> str:
    charts, sources = [], []
    for name in scored:
        run, controls = results.state_controls(name)[0]
        if len(controls.segments) < 2:
            continue
        index = results.names.index(name)
        for i, memory in enumerate(controls.memories):
            scores = memory.scored()
            chart = Chart(
                *(f"memory-{index}-{i}", f"{short(name)}: {memory.name}", f"change of {controls.metric}"),
                [variant(WORDS[control], _COLOURS[control]) for control in scores],
                [run.label],
                [Axis("segment", WHOLE)],
                references=[("as carried", 0.0)],
            )
            for series, one in enumerate(scores.values()):
                chart.add(series, 0, one.by_segment - controls.carried.by_segment, controls.segments)
            charts.append(chart)
        cut = "" if controls.cut is None else f"Rows are cut into segments of {controls.cut} tokens for this. "
        sizes = f"{plural(controls.rows, 'row')} at once, {plural(controls.targets, 'target')} in"
        sources.append(
            f"{name}: {cut}{sizes} {plural(len(controls.segments), 'segment')}. From {run.label}/explain.json."
        )
    caption = (
        f"Change of the {results.split} metric by segment of a row, against the state as carried. The memory is "
        "replaced before each segment after the first, which reads none. Emptied: by that of a new row. Exchanged: by "
        "that which another row has at this segment. Frozen: by the row's own after its first segment. "
        + " ".join(sources)
    )
    return chart_figure(charts, caption)


def _table(results: Results, scored: list[str]) -> str:
    rows, notes, intervals = [], [], 0
    for name in scored:
        runs = results.state_controls(name)
        controls = runs[0][1]
        metric = results.metric if results.metric in controls.carried.scores else controls.metric
        carried = float(np.mean([of_run.carried.scores.get(metric, math.nan) for _, of_run in runs]))
        facts = [metric, str(len(runs)), f"{controls.rows:,}", f"{controls.targets:,}"]
        memories = {memory.name: memory for _, of_run in reversed(runs) for memory in of_run.memories}
        for memory in memories.values():
            notes += [f"{name}, {memory.name} not {what}: {why}." for what, why in memory.unscored().items()]
            changes = [results.memory_effect(name, memory.name, control) for control in WORDS]
            if all(_unread(of_run, one) for _, of_run in runs for one in of_run.memories if one.name == memory.name):
                changes = [None] * len(WORDS)
                notes.append(
                    f"{name}, {memory.name} not tested: rows were cut into segments of {controls.cut} tokens for the "
                    "controls, and none changes a score. No target reads what is carried over a cut, as with a window "
                    "that is shorter than a segment; inside of a segment the memory may be used."
                )
            cells = []
            for change in changes:
                ends = change.interval if change else None
                intervals += ends is not None
                small = f"<small>{' to '.join(map(rounded, ends))}</small>" if ends else ""
                cells.append(f"{rounded(change.difference)}{small}" if change else "–")
            first = [variant_name(results.names.index(name), name), escape(memory.name), *map(escape, facts)]
            rows.append([*first, decimal(carried), *cells])
    caption = (
        f"The {results.split} score of the segments after a row's first, with the memory as carried, and its change "
        "where the memory is replaced before each of these segments: the mean over seeds"
        f"{', below it the 95% interval where there is one' if intervals else ''}. Rows are read at once. "
        "From the runs' explain.json."
    )
    head = ["variant", "memory", "metric", "seeds", "rows", "targets", "as carried", *WORDS.values()]
    return table(caption, head, rows, "controls") + "\n".join(map(missing, notes))


def _unread(controls: StateControls, memory: ControlledMemory) -> bool:
    """Whether rows were cut for the controls of a memory, and none of them changes a score."""
    carried, scored = controls.carried, memory.scored().values()
    unchanged = (
        math.isclose(one.scores.get("loss", math.nan), carried.scores.get("loss", math.nan), rel_tol=1e-6)
        and np.array_equal(one.by_segment, carried.by_segment)
        for one in scored
    )
    return controls.cut is not None and bool(scored) and all(unchanged)


def rounded(value: float) -> str:
    """A change with its sign; what is smaller than 0.00005 is a rounding error."""
    return decimal(0.0 if abs(value) < 0.00005 else value, signed=True)
