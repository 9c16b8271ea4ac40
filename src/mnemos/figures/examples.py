"""Examples that tasks write to result.json: the reference and the output of each variant, side by side."""

from mnemos.types import JSONObject

from .markup import escape, paragraph, table
from .results import Comparison

Lines = list[tuple[str, str]]


def section(comparison: Comparison) -> str:
    """One table per kind of example, for all variants with the same references, from their first runs; "" if none."""
    tables: dict[tuple[str, str, str, str, tuple[str, ...]], dict[str, list[str]]] = {}
    for name in comparison.variants:
        for run in comparison.runs.get(name, ())[:1]:
            for about, lines in _examples(run.result or {}):
                rows = tuple(one for one, _ in lines)
                tables.setdefault((*about, rows), {})[name] = [one for _, one in lines]
    parts = []
    for (title, given, answer, text, rows), variants in tables.items():
        caption = (
            f"{text} First what was {given}, then what the first run of each variant {answer}; bold where it differs. "
            "From result.json."
        )
        cells = [[escape(row), *(_marked(row, variants[name][i]) for name in variants)] for i, row in enumerate(rows)]
        parts += [paragraph(title), table(caption.strip(), [given, *variants], cells, "examples")]
    return "\n".join(parts)


def _marked(given: str, found: str) -> str:
    text = escape(found) or "nothing"
    return text if given == found else f"<b>{text}</b>"


def _examples(result: JSONObject) -> list[tuple[tuple[str, str, str, str], Lines]]:
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
