"""What a report says first: each sentence in a run in which it holds, and in one in which it would be false."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mnemos.lab.compare.comparison import MetricByX, Row, ScoreAt
from mnemos.lab.compare.significance import UNBOUNDED, spread
from mnemos.lab.report.read import Results
from mnemos.lab.report.run_records import RunRecord
from mnemos.lab.report.verdict import caveats, differences_of, headline, summary_table
from mnemos.lab.run.files import Provenance, Result

PLAIN = Row("north", 0.500, 0.010, 5, 70_000)
CACHED = Row("east", 0.600, 0.010, 5, 91_400, memory="cache")
UNWRITTEN = Row("west", 0.550, 0.010, 5, 91_400, baseline_of=("east",))
FAR = replace(CACHED, name="far", mean=0.56), replace(UNWRITTEN, name="of far", mean=0.55, baseline_of=("far",))
ONE_SEED = [replace(row, seeds=1, std=math.nan) for row in (PLAIN, CACHED, UNWRITTEN)]
DIVERGED = replace(PLAIN, mean=math.nan, std=math.nan)


def made(*rows, higher=True, **fields):
    """A comparison in which no name says what a variant is."""
    fields = {"bounds": (0.0, 1.0) if higher else UNBOUNDED} | fields
    return Results("accuracy" if higher else "loss", higher, rows, against=rows[0].name, **fields)


def with_result(result, provenance=None):
    return RunRecord(Path("x"), "x", {}, provenance, {}, {}, None, result)


def of_rows(rows, counts, targets=0):
    """The runs of rows, which scored so many rows of the test split each; `targets` in a row, if that is known."""
    results = (
        Result(
            test={"accuracy": row.mean},
            scored_rows={"test": n},
            scored_targets={"test": targets * n} if targets else {},
        )
        for row, n in zip(rows, counts, strict=True)
    )
    return {row.name: (with_result(result),) for row, result in zip(rows, results, strict=True)}


WHOLE = (CACHED, UNWRITTEN)
ALONE = replace(UNWRITTEN, baseline_of=())
SHARED = Provenance(warnings=["the same data in two splits: a and b; remove one"])


def at(row, mean, **fields):
    return replace(row, mean=mean, **fields)


def scored(rows, targets=0):
    return made(*WHOLE, scored_rows={"test": rows}, scored_targets={"test": targets} if targets else {})


def ran(provenance):
    return made(PLAIN, records={"north": (with_result(None, provenance),)})


def along(row, mean):
    return replace(row, along=MetricByX("accuracy", "words", (ScoreAt(4, mean, math.nan, 1),)))


# What is said of some rows, and other rows of which it would be false.
HEADLINES = {
    "helps": ("east helps", made(*WHOLE), made(at(CACHED, 0.56), UNWRITTEN)),
    "harms": ("east harms", made(CACHED, at(UNWRITTEN, 0.7)), made(*WHOLE)),
    "not shown": ("east is not shown to help", made(at(CACHED, 0.552), UNWRITTEN), made(*WHOLE)),
    "a lower loss": ("east helps", made(at(CACHED, 0.5), UNWRITTEN, higher=False), made(*WHOLE[::-1], higher=False)),
    "one seed": ("cannot be judged by one seed", made(*ONE_SEED), made(*WHOLE)),
    "equal seeds": ("without a spread", made(*(replace(row, std=0.0) for row in WHOLE)), made(*ONE_SEED)),
    "baseline": ("0.550 of its never-written baseline west", made(*WHOLE), made(PLAIN, CACHED)),
    "several": ("east helps (+0.050", made(*WHOLE, *FAR), made(*FAR)),
    "rows": ("over 40 rows", scored(40, 40), scored(50, 50)),
    "rows that hold what is averaged": ("accuracy of 40 rows", scored(40), scored(40, 120)),
    "targets": ("over 120 targets", scored(40, 120), scored(40)),
    "without learning": (
        "Without learning: byte bigrams 0.300, byte unigrams 0.500.",
        made(PLAIN, higher=False, reference={"byte unigrams": 0.5, "byte bigrams": 0.3}),
        made(PLAIN, higher=False),
    ),
    "of memories": ("Without learning: majority class 0.100.", made(*WHOLE, majority=0.1), made(*WHOLE)),
    "shown": ("1 of 1 difference to north", made(PLAIN, ALONE), made(PLAIN, DIVERGED)),
    "order": ("west 0.550, north 0.500", made(PLAIN, ALONE), made(PLAIN, at(PLAIN, 0.4, name="west"))),
    "a memory and its baseline along an axis": (
        "At 4 words: 0.750 against 0.250.",
        made(*map(along, WHOLE, (0.75, 0.25))),
        made(along(CACHED, 0.75), UNWRITTEN),
    ),
    "no result": ("No variant has a finite", made(Row("a", math.nan, math.nan, 0)), made(PLAIN)),
}
CAVEATS = {
    "rank": ("another order: every variant", made(*ONE_SEED), made(*WHOLE)),
    "rank of one": ("another order: east", made(PLAIN, ONE_SEED[1]), made(*ONE_SEED)),
    "lacking": ("what the memory adds: east", made(PLAIN, CACHED), made(PLAIN, *WHOLE)),
    "baseline failed": ("finite test accuracy: west", made(CACHED, at(UNWRITTEN, math.nan)), made(*WHOLE)),
    "diverged": ("finite test accuracy: north", made(CACHED, DIVERGED), made(CACHED, replace(DIVERGED, seeds=0))),
    "no better": (
        "No better than always answering the majority class, 0.650",
        made(*WHOLE, majority=0.65),
        made(*WHOLE, majority=0.3),
    ),
    "n-grams": (
        "Not 2% better than byte unigrams",
        made(CACHED, higher=False, reference={"byte unigrams": 0.61}),
        made(CACHED, higher=False, reference={"byte unigrams": 0.62}),
    ),
    "shared files": ("The same data in two splits: a and b; remove one.", ran(SHARED), ran(Provenance())),
}
TABLES = {
    "reference": ("to north", made(PLAIN, CACHED), made(DIVERGED, CACHED)),
    "one test": ("interval and p.", made(PLAIN, CACHED), made(*WHOLE, *FAR)),
    "corrected": ("corrected for 3 comparisons", made(*WHOLE, *FAR), made(PLAIN, CACHED)),
    "its role": ("never-written baseline of east", made(*WHOLE), made(PLAIN, CACHED)),
    "without learning": ("the training mean", made(*WHOLE, reference={"the training mean": 0.2}), made(*WHOLE)),
    "bounds": ("intervals end at 0 and 1", made(at(CACHED, 0.99, std=0.02)), made(CACHED)),
    "no bounds": (
        "+0.633 to +1.000",
        made(*(at(row, mean, std=0.1, seeds=3) for row, mean in zip(WHOLE, (0.96, 0.1), strict=True))),
        made(*WHOLE),
    ),
}
SAID = [
    pytest.param(say, *case, id=f"{say.__name__}: {name}")
    for say, cases in ((headline, HEADLINES), (caveats, CAVEATS), (summary_table, TABLES))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("say", "words", "holds", "fails"), SAID)
def test_a_sentence_is_said_where_it_holds_and_only_there(say, words, holds, fails):
    assert words in "\n".join([*say(holds)] if say is caveats else [say(holds)])
    assert words not in "\n".join([*say(fails)] if say is caveats else [say(fails)])


def test_headline_table_and_intervals_say_the_same():
    """One family of tests: an interval excludes 0 exactly where p (Holm) is below 5 %, and both are in both places."""
    draw = np.random.default_rng(0)
    seen = set()
    for shift, n in itertools.product((0.0, 0.02, 0.03, 0.05), (2, 3, 5)):
        scores = {
            name: spread((0.5 + shift * i + 0.02 * draw.normal(size=n)).tolist()) for i, name in enumerate("abcd")
        }
        roles = {"a": (), "b": ("c",), "c": (), "d": ()}
        results = made(*(Row(name, *one, baseline_of=roles[name]) for name, one in scores.items()))
        tests = differences_of(results)
        assert {name: other.name for name, (other, _) in tests.items()} == {"b": "a", "c": "b", "d": "a"}
        p = sorted(one.p for _, one in tests.values())
        said, table = headline(results), summary_table(results)
        for name, (_, one) in tests.items():
            low, high = one.interval
            assert one.p_holm == pytest.approx(max(min(1, (3 - i) * p[i]) for i in range(p.index(one.p) + 1)))
            assert (low > 0 or high < 0) == (one.p_holm < 0.05)
            ends = [f"{end:+.3f}".replace("-", "−") for end in one.interval]
            assert " to ".join(ends) in table
            if name == "c":
                assert " to ".join(ends) in said
                verb = "is not shown" if low <= 0 <= high else "helps" if low > 0 else "harms"
                assert verb in said
                seen.add(verb)
    assert {"is not shown", "helps"} <= seen


def test_a_baseline_is_not_tested_twice_against_its_memory():
    assert {name: other.name for name, (other, _) in differences_of(made(CACHED, UNWRITTEN, PLAIN)).items()} == {
        "east": "west",
        "north": "east",
    }


@pytest.mark.parametrize(("described", "order"), [({}, "far 0.900, near 0.800"), (None, "near 0.800, far 0.900")])
def test_scores_along_an_axis_are_ranked_by_their_own_direction(described, order):
    """A comparison by a loss, whose axis has an accuracy; a metric of unknown direction is not ranked."""
    metric = "reach" if described is None else "accuracy"
    rows = [
        replace(PLAIN, name=name, along=MetricByX(metric, "words", (ScoreAt(4, x, math.nan, 1),)))
        for name, x in (("near", 0.8), ("far", 0.9))
    ]
    assert order in headline(made(*rows, higher=False, records=of_rows(rows, (9, 9))))


@pytest.mark.parametrize(("targets", "interval"), [(1, True), (3, False)])
def test_only_a_share_of_rows_has_an_interval_of_rows(targets, interval):
    """An accuracy of 1 is a whole number of rows, also where it is one of the tokens in them."""
    row = replace(PLAIN, mean=1.0, seeds=1)
    said = summary_table(made(row, records=of_rows([row], [40], targets)))
    assert ("0.912 to 1.000" in said) == interval
    assert ("Wilson" in said) == interval


def test_p_of_the_table_is_rounded():
    assert re.search(r'data-head="p">&lt; 0.001<', summary_table(made(PLAIN, CACHED)))
