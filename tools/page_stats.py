"""How a page reads, in numbers, for whoever writes it; nothing fails on them: `python tools/page_stats.py [PAGE ...]`.

By default README, CONTRIBUTING, CHANGELOG, docs/ and the papers' and operators' pages. Words are those of prose and
tables, without code, links' addresses and tables made by tools/page_tables.py. A sentence ends at . ! ? or : and at the
end of a paragraph or list entry.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEGATION = re.compile(r"\b(?:no|not|none|never|nor|neither|nothing|nobody|cannot|without)\b|n't\b", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\w.])[+−-]?\d[\d,.]*")
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]+\)|<img |<picture")
COLUMNS = ("words", "longest cell", "cells > 30", "sentences > 30", "numbers %", "negations %", "pictures")


def stats(text: str) -> tuple[int, int, int, int, float, float, int]:
    """The figures of `COLUMNS` for a page in Markdown. Those in % are per 100 words of prose."""
    pictures = len(PICTURE.findall(text))
    text = re.sub(r"^```.*?^```|<!--table.*?<!--/table-->|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = text.splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    lengths = [len(cell.split()) for cell in cells]
    prose = "\n".join("" if re.match(r"[|#]", line) else re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", line) for line in lines)
    sentences = [part for block in re.split(r"\n\s*\n", prose) for part in re.split(r"(?<=[.!?:])\s+", block.strip())]
    words = prose.split()
    per = 100 / max(len(words), 1)
    return (
        len(words) + sum(lengths),
        max(lengths, default=0),
        sum(length > 30 for length in lengths),
        sum(len(sentence.split()) > 30 for sentence in sentences),
        len(NUMBER.findall(prose)) * per,
        len(NEGATION.findall(prose)) * per,
        pictures,
    )


def main(names: list[str]) -> None:
    """Print a line for each page, and the sums."""
    pages = [Path(name) for name in names] or [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((ROOT / "docs").glob("**/*.md")),
        *sorted((ROOT / "src").glob("**/README.md")),
    ]
    rows = [
        (str(p.resolve().relative_to(ROOT) if p.resolve().is_relative_to(ROOT) else p), stats(p.read_text()))
        for p in pages
    ]
    wide = max(len(name) for name, _ in rows)
    print(" " * wide, *(f"{name:>14}" for name in COLUMNS))
    for name, found in rows:
        print(f"{name:{wide}}", *(f"{one:14.1f}" if isinstance(one, float) else f"{one:14,}" for one in found))
    words, longest, cells, sentences, _, _, pictures = map(list, zip(*(found for _, found in rows), strict=True))
    print(
        f"{'all':{wide}}",
        *(f"{one:14,}" for one in (sum(words), max(longest), sum(cells), sum(sentences))),
        " " * 29,
        f"{sum(pictures):14}",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
