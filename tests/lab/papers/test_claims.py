"""The claims as data: every one has what it needs, and a verdict."""

import importlib
import re

import pytest

from mnemos import registry
from mnemos.lab.cli import main
from mnemos.lab.papers.cached_transformers.detection_tables import detector_cost, recipe_of
from mnemos.lab.papers.reproduce import PAPERS, chosen
from mnemos.lab.papers.verdicts import SYMBOLS, verdicts
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
def test_every_claim_has_a_verdict(about, claim):
    assert all(row.symbol in SYMBOLS for row in verdicts(about.name, claim.name))
    assert verdicts(about.name, claim.name)


@pytest.mark.slow
def test_detectors_have_the_published_sizes_and_every_row_its_recipe():
    """PVT (Wang et al. 2021, Tables 4 and 5) has Mask R-CNN with 32.9 and RetinaNet with 23.0 million parameters."""
    costs = {}
    for table, detector in (("table3", "mask-rcnn"), ("table7", "retinanet")):
        names = [recipe_of(table, row) for row in PAPERS["cached_transformers"].claim(table).values]
        assert names[1] == f"coco-{detector}-pvt-tiny-cached"
        assert set(names) <= set(registry.names("recipe"))
        costs[detector] = detector_cost(names[0])
    plain, cached = costs["mask-rcnn"], detector_cost("coco-mask-rcnn-pvt-tiny-cached")
    assert plain[1:] == cached[1:]
    assert cached.backbone[0] > plain.backbone[0]
    assert 1 < cached.backbone[1] / plain.backbone[1] < 1.15
    whole = {detector: sum(part[0] for part in one) / 1e6 for detector, one in costs.items()}
    assert round(whole["mask-rcnn"], 1) == 32.9
    assert abs(whole["retinanet"] - 23.0) < 1  # theirs is mmdetection's, which takes P6 from another map


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
        chosen("cached-transformers")


def test_without_a_paper_all_are_listed(capsys):
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    for about, claim in EVERY:
        assert re.search(rf"mnemos reproduce {about.name}/{claim.name}\s", said)
