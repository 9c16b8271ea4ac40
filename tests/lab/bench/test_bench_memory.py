"""`mnemos bench-memory`: its tables, the choice of learning rates, and its results."""

import json
import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mnemos.atomic import write_json
from mnemos.lab.bench import Options, bench_memory, run
from mnemos.lab.bench.memories import MEMORIES, Sizes
from mnemos.lab.bench.tasks import BENCHMARKS, DEFAULT, QUICK
from mnemos.lab.cli import benchmarking, main
from mnemos.lab.compare import runs as module
from mnemos.lab.compare.runs import train_apart
from mnemos.lab.errors import Interrupted, TrainingFailed
from mnemos.lab.run.checks import complete
from mnemos.lab.tasks.listops import Rules, generate_block
from mnemos.lab.tasks.recall import MQARConfig

SMALL = replace(
    BENCHMARKS["mqar"],
    data=MQARConfig(16, 2, 16, rows=6),
    beyond=({"length": 32},),
    steps=2,
    batch=4,
    sizes=Sizes(8, 4, 1, 2, 8),
)


@pytest.mark.each_value
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("task", [*DEFAULT, "rewriting", "facts"])
def test_every_memory_reads_every_task_and_longer_rows(memory, task):
    benchmark = BENCHMARKS[task].of_books(str(Path(__file__).parents[3] / "log" / "README.md"))
    data = replace(benchmark.data, rows=2)
    data = replace(data, examples=min(data.examples, 8)) if hasattr(data, "examples") else data
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
        assert benchmark.of_books("x").data == (
            replace(benchmark.data, path="x") if benchmark.books else benchmark.data
        )


def test_the_small_listops_has_the_lengths_that_it_names():
    data = BENCHMARKS["listops-32"].data
    rules = Rules(data.min_length, data.max_length, data.max_depth, data.max_arguments, data.digit_probability)
    lengths = [int(n) for block in range(9) for n in generate_block(rules, 0, block).lengths]
    assert f"of {min(lengths)} to {max(lengths)} symbols" in BENCHMARKS["listops-32"].about


@pytest.mark.parametrize("task", ["listops-32", "listops"])
def test_chance_in_listops_is_the_most_frequent_digit(task):
    benchmark = BENCHMARKS[task]
    opened = replace(benchmark.data, examples=1, rows=1000).build()
    answers = torch.cat([batch.targets[batch.targets >= 0] for batch in opened.batches("test", 1000)])
    assert answers.bincount().max() / 1000 == pytest.approx(benchmark.chance, abs=0.02)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the small benchmark with training replaced: `trained(recipe, place)` writes or raises what a test gives."""
    monkeypatch.setitem(BENCHMARKS, "mqar", SMALL)
    seen: list[tuple[str, float, int]] = []

    def called(trained, **options):
        def alone(recipe, place, quiet):
            if trained is None:  # as it is
                seen.append((recipe.name, recipe.optim.lr, recipe.train.seed))
                return train_apart(recipe, place, quiet)
            if not (place / "result.json").exists():
                seen.append((recipe.name, recipe.optim.lr, recipe.train.seed))
                trained(recipe, place)

        called.seen = seen
        monkeypatch.setattr(module, "train_apart", alone)
        given = {"tasks": ["mqar"], "memories": ["softmax", "lstm"], "jobs": 1, "rates": (1e-3, 1e-2)} | options
        return bench_memory(Options(tmp_path / "out", **given)), seen

    return called


@pytest.mark.slow
def test_a_benchmark_from_training_to_page(bench, tmp_path, capsys, forked_comparisons):
    given = {"memories": ["softmax", "rmt"], "rates": (1e-2,), "seeds": 1}
    result, _ = bench(None, **given)
    stored = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    assert stored["provenance"]["commit"]
    (entry,) = stored["benchmarks"]
    assert entry == result["benchmarks"][0]
    assert [row["name"] for row in entry["rows"]] == ["rmt", "softmax"], "in the order of their state"
    for row in entry["rows"]:
        assert row["seeds"] == 1
        assert [one["at"] for one in row["beyond"]] == [16, 32]
        assert row["beyond"][0]["mean"] == row["mean"], "the test split at the training length"
        assert "emptied" in row["controls"]
    states = {row["name"]: row["state_bytes"] for row in entry["rows"]}
    # Keys and values of 16 tokens, 8 channels in float32, with a mark for each token and two counts.
    assert states["softmax"] == 2 * 16 * 8 * 4 + 16 + 2 * 8
    between = {row["name"]: row["segment_state_bytes"] for row in entry["rows"]}
    assert between["softmax"] == states["softmax"]
    assert between["rmt"] < states["rmt"], "which has the keys and values of a segment"
    page = (tmp_path / "out" / "benchmarks.html").read_text()
    assert page.count('class="chart"') == 3
    assert "rmt" in page
    assert "Published scores are of other data" in page
    said = capsys.readouterr().out
    assert "\nRWKV " in said.partition("\npublished ")[2]
    assert (tmp_path / "out" / "mqar" / "comparison.json").is_file()
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("metrics.jsonl")}
    assert bench(None, **given)[0]["benchmarks"] == result["benchmarks"]
    assert times == {file: file.stat().st_mtime_ns for file in times}, "nothing is trained again"


def fake(scores):
    """Training that writes validation scores by (memory, rate); a test score is 1 minus the seed's hundredth."""

    def trained(recipe, place):
        score = scores[recipe.name, recipe.optim.lr]
        if score is None:
            raise TrainingFailed("loss is not finite")
        place.mkdir(parents=True)
        write_json(place / "recipe.json", {})
        write_json(place / "run.json", {})
        test = {"loss": 0.1, "accuracy": 1 - recipe.train.seed / 100}
        costs = {"seconds": 1.0, "peak_bytes": 1, "parameters": 1, "flops": 1, "majority": None}
        write_json(place / "result.json", {"metric": "accuracy", "valid": {"accuracy": score}, "test": test, **costs})

    return trained


