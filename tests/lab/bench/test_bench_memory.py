"""`mnemos bench-memory`: its tables, what it measures, and its results."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from mnemos.atomic import write_json
from mnemos.lab.bench import Options, bench_memory, run
from mnemos.lab.bench.memories import MEMORIES, Sizes
from mnemos.lab.bench.tasks import BENCHMARKS, DEFAULT, QUICK
from mnemos.lab.cli import main
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.run.checks import complete
from mnemos.lab.run.files import Result
from mnemos.lab.tasks.recall import MQARConfig
from mnemos.types import InputError

SMALL = replace(BENCHMARKS["mqar"], data=MQARConfig(16, 2, 16, rows=6), beyond=({"length": 32},))
SMALL = replace(SMALL, steps=2, batch=4, sizes=Sizes(8, 4, 1, 2, 8))


@pytest.mark.each_value
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("task", DEFAULT)
def test_every_memory_reads_every_task_and_longer_rows(memory, task):
    benchmark = BENCHMARKS[task]
    data = replace(benchmark.data, rows=2)
    few = {"examples": min(data.examples, 8)} if "examples" in asdict(data) else {}
    data = replace(data, **few)
    made = run.recipe(memory, replace(benchmark, data=data, sizes=replace(benchmark.sizes, dim=16)), 1e-3, 0)
    model = complete(made, data.build()).model.build().eval()
    for settings in ({}, benchmark.beyond[0]):
        opened, state = replace(data, **settings).build(), None
        with torch.no_grad():
            for part in opened.segments(next(opened.batches("test", 2)), made.train.rollout.segment_length):
                outputs, state = opened.forward(model, part, state)
        assert outputs.isfinite().all()


def test_the_tables_are_whole():
    assert {*QUICK} <= {*DEFAULT} <= {*BENCHMARKS}
    for name, benchmark in BENCHMARKS.items():
        assert 0 < benchmark.chance < 1
        assert benchmark.keyless == 0 or benchmark.chance < benchmark.keyless < 1
        assert all(replace(benchmark.data, **settings).files() is not None for settings in benchmark.beyond), name
        assert [benchmark.at(s) for s in benchmark.beyond] == sorted(benchmark.at(s) for s in benchmark.beyond)


@pytest.mark.parametrize("task", ["listops-32", "listops"])
def test_chance_in_listops_is_the_most_frequent_digit(task):
    benchmark = BENCHMARKS[task]
    opened = replace(benchmark.data, examples=1, rows=1000).build()
    answers = torch.cat([batch.targets[batch.targets >= 0] for batch in opened.batches("test", 1000)])
    assert answers.bincount().max() / 1000 == pytest.approx(benchmark.chance, abs=0.02)


# --- what is measured of a run ---


@pytest.mark.parametrize(("memory", "kept", "tokens"), [("softmax", 16, 0), ("window", 3, 0), ("rmt", 1, 4 + 3)])
def test_state_counts_keys_and_values_within_a_segment(memory, kept, tokens):
    # A window of 4 reads 3 earlier tokens. An RMT keeps 4 memory tokens, and within a segment of 4 the keys and values
    # of them and of 3 tokens. Marks and counters are less than 100 bytes.
    size = 2 * 2 * 8 * 4  # bytes per token, of 2 layers, 8 channels in float32
    benchmark = replace(SMALL, data=MQARConfig(16, 2, 16, rows=2), sizes=Sizes(8, 4, 2, 1, 0))
    task = benchmark.data.build()
    recipe = complete(run.recipe(memory, benchmark, 1e-3, 0), task)
    model = recipe.model.build().eval()
    between = run.most_bytes(model, task, recipe.train.rollout.segment_length)
    assert 0 <= between - kept * size < 100
    assert 0 <= run.most_bytes(model, task, 1) - between - tokens * size < 100


class Reader(nn.Module):
    """Answers the first or the last value that followed a key in the row."""

    def __init__(self, last):
        super().__init__()
        self.last, self.unused = last, nn.Parameter(torch.zeros(()))

    def forward(self, x, state=None, mask=None):
        logits = torch.zeros(*x.shape, 64)
        for row, tokens in zip(logits, x.tolist(), strict=True):
            values = {}
            for t, (token, following) in enumerate(zip(tokens, [*tokens[1:], 0], strict=True)):
                if 0 < token < 32 <= following and (self.last or token not in values):
                    values[token] = following
                row[t, values.get(token, 0)] = 1
        return logits, state


@pytest.mark.parametrize(("last", "scores"), [(True, [1.0, 1.0, 0.0]), (False, [0.5, 0.0, 1.0])])
def test_answers_with_old_values_are_counted(last, scores, monkeypatch, tmp_path):
    whole = BENCHMARKS["mqar-rewritten"]
    benchmark = replace(whole, data=replace(whole.data, rows=30), beyond=({"length": 96},))
    write_json(tmp_path / "result.json", {"metric": "accuracy", "valid": {}, "test": {"loss": 1.0, "accuracy": 0.75}})
    monkeypatch.setattr(run, "read_recipe", lambda folder: run.recipe("softmax", benchmark, 1e-3, 0))
    monkeypatch.setattr(run, "trained_model", lambda folder, recipe: Reader(last))
    for _ in range(2):  # measured, and read again
        run.measure(tmp_path, benchmark)
        artifacts = Result.read(tmp_path).artifacts
        assert artifacts["along"]["values"] == [[64, 0.75], [96, scores[0]]]
        assert artifacts["bench"]["beside"] == {"rewritten keys": scores[1], "their old values": scores[2]}
        monkeypatch.setattr(run, "trained_model", None)


# --- the command ---


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The results of the small benchmark, and of two memories unless a test asks for others."""
    monkeypatch.setitem(BENCHMARKS, "mqar", SMALL)

    def call(**options):
        asked = {"tasks": ["mqar"], "memories": ["softmax", "lstm"], "jobs": 1, "rates": (1e-3, 1e-2)} | options
        return bench_memory(Options(tmp_path / "out", **asked))

    return call


