"""Examples that tasks write to result.json: the reference and the output of each variant, side by side."""

from typing import NamedTuple

from mnemos.types import JSONObject

from .markup import escape, paragraph, table
from .results import Comparison

Lines = list[tuple[str, str]]


class _About(NamedTuple):
    """The description of a kind of example; exact: an output should equal what was given, and is bold where not."""

    title: str
    given: str
    found: str
    text: str
    exact: bool


def section(comparison: Comparison) -> str:
    """One table per kind of example, for all variants with the same references, from their first runs; "" if none."""
    tables: dict[tuple[_About, tuple[str, ...]], dict[str, list[str]]] = {}
    for name in comparison.variants:
        for run in comparison.runs.get(name, ())[:1]:
            for about, lines in _examples(run.result or {}):
                rows = tuple(one for one, _ in lines)
                tables.setdefault((about, rows), {})[name] = [one for _, one in lines]
    parts = []
    for (about, rows), variants in tables.items():
        caption = (
            f"{about.text} First what was {about.given}, then what the first run of each variant {about.found}"
            f"{'; bold where it differs' if about.exact else ''}. From result.json."
        )
        cells = [
            [escape(row), *(_marked(about, row, variants[name][i]) for name in variants)] for i, row in enumerate(rows)
        ]
        kind = "examples" if about.exact else "examples texts"
        parts += [paragraph(about.title), table(caption.strip(), [about.given, *variants], cells, kind)]
    return "\n".join(parts)


def _marked(about: _About, given: str, found: str) -> str:
    text = escape(found) or "nothing"
    return text if given == found or not about.exact else f"<b>{text}</b>"


def _examples(result: JSONObject) -> list[tuple[_About, Lines]]:
    """(its description, [(given, found)]) of each entry that the result describes as examples."""
    described = result.get("examples")
    found = []
    for entry, about in described.items() if isinstance(described, dict) else ():
        if isinstance(about, dict) and isinstance(result.get(entry), list):
            title, given, answer, text = (str(about.get(key, "")) for key in ("title", "given", "found", "about"))
            lines = [
                (str(one.get(given, "")), str(one.get(answer, ""))) for one in result[entry] if isinstance(one, dict)
            ]
            found.append((_About(title, given, answer, text, about.get("exact") is not False), lines))
    return [one for one in found if one[1]]
