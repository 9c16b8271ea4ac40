"""Examples that tasks leave in result.json: what was given, and what each arm's model found, side by side."""

from typing import Any

from .markup import escape, paragraph, table
from .results import Comparison

Lines = list[tuple[str, str]]


def section(comparison: Comparison) -> str:
    """A table for each kind of example, of all arms that were given the same, by their first runs; "" without any."""
    tables: dict[tuple[str, str, str, str, tuple[str, ...]], dict[str, list[str]]] = {}
    for name in comparison.arms:
        for run in comparison.runs.get(name, ())[:1]:
            for about, lines in _examples(run.result or {}):
                rows = tuple(one for one, _ in lines)
                tables.setdefault((*about, rows), {})[name] = [one for _, one in lines]
    parts = []
    for (title, given, answer, text, rows), arms in tables.items():
        caption = (
            f"{text} First what was {given}, then what the first run of each variant {answer}; bold where it differs. "
            "From result.json."
        )
        cells = [[escape(row), *(_marked(row, arms[name][i]) for name in arms)] for i, row in enumerate(rows)]
        parts += [paragraph(title), table(caption.strip(), [given, *arms], cells, "examples")]
    return "\n".join(parts)


def _marked(given: str, found: str) -> str:
    text = escape(found) or "nothing"
    return text if given == found else f"<b>{text}</b>"


def _examples(result: dict[str, Any]) -> list[tuple[tuple[str, str, str, str], Lines]]:
    """((title, given, found, about), [(given, found)]) of each entry that the result describes as examples."""
    described = result.get("examples")
    found = []
    for entry, about in described.items() if isinstance(described, dict) else ():
        if isinstance(about, dict) and isinstance(result.get(entry), list):
            title, given, answer, text = (str(about.get(key, "")) for key in ("title", "given", "found", "about"))
            lines = [
                (str(one.get(given, "")), str(one.get(answer, ""))) for one in result[entry] if isinstance(one, dict)
            ]
            found.append(((title, given, answer, text), lines))
    return [one for one in found if one[1]]
