import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mnemos import registry
from mnemos.config import to_dict
from mnemos.lab.report.differences import difference, differences, differences_of_best
from mnemos.lab.report.results import Comparison, Control, Row, RunRecord
from mnemos.lab.report.roles import memory
from mnemos.lab.report.verdict import _unwritten_command, verdict

PLAIN = {"mean": 0.500, "std": 0.010, "parameters": 70_000, "cache": None}
EQUAL = {"mean": 0.505, "std": 0.010, "parameters": 91_000, "cache": None}
CACHED = {"mean": 0.600, "std": 0.010, "parameters": 91_400, "cache": {"preset": "mnemos", "length": 8}}
UNWRITTEN = CACHED | {"mean": 0.550, "cache": CACHED["cache"] | {"write": False}, "of": ("east",)}


def made(
    cached=CACHED, plain=PLAIN, equal=EQUAL, unwritten=None, emptied=None, seeds=5, majority=None, higher=True, more=()
):
    """A comparison in which no name says what a variant is."""
    variants = {"north": plain, "east": cached, "south": equal, "west": unwritten, **dict(more)}
    variants = {name: one for name, one in variants.items() if one}
    rows = tuple(
        Row(n, one["mean"], one["std"], seeds, one["parameters"], baseline_of=one.get("of", ()))
        for n, one in variants.items()
    )
    controls = (Control("east", "emptied", emptied, 0.010, seeds),) if emptied is not None else ()
    runs = {name: (run(name, one),) for name, one in variants.items()}
    about = {"command": ["mnemos", "compare", "north", "east", "--seeds", "5"]}
    return Comparison("accuracy" if higher else "loss", higher, majority, rows, controls, runs, "c/x.json", about)


def run(name, one):
    mlp = {70_000: 128, 91_000: 210, 91_400: 128}[one["parameters"]]
    recipe = {"name": name, "about": name, "model": {"is": "transformer", "mlp": mlp, "cache": one["cache"]}}
    recipe |= {"data": {"is": "listops"}, "train": {"steps": 10, "seed": len(name)}}
    return RunRecord(Path(name), name, recipe, None, {}, {}, None, None, None)


def test_the_memory_pays_where_it_beats_its_never_written_baseline():
    said = verdict(made(unwritten=UNWRITTEN, emptied=0.45))
    assert said[0].startswith("The memory itself pays in east")
    assert "better than north, a smaller model without a memory" in said[1]
    assert "better than south, of equal parameters without a memory" in said[1]
    assert "better than west, the same model with a cache that is never written, at 0.550" in said[1]
    assert "(+0.050, 95% interval +0.0" in said[1]
    assert "--unwritten" not in said[1]
    assert said[0].endswith("never written, of equal parameters.")


def test_rounding_errors_are_no_change():
    """The mean of +0.01 and −0.01, as the accuracies of two seeds give them, is not exactly 0 in float64."""
    found = made(unwritten=UNWRITTEN)
    pairs = [{"test": {"accuracy": 0.17}, "controls": {"emptied": {"accuracy": x}}} for x in (0.18, 0.16)]
    assert pairs[0]["controls"]["emptied"]["accuracy"] + pairs[1]["controls"]["emptied"]["accuracy"] != 2 * 0.17
    runs = tuple(replace(found.runs["east"][0], result=result) for result in pairs)
    (said,) = [line for line in verdict(replace(found, runs=found.runs | {"east": runs})) if "Emptying" in line]
    assert "Emptying the cache at evaluation makes no difference beyond the spread (+0.000, 95% interval −0.1" in said


def test_slots_have_a_never_written_baseline_too():
    """It lacks the writer's parameters, and there is no control that empties the slots."""
    slots = {"slots": 8, "temperature": 0.25, "write": True}
    written = CACHED | {"cache": slots}
    never = UNWRITTEN | {"parameters": 70_000, "cache": slots | {"write": False}}
    said = verdict(made(cached=written, plain=None, unwritten=never))
    assert said[0] == (
        "The memory itself pays in east: it is better than the same model with slots that are never written, which has "
        "fewer parameters, as it has no writer."
    )
    assert "better than west, the same model with slots that are never written, at 0.550" in said[1]
    assert "mptied" not in said[1]


