"""Numbers of pages, the index of the log and the map of files are up to date; the tools find what is wrong."""

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


@pytest.mark.parametrize("name", ["page_numbers", "log_index", "file_map", "recipe_table"])
def test_the_pages_are_up_to_date(name, capsys):
    assert tool(name).main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_every_measured_number_is_listed(name):
    """Without the listed numbers, tables that are written whole, code and links, no number with a fraction is left."""
    text, numbers = (ROOT / name).read_text(), tool("page_numbers")
    listed = json.loads(numbers.NUMBERS.read_text())[name]
    for (said, *_), start in reversed(list(numbers.places(text, listed))):
        text = text[:start] + text[start + len(said) :]
    for span in (r"```.*?```", r"<!--table.*?<!--/table-->", r"`[^`\n]*`", r"\]\([^)]*\)"):
        text = re.sub(span, "", text, flags=re.DOTALL)
    assert re.findall(r"\d*[.]\d+|\d+ ?(?:ms|MiB|GFLOP|bits|seconds|times)\b", text) == []


def test_claims_whose_training_commit_is_not_recorded_are_named():
    """A claim's file has the commit that wrote its tables; its models may have been trained at another one."""
    page = (ROOT / "docs/results.md").read_text()
    named = re.search(r"<!--unrecorded-->(.*?)<!--/unrecorded-->", page, re.DOTALL)[1]
    claims = {path.stem: json.loads(path.read_text()) for path in (ROOT / "results").glob("*.json")}
    claims = {name: one for name, one in claims.items() if isinstance(one, dict) and "claim" in one}
    found = [name for name, one in claims.items() if len(one.get("trained") or ()) < len(one["runs"])]
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(found)


@pytest.fixture
def numbers(tmp_path, monkeypatch):
    module = tool("page_numbers")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    rows = [
        {"name": "a", "mean": 0.9917, "std": 0.004, "peak": 2**21},
        {"name": "b.c", "mean": -2.0, "right, %": "6.2"},
    ]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    return module


PAGE = "# A\n0.5\n```sh\n# 7\n```\n## B\nof 7 and\nso 7, not 7.5.\n"


def row(path, form, *after):
    return ["7", "r.json", path, form, *after]


@pytest.mark.parametrize(
    ("path", "form", "printed"),
    [
        ("rows/0/mean", ".1%", "99.2 %"),
        ("rows/name=a", "±.3f", "0.992 ± 0.004"),
        ("rows/name=b.c/right, %", ".1f", "6.2"),
        ("rows/name=a/peak", ".1f/MiB", "2.0"),
        ("rows/name=a/peak", ",.0f", "2,097,152"),
        ("min:rows/*/mean", ".0f", "-2"),
        ("rows/-1/name", "s", "b.c"),
    ],
)
def test_a_number_is_read_and_printed(numbers, path, form, printed):
    """The first 7 of its section, not the one before its heading; after some text, another one."""
    listed = {"B": [row(path, form)]}
    text, wrong = numbers.render(PAGE, "page.md", listed)
    assert text == PAGE.replace("of 7", f"of {printed}")
    assert len(wrong) == 1
    assert all(part in wrong[0] for part in ("page.md:7", " 7,", printed, "r.json"))
    assert listed["B"][0][0] == printed
    assert numbers.render(text, "page.md", listed) == (text, [])
    assert numbers.render(PAGE, "page.md", {"B": [row(path, form, "so")]})[0] == PAGE.replace("so 7", f"so {printed}")


@pytest.mark.parametrize(
    ("heading", "number", "named"),
    [
        ("B", ["7", "no.json", "rows", ".1f"], "no.json"),
        ("B", row("rows/2/mean", ".1f"), ":7: .*rows/2"),
        ("B", row("rows/name=z/mean", ".1f"), "name=z"),
        ("B", row("rows/*/mean", ".1f"), "min: or max:"),
        ("B", row("rows/0/mean", ".1f", "nowhere"), "7 after 'nowhere' under 'B'"),
        ("7", row("rows/0/mean", ".1f"), "heading '7'"),
    ],
)
def test_a_number_that_cannot_be_made_is_left_and_named(numbers, heading, number, named):
    text, wrong = numbers.render(PAGE, "page.md", {heading: [number]})
    assert text == PAGE
    assert len(wrong) == 1
    assert re.search(f"page.md.*{named}", wrong[0])


def test_a_table_is_compared_line_by_line(numbers, monkeypatch):
    monkeypatch.setitem(numbers.TABLES, "two", lambda: "| a |\n| 2 |\n")
    text, wrong = numbers.render("x\n<!--table two-->\n| a |\n| 1 |\n<!--/table-->\n", "page.md", {})
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
    assert rows == ["| 2026-01-03 | [T](2026-01-03-b.md) | r |", "| 2026-01-02 | [T](2026-01-02-a.md) | r |"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("2026-01-03-a.md", HEAD + "x"),
        ("2026-01-02-a.md", HEAD),
        ("2026-01-02-a.md", HEAD.replace("- Commit: d\n", "") + "x"),
        ("2026-01-02-a.md", HEAD.replace("nothing", "[b](2026-01-01-b.md)") + "x"),
        ("2026-01-02-a.md", HEAD.replace("Result: r", "Result: |r|") + "x"),
    ],
    ids=["date", "empty", "field", "supersedes", "cell"],
)
def test_a_wrong_finding_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    module = tool("log_index")
    with pytest.raises(module.HeadError, match=name):
        module.index(tmp_path)


def test_the_map_has_a_line_for_each_file(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text('"""A room."""')
    (tmp_path / "room" / "one.py").write_text('"""The first. More."""\n')
    found = tool("file_map").file_map(tmp_path)
    assert found == f"**`{tmp_path.name}/room/`**: A room\n\n- `one.py`: The first. More\n"
    (tmp_path / "room" / "two.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="two"):
        tool("file_map").file_map(tmp_path)
