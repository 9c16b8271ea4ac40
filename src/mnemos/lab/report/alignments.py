"""What a model attends to in one source while it writes each word: a table of shades."""

from mnemos.types import JSONObject

from .markup import escape, paragraph, table
from .results import Comparison

MOST = 40  # rows of a table: a bad translation may repeat a word until its length is reached


def section(comparison: Comparison) -> str:
    """A table for the first run of each variant whose result.json has an alignment; "" if none has."""
    parts = []
    for name in comparison.variants:
        for run in comparison.runs.get(name, ())[:1]:
            found = (run.result or {}).get("alignment")
            if isinstance(found, dict) and {"rows", "columns", "weights", "about"} <= {*found}:
                parts += _shades(name, found)
    return "\n".join(parts)


def _shades(name: str, found: JSONObject) -> list[str]:
    rows, columns, weights = found["rows"], found["columns"], found["weights"]
    most = max((weight for row in weights for weight in row), default=0.0) or 1.0
    if len(rows) > MOST:
        found = found | {"about": f"{found['about']} The first {MOST} of {len(rows)} rows are shown."}
        rows, weights = rows[:MOST], weights[:MOST]
    cells = [[escape(word), *(_shade(weight, most) for weight in row)] for word, row in zip(rows, weights, strict=True)]
    caption = f"{name}: {found['about']} The darkest cell is {most:.2f}. From result.json."
    return [paragraph(f"{name}: what each word was read from"), table(caption, ["", *columns], cells, "alignment")]


def _shade(weight: float, most: float) -> str:
    names = f'role="img" aria-label="{weight:.2f}" title="{weight:.2f}"'
    return f'<i class="weight" {names} style="--weight:{100 * weight / most:.0f}%"></i>'
