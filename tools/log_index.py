"""The text of log/README.md, the index of the findings, from their heads; page_tables.py writes it.

A finding is one file log/YYYY-MM-DD-short-name.md: a title, a head of eight fields in a fixed order, then the findings.
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "log" / "README.md"
WORDS = 15  # of a line of the index, at most
HEAD = re.compile(
    r"# .+\n\n- In short: (?P<symbol>[✓≈✗?–]) (?P<words>[^|\[\]\n]+)\n- Date: (?P<date>\d{4}-\d\d-\d\d)\n"
    + "".join(rf"- {name}: .+\n(?: .+\n)*" for name in ("Question", "Expectation", "Command", "Commit", "Result"))
    + r"- Supersedes: (?P<old>.+\n(?: .+\n)*)\n+\S"
)
INTRODUCTION = """\
# Log

Dated findings, the negative ones too: the question, what was expected, the command, the commit, the result. One finding
is one file. The names and commands in a finding are those of its commit. The machine is a virtual one with 2 cores (AMD
EPYC, AVX-512) and torch 2.13.0 on the CPU, unless a finding says otherwise. A bar is a goal that was set before the
measurement.

[CONTRIBUTING.md](../CONTRIBUTING.md) says how to add a finding. `make numbers` writes this index.

✓ expectation met, or shown; ≈ partly; ✗ tested and not seen; ? undecided, too few seeds; – a measurement or decision
without an expectation.

| date | | finding |
|---|---|---|
"""


def read(path: Path) -> tuple[str, str, str, str]:
    """The date, the symbol, the words and the file of a finding; ends the program where a field is missing or wrong."""
    head = HEAD.match(path.read_text())
    if head is None:
        sys.exit(f"log/{path.name}: expected a title, eight fields and a text as CONTRIBUTING.md shows them")
    if not re.fullmatch(rf"{head['date']}-[a-z0-9-]+\.md", path.name):
        sys.exit(f"log/{path.name}: expected a name that starts with its date {head['date']}; rename the file")
    if len(head["words"].split()) > WORDS:
        sys.exit(f"log/{path.name}: expected at most {WORDS} words in short, found {head['words']!r}; shorten it")
    for old in re.findall(r"\]\(([^)]+)\)", head["old"]):
        if not (path.parent / old).exists():
            sys.exit(f"log/{path.name}: expected a finding in Supersedes, found {old}, which does not exist")
    return head["date"], head["symbol"], head["words"], path.name


def index() -> str:
    """The text of log/README.md: one row per finding, the newest first, those of one day by name."""
    rows = [read(path) for path in sorted(PAGE.parent.glob("*.md")) if path != PAGE]
    rows.sort(key=lambda row: row[0], reverse=True)
    return INTRODUCTION + "".join(f"| {date} | {symbol} | [{words}]({name}) |\n" for date, symbol, words, name in rows)