@pytest.fixture
def unmeasured(monkeypatch):
    empty = {
        "state_bytes": 1,
        "segment_state_bytes": 1,
        "beyond": [{"at": 16, "mean": 0.5, "std": None}],
        "beside": {},
        "controls": {"left": "no state"},
    }
    monkeypatch.setattr(run, "measure_runs", lambda runs, benchmark: empty)


def test_the_rate_is_chosen_on_the_validation_split_and_its_seeds_are_trained(bench, unmeasured):
    scores = {("softmax", 1e-3): 0.4, ("softmax", 1e-2): 0.6, ("lstm", 1e-3): 0.5, ("lstm", 1e-2): None}
    result, seen = bench(fake(scores), seeds=3)
    assert {*seen} == {
        *((memory, rate, 0) for memory, rate in scores),
        *(("softmax", 1e-2, seed) for seed in (1, 2)),
        *(("lstm", 1e-3, seed) for seed in (1, 2)),
    }
    softmax, lstm = result["benchmarks"][0]["rows"]
    assert (softmax["rate"], lstm["rate"]) == (1e-2, 1e-3)
    assert lstm["rates"] == [[1e-3, 0.5], [1e-2, None]]
    assert softmax["mean"] == pytest.approx(0.99)
    assert softmax["std"] == pytest.approx(0.01)


def test_progress_counts_all_runs_of_a_task_and_prints_each_once(bench, unmeasured, capsys):
    scores = {("softmax", 1e-3): 0.4, ("softmax", 1e-2): 0.6, ("lstm", 1e-3): None, ("lstm", 1e-2): None}
    bench(fake(scores), seeds=3)
    first, *said = [line for line in capsys.readouterr().out.splitlines() if "run" in line]
    assert first == "1 task × 2 memories: 8 runs, 1 at a time"
    assert [line.partition(" of ")[0].rpartition("(")[2] for line in said[:6]] == [*"123456"]
    assert ("8 runs" in said[3], "6 runs" in said[4]) == (True, True), "the failed memory needs no other seeds"
    assert "left" in said[4]
    assert "left" not in said[5]
    bench(fake(scores), seeds=3)
    assert "validation" not in capsys.readouterr().out, "nothing was trained"


def test_a_score_of_zero_is_better_than_a_failed_run(bench, unmeasured):
    scores = {("softmax", 1e-3): None, ("softmax", 1e-2): 0.0, ("lstm", 1e-3): 0.1, ("lstm", 1e-2): None}
    result, _ = bench(fake(scores), seeds=1)
    assert result["benchmarks"][0]["failed"] == []
    assert result["benchmarks"][0]["rows"][0]["rate"] == 1e-2


