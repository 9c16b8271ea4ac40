"""`mnemos reproduce`: the claims as data, what it prints and writes, and what it refuses."""

import json
import math
import re

import pytest

from mnemos.lab.cli import main
from mnemos.lab.papers import reproduce
from mnemos.lab.papers.claims import Claim, Paper
from mnemos.lab.papers.findings import Finding, Table, cell_text, spread
from mnemos.lab.papers.reproduce import PAPERS, Options
from mnemos.lab.papers.verdicts import SYMBOLS, verdicts

EVERY = [(paper, claim) for paper in PAPERS.values() for claim in paper.claims]

# ---- the claims ----


@pytest.mark.parametrize(("paper", "claim"), EVERY, ids=lambda one: one.name)
def test_a_claim_has_a_number_for_every_column_and_a_verdict(paper, claim):
    assert claim.about
    assert claim.says
    assert {len(values) for values in claim.values.values()} <= {len(claim.columns)}
    assert PAPERS[paper.name].claim(claim.name) is claim
    assert {row.symbol for row in verdicts(paper.name, claim.name)} <= set(SYMBOLS)
    assert all(row.item and row.line for row in verdicts(paper.name, claim.name))
    assert verdicts(paper.name, claim.name)


def test_differences_in_nats_are_those_of_the_perplexities():
    form = re.compile(r"([\d.]+) → ([\d.]+)(?: perplexity)?: −(\.\d+) nats")
    found = [match.groups() for row in verdicts("memformer") for match in form.finditer(row.paper)]
    assert len(found) == 6
    assert [nats for _, _, nats in found] == [f"{math.log(float(a) / float(b)):.3f}"[1:] for a, b, _ in found]


def test_every_verdict_is_read():
    """A row that is written wrongly would be left out."""
    assert {name: len(verdicts(name)) for name in PAPERS} == {
        "cached_transformers": 17, "linear_transformers": 12, "memformer": 21,
    }  # fmt: skip
    first, *_, last = verdicts("linear_transformers")
    assert first[:4] == ("✓", "Figure 1: time", "figure1", "linear in the length")
    assert last[1:4] == ("Figure 4: completed CIFAR pictures", "cifar10", "")


def test_the_papers_numbers_agree_with_each_other():
    """Accuracies and FLOPs that the paper prints in two tables."""
    tables = {claim.name: claim.values for claim in PAPERS["cached_transformers"].claims}
    for name in ("ViT-S", "PVT-Tiny", "PVT-Small"):
        assert (tables["table2"][name][0], tables["table2"][name][2]) == tables["table1"][name][:2]
    assert tables["table10"]["0"] == (tables["table9"]["PVT-Tiny"][4], tables["table1"]["PVT-Tiny"][0])
    assert tables["table10"]["0.5"] == (tables["table9"]["PVT-Tiny"][5], tables["table1"]["PVT-Tiny"][1])


# ---- the command ----


def made_up(claim: Claim, options: Options) -> Finding:
    table = Table("A title", ["", "ours", "paper top-1"])
    for name, values in claim.values.items():
        table.add(name, 12345.678, *values)
    (options.out / "drawn.png").parent.mkdir(parents=True, exist_ok=True)
    (options.out / "drawn.png").write_bytes(b"picture")
    return Finding([table], ["A note."], [options.out / "drawn.png"], [options.out / "runs"])


def test_a_claim_is_printed_and_written(tmp_path, capsys, monkeypatch):
    each = [Claim(name, "about", f"{__name__}:made_up", "says", ("top-1",), {"ViT": (79.9,)}) for name in "ab"]
    monkeypatch.setitem(reproduce.PAPERS, "made_up", Paper("made_up", "A title", tuple(each)))
    (found,) = reproduce.reproduce("made_up/b", Options(tmp_path))
    said = capsys.readouterr().out
    for words in ("made_up/b: about", "says", "A title", "12,346", "79.9", "A note.", "drawn.png", "b.json"):
        assert words in said
    assert json.loads((tmp_path / "b.json").read_text()) == json.loads(json.dumps(found))
    assert found["tables"] == [{"title": "A title", "rows": [{"": "ViT", "ours": 12345.678, "paper top-1": 79.9}]}]
    assert {"paper", "claim", "says", "notes", "files", "runs", "seconds", "provenance"} <= set(found)
    assert not (tmp_path / "a.json").exists()
    assert [one["claim"] for one in reproduce.reproduce("made_up", Options(tmp_path))] == ["a", "b"], "all claims"


def refused(claim: Claim, options: Options) -> Finding:
    raise reproduce.OtherDataError("--data: expected recordings, found none; add --data FOLDER")


def test_a_claim_of_a_whole_paper_without_its_data_is_left_out(tmp_path, capsys, monkeypatch):
    says = "says", ("top-1",), {"ViT": (79.9,)}
    each = [Claim(name, "about", f"{__name__}:{make}", *says) for name, make in (("a", "refused"), ("b", "made_up"))]
    monkeypatch.setitem(reproduce.PAPERS, "made_up", Paper("made_up", "A title", tuple(each)))
    assert [one["claim"] for one in reproduce.reproduce("made_up", Options(tmp_path))] == ["b"]
    assert "  Not run: --data: expected recordings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("cached_transfomers", "did you mean 'cached_transformers'"),
        ("zzz", "cached_transformers, linear_transformers, memformer"),
        ("cached_transformers/tabel9", "did you mean 'table9'"),
        ("cached_transformers/zzz", "figure1, figure4"),
        ("cached_transformers/figure5 --seeds 0", "--seeds: expected at least 1, found 0"),
        ("cached_transformers/figure5 --data nowhere", "--data nowhere:"),
        (f"cached_transformers/figure5 --data {__file__}", "expected a folder with CIFAR-10 or MNIST"),
        (f"cached_transformers/figure5 --out {__file__}", f"{__file__}: expected a folder"),
        ("cached_transformers/figure5 --run nowhere", "nowhere/metrics.jsonl:"),
        ("linear_transformers/speech", "--data FOLDER"),
        ("memformer/recall --run .", "expected a claim that draws one run"),
        (
            "memformer/figure4 --seeds 5 --steps 3",
            "found --steps, --seeds: memformer/figure4 measures and trains nothing",
        ),
    ],
)
def test_what_cannot_be_is_one_line(target, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *target.split()]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_without_a_paper_all_are_listed(capsys):
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    for paper, claim in EVERY:
        assert re.search(rf"mnemos reproduce {paper.name}/{claim.name}\s", said)


def test_cells_are_read_to_four_figures():
    cells = {82.0: "82.0", 1.90: "1.9", 313: "313", 0.030812: "0.03081", 12345.6: "12,346", None: "–", "words": "words"}
    cells |= {math.nan: "nan", math.inf: "inf"}  # of a run that diverged
    assert [cell_text(cell) for cell in cells] == list(cells.values())
    assert spread(0.8123, 0.0151) == "81.2 ± 1.5"
    assert spread(0.8123, None) == "81.2"
