"""What models that write down speech heard, beside what was said."""

from typing import Any

from .markup import escape, table
from .results import Comparison


def section(comparison: Comparison) -> str:
    """A table of some test strings for all arms that heard the same, by their first runs; "" where nobody listens."""
    heard: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name in comparison.arms:
        for run in comparison.runs.get(name, ())[:1]:
            lines = _lines((run.result or {}).get("transcriptions"))
            if lines:
                heard.setdefault(tuple(said for said, _ in lines), {})[name] = [one for _, one in lines]
    caption = (
        "Some strings of the test split, from the shortest to the longest: what was said, and what each arm's first "
        "run heard; bold where it is not the same. From result.json."
    )
    return "\n".join(
        table(
            caption,
            ["said", *arms],
            [[escape(one), *(_marked(one, arms[name][i]) for name in arms)] for i, one in enumerate(said)],
            "heard",
        )
        for said, arms in heard.items()
    )


def _marked(said: str, heard: str) -> str:
    text = escape(heard) or "nothing"
    return text if said == heard else f"<b>{text}</b>"


def _lines(found: Any) -> list[tuple[str, str]]:
    """(said, heard) of what a result holds; [] for what is none of that."""
    if not isinstance(found, list):
        return []
    return [(str(one.get("said", "")), str(one.get("heard", ""))) for one in found if isinstance(one, dict)]
