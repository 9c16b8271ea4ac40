"""Every promise of the page names a test or a trial that exists."""

import importlib.util
import re
from pathlib import Path

import soak_faults

ROOT = Path(__file__).parents[2]


def test_the_named_tests_exist():
    page = (ROOT / "docs/reliability.md").read_text()
    known = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert not set(re.findall(r"`(test_\w+)`", page)) - known
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools/soak.py")
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    trials = re.findall(r"soak: `(\w+)`", page)
    assert trials
    assert not [name for name in trials if name not in soak.PARTS and not hasattr(soak_faults, name)]
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows
    assert all("`test_" in row for row in rows)
