"""Tables of pages, the index of the log and the names of tests are up to date."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["page_tables", "log_index"])
def test_the_pages_are_up_to_date(name, capsys):
    tool = runpy.run_path(str(ROOT / "tools" / f"{name}.py"))
    assert tool["main"](["--check"]) == 0, capsys.readouterr().err


def test_claims_whose_training_commit_is_not_recorded_are_named():
    """A claim's file has the commit that wrote its tables; its models may have been trained at another one."""
    page = (ROOT / "docs/results.md").read_text()
    named = re.search(r"<!--unrecorded-->(.*?)<!--/unrecorded-->", page, re.DOTALL)[1]
    claims = {path.stem: json.loads(path.read_text()) for path in (ROOT / "results").glob("*.json")}
    claims = {name: one for name, one in claims.items() if isinstance(one, dict) and "claim" in one}
    found = [name for name, one in claims.items() if len(one["trained"]) < len(one["runs"])]
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(found)


def test_every_promise_of_reliability_names_a_test_that_exists():
    page = (ROOT / "docs/reliability.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert not set(re.findall(r"`(test_\w+)`", page)) - set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows
    assert all("`test_" in row for row in rows)
