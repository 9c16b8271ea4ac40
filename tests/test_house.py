"""The size of files, and what the benchmarks take from the package."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_file_is_longer_than_700_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert not {path.name: length for path, length in lengths.items() if length > 700}


def test_no_two_test_files_have_one_name():
    """pytest imports them as modules of one level: together they could not be collected."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_benchmarks_import_names_that_exist():
    taken = [
        (path.name, node.lineno, node.module, alias.name)
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mnemos"
        for alias in node.names
    ]
    missing = [
        (*place, module, name)
        for *place, module, name in taken
        if not hasattr(importlib.import_module(module), name) and not _is_module(f"{module}.{name}")
    ]
    assert not missing


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True
