"""Tables of pages, the index of the log and the names of tests are up to date."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_pages_are_up_to_date(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import page_tables

    assert page_tables.main(["--check"]) == 0, capsys.readouterr().err


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


def test_files_of_tests_that_commands_and_pages_name_exist():
    files = [ROOT / "Makefile", ROOT / "CONTRIBUTING.md", *(ROOT / "tools").glob("*.py"), *(ROOT / "docs").glob("*.md")]
    named = {name for path in files for name in re.findall(r"\btests/[\w/]+\.(?:py|txt)", path.read_text())}
    assert len(named) > 10
    assert not {name for name in named if "NAME" not in name and not (ROOT / name).exists()}
