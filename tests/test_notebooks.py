"""The notebooks of examples/ run from top to bottom at small sizes, without Jupyter, and show what they say."""

import json
import re
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
SMALL = {  # the names that the first cell of code sets
    "photos_cached_vit": {"PIXELS": 32, "DEPTH": 1, "DRAWN": 4, "STEPS": 1, "BATCH": 8},
    "endless_stream": {"DIM": 16, "LAYERS": 1, "STEPS": 1, "LENGTH": 16, "READ": 4000, "CHUNK": 400},
    "long_document_replay": {"DIM": 16, "SEGMENT": 8, "SEGMENTS": 8, "UPDATES": 1, "MEASURED": (1, 8)},
}


def cells(name, kind):
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the code of a notebook and returns what it printed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(SMALL["endless_stream"], "TEXT", tmp_path / "text.txt")
    (tmp_path / "text.txt").write_text("so be it, or so it may be. " * 1000)

    def execute(name):
        values = {"__name__": "__main__"}
        sizes, *code = cells(name, "code")
        exec(sizes, values)
        assert SMALL[name].keys() <= values.keys()
        values |= SMALL[name]
        for cell in code:
            exec(cell, values)
        return capsys.readouterr().out

    return execute


def test_photos_are_classified_with_a_cache_and_the_cache_can_be_emptied(run):
    said = run("photos_cached_vit")
    assert re.findall(r"^([a-z ]*\w) +accuracy [01]\.\d+ on", said, re.MULTILINE) == [
        "no cache",
        "never written",
        "cached",
    ]
    assert "16 slots" in said
    assert re.search(r"^emptied +[01]\.\d+$", said, re.MULTILINE)
    assert "columns" in said.splitlines()[-1]


def test_a_stream_has_a_constant_state_and_goes_on_after_it_was_saved(run):
    said = run("endless_stream")
    assert len(set(re.findall(r"tokens: state +(\d+) KiB", said))) == 1
    softmax = [int(size) for size in re.findall(r"of softmax +(\d+)", said)]
    assert softmax == sorted(set(softmax))
    assert len(re.findall(r"^ +[\d,]+ .* KiB$", said, re.MULTILINE)) >= 10
    assert "\nTrue\n" in said


def test_replay_has_the_gradients_of_one_graph_at_the_memory_of_a_segment(run):
    said = run("long_document_replay")
    assert float(re.search(r"largest difference (\S+)", said)[1]) < 1e-4
    plain, replayed = zip(*re.findall(r"^ +\d+ +(\d+\.\d) +(\d+\.\d)$", said, re.MULTILINE), strict=True)
    assert float(plain[-1]) > 3 * float(plain[0])
    assert float(replayed[-1]) < 2 * float(replayed[0])
    assert "update 1: " in said


def test_notebooks_store_what_they_print_and_their_links_lead_to_pages():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == SMALL.keys()
    for name in SMALL:
        book = json.loads((FOLDER / f"{name}.ipynb").read_text())
        for cell in book["cells"]:
            said = cell.get("outputs", [])
            assert bool(said) or not re.search(r"^ *print\(", "".join(cell["source"]), re.MULTILINE)
            assert all(one["output_type"] in ("stream", "display_data") for one in said)
            assert "/tmp" not in json.dumps(said)
        for link in re.findall(r"\]\(([^)#]+)", "\n".join(cells(name, "markdown"))):
            assert (FOLDER / link).exists()