def test_a_benchmark_from_training_to_page(bench, tmp_path, trained_here):
    asked = {"memories": ["softmax", "rmt"], "rates": (1e-2,), "seeds": 1}
    result = bench(**asked)
    stored = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    assert stored["provenance"]["commit"]
    (entry,) = stored["benchmarks"]
    assert entry == result["benchmarks"][0]
    assert [row["name"] for row in entry["rows"]] == ["rmt", "softmax"], "in the order of their state"
    for row in entry["rows"]:
        assert row["seeds"] == 1
        assert [one["at"] for one in row["beyond"]] == [16, 32]
        assert row["beyond"][0]["mean"] == row["mean"], "the test split at the training length"
    rmt, softmax = entry["rows"]
    # Keys and values of 16 tokens, 8 channels in float32, with a mark for each token and two counts.
    assert softmax["state_bytes"] == softmax["segment_state_bytes"] == 2 * 16 * 8 * 4 + 16 + 2 * 8
    assert rmt["segment_state_bytes"] < rmt["state_bytes"], "which has the keys and values of a segment"
    page = (tmp_path / "out" / "benchmarks.html").read_text()
    assert "by length" in page
    assert "ignoring what is asked" in page
    assert "emptied" in page
    assert (tmp_path / "out" / "mqar" / "comparison.json").is_file()
    assert len(trained_here) == 2
    assert bench(**asked)["benchmarks"] == result["benchmarks"]
    assert len(trained_here) == 2, "nothing is trained again"


