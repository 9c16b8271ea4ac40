"""Write the measured numbers of the pages from results/*.json: `python tools/page_numbers.py [--check]`.

docs/numbers.json says where the numbers of a page come from: for each page and each of its headings, in the order in
which the section has them,

    ["99.2", "results/recall.json", "tables/0/rows/0/right, %", ".1f"]

the number as the page prints it, its file, the path in the file and the format. A fifth item is text of the section
that stands before the number, for a number that the section also has elsewhere. The parts of a path are keys, positions
in a list, or KEY=VALUE for the one element of a list with that value; `~1` is a `/` in a key. `min:` or `max:` before a
path with `*` takes the least or the largest value. A format is one of Python's (`.3f`, `,.0f`), optionally with a
divisor (`.2f/1e6`, `.0f/MiB`); `.1%` is a percentage; `±.3f` reads "mean" and "std" of an object; `s` is the text as it
is. A whole table stands between `<!--table NAME-->` and `<!--/table-->`; tools/page_tables.py makes it.

When a file changes, the page and docs/numbers.json are written. `--check` writes nothing. It fails where a page says
another number than its file, and names the page, the line and both numbers.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from page_tables import TABLES

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "docs/numbers.json"
HEADING = re.compile(r"^```.*?^```|^#+ +(.*?) *$", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"<!--table (\S+)-->\n(.*?)<!--/table-->", re.DOTALL)
DIFFERS = "; `make numbers` writes it"
UNITS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
Value = Any  # what JSON holds


class NumberError(Exception):
    """A comment names a file, a path or a format that does not exist; the message says which."""


@cache
def _load(name: str) -> Value:
    path = ROOT / name
    if not path.exists():
        raise NumberError(f"expected a file of results, found no {name}; link the finding in log/ instead")
    return json.loads(path.read_text())


def _children(value: Value, part: str) -> Iterator[Value]:
    part = part.replace("~1", "/")
    if part == "*":
        yield from value.values() if isinstance(value, dict) else value
    elif isinstance(value, dict):
        if part not in value:
            raise NumberError(f"expected one of {', '.join(value)}, found {part!r}")
        yield value[part]
    elif isinstance(value, list):
        if part.lstrip("-").isdigit():
            yield value[int(part)]
            return
        key, _, wanted = part.partition("=")
        fits = [item for item in value if isinstance(item, dict) and str(item.get(key)) == wanted]
        if len(fits) != 1:
            raise NumberError(f"expected one element with {part!r}, found {len(fits)}")
        yield fits[0]
    else:
        raise NumberError(f"expected an object or a list at {part!r}, found {value!r}")


def lookup(name: str, path: str) -> Value:
    """The value at `path` of the file `name`. Raises NumberError where there is none."""
    choose: Callable[[list[float]], float] | None = None
    for prefix, function in (("min:", min), ("max:", max)):
        if path.startswith(prefix):
            path, choose = path.removeprefix(prefix), function
    values: list[Value] = [_load(name)]
    for part in path.split("/"):
        values = [child for value in values for child in _children(value, part)]
    if choose is not None:
        return choose([float(value) for value in values])
    if len(values) != 1:
        raise NumberError(f"expected one value, found {len(values)}; put min: or max: before the path")
    return values[0]


def show(value: Value, form: str) -> str:
    """`value` as the page prints it."""
    if form == "s":
        return str(value)
    if form.startswith("±"):
        if not (isinstance(value, dict) and {"mean", "std"} <= value.keys()):
            raise NumberError(f"expected an object with mean and std, found {value!r}")
        return f"{show(value['mean'], form[1:])} ± {show(value['std'], form[1:])}"
    form, _, divisor = form.partition("/")
    number = float(value) / (UNITS.get(divisor) or float(divisor or 1))
    if form.endswith("%"):
        return f"{number * 100:{form[:-1]}f} %"
    return f"{number:{form}}"


def sections(text: str) -> dict[str, tuple[int, int]]:
    """Where the section under each heading of a page starts and ends; of equal headings the last one's."""
    heads = [match for match in HEADING.finditer(text) if match[1]]
    ends = [match.start() for match in heads[1:]] + [len(text)] * bool(heads)
    return {match[1]: (match.end(), end) for match, end in zip(heads, ends, strict=True)}


