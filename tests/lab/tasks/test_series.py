"""Series: what is read and predicted at each step, splits by time, naive scores, a run from file to forecast."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses

from mnemos.config import from_dict, to_dict
from mnemos.lab.cli import main
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.series import ERROR, MEAN, REPEAT, SeriesConfig
from mnemos.types import InputError

pytest.importorskip("datasets")
STEPS = 400
WAVE = np.sin(np.arange(STEPS) / 3)
COLUMNS = {
    "time": [f"2024-01-01 {i}" for i in range(STEPS)],
    "a": 5 + 3 * WAVE,
    "b": np.random.default_rng(0).normal(size=STEPS),
    "on": ["yes", "no"] * 200,
}


def write(path, **columns):
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "s.csv", **COLUMNS)


def test_a_column_that_only_grows_or_falls_is_read_where_it_is_named(tmp_path):
    t = np.arange(STEPS)
    for seconds in (1e9 + 60.5 * t, 1e9 - 60.5 * t):
        path = write(tmp_path / "s.csv", seconds=seconds, level=np.sin(t / 3), counts=np.maximum(t - 1, 0))
        task = SeriesConfig(path).build()
        assert task.prepared.columns == ("level", "counts"), "counts does not grow at its first step"
        assert any("left out: seconds (only grows or falls" in line for line in task.about)
        assert SeriesConfig(path, columns=("seconds", "level")).build().sizes["features"] == 2
        assert SeriesConfig(path, target="seconds").build().sizes["features"] == 3
        assert SeriesConfig(write(tmp_path / "alone.csv", meter=seconds)).build().sizes["features"] == 1
        with_gaps = (["" if i in gaps else x for i, x in enumerate(seconds)] for gaps in ({7}, range(3, STEPS)))
        read = [SeriesConfig(write(tmp_path / "g.csv", s=s, level=t % 5)).build().prepared.columns for s in with_gaps]
        assert read == [("level",), ("s", "level")], "a gap makes no other column of it; three values rise by chance"


def test_a_step_is_predicted_from_the_steps_before(table):
    task = SeriesConfig(table, segment=16, longest=50).build()
    values = np.stack([COLUMNS["a"], COLUMNS["b"]], 1)
    values = (values - values[:280].mean(0)) / values[:280].std(0)
    assert task.sizes == {"vocab_size": 2, "features": 2, "max_length": 16}
    for split, first in (("valid", 280), ("test", 340)):
        batches = list(task.batches(split, 8))
        inputs, targets = (torch.cat([getattr(b, n)[0] for b in batches]) for n in ("inputs", "targets"))
        valid = ~targets[:, 0].isnan()
        assert sum(map(task.count, batches)) == task.size(split) == valid.sum() == 60
        np.testing.assert_allclose(targets[valid], values[first : first + 60], atol=1e-5)
        np.testing.assert_allclose(inputs[valid], values[first - 1 : first + 59], atol=1e-5)
    first, second = task.train_batch(0, 3, 0), task.train_batch(1, 3, 0)
    assert first.reset.all()
    assert not second.reset.any(), "the state is carried"
    assert torch.equal(second.inputs[:, 0], first.targets[:, -1])


def test_the_score_of_repeating_is_beside_that_of_the_model(table):
    task = SeriesConfig(table, columns=("a",)).build()
    a = (COLUMNS["a"] - COLUMNS["a"][:280].mean()) / COLUMNS["a"][:280].std()
    assert task.reference[REPEAT] == pytest.approx(math.sqrt(np.mean((a[340:] - a[339:-1]) ** 2)), rel=1e-5)
    assert task.reference[MEAN] == pytest.approx(math.sqrt(np.mean(a[340:] ** 2)), rel=1e-5)
    sums = torch.zeros(2)
    for batch in task.batches("test", 4):  # a model that repeats
        sums += torch.stack(ERROR.sums(None, batch.inputs, batch))
        outputs = batch.inputs.clone().requires_grad_()
        task.loss(None, outputs, batch).backward()
        assert outputs.grad.isfinite().all()
    assert ERROR.value(sums.tolist()) == pytest.approx(task.reference[REPEAT], rel=1e-5)


def test_one_column_or_a_class_is_predicted(table):
    one = SeriesConfig(table, target="b").build()
    assert (one.sizes["vocab_size"], one.sizes["features"]) == (1, 2)
    task = SeriesConfig(table, target="on", segment=30).build()
    assert (task.sizes["vocab_size"], task.metrics[0].name, task.reference) == (2, "accuracy", {"majority class": 0.5})
    batch = next(task.batches("test", 1))
    assert batch.targets[0].tolist() == [1, 0] * 15
    assert batch.inputs[0, 0, 1].item() == pytest.approx(task.values[340, 1].item()), "the step itself is read"


def test_gaps_have_the_value_before_and_columns_are_named(tmp_path):
    path = write(tmp_path / "g.csv", a=["", 1, 2, "", "", 5, *range(30)], b=range(36))
    task = SeriesConfig(path, columns=("a",)).build()
    mean, std = task.prepared.mean[0], task.prepared.std[0]
    assert mean == pytest.approx(np.mean([1, 2, 2, 2, 5, *range(20)])), "of training, and of no gap at its start"
    assert task.values[0] == 0, "its mean, and no value from the future"
    assert (task.values[1:7, 0] * std + mean).round().tolist() == [1, 2, 2, 2, 5, 0]


@pytest.mark.parametrize(
    ("days", "words"),
    [
        ((*range(1, 11), *range(13, 31)), "warning: day has 1 hole .* from 2024-01-10T00:00:00 to 2024-01-13T00:00:00"),
        ([1 + i // 2 for i in range(28)], "warning: day stands still, from 2024-01-01T00:00:00 to 2024-01-01T00:00:00"),
        (range(28, 0, -1), "warning: day goes back, from 2024-01-28T00:00:00 to 2024-01-27T00:00:00: the rows must"),
        (range(1, 29), None),
        ((*range(1, 28), 28.5), None),
        ([1, *[""] * 27], None),
    ],
)
def test_dates_that_the_model_does_not_see_are_looked_at(tmp_path, days, words):
    dates = ["" if day == "" else np.datetime64("2023-12-31T00") + np.timedelta64(int(24 * day), "h") for day in days]
    columns = {"day": dates, "a": WAVE[:28], "b": WAVE[1:29]}
    columns["second"] = [f"2024-01-01 00:00:{i:02}" for i in range(28)]
    about = SeriesConfig(write(tmp_path / "s.csv", **columns), segment=4).build().about
    warned = [line for line in about if line.startswith("warning")]
    assert len(warned) == (words is not None)
    assert "" not in about
    assert words is None or re.match(words, warned[0])


LATE = ["" if i < 300 else i % 3 for i in range(STEPS)]
EARLY = [i % 5 / 2 if i < 300 else "" for i in range(STEPS)]


@pytest.mark.parametrize(
    ("columns", "change", "words"),
    [
        ({"a": range(9)}, {}, "found 9 in all"),
        ({"a": WAVE, "late": LATE}, {}, "in the training split, rows 1 to 280, found none in late; name the others"),
        ({"a": WAVE, "b": EARLY}, {"target": "b"}, "expected a value in the test split, found none of b"),
        (COLUMNS, {"target": "time"}, r"found 400 different ones in 400 rows of time; name another column$"),
        ({"a": WAVE, "no": [""] * STEPS}, {"target": "no"}, "found 0 different ones in 0 rows of no; name another"),
        (COLUMNS, {"target": "onn"}, r"a column in data.target, found 'onn'; did you mean 'on'\?$"),
        ({"on": COLUMNS["on"]}, {}, "expected columns of numbers, found none; it has the columns on, of which none"),
        ({"on": COLUMNS["on"]}, {"target": "on"}, "expected columns of numbers, found none"),
        (COLUMNS, {"columns": ("a", "bb")}, r"the column 'bb' of data.columns, found no such column; did you mean 'b'"),
        (COLUMNS, {"columns": ("on",)}, "the column 'on' of data.columns, found other values in it; it has the"),
        ({"a": range(13)}, {}, "expected at least two steps in each split, found 13 in all"),
        (COLUMNS, {"held_out": 0.5}, "data.held_out: expected 0 < held_out < 0.5, found held_out 0.5"),
    ],
)
def test_columns_that_cannot_be_learned_are_refused(tmp_path, columns, change, words):
    refuses(words, SeriesConfig(write(tmp_path / "s.csv", **columns), **change).build)


def test_a_series_is_learned_and_continued(table, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = f"--data.path {table} --data.columns a --data.segment 16 --data.longest 64 --model.dim 16 --model.mlp 32"
    words += " --model.layers 1 --train.steps 60 --optim.lr 2e-2 --out run"
    assert main(["train", "series", *words.split()]) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["test"]["error"] < 0.8 * result["reference"][REPEAT]
    assert "repeating the last value" in capsys.readouterr().out
    assert main(["report", "run"]) == 0
    said = f"Test error over {result['scored_targets']['test']} steps"
    page = (tmp_path / "run/report.html").read_text()
    assert "Without learning: repeating the last value" in page
    assert said in page
    assert result["scored_targets"]["test"] > result["scored_rows"]["test"]
    capsys.readouterr()
    assert main(["predict", "run", table, "--length", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{table}: the next 2 steps"
    wanted = 5 + 3 * np.sin(np.array([400, 401]) / 3)
    np.testing.assert_allclose([float(line.split()[1]) for line in lines[2:]], wanted, atol=1.5)


def test_before_the_first_step_is_no_value_to_repeat(table, tmp_path):
    run = SeriesConfig(table, ("b",)).build().preprocessing()
    steps = [5.0, 0, 0, 0, 0, 0]
    scored = SeriesConfig(write(tmp_path / "new.csv", b=steps), ("b",)).build_to_score("test", run)
    value = (np.array(steps) - run.mean[0]) / run.std[0]
    before = np.append(0, value[:-1])  # as the model reads them
    assert scored.reference[REPEAT] == pytest.approx(math.sqrt(np.mean((value - before) ** 2)), rel=1e-5)


def test_a_column_that_never_changes_is_read_and_not_magnified(tmp_path):
    path = write(tmp_path / "c.csv", a=[0.1] * 280 + [0.2] * 120, b=COLUMNS["b"], same=[1.0] * STEPS)
    task = SeriesConfig(path).build()
    assert task.prepared.columns == ("a", "b", "same")
    assert task.values.abs().max() < 10


def test_a_forecast_reads_segments_as_the_training_did(table, tmp_path):
    calls = []

    def model(x, state):
        calls.append(x.shape[1])
        return torch.zeros(1, x.shape[1], 2), state

    options = {"length": 3, "top": 3}
    about = SeriesConfig(table, columns=("a", "b"), segment=150).build().preprocessing()
    assert from_dict(Preprocessing, to_dict(about)) == about
    forecast = next(about.predict(model, [Path(table)], options))
    _, names, *rows = (line.split() for line in forecast.text.split("\n"))
    assert (names, len(rows), len(forecast.details["next"])) == (["step", "a", "b"], 3, 3)
    assert [*map(float, rows[2])] == pytest.approx([3, *forecast.details["next"][2].values()], rel=1e-5)
    assert calls == [150, 150, 100, 1, 1]
    (one,) = about.predict(None, [Path(write(tmp_path / "one.csv", a=COLUMNS["a"]))], options)
    assert "one.csv: expected numbers in the column 'b' of the run, found no such column" in one.problem
    assert "data." not in one.problem
    for target in ("b", "on"):
        about = SeriesConfig(table, target=target).build().preprocessing()
        assert "expected --length 1 for a model" in next(about.predict(model, [Path(table)], options)).problem


def test_steps_without_a_class_are_named_and_not_scored(tmp_path):
    path = write(tmp_path / "n.csv", a=np.random.default_rng(0).normal(size=STEPS), b=["x", "", "y", ""] * 100)
    task = SeriesConfig(path, target="b").build()
    assert "200 steps without b (empty, NA, null, …): read and not scored" in task.about
    assert (task.sizes["vocab_size"], task.reference) == (2, {"majority class": 0.5})
    assert sum(map(task.count, task.batches("test", 1))) == task.size("test") == 30


def test_what_makes_a_column_words_is_said(tmp_path):
    columns = {"x": WAVE[:300], "y": [0.5, "off", *range(298)], "no": [""] * 300}
    about = SeriesConfig(write(tmp_path / "s.csv", **columns)).build().about
    assert "left out: y (has other values than numbers, first 'off'), no (has no values)" in about[4]


def test_a_gap_is_not_scored(tmp_path):
    """Otherwise repeating the last value would be right where the value was made by repeating it."""
    a = np.random.default_rng(0).normal(size=STEPS)
    path = write(tmp_path / "g.csv", a=[x if i % 4 == 0 else "" for i, x in enumerate(a)], b=a[::-1])
    task = SeriesConfig(path, target="a").build()
    scored = np.arange(340, STEPS, 4)
    mean, std = task.prepared.target_mean[0], task.prepared.target_std[0]
    assert sum(map(task.count, task.batches("test", 1))) == task.size("test") == len(scored)
    repeated = math.sqrt(np.mean(((a[scored] - a[scored - 4]) / std) ** 2))
    assert task.reference[REPEAT] == pytest.approx(repeated, rel=1e-5)
    assert task.reference[MEAN] == pytest.approx(math.sqrt(np.mean(((a[scored] - mean) / std) ** 2)), rel=1e-5)
    both = SeriesConfig(path).build()
    assert sum(map(both.count, both.batches("test", 1))) == 60
    batch = next(both.batches("test", 1))
    outputs = batch.targets.nan_to_num(7.0)  # anything where nothing is known
    assert ERROR.sums(None, outputs, batch)[0] == 0
    targets = torch.tensor([[[1.0, 2.0], [math.nan, 2.0], [math.nan, math.nan]]])
    errors, steps = ERROR.sums(None, torch.tensor([[[2.0, 5.0], [7.0, 4.0], [7.0, 7.0]]]), Batch(None, targets))
    assert (errors, steps) == (5 + 4, 2), "the mean over the known columns of each step"


def test_whole_numbers_with_a_gap_are_classes_and_a_run_keeps_its_own(tmp_path):
    states = [i // 7 % 2 for i in range(STEPS)]
    gap = {"x": WAVE, "state": ["" if i == 9 else one for i, one in enumerate(states)]}
    path = write(tmp_path / "s.csv", **gap)
    task = SeriesConfig(path, target="state").build()
    assert (task.prepared.columns, task.prepared.names) == (("x",), ("0", "1"))
    assert SeriesConfig(path, target="state").build_to_score("test", task.prepared).labels[8:11].tolist() == [
        1,
        -100,
        1,
    ]
    many = write(tmp_path / "many.csv", x=WAVE, state=range(STEPS))
    with pytest.raises(InputError, match=r"many.csv: .*classes of the run, found '10'"):
        SeriesConfig(many, target="state").build_to_score("test", task.prepared)
    # A run of numbers predicts numbers, also of few whole ones.
    settings = {"columns": ("x",), "target": "state"}
    numbers = SeriesConfig(write(tmp_path / "noise.csv", x=WAVE, state=WAVE[::-1]), **settings).build().prepared
    scored = SeriesConfig(path, **settings).build_to_score("test", numbers)
    assert (scored.metrics[0].name, scored.sizes["vocab_size"]) == ("error", 1)
    words = write(tmp_path / "words.csv", x=WAVE, state=["x", "y"] * 200)
    with pytest.raises(InputError, match=r"words.csv: .*numbers in the column 'state'"):
        SeriesConfig(words, **settings).build_to_score("test", numbers)


def test_decimals_are_numbers(tmp_path):
    import pyarrow
    import pyarrow.parquet

    prices = pyarrow.array([round(float(x), 2) for x in WAVE]).cast(pyarrow.decimal128(9, 2))
    pyarrow.parquet.write_table(pyarrow.table({"x": WAVE, "price": prices}), tmp_path / "s.parquet")
    task = SeriesConfig(str(tmp_path / "s.parquet"), target="price").build()
    assert (task.prepared.columns, task.prepared.names) == (("x", "price"), ())


def test_a_run_is_scored_with_its_own_columns_and_targets(table):
    config = SeriesConfig(table)
    run, same = (config.build().preprocessing() for _ in range(2))
    assert run.difference(same) is None
    other = SeriesConfig(table, ("a",)).build().preprocessing()
    assert run.difference(other) == "expected the columns of the run, a, b, found a; rename them"
    named = {target: SeriesConfig(table, target=target) for target in ("a", "b", "on")}
    runs = {target: one.build().preprocessing() for target, one in named.items()}
    words = "expected the target of the run, a, b, found {}; leave data.target out"
    for target, said in (("b", "b"), ("on", "classes")):
        assert run.difference(runs[target]) == words.format(said)
        assert named[target].build_to_score("test", runs[target]).size("test") == STEPS
    for one, trained, own, found in (
        (named["b"], run, "a, b", "b"),
        (config, runs["b"], "b", "a, b"),
        (named["a"], runs["b"], "b", "a"),
        (config, runs["on"], "classes", "a, b"),
    ):
        refuses(f"s.csv: .*target of the run, {own}, found {found};", one.build_to_score, "test", trained)
    assert "classes of the run" in run.difference(Preprocessing(names=("yes",)))
    assert runs["on"].difference(named["on"].build().preprocessing()) is None
    assert "classes of the run" in runs["on"].difference(run)
    assert config.build_to_score("test").size("test") == config.build().size("test") == 60, "without a run: its splits"
    task = config.build()
    task.check(next(task.batches("test", 1)), "here")
    for wrong in (torch.zeros(1, 4), torch.zeros(1, 4, 3)):
        refuses(r"^here: expected inputs \[B, T, columns\], found \[1, 4", task.check, Batch(wrong, None), "here")


def test_the_class_of_the_last_step_is_predicted(table):
    def model(x, state):
        last = torch.zeros(1, x.shape[1], 2)
        last[:, -1, 1] = math.log(3)
        return last, state

    about = SeriesConfig(table, target="on").build().preprocessing()
    (found,) = about.predict(model, [Path(table)], {"length": 1, "top": 2})
    assert found.text == "yes 0.750  no 0.250"
