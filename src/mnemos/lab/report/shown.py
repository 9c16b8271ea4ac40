"""What the seeds show: the interval of each variant's mean, and its difference to a reference variant."""

import math
from collections.abc import Sequence

from mnemos.lab.compare.significance import NO_DIFFERENCE, NO_SPREAD

from .differences import differences, mean_interval
from .markup import capital, decimal, escape, plural, table
from .results import Comparison, Row
from .style import VARIANTS


def reference(comparison: Comparison) -> Row:
    """The variant that the others are tested against."""
    name = comparison.against or comparison.rows[0].name
    return next(row for row in comparison.rows if row.name == name)


def shown_table(comparison: Comparison) -> str:
    """A table of intervals and tests; "" without a spread."""
    rows = comparison.rows
    if not any(math.isfinite(mean_interval(row)[0]) for row in rows):
        return ""
    first = reference(comparison)
    others = [row for row in rows if row is not first]
    # The reference is the second of each difference, so the sign is turned.
    tests = dict(
        zip((row.name for row in others), differences(first, others, comparison.higher_is_better), strict=True)
    )
    sign = -1 if comparison.higher_is_better else 1
    cells = []
    for i, row in enumerate(rows):
        name = f'<i class="dot" style="color:var(--variant-{i % len(VARIANTS)})"></i>{escape(row.name)}'
        line = [name, decimal(row.mean), _range(mean_interval(row))]
        if row is first:
            cells.append([*line, "", "", "", "", "reference"])
            continue
        test = tests[row.name]
        value, ends = sign * test.value + 0.0, [sign * test.low, sign * test.high]
        said = {"better": "worse", "worse": "better", "alike": NO_DIFFERENCE, "unknown": "–"}[test.says]
        p = [_p(test.p), _p(test.p_holm)]
        cells.append([*line, decimal(value, signed=True), _range(sorted(ends), signed=True), *p, said])
    caption = (
        f"What the seeds show: the 95% interval of each mean of the {comparison.scored} {comparison.metric} "
        f"(Student's t), and the difference to {first.name} by Welch's t-test: its 95% interval, p, and p corrected "
        f"for {plural(len(tests), 'comparison')} by Holm. No difference is shown where the corrected p is 0.05 or "
        f"more; the intervals are not corrected. {_no_spread(rows)}Runs of equal seeds are not pairs: they read "
        "the same batches but start from other weights. From "
        f"{comparison.source}."
    )
    head = ["variant", comparison.metric, "95% interval", "difference", "95% interval", "p", "p (Holm)", "shown"]
    return table(caption, head, cells)


def _no_spread(rows: Sequence[Row]) -> str:
    found = any(row.seeds > 1 and row.std == 0 for row in rows)
    return f"{capital(NO_SPREAD)}. " if found else ""


def _range(ends: Sequence[float], signed: bool = False) -> str:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high)):
        return "–"
    return f"{decimal(low, signed=signed)} to {decimal(high, signed=signed)}"


def _p(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return "&lt; 0.001" if value < 0.001 else f"{value:.3f}"