def test_other_tasks_of_the_folder_stay(bench, unreported, runs_here, monkeypatch, tmp_path):
    monkeypatch.setitem(BENCHMARKS, "copy", SMALL)

    def trained(recipe, folder):
        folder.mkdir(parents=True)
        write_json(folder / "run.json", {})
        costs = {"seconds": 1.0, "peak_bytes": 1, "parameters": 1, "flops": 1, "majority": None}
        scores = {split: {"loss": 0.1, "accuracy": 0.5} for split in ("valid", "test")}
        write_json(folder / "result.json", {"metric": "accuracy", **scores, **costs})

    runs_here(trained)
    for tasks in (["mqar"], ["copy"], ["mqar"]):
        bench(tasks=tasks, seeds=1)
    stored = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    assert [one["name"] for one in stored["benchmarks"]] == ["mqar", "copy"]


def test_what_cannot_run_is_refused_before_the_first_run(bench, monkeypatch, trained_here):
    monkeypatch.setitem(BENCHMARKS, "copy", replace(SMALL, sizes=replace(SMALL.sizes, dim=7)))
    with pytest.raises(InputError, match="copy, softmax: dim must be divisible"):
        bench(tasks=["mqar", "copy"])
    with pytest.raises(InputError, match="jobs: expected at least 1, found 0"):
        bench(jobs=0)
    assert not trained_here


@pytest.fixture
def unreported(monkeypatch):
    """Results of runs that have scores alone: nothing else is measured, and there is no page."""
    known = {"along": {"metric": "accuracy", "x": "length", "values": [[16, 0.5]]}}
    known["bench"] = {"settings": [], "beside": {}, "state_bytes": 1, "segment_state_bytes": 1}

    def measure(folder, benchmark):
        result = Result.read(folder)
        replace(result, artifacts=known).write(folder)

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr("mnemos.lab.report.report", lambda *_: None)


def test_rates_are_chosen_on_the_validation_split_and_failures_are_named(bench, unreported, runs_here, capsys):
    scores = {"softmax": (0.4, 0.6), "lstm": (0.0, None), "linear": (None, None)}  # of the validation split, by rate
    planned = []

    def trained(recipe, folder):
        planned.append((recipe.name, recipe.optim.lr, recipe.train.seed))
        score = scores[recipe.name][recipe.optim.lr == 1e-2]
        if score is None or (recipe.name, recipe.train.seed) == ("lstm", 2):
            raise TrainingFailed("loss is not finite")
        folder.mkdir(parents=True)
        write_json(folder / "run.json", {})
        test = {"loss": 0.1, "accuracy": 1 - recipe.train.seed / 100}
        costs = {"seconds": 1.0, "peak_bytes": 1, "parameters": 1, "flops": 1, "majority": None}
        write_json(folder / "result.json", {"metric": "accuracy", "valid": {"accuracy": score}, "test": test, **costs})

    runs_here(trained)
    (entry,) = bench(memories=[*scores], seeds=3)["benchmarks"]
    softmax, lstm = entry["rows"]
    first = [(memory, rate, 0) for rate in (1e-3, 1e-2) for memory in scores]
    assert planned == [*first, *((name, rate, n) for n in (1, 2) for name, rate in (("softmax", 1e-2), ("lstm", 1e-3)))]
    assert (softmax["rate"], softmax["mean"], softmax["std"]) == (1e-2, pytest.approx(0.99), pytest.approx(0.01))
    assert (lstm["rates"], lstm["seeds"], lstm["failed_seeds"]) == ([[1e-3, 0.0], [1e-2, None]], 2, 1)
    assert entry["failed"] == ["linear"]
    printed = capsys.readouterr().out
    assert "1 task × 3 memories: 12 runs, 1 at a time" in printed
    assert "10 of 10 runs" in printed, "the failed memory needs no other seeds"
    assert "not in the mean: lstm (1 of 3)" in printed


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["mqr"], "expected the name of a task, found 'mqr'; did you mean 'mqar'?"),
        (["mqar", "--dim", "7", "--memories", "softmax"], "mqar, softmax: rotary positions: expected an even width"),
    ],
)
def test_bad_input_is_one_line(words, problem, capsys, tmp_path):
    assert main(["bench-memory", *words, "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