def test_a_memory_whose_runs_all_fail_is_named(bench, unmeasured, capsys):
    scores = {("softmax", 1e-3): 0.4, ("softmax", 1e-2): 0.6, ("lstm", 1e-3): None, ("lstm", 1e-2): None}
    result, _ = bench(fake(scores), seeds=1)
    assert result["benchmarks"][0]["failed"] == ["lstm"]
    assert [row["name"] for row in result["benchmarks"][0]["rows"]] == ["softmax"]
    assert "loss is not finite" in capsys.readouterr().out


def test_ctrl_c_of_a_terminal_does_not_end_a_run_that_a_thread_started():
    # Not by get_context, which `forked_comparisons` replaces.
    child = multiprocessing.context.SpawnContext().Process(target=signal.raise_signal, args=(signal.SIGINT,))
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(module._join, child).result()
    assert child.exitcode == 0  # 1: KeyboardInterrupt, with a traceback


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupted_command_starts_no_other_run(bench, jobs):
    def trained(recipe, place):
        raise Interrupted("interrupted; the same command continues")

    with pytest.raises(Interrupted):
        bench(trained, jobs=jobs)
    assert len(bench.seen) <= jobs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mqr"], "expected the name of a task, found 'mqr'; did you mean 'mqar'?"),
        (["--memories", "softmx"], "expected the name of a memory, found 'softmx'; did you mean 'softmax'?"),
        (["--seeds", "0"], "--seeds: expected at least 1, found 0"),
        (["mqar", "mqar"], "expected each task once, found 'mqar' again; leave one out"),
        (["--memories", "lstm,lstm"], "expected each memory once, found 'lstm' again; leave one out"),
        (["facts", "--books", "sentence"], "facts: --books: expected text in sentences"),
        (["needle", "--books", "few"], "needle: --books: expected at least 3,746 bytes of text in each split, found"),
        (["--steps", "0"], "--steps: expected at least 1, found 0; leave the option out"),
        (["--dim", "-1"], "--dim: expected at least 1, found -1"),
        (["--rates", "a,b"], "--rates: expected numbers such as 1e-3,1e-2, found 'a,b'"),
        (["--rates", "0"], "--rates: expected learning rates above 0"),
        (["--rates", "1e-3,1.01e-3"], "--rates: expected rates that differ in two digits"),
        (
            ["facts", "--books", "/no/such/place"],
            "facts: /no/such/place: expected a file or a folder of text, but the path does not",
        ),
        (["facts", "--books", "/no/such/place"], "check --books"),
        (
            ["mqar", "--books", "."],
            "--books: expected a task that reads books (facts, needle), found mqar; leave it out",
        ),
        (["mqar", "--dim", "7", "--memories", "softmax"], "mqar, softmax: rotary positions: expected an even width"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sentence").write_text("no end " * 1000)
    Path("few").write_text("One. And two. " * 2000)
    assert main(["bench-memory", *words, "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_arguments(monkeypatch):
    chosen = []
    monkeypatch.setattr(benchmarking, "train_all", chosen.append)
    assert main(["bench-memory", "mqar", "--memories", "lstm,linear", "--rates", "1e-3", "--out", "x"]) == 0
    assert chosen.pop() == Options(Path("x"), ("mqar",), ("lstm", "linear"), rates=(1e-3,))
    for words, seeds in (([], 3), (["--quick"], 1), (["--quick", "--seeds=2"], 2)):
        assert main(["bench-memory", *words]) == 0
        assert run._seeds(chosen.pop()) == seeds


def test_a_later_seed_that_fails_is_named_beside_the_mean(bench, unmeasured, capsys, tmp_path):
    whole = fake({("lstm", 1e-2): 0.5})

    def trained(recipe, place):
        if recipe.train.seed == 2:
            raise TrainingFailed("loss is not finite")
        whole(recipe, place)

    (row,) = bench(trained, memories=["lstm"], rates=(1e-2,))[0]["benchmarks"][0]["rows"]
    assert (row["seeds"], row["failed_seeds"]) == (2, 1)
    assert "not in the mean: lstm (1 of 3)" in capsys.readouterr().out
    assert "not in the mean: lstm (1 of 3)" in (tmp_path / "out" / "benchmarks.html").read_text()