def places(text: str, listed: dict[str, list[list[str]]]) -> Iterator[tuple[list[str], int]]:
    """Each number that docs/numbers.json lists for a page, and where the page has it.

    Raises NumberError for a number that the page does not have there.
    """
    found = sections(text)
    for heading, numbers in listed.items():
        if heading not in found:
            raise NumberError(f"expected the heading {heading!r} of docs/numbers.json, found {', '.join(found)}")
        at, end = found[heading]
        for number in numbers:
            said, after = number[0], number[4] if len(number) > 4 else ""
            start = text.find(after, at, end)
            match = re.compile(rf"(?<![\w.,]){re.escape(said)}(?!\w|[.,]\d)").search(text, start + len(after), end)
            if start < 0 or match is None:
                before = f"after {after!r} " if after else ""
                raise NumberError(
                    f"expected {said} {before}under {heading!r}, after line {_line(text, at)}, found none"
                )
            yield number, match.start()
            at = match.end()


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def render(text: str, page: str, listed: dict[str, list[list[str]]]) -> tuple[str, list[str]]:
    """The page with its numbers written anew, and one line for each number that was another or cannot be made.

    The numbers of `listed` are replaced too.
    """
    wrong: list[str] = []

    def table(match: re.Match[str]) -> str:
        name, said = match.groups()
        if name not in TABLES:
            wrong.append(f"{page}:{_line(text, match.start())}: expected one of {', '.join(TABLES)}, found {name}")
            return match[0]
        found = TABLES[name]()
        for offset, (ours, theirs) in enumerate(_pairs(said.splitlines(), found.splitlines())):
            if ours != theirs:
                place = f"{page}:{_line(text, match.start()) + 1 + offset}"
                wrong.append(f"{place}: the page says {ours!r}, the table {name} says {theirs!r}{DIFFERS}")
        return f"<!--table {name}-->\n{found}<!--/table-->"

    parts, end = [], 0
    try:
        for number, start in list(places(text, listed)):
            said, file, path, form = number[:4]
            try:
                found = show(lookup(file, path), form)
            except (NumberError, ValueError, TypeError, IndexError) as error:
                wrong.append(f"{page}:{_line(text, start)}: {file} {path} {form}: {error}")
                continue
            if found != said:
                wrong.append(f"{page}:{_line(text, start)}: the page says {said}, {file} {path} says {found}{DIFFERS}")
                number[0] = found
            parts += [text[end:start], found]
            end = start + len(said)
    except NumberError as error:
        wrong.append(f"{page}: {error}")
    return TABLE.sub(table, "".join([*parts, text[end:]])), wrong


def _pairs(said: list[str], found: list[str]) -> Iterator[tuple[str, str]]:
    length = max(len(said), len(found))
    yield from zip(said + [""] * (length - len(said)), found + [""] * (length - len(found)), strict=True)


def main(argv: list[str] | None = None) -> int:
    """Write the numbers, or with `--check` compare them; 1 where a page is wrong or a number cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page and its file differ")
    check = parser.parse_args(argv).check
    failed = False
    listed = json.loads(NUMBERS.read_text())
    tables = [str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")]
    for name in sorted({*listed, "README.md", *tables}):
        page = ROOT / name
        text, wrong = render(page.read_text(), name, listed.get(name, {}))
        for message in wrong:
            failed |= check or not message.endswith(DIFFERS)
            print(message, file=sys.stderr)
        if not check and text != page.read_text():
            page.write_text(text)
            NUMBERS.write_text(_format(listed))
    return int(failed)


def _format(listed: dict[str, dict[str, list[list[str]]]]) -> str:
    """docs/numbers.json with a line for each number."""

    def inside(items: Iterator[str], indent: str) -> str:
        return "\n" + ",\n".join(indent + item for item in items) + "\n" + indent[2:]

    def quote(value: Value) -> str:
        return json.dumps(value, ensure_ascii=False)

    def section(numbers: list[list[str]]) -> str:
        return f"[{inside(map(quote, numbers), ' ' * 6)}]"

    def page(headings: dict[str, list[list[str]]]) -> str:
        return f"{{{inside((f'{quote(key)}: {section(value)}' for key, value in headings.items()), ' ' * 4)}}}"

    return f"{{{inside((f'{quote(key)}: {page(value)}' for key, value in listed.items()), '  ')}}}\n"


if __name__ == "__main__":
    sys.exit(main())
