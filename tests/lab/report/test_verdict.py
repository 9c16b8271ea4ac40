"""What a report says: differences with their intervals, whose baseline a row is, what one seed does not show."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mnemos.lab.compare.comparison import Control, Row
from mnemos.lab.compare.significance import UNBOUNDED
from mnemos.lab.report.read import Results
from mnemos.lab.report.run_records import RunRecord
from mnemos.lab.report.verdict import arms, caveats, headline, verdict
from mnemos.lab.run.files import Result

PLAIN = Row("north", 0.500, 0.010, 5, 70_000, baseline_of=())
CACHED = Row("east", 0.600, 0.010, 5, 91_400, baseline_of=(), memory="cache")
UNWRITTEN = Row("west", 0.550, 0.010, 5, 91_400, baseline_of=("east",))


def made(*rows, higher=True, emptied=None, **fields):
    """A comparison in which no name says what a variant is."""
    controls = (Control("east", "emptied", emptied, 0.010, 5),) if emptied is not None else ()
    fields = {"bounds": (0.0, 1.0) if higher else UNBOUNDED} | fields
    return Results("accuracy" if higher else "loss", higher, rows, controls=controls, against=rows[0].name, **fields)


def with_result(result):
    return RunRecord(Path("x"), "x", {}, None, {}, {}, None, result, None)


def test_what_a_memory_adds_is_the_difference_to_its_never_written_baseline():
    said = verdict(made(PLAIN, CACHED, UNWRITTEN, emptied=0.45))
    assert said[0] == (
        "What the memory of east adds to its never-written baseline west, in test accuracy: +0.050, 95% interval "
        "+0.035 to +0.065, p 4.8e-05 (one comparison, not corrected): better (5 seeds)."
    )
    assert said[1].startswith("east has a test accuracy of 0.600\u00a0±\u00a00.010 (5 seeds), the best of 3. Against ")
    assert "north (0.500\u00a0±\u00a00.010): +0.100, 95% interval +0.085 to +0.115" in said[1]
    assert said[2].startswith("east with its cache emptied at evaluation: −0.150, 95% interval −0.165 to −0.135")
    assert said[1].count("(Holm, 3 comparisons)") == 2, "over all pairs: the best is chosen by the same scores"
    assert "depends on what its memory holds, not that it is better than one without" in said[2]


def test_the_baselines_of_several_memories_are_corrected_together():
    more = replace(CACHED, name="far", mean=0.56), replace(UNWRITTEN, name="of far", mean=0.55, baseline_of=("far",))
    said = verdict(made(CACHED, UNWRITTEN, *more))[0]
    alone = verdict(made(*more))[0]
    assert "of far adds to its never-written baseline of far, in test accuracy: +0.010" in said
    both = re.search(r", p (\S+) \(Holm, 2 comparisons\)", said[said.index("of far") :])[1]
    assert both == re.search(r", p (\S+) \(one comparison, not corrected\):", alone)[1], (
        "the greatest p is not multiplied"
    )
    assert "no significant difference" in said


def test_a_memory_without_its_baseline_is_named():
    said = caveats(made(PLAIN, CACHED))
    assert said == ["No never-written baseline shows what the memory adds: east. Compare with --unwritten."]
    assert not any("--unwritten" in text for text in caveats(made(PLAIN, CACHED, UNWRITTEN)))


def test_without_recorded_baselines_there_is_no_verdict():
    """As in comparisons of older versions whose recipes cannot be read."""
    unknown = made(PLAIN, CACHED, replace(UNWRITTEN, baseline_of=None), emptied=0.3)
    assert verdict(unknown) == []
    assert caveats(unknown)[0].startswith("It is not recorded which variant is the never-written baseline of which")


def test_only_what_is_not_recorded_is_not_judged():
    """A further run beside a comparison does not say whether it is a baseline; the recorded pair stays judged."""
    partly = made(CACHED, UNWRITTEN, replace(PLAIN, baseline_of=None))
    assert headline(partly).startswith("The memory of east helps")
    assert verdict(partly)[0].startswith("What the memory of east adds to its never-written baseline west")
    said = "It is not recorded whether north is a never-written baseline, so only memories with a recorded one are"
    assert caveats(partly)[0].startswith(said)


def test_only_pairs_that_can_be_tested_are_counted():
    one = replace(UNWRITTEN, name="single", seeds=1, std=math.nan, baseline_of=("far",))
    found = verdict(made(CACHED, UNWRITTEN, replace(PLAIN, seeds=1, std=math.nan)))
    assert not any("Holm" in text for text in found), "of three pairs one has a p"
    found = verdict(made(CACHED, UNWRITTEN, replace(CACHED, name="far", mean=0.56), one))
    assert "Holm" not in found[0]
    assert "(Holm, 3 comparisons)" in found[1], "of six pairs"


def test_several_memories_are_one_sentence():
    more = replace(CACHED, name="far", mean=0.56), replace(UNWRITTEN, name="of far", mean=0.55, baseline_of=("far",))
    said = headline(made(CACHED, UNWRITTEN, *more))
    assert said.startswith("The memory of east helps (+0.050, 95% interval +0.035 to +0.065); that of far is not shown")
    assert said.endswith("that is never written, by accuracy over the whole test split.")


@pytest.mark.parametrize(("described", "order"), [({}, "far 0.900, near 0.800"), (None, "near 0.800, far 0.900")])
def test_scores_along_an_axis_are_ranked_by_their_own_direction(described, order):
    """A comparison by a loss, whose axis has an accuracy; a metric of unknown direction is not ranked."""
    metric = "reach" if described is None else "accuracy"
    records = {
        name: (with_result(Result(artifacts={"along": {"metric": metric, "x": "words", "values": [[4, value]]}})),)
        for name, value in (("near", 0.8), ("far", 0.9))
    }
    rows = [replace(PLAIN, name=name) for name in records]
    assert order in headline(made(*rows, higher=False, records=records))


def test_one_seed_ranks_nothing():
    rows = [replace(row, seeds=1, std=math.nan) for row in (PLAIN, CACHED, UNWRITTEN)]
    said = verdict(made(*rows))
    assert said[0].endswith("in test accuracy: +0.050: no interval, so nothing is shown (1 seed).")
    assert caveats(made(*rows)) == [
        "One seed ranks nothing, and another may give another order: every variant. Compare with --seeds 5."
    ]
    assert "cannot be judged by one seed: accuracy over the whole test split 0.600, against 0.550" in headline(
        made(*rows)
    )
    assert not any(word in " ".join(said) for word in (": better", ": worse", "Holm"))
    assert "another order: east." in caveats(made(PLAIN, rows[1]))[0]


def test_a_lower_loss_is_better():
    said = verdict(made(replace(CACHED, mean=1.0), replace(UNWRITTEN, mean=1.2), higher=False, emptied=1.5))
    assert ": −0.200, 95% interval −0.2" in said[0]
    assert ": better (5 seeds)" in said[0]
    assert "emptied at evaluation: +0.500" in said[-1]
    assert ": worse." in said[-1]


def test_rounding_errors_are_no_change():
    """The mean of +0.01 and −0.01, as the accuracies of two seeds give them, is not exactly 0 in float64."""
    assert 0.18 + 0.16 != 2 * 0.17
    pairs = [Result(test={"accuracy": 0.17}, controls={"emptied": {"accuracy": x}}) for x in (0.18, 0.16)]
    said = verdict(made(CACHED, UNWRITTEN, records={"east": tuple(map(with_result, pairs))}))
    assert "emptied at evaluation: +0.000, 95% interval −0.127 to +0.127: no significant difference" in said[-1]


@pytest.mark.parametrize(
    ("score", "learned"),
    [
        (0.1, "east does no better than always answering the most frequent class (0.106): the task was not learned."),
        (0.2, ""),
    ],
)
def test_what_learned_nothing_is_said_and_not_ranked(score, learned):
    results = made(replace(PLAIN, mean=0.09), replace(CACHED, mean=score), majority=0.106)
    said = verdict(results)
    if learned:
        assert caveats(results)[0] == learned.replace("east does", "north and east do")
        assert not any("the best of" in text for text in [*said, headline(results)])
    else:
        assert said[0].startswith("east has a test accuracy of 0.200")
        assert "north does no better than" in caveats(results)[0]


@pytest.mark.parametrize(
    ("majority", "rows", "interval"), [(0.1, None, True), (None, None, False), (None, [10, 30], True)]
)
def test_only_a_share_of_rows_has_an_interval_of_rows(majority, rows, interval):
    """An accuracy of 1 is a whole number of rows, also where it is one of the tokens in them."""
    along = {"along": {"metric": "accuracy", "x": "d", "values": [[1, 1.0], [2, 1.0]], "rows": rows}}
    one = Result(test={"accuracy": 1.0}, scored_rows={"test": 40}, artifacts=along if rows else {})
    row = replace(PLAIN, mean=1.0, seeds=1)
    said = arms(made(row, majority=majority, records={"north": (with_result(one),)}))
    assert ("0.912 to 1.000" in said) == interval


def test_text_is_compared_with_what_no_learning_gives():
    known = {"byte unigrams": 4.5, "byte bigrams": 3.5, "bz2 of the text alone": 2.5}
    told = replace(made(replace(CACHED, mean=4.45), higher=False, reference=known), metric="bits per byte")
    said = caveats(told)[0]
    assert "east has learned no more than letter frequencies: 4.450 bits per byte, and byte unigrams have" in said
    assert not any("letter" in text for text in caveats(replace(told, rows=(replace(told.rows[0], mean=3.4),))))


def test_without_results():
    none = made(Row("a", math.nan, math.nan, 0))
    assert headline(none) == "No variant has a test result yet."
    assert verdict(none) == caveats(none) == []
    assert arms(none) == ""


def test_intervals_end_at_the_bounds_of_the_metric():
    """Student's t reaches above 1 for shares near it; the interval of a difference of two shares ends at 1 too."""
    near = replace(CACHED, mean=0.96, std=0.06, seeds=3), replace(UNWRITTEN, mean=0.10, std=0.06, seeds=3)
    said = arms(made(*near))
    assert "0.811 to 1.000" in said
    assert "0.000 to 0.249" in said
    assert said.count("intervals end at 0 and 1") == 1
    wide = tuple(replace(row, std=0.1) for row in near)
    assert "+0.633 to +1.000" in arms(made(*wide))
    assert "+0.633 to +1.000" in verdict(made(*wide))[0]
    losses = arms(replace(made(*near), metric="loss", bounds=UNBOUNDED))
    assert "0.811 to 1.109" in losses
    assert "intervals end" not in losses


def test_the_first_sentence_and_the_table_are_of_the_whole_split():
    said = headline(made(PLAIN, CACHED, UNWRITTEN))
    assert said == (
        "The memory of east helps: accuracy over the whole test split 0.600, against 0.550 for the same model with a "
        "memory that is never written (+0.050, 95% interval +0.035 to +0.065)."
    )
    assert headline(made(PLAIN, replace(UNWRITTEN, baseline_of=()))).startswith(
        "west has the best test accuracy, 0.550"
    )
    assert "is not shown to help" in headline(made(CACHED, replace(UNWRITTEN, mean=0.599)))
    assert "harms" in headline(made(CACHED, replace(UNWRITTEN, mean=0.7)))
