"""The claims as data: every one has what it needs, and the README of its paper has a row for it."""

import importlib
import re
from pathlib import Path

import pytest

import mnemos.papers
from mnemos.cli import main
from mnemos.papers.claims import PAPERS, paper
from mnemos.types import InputError

EVERY = [(about, claim) for about in PAPERS.values() for claim in about.claims]


@pytest.mark.parametrize(("about", "claim"), EVERY, ids=lambda one: one.name)
def test_a_claim_has_a_function_and_a_number_for_every_column(about, claim):
    module, _, function = claim.make.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert claim.about
    assert claim.says
    for name, values in claim.values.items():
        assert len(values) == len(claim.columns), name
    assert PAPERS[about.name].claim(claim.name) is claim


@pytest.mark.parametrize(("about", "claim"), EVERY, ids=lambda one: one.name)
def test_the_papers_readme_has_a_row_for_every_claim(about, claim):
    text = (Path(mnemos.papers.__file__).parent / about.name / "README.md").read_text()
    rows = [line for line in text.splitlines() if f"`mnemos reproduce {about.name}/{claim.name}`" in line]
    assert len(rows) == 1
    assert len(rows[0].strip("|").split("|")) == 5, "claim, command, paper, ours, verdict"


def test_a_claim_that_is_not_measured_says_why_and_shows_the_papers_values(capsys, tmp_path):
    missing = [(about, claim) for about, claim in EVERY if claim.missing]
    assert {claim.name for _, claim in missing} == {"table3", "table7"}
    assert all((claim.make == "mnemos.papers.not_yet:not_yet") is bool(claim.missing) for _, claim in EVERY)
    assert main(["reproduce", "cached_transformers/table3", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Not yet: mnemos has no detection model" in said
    assert "44.8" in said
    main(["reproduce"])
    assert capsys.readouterr().out.count("(not yet)") == len(missing)


def test_the_papers_numbers_agree_with_each_other():
    """Accuracies and FLOPs that the paper prints in two tables."""
    tables = {claim.name: claim.values for claim in PAPERS["cached_transformers"].claims}
    for name in ("ViT-S", "PVT-Tiny", "PVT-Small"):
        assert (tables["table2"][name][0], tables["table2"][name][2]) == tables["table1"][name][:2]
    assert tables["table10"]["0"] == (tables["table9"]["PVT-Tiny"][4], tables["table1"]["PVT-Tiny"][0])
    assert tables["table10"]["0.5"] == (tables["table9"]["PVT-Tiny"][5], tables["table1"]["PVT-Tiny"][1])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("cached_transfomers", "did you mean 'cached_transformers'"),
        ("zzz", "cached_transformers, linear_transformers, memformer"),
        ("cached_transformers/tabel9", "did you mean cached_transformers/table9"),
        ("cached_transformers/zzz", "figure1, figure4"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(target, words, capsys):
    assert main(["reproduce", target]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_an_unknown_paper_raises():
    with pytest.raises(InputError, match=r"'cached-transformers'.*'cached_transformers'"):
        paper("cached-transformers")


def test_without_a_paper_all_are_listed(capsys):
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    for about, claim in EVERY:
        assert re.search(rf"mnemos reproduce {about.name}/{claim.name}\s", said)
