"""Write log/README.md, the index of the findings, from their heads: `python tools/log_index.py [--check]`.

A finding is one file log/YYYY-MM-DD-short-name.md: a title, a head of eight fields in a fixed order, then the findings.
`--check` writes nothing and fails where a head is incomplete or the index is out of date.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "log"
FIELDS = ("In short", "Date", "Question", "Expectation", "Command", "Commit", "Result", "Supersedes")
SYMBOLS = "✓≈✗?–"
WORDS = 15
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


class HeadError(Exception):
    """The head of a finding is not as it should be; the message names the file and the field."""


@dataclass(frozen=True)
class Finding:
    """One file of the log: its name without `.md`, its title and the fields of its head."""

    name: str
    title: str
    head: dict[str, str]


def read(path: Path) -> Finding:
    """Read the title and the head of one finding. Raises HeadError where a field is missing, empty or wrong."""
    text = path.read_text()
    title, _, rest = text.partition("\n\n")
    head, _, body = rest.partition("\n\n")
    fields = re.findall(r"^- (\w+(?: \w+)?): (.+)$", head, re.MULTILINE)
    if not title.startswith("# ") or tuple(name for name, _ in fields) != FIELDS:
        names = ", ".join(name for name, _ in fields) or "none"
        expected = f"expected a title and the fields {', '.join(FIELDS)}"
        raise HeadError(f"log/{path.name}: {expected}, found {title!r} and {names}; write the head as in the others")
    found = dict(fields)
    date = re.match(r"\d{4}-\d\d-\d\d(?=-[a-z0-9-]+\.md$)", path.name)
    if not date or date[0] != found["Date"]:
        raise HeadError(f"log/{path.name}: expected a name that starts with its date {found['Date']}; rename the file")
    symbol, _, words = found["In short"].partition(" ")
    if symbol not in tuple(SYMBOLS) or not 1 <= len(words.split()) <= WORDS or re.search(r"[|\[\]]", words):
        wanted = f"one of {' '.join(SYMBOLS)} and at most {WORDS} words without | [ ]"
        raise HeadError(f"log/{path.name}: expected In short to be {wanted}, found {found['In short']!r}; shorten it")
    for old in re.findall(r"\]\(([^)]+)\)", found["Supersedes"]):
        if not (path.parent / old).exists():
            raise HeadError(f"log/{path.name}: expected a finding in Supersedes, found {old}, which does not exist")
    if not body.strip():
        raise HeadError(f"log/{path.name}: expected text below the head, found none; say what was found")
    return Finding(path.stem, title[2:].strip(), found)


def index(folder: Path = FOLDER) -> str:
    """The text of log/README.md: one row per finding, the newest first, those of one day by name."""
    findings = [read(path) for path in sorted(folder.glob("*.md")) if path.name != "README.md"]
    findings.sort(key=lambda finding: finding.head["Date"], reverse=True)
    lines = ((finding, *finding.head["In short"].partition(" ")[::2]) for finding in findings)
    rows = (f"| {f.head['Date']} | {symbol} | [{words}]({f.name}.md) |\n" for f, symbol, words in lines)
    return INTRODUCTION + "".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Write the index, or with `--check` compare it; 1 where a head is wrong or the index is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the index is out of date")
    check = parser.parse_args(argv).check
    page = FOLDER / "README.md"
    try:
        text = index()
    except HeadError as error:
        print(error, file=sys.stderr)
        return 1
    if check:
        if not page.exists() or page.read_text() != text:
            print("log/README.md is out of date: run `make numbers`", file=sys.stderr)
            return 1
    else:
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
