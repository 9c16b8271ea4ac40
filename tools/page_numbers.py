"""Write the measured numbers of the pages from results/*.json: `python tools/page_numbers.py [--check]`.

A number stands between two comments, which a reader of the page does not see:

    <!--n results/recall.json tables/0/rows/0/right, % .1f-->99.2<!--/n-->

The comment names a file, a path in it and a format. The parts of a path are keys, positions in a list, or KEY=VALUE
for the one element of a list with that value; `~1` is a `/` in a key. `min:` or `max:` before a path with `*` takes the
least or the largest value. A format is one of Python's (`.3f`, `,.0f`), optionally with a divisor (`.2f/1e6`,
`.0f/MiB`); `.1%` is a percentage; `±.3f` reads "mean" and "std" of an object; `s` is the text as it is. A whole table
stands between `<!--table NAME-->` and `<!--/table-->`; tools/page_tables.py makes it.

`--check` writes nothing. It fails where a page says another number than its file, and names the page, the line and both
numbers.
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
NUMBER = re.compile(r"<!--n (\S+) ([^>]+?) ([^\s>]+?)-->(.*?)<!--/n-->")
TABLE = re.compile(r"<!--table (\S+)-->\n(.*?)<!--/table-->", re.DOTALL)
DIFFERS = "; `make numbers` writes it"
UNITS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
Value = Any  # what JSON holds


class NumberError(Exception):
    """A comment names a file, a path or a format that does not exist; the message says which."""


def pages() -> list[Path]:
    """The pages whose numbers are written: README, docs/ and the papers' tables of claims."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "src/mnemos/lab/papers").glob("*/README.md")),
    ]


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


def render(text: str, page: str) -> tuple[str, list[str]]:
    """The page with its numbers written anew, and one line for each number that was another or cannot be made."""
    wrong: list[str] = []

    def line(match: re.Match[str]) -> str:
        return f"{page}:{text.count(chr(10), 0, match.start()) + 1}"

    def number(match: re.Match[str]) -> str:
        name, path, form, said = match.groups()
        try:
            found = show(lookup(name, path), form)
        except (NumberError, ValueError, TypeError, IndexError) as error:
            wrong.append(f"{line(match)}: {name} {path} {form}: {error}")
            return match[0]
        if found != said:
            wrong.append(f"{line(match)}: the page says {said}, {name} {path} says {found}{DIFFERS}")
        return f"<!--n {name} {path} {form}-->{found}<!--/n-->"

    def table(match: re.Match[str]) -> str:
        name, said = match.groups()
        if name not in TABLES:
            wrong.append(f"{line(match)}: expected a table of {', '.join(TABLES)}, found {name}")
            return match[0]
        found = TABLES[name]()
        for offset, (ours, theirs) in enumerate(_pairs(said.splitlines(), found.splitlines())):
            if ours != theirs:
                place = f"{page}:{text.count(chr(10), 0, match.start()) + 2 + offset}"
                wrong.append(f"{place}: the page says {ours!r}, the table {name} says {theirs!r}{DIFFERS}")
        return f"<!--table {name}-->\n{found}<!--/table-->"

    once = NUMBER.sub(number, text)
    return TABLE.sub(table, once), wrong


def _pairs(said: list[str], found: list[str]) -> Iterator[tuple[str, str]]:
    length = max(len(said), len(found))
    yield from zip(said + [""] * (length - len(said)), found + [""] * (length - len(found)), strict=True)


def main(argv: list[str] | None = None) -> int:
    """Write the numbers, or with `--check` compare them; 1 where a page is wrong or a number cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page and its file differ")
    check = parser.parse_args(argv).check
    failed = False
    for page in pages():
        text, wrong = render(page.read_text(), str(page.relative_to(ROOT)))
        for message in wrong:
            failed |= check or not message.endswith(DIFFERS)
            print(message, file=sys.stderr)
        if not check and text != page.read_text():
            page.write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
