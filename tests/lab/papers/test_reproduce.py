"""`mnemos reproduce`: what it prints and writes, what it refuses, and one claim of each kind from end to end."""

import json

import pytest
import torch

from mnemos.lab.cli import main
from mnemos.lab.papers import claim_page, reproduce
from mnemos.lab.papers.claim import Claim, Paper
from mnemos.lab.papers.findings import Finding, Table, cell_text, spread
from mnemos.lab.papers.reproduce import Options


def made_up(claim: Claim, options: Options) -> Finding:
    table = Table("A title", ["", "ours", "paper top-1"])
    for name, values in claim.values.items():
        table.add(name, 12345.678, *values)
    (options.out / "drawn.png").parent.mkdir(parents=True, exist_ok=True)
    return Finding([table], ["A note."], [options.out / "drawn.png"], [options.out / "runs"])


@pytest.fixture
def two_claims(monkeypatch) -> Paper:
    each = [Claim(name, "about", f"{__name__}:made_up", "says", ("top-1",), {"ViT": (79.9,)}) for name in "ab"]
    found = Paper("made_up", "A title", tuple(each))
    monkeypatch.setitem(reproduce.PAPERS, "made_up", found)
    return found


def test_a_claim_is_printed_and_written(two_claims, tmp_path, capsys):
    (found,) = reproduce.reproduce("made_up/b", Options(tmp_path))
    said = capsys.readouterr().out
    for words in ("made_up/b: about", "says", "A title", "12,346", "79.9", "A note.", "drawn.png", "b.json"):
        assert words in said
    assert json.loads((tmp_path / "b.json").read_text()) == json.loads(json.dumps(found))
    assert found["tables"] == [{"title": "A title", "rows": [{"": "ViT", "ours": 12345.678, "paper top-1": 79.9}]}]
    assert {"paper", "claim", "says", "notes", "files", "runs", "seconds", "provenance"} <= set(found)
    page = (tmp_path / "claim-b.html").read_text()
    for words in ("about", "The claim: says", "A title", "12,346", "A note."):
        assert words in page
    assert not (tmp_path / "a.json").exists()


def test_a_figure_too_large_for_the_page_leaves_out_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_page, "_MOST", 100)
    files = [tmp_path / f"{name}.png" for name in ("large", "small")]
    for file, size in zip(files, (101, 100), strict=True):
        file.write_bytes(bytes(size))
    about = dict.fromkeys(("paper", "claim", "title", "about", "says"), "x")
    claim_page.write_claim_page({**about, "provenance": {}, "seconds": 1}, Finding([], [], files), tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert page.count("left out, for the size") == page.count('alt="small"') == 1


@pytest.mark.parametrize(
    "target", [f"{one.name}/{claim.name}" for one in reproduce.PAPERS.values() for claim in one.claims]
)
def test_recipes_only_runs_no_model_and_writes_no_file(target, tmp_path, capsys, monkeypatch):
    """It is therefore quick; counting the FLOPs of the paper's models would take a minute."""

    def ran(*_: object) -> None:
        raise AssertionError(f"{target}: a model runs")

    monkeypatch.setattr(torch.nn.Module, "__call__", ran)
    (found,) = reproduce.reproduce(target, Options(tmp_path / "out", recipes_only=True))
    assert reproduce.PAPERS[found["paper"]].claim(found["claim"]).says in capsys.readouterr().out
    assert found["notes"]
    assert not found["runs"]
    assert not (tmp_path / "out").exists()


def test_a_paper_is_all_its_claims(two_claims, tmp_path):
    assert [one["claim"] for one in reproduce.reproduce("made_up", Options(tmp_path))] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds: expected at least 1, found 0"),
        (["--steps", "0"], "--steps: expected at least 1, found 0"),
        (["--data", "nowhere"], "--data nowhere:"),
        (["--data", __file__], "expected a folder with CIFAR-10 or MNIST"),
        (["--out", __file__], f"--out {__file__}:"),
        (["--run", "nowhere"], "nowhere:"),
        (["--sedes", "3"], "unrecognized arguments: --sedes 3"),
    ],
)
def test_wrong_options_are_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "cached_transformers/figure5", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_cells_are_read_to_four_figures():
    assert [cell_text(cell) for cell in (82.0, 1.90, 313, 0.030812, 12345.6, None, "words")] == [
        "82.0",
        "1.9",
        "313",
        "0.03081",
        "12,346",
        "–",
        "words",
    ]
    assert spread(0.8123, 0.0151) == "81.2 ± 1.5"
    assert spread(0.8123, None) == "81.2"


def test_a_row_must_fit_its_columns():
    with pytest.raises(ValueError, match="2 columns, 1 cells"):
        Table("A title", ["", "ours"]).add("ViT")