def test_a_gain_that_the_never_written_baseline_has_too_is_the_branches():
    said = verdict(made(unwritten=UNWRITTEN | {"mean": 0.598}, emptied=0.3))
    assert said[0] == (
        "No gain is shown for the memory of east: its never-written baseline does as well, within the spread between "
        "seeds. What it gains over north and south is its branch's."
    )
    assert "Emptying the cache at evaluation hurts (−0.300" in said[1]
    assert "depends on what its cache holds, and not that the memory pays" in said[1]
    assert "does better" in verdict(made(unwritten=UNWRITTEN | {"mean": 0.650}))[0]


def test_the_memory_must_beat_every_never_written_baseline():
    said = verdict(made(unwritten=UNWRITTEN, more=(("far", UNWRITTEN | {"mean": 0.650}),)))
    assert said[0].startswith("No gain is shown for the memory of east: its never-written baseline does better.")


def test_a_baseline_of_unknown_variants_is_not_called_missing():
    """As in comparisons of older versions whose recipes cannot be read."""
    said = verdict(made(unwritten=UNWRITTEN | {"of": None}))
    assert "pays" not in said[0]
    assert not any("missing" in text for text in said)


def test_emptying_alone_proves_nothing_and_the_missing_run_is_named():
    said = verdict(made(emptied=0.3))
    assert said[0].startswith("east is better than north and south, but nothing can be claimed for its memory")
    assert said[1] == (
        "The never-written baseline of east is missing, so nothing tells what the memory adds. This command adds it: "
        "mnemos compare north east --seeds 5 --out runs/c --unwritten"
    )
    told = replace(made(emptied=0.3), provenance={}, budget=("--equal", "time", "--minutes", "2"))
    command = "mnemos compare north east south --equal time --minutes 2 --unwritten --seeds 5"
    assert verdict(told)[1].endswith(f": {command}")


def test_the_missing_run_has_the_data_steps_and_folder_of_a_comparison_made_in_python():
    recipe = to_dict(registry.load("recipe", "text-cached")())
    recipe |= {"data": recipe["data"] | {"path": "my books", "held_out": 0.1}, "train": recipe["train"] | {"steps": 9}}
    found = made(plain=None, equal=None, seeds=1)
    runs = {"east": (replace(found.runs["east"][0], recipe=recipe),)}
    told = replace(found, runs=runs, provenance={"command": ["my.py"]}, source="mine/comparison.json")
    fields = ["--data.path", "my books", "--data.held-out", "0.1", "--train.steps", "9"]
    last = ["--out", "runs/mine", "--unwritten", "--seeds", "5"]
    assert shlex.split(_unwritten_command(told)) == ["mnemos", "compare", "text-cached", *fields, *last]


def test_the_missing_run_of_a_single_run_has_the_fields_of_its_command():
    told = made(emptied=0.3)
    (east,) = (row for row in told.rows if row.name == "east")
    object.__setattr__(told, "rows", [replace(east, seeds=1)])
    words = ["python", "-m", "mnemos", "train", "east", "--out", "runs/x", "--data.folder", "my photos"]
    run = told.runs["east"][0]
    object.__setattr__(told, "provenance", {})
    object.__setattr__(told, "runs", {"east": [replace(run, provenance={"command": [*words, "--from", "a", "--b=1"]})]})
    fields = ["--data.folder", "my photos", "--train.init-from", "a", "--b=1"]
    last = ["--unwritten", "--seeds", "5"]
    assert shlex.split(_unwritten_command(told)) == ["mnemos", "compare", "east", *fields, *last]
    # Trained for longer, the run has another number of steps than its first command.
    resumed = [{"step": 6, "command": ["mnemos", "train", "--resume", "runs/x", "--train.steps", "9"]}]
    about = {"command": [*words, "--train.steps", "6"], "resumed": resumed}
    longer = replace(run, provenance=about, recipe=run.recipe | {"train": {"steps": 9}})
    object.__setattr__(told, "runs", {"east": [longer]})
    said = shlex.split(_unwritten_command(told))
    assert said == ["mnemos", "compare", "east", *fields[:2], "--train.steps", "9", *last]
    object.__setattr__(told, "runs", {"east": [replace(run, provenance={"command": "mnemos train --resume runs/x"})]})
    assert _unwritten_command(told) == "mnemos compare east --unwritten --seeds 5"


def test_a_memory_that_adds_to_its_branch_but_not_to_equal_parameters():
    said = verdict(made(unwritten=UNWRITTEN, equal=EQUAL | {"mean": 0.601}))
    assert said[0].startswith("The memory of east adds to its branch, but no gain is shown for the whole")
    assert "not better than south" in said[0]


