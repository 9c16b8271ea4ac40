"""Which tests reach which faults: one run of the tests, in a tree where each fault's place notes who came by.

A probe leaves the value as it is: `x + 1` becomes `(_reached(7), x + 1)[1]`. Processes that tests start note it too.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from mutations import Fault

PROBE = '''"""Notes that a fault was reached and in which test, which all processes read from the same memory."""
import mmap, os
FOLDER = os.path.dirname(os.path.abspath(__file__))
seen = set()
with open(os.path.join(FOLDER, "now"), "r+b") as file:
    now = mmap.mmap(file.fileno(), 8)

def reached(number):
    note = number, now[:]
    if note not in seen:
        seen.add(note)
        with open(os.path.join(FOLDER, "reached"), "a") as file:
            file.write(f"{number} {int.from_bytes(note[1], 'little')}\\n")
'''


def insert_probes(tree: Path, faults: list[Fault]) -> None:
    """Into the files of the faults, which are known by their numbers in the list."""
    marks: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
    for number, fault in enumerate(faults):
        call, length = f'__import__("mutant_probe").reached({number})', fault.stop - fault.start
        is_expression = fault.kind != "statement dropped" or fault.new == "pass"
        # of probes that begin or end at the same character, the longest surrounds the others
        marks[fault.file].append((fault.start, 1, -length, f"({call}, " if is_expression else f"{call}; "))
        if is_expression:
            marks[fault.file].append((fault.stop, 0, length, ")[1]"))
    for file, of_file in marks.items():
        source = (tree / file).read_text()
        for position, _, _, text in sorted(of_file, reverse=True):
            source = source[:position] + text + source[position:]
        (tree / file).write_text(source)
    (tree / "src" / "now").write_bytes(bytes(8))
    (tree / "src" / "reached").touch()
    (tree / "src" / "mutant_probe.py").write_text(PROBE)


class Tests:
    """Tells the probes what runs, as the number of a line of a file: a test, or what all tests of a file may share."""

    def __init__(self, tree: Path) -> None:
        self.names = tree / "src" / "names"
        self.count = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: Any) -> Any:
        if isinstance(collector, pytest.Module):
            self.begin(collector.nodeid)
        return (yield)

    def pytest_runtest_setup(self, item: Any) -> None:
        self.begin(item.nodeid.partition("::")[0])  # fixtures

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> None:
        self.begin(item.nodeid)

    def begin(self, name: str) -> None:
        import mutant_probe

        self.count += 1
        with self.names.open("a") as file:
            file.write(name + "\n")
        mutant_probe.now[:] = self.count.to_bytes(8, "little")


def tests_of(tree: Path, faults: list[Fault]) -> list[list[str]]:
    """After that run: of each fault the tests that reach it."""
    names = (tree / "src" / "names").read_text().splitlines()
    of_file = defaultdict(list)
    for name in names:
        if "::" in name:
            of_file[name.partition("::")[0]].append(name)
    tests: list[dict[str, None]] = [{} for _ in faults]
    for line in (tree / "src" / "reached").read_text().splitlines():
        fault, number = map(int, line.split())
        name = names[number - 1] if number else ""  # 0: before the first file
        tests[fault] |= dict.fromkeys([name] if "::" in name else of_file[name])
    return [list(of_fault) for of_fault in tests]
