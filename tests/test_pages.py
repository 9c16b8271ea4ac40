"""Tables of pages and the index of the log are up to date; the tools find what is wrong."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tool(name):
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["page_tables", "log_index"])
def test_the_pages_are_up_to_date(name, capsys):
    assert tool(name).main(["--check"]) == 0, capsys.readouterr().err


def test_claims_whose_training_commit_is_not_recorded_are_named():
    """A claim's file has the commit that wrote its tables; its models may have been trained at another one."""
    page = (ROOT / "docs/results.md").read_text()
    named = re.search(r"<!--unrecorded-->(.*?)<!--/unrecorded-->", page, re.DOTALL)[1]
    claims = {path.stem: json.loads(path.read_text()) for path in (ROOT / "results").glob("*.json")}
    claims = {name: one for name, one in claims.items() if isinstance(one, dict) and "claim" in one}
    found = [name for name, one in claims.items() if len(one["trained"]) < len(one["runs"])]
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(found)


def test_a_table_is_compared_line_by_line(monkeypatch):
    tables = tool("page_tables")
    monkeypatch.setitem(tables.TABLES, "two", lambda: "| a |\n| 2 |\n")
    text, wrong = tables.render("x\n<!--table two-->\n| a |\n| 1 |\n<!--/table-->\n", "page.md")
    assert text == "x\n<!--table two-->\n| a |\n| 2 |\n<!--/table-->\n"
    assert len(wrong) == 1
    assert "page.md:4" in wrong[0]


@pytest.mark.parametrize(
    ("rows", "bold"),
    [
        ([("a", 1.0, 0.0), ("b", 0.99, 0.01), ("c", 0.82, 0.01)], {"a", "b"}),
        ([("a", 0.71, 0.15), ("b", 0.32, 0.0), ("c", 0.56, 0.38)], set()),
        ([("a", 0.71, None), ("b", 0.32, None)], set()),
    ],
)
def test_the_best_memory_is_bold_where_the_seeds_agree(rows, bold):
    rows = [{"name": name, "mean": mean, "std": std} for name, mean, std in rows]
    assert tool("page_tables")._best(rows) == bold


HEAD = """# T

- In short: ✓ s
- Date: 2026-01-02
- Question: q
- Expectation: e
- Command: c
- Commit: d
- Result: r
- Supersedes: nothing

"""


def test_the_newest_finding_comes_first(tmp_path):
    (tmp_path / "2026-01-02-a.md").write_text(HEAD + "x\n")
    (tmp_path / "2026-01-03-b.md").write_text(HEAD.replace("01-02", "01-03") + "x\n")
    rows = tool("log_index").index(tmp_path).splitlines()[-2:]
    assert rows == ["| 2026-01-03 | ✓ | [s](2026-01-03-b.md) |", "| 2026-01-02 | ✓ | [s](2026-01-02-a.md) |"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("2026-01-03-a.md", HEAD + "x"),
        ("2026-01-02-a.md", HEAD),
        ("2026-01-02-a.md", HEAD.replace("- Commit: d\n", "") + "x"),
        ("2026-01-02-a.md", HEAD.replace("nothing", "[b](2026-01-01-b.md)") + "x"),
        ("2026-01-02-a.md", HEAD.replace("✓ s", "✓ |s|") + "x"),
        ("2026-01-02-a.md", HEAD.replace("✓ s", "s") + "x"),
        ("2026-01-02-a.md", HEAD.replace("✓ s", "✓" + " s" * 16) + "x"),
    ],
    ids=["date", "empty", "field", "supersedes", "cell", "symbol", "words"],
)
def test_a_wrong_finding_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    module = tool("log_index")
    with pytest.raises(module.HeadError, match=name):
        module.index(tmp_path)