def test_another_variants_baseline_is_not_this_ones():
    said = verdict(made(unwritten=UNWRITTEN | {"of": ("another",)}))
    assert "pays" not in said[0]
    assert "is missing" in said[1]
    assert "west, another model with a memory that is never written" in said[2]


def test_variants_with_a_memory_are_compared_with_each_other():
    """Two lengths of a cache, beside their baselines: which length is better is what the comparison is for."""
    longer = CACHED | {"mean": 0.620, "cache": CACHED["cache"] | {"length": 32}}
    assert "Of the variants with a memory, far is better than east (0.600\u00a0±\u00a00.010)." in verdict(
        made(unwritten=UNWRITTEN, more=(("far", longer),))
    )
    alike = verdict(made(unwritten=UNWRITTEN, more=(("far", longer | {"mean": 0.601}),)))
    assert any("far is not distinguishable from east" in text for text in alike)
    assert not any("Of the variants" in text for text in verdict(made(unwritten=UNWRITTEN)))


def test_an_attention_cache_is_no_baseline_without_a_memory():
    tokens = EQUAL | {"cache": {"images": 1}}
    said = verdict(made(equal=tokens, unwritten=UNWRITTEN))
    assert said[0].startswith("The memory itself pays in east")
    assert "south, another model with a memory" in said[1]


def test_within_the_spread_is_no_gain():
    said = verdict(made(cached=CACHED | {"mean": 0.506}, emptied=0.505))
    assert said[0] == "No gain is shown for the memory of east."
    assert "within the spread between seeds" in said[2]


def test_worse_is_said():
    said = verdict(made(cached=CACHED | {"mean": 0.400}, emptied=0.400))
    assert said[0] == "No gain is shown for the memory of east."
    assert "It is worse than north" in said[2]


def test_one_seed_claims_nothing():
    said = verdict(made(unwritten=UNWRITTEN, emptied=0.2, seeds=1))
    assert said[0].startswith("east reaches a test accuracy of 0.600 (1 seed). It scored better than north (0.500)")
    order = "Every variant was run with one seed, and another seed may give another order, so no difference is shown"
    assert order in said[0], "beside the order, in the first paragraph"
    assert not any(word in " ".join(said) for word in ("pays", "is better than", "ahead of", "hurts", "No gain"))
    assert sum("seed" in text.replace("(1 seed)", "") for text in said) == 1, "the caveat is said once"


def test_a_lower_loss_is_better():
    cached, unwritten = CACHED | {"mean": 1.0}, UNWRITTEN | {"mean": 1.2}
    said = verdict(made(cached=cached, plain=None, equal=None, unwritten=unwritten, emptied=1.5, higher=False))
    assert said[0].startswith("The memory itself pays in east")
    assert "(−0.200, 95% interval −0.2" in said[1]
    assert "hurts (+0.500" in said[1]


def test_no_better_than_the_majority_class():
    low = verdict(made(cached=CACHED | {"mean": 0.1}, majority=0.106))
    assert low[0].endswith(
        "east does no better than always answering the most frequent class (0.106): the task was not learned."
    )
    assert verdict(made(majority=0.106))[-1].startswith("For scale")


def test_what_learned_nothing_is_not_ranked():
    said = verdict(
        made(cached=CACHED | {"mean": 0.1}, plain=PLAIN | {"mean": 0.09}, equal=None, majority=0.106, seeds=1)
    )
    assert said[0].startswith("north and east do no better than")
    some = verdict(
        made(cached=CACHED | {"mean": 0.2}, plain=PLAIN | {"mean": 0.09}, equal=None, majority=0.106, seeds=1)
    )
    assert some[0].startswith(
        "east reaches a test accuracy of 0.200 (1 seed). It scored better than north (0.090). Every variant was run"
    )


def test_without_results_or_baselines():
    nothing = Row("a", math.nan, math.nan, 0)
    assert "has a test result yet" in verdict(Comparison("accuracy", True, None, (nothing,), (), {}, "test"))[0]
    rows = (Row("a", 0.5, 0.01, 5), Row("b", 0.7, 0.01, 5))
    said = verdict(Comparison("accuracy", True, None, rows, (), {}, "test"))
    assert said[0].startswith("b reaches a test accuracy of 0.700")
    assert "It is better than a (0.500" in said[0]


