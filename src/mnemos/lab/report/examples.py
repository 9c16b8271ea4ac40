"""Examples that tasks write to result.json: the reference and the output of each variant, side by side."""

import difflib
from typing import NamedTuple

from mnemos.types import JSONObject

from .markup import escape, paragraph, table
from .results import Comparison

Lines = list[tuple[str, str, str]]  # (what is beside it, given, found)


class _About(NamedTuple):
    """The description of a kind of example: see `mnemos.lab.tasks.task.Task.artifacts`.

    exact: an output should equal what was given, and is bold where not. compared: the words in which an output differs
    from that of the first variant are bold.
    """

    title: str
    given: str
    found: str
    text: str
    exact: bool
    beside: str
    compared: bool


def section(comparison: Comparison) -> str:
    """One table per kind of example, for all variants with the same references, from their first runs; "" if none."""
    tables: dict[tuple[_About, tuple[tuple[str, str], ...]], dict[str, list[str]]] = {}
    for name in comparison.variants:
        for run in comparison.runs.get(name, ())[:1]:
            for about, lines in _examples(run.result or {}):
                rows = tuple(line[:2] for line in lines)
                tables.setdefault((about, rows), {})[name] = [line[2] for line in lines]
    parts = []
    for (about, rows), variants in tables.items():
        several = about.compared and len(variants) > 1
        caption = (
            f"{about.text} First what was {about.given}, then what the first run of each variant {about.found}"
            f"{'; bold where it differs' if about.exact else ''}"
            f"{'; bold: words that the first variant does not have there' if several else ''}. From result.json."
        )
        cells = []
        for i, (beside, given) in enumerate(rows):
            first, *others = (lines[i] for lines in variants.values())
            answers = [_marked(about, given, first), *(_marked(about, given, other, first) for other in others)]
            cells.append([escape(beside)] * bool(about.beside) + [escape(given), *answers])
        head = [about.beside] * bool(about.beside) + [about.given, *variants]
        kind = "examples" if about.exact else "examples texts"
        parts += [paragraph(about.title), table(caption.strip(), head, cells, kind)]
    return "\n".join(parts)


def _marked(about: _About, given: str, found: str, first: str | None = None) -> str:
    text = escape(found) or "nothing"
    if about.compared and first is not None:
        return _differing(found, first) or text
    return text if given == found or not about.exact else f"<b>{text}</b>"


def _differing(found: str, first: str) -> str:
    """The words of a text, those bold that are not at their place in another text."""
    words, others = found.split(), first.split()
    same = [False] * len(words)
    for block in difflib.SequenceMatcher(None, words, others, autojunk=False).get_matching_blocks():
        same[block.a : block.a + block.size] = [True] * block.size
    shown = (escape(word) if kept else f"<b>{escape(word)}</b>" for word, kept in zip(words, same, strict=True))
    return " ".join(shown)


def _examples(result: JSONObject) -> list[tuple[_About, Lines]]:
    """(its description, [(given, found)]) of each entry that the result describes as examples."""
    described = result.get("examples")
    found = []
    for entry, about in described.items() if isinstance(described, dict) else ():
        if isinstance(about, dict) and isinstance(result.get(entry), list):
            keys = ("title", "given", "found", "about", "beside")
            title, given, answer, text, beside = (str(about.get(key, "")) for key in keys)
            lines = [
                (str(one.get(beside, "")), str(one.get(given, "")), str(one.get(answer, "")))
                for one in result[entry]
                if isinstance(one, dict)
            ]
            exact, compared = about.get("exact") is not False, about.get("compared") is True
            found.append((_About(title, given, answer, text, exact, beside, compared), lines))
    return [one for one in found if one[1]]