def test_numbers_without_run_folders_are_read_by_their_controls():
    rows = (Row("a", 0.5, 0.01, 5, 10.0), Row("b", 0.7, 0.01, 5, 10.0))
    controls = (Control("b", "emptied", 0.2, 0.01, 5),)
    said = verdict(Comparison("accuracy", True, None, rows, controls, {}, "test"))
    assert said[0].startswith("b is better than a, but nothing can be claimed for its memory")
    assert "mnemos compare a b --unwritten" in said[1]


def test_interval_is_welch_s():
    # Worked by hand: se² = .034²/3 + .007²/3, 2.1692 degrees of freedom, t = 3.9964.
    a, b = Row("a", 0.559, 0.007, 3), Row("b", 0.512, 0.034, 3)
    d = difference(a, b, higher_is_better=True)
    assert d.value == pytest.approx(0.047)
    assert (d.low, d.high) == (pytest.approx(-0.0331, abs=1e-4), pytest.approx(0.1271, abs=1e-4))
    assert d.says == "alike"
    assert difference(b, a, higher_is_better=False).value == pytest.approx(0.047)


def test_a_difference_among_many_must_be_greater():
    """p is 0.03 for each of them: shown alone, not among three."""
    more = CACHED | {"mean": 0.516, "std": 0.0092}
    alone = verdict(made(cached=more, equal=None))
    assert "It is better than north" in alone[2]
    plain = {name: PLAIN for name in ("second", "third")}
    said = verdict(made(cached=more, equal=None, more=plain.items()))
    assert "It cannot be distinguished from north, a smaller model without a memory, at 0.500" in said[2]
    assert "corrected for the number of comparisons (Holm), p is 0.091" in said[2]


def test_many_seeds_approach_the_normal_interval():
    a, b = Row("a", 1.0, 1.0, 31), Row("b", 0.0, 1.0, 31)
    d = difference(a, b, higher_is_better=True)
    assert d.high - d.value == pytest.approx(2.0003 * math.sqrt(2 / 31), rel=1e-3)  # t at 60 degrees of freedom


def test_text_is_compared_with_what_no_learning_gives():
    known = {"byte unigrams": 4.5, "byte bigrams": 3.5, "bz2 of the text alone": 2.5}
    told = replace(made(cached=CACHED | {"mean": 4.45}, equal=None, higher=False), reference=known)
    said = verdict(replace(told, metric="bits per byte"))
    assert "east has learned no more than letter frequencies: 4.450 bits per byte, and byte unigrams have" in said[0]
    told = replace(told, rows=[replace(row, mean=3.4) for row in told.rows])
    scale = (
        "For scale, what no learning gives: byte unigrams 4.500, byte bigrams 3.500 and bz2 of the text alone 2.500."
    )
    assert verdict(told)[-1] == scale


def test_sums_and_segments_are_memories_where_attention_is_causal():
    def remembers(attention, causal=True):
        recipe = {"model": {"attention": attention, "causal": causal}}
        one = RunRecord(Path("x"), "x", recipe, None, {}, {}, None, None, None)
        rows = (Row("x", 0.5, 0.0, 1, 1.0),)
        return memory(Comparison("accuracy", True, None, rows, (), {"x": (one,)}, ""), "x") == "other"

    assert remembers({"is": "linear"})
    assert remembers({"is": "relative", "memory": 4})
    assert remembers({"is": "compressive"})
    assert not remembers({"is": "relative", "memory": 0})
    assert not remembers({"is": "softmax", "window": 32})
    assert not remembers({"is": "linear"}, causal=False)
    assert not remembers({"is": "of-a-plug-in"})
    assert not remembers(None)


def test_the_best_of_equal_variants_is_rarely_told_apart():
    """It is chosen by its score, so p is corrected over all pairs and not over those of the best alone."""
    rng = np.random.default_rng(0)
    shown = {"all pairs": 0, "pairs of the best": 0}
    for drawn in rng.normal(0.5, 0.1, (200, 8, 10)):
        rows = [Row(str(i), float(x.mean()), float(x.std(ddof=1)), 10, 1) for i, x in enumerate(drawn)]
        best, others = differences_of_best(rows, True)
        assert best.mean == max(row.mean for row in rows)
        shown["all pairs"] += any(d.says == "better" for _, d in others)
        shown["pairs of the best"] += any(d.says == "better" for d in differences(best, [r for r, _ in others], True))
    assert shown["all pairs"] <= 0.05 * 200
    assert shown["pairs of the best"] > 0.1 * 200
