"""Comparisons at equal samples, FLOPs, time and parameters."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refuses

from mnemos import registry
from mnemos.atomic import write_json
from mnemos.config import to_dict
from mnemos.lab.compare import budgets, compare
from mnemos.lab.compare.baselines import parameters, with_parameters
from mnemos.lab.compare.budgets import Budget, Seconds, budget_text, samples_per_update, with_steps
from mnemos.lab.compare.equal import check_equal, check_scored, read_equal
from mnemos.lab.measure.flops import count_flops, task_flops
from mnemos.lab.report.read import read_tasks
from mnemos.lab.report.verdict import caveats
from mnemos.lab.run import devices
from mnemos.lab.run import flops as run_flops
from mnemos.lab.run.checks import complete
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.loop import update
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.tasks.text_classes import TextClassesConfig
from mnemos.memory.tokens import TokensConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.segments import RMTConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.types import InputError, leaves


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for i in range(4):
        (folder / f"{i}.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * (24 + i))
    return str(folder)


def plain(text: str, **train) -> Recipe:
    settings = {"steps": 8, "batch_size": 2, "eval_every": 4, "log_every": 1, "checkpoint_every": 8, "threads": 1}
    return Recipe(
        LSTMConfig(vocab_size=0, dim=8, layers=1),
        TextConfig(text, segment=32),
        OptimConfig(schedule=ScheduleConfig("cosine", warmup=2)),
        TrainConfig(**settings | {"accelerator": "cpu"} | train),
        name="lstm",
    )


def rmt(text: str, **train) -> Recipe:
    return replace(
        plain(text, **{"rollout": RolloutConfig(segments=4)} | train),
        model=RMTConfig(vocab_size=0, dim=8, layers=1, num_heads=2, segment=8, memory=TokensConfig(tokens=2)),
        data=TextConfig(text, segment=8),
        name="rmt",
    )


def finished(recipe: Recipe, folder: Path) -> None:
    """A run in place of its training: the lower the rate the better it scores."""
    folder.mkdir(parents=True)
    write_json(folder / "recipe.json", to_dict(recipe))
    write_json(folder / "run.json", {})
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
    scores = {"loss": 1.0, "bits per byte": 1 + recipe.optim.lr}
    costs = {"steps": recipe.train.steps, "update_flops": 2.0, "flops": 1, "parameters": 1, "seconds": 1.0}
    result = {"recipe": recipe.name, "seed": recipe.train.seed, "metric": "bits per byte", **costs}
    result["scored_rows"] = {"valid": 9, "test": 5}
    write_json(folder / "result.json", {**result, "valid": scores, "test": scores})


def test_kinds_are_read():
    assert read_equal("updates") == ("updates",)
    assert read_equal("parameters") == ("updates", "parameters")
    assert read_equal("parameters,time") == ("time", "parameters")
    refuses(r"--equal: expected one of updates, samples, .*found 'flop'", read_equal, "flop")
    refuses("found flops and time; leave one out", read_equal, "time,flops")


@pytest.mark.parametrize(
    ("named", "options", "words"),
    [
        (("rmt", "wide"), {"seeds": 0}, "^--seeds: expected at least 1, found 0; raise it"),
        (("rmt", "wide"), {"jobs": 0}, "^--jobs: expected at least 1, found 0"),
        (("rmt", "wide"), {"rates": (0.0,)}, r"^--rates: expected learning rates above 0, found \[0.0\]"),
        (("rmt", "wide"), {"against": "lstm"}, "^--against: expected one of rmt, wide, found 'lstm'"),
        (
            ("rmt", *3 * ["wide"]),
            {},
            r"rmt, wide, wide, wide: two called 'wide', .* model.dim \(65, not 66\); name each",
        ),
        # each step within 5 %, and both beyond
        (("small", "rmt"), {"equal": ("parameters",), "baselines": True}, "12,504 .* of small, .* 13,136 of rmt-wider"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(text, tmp_path, named, options, words):
    sizes = [{"wide": {"dim": 64 + i}, "small": {"mlp": 326}}.get(name, {}) for i, name in enumerate(named)]
    one = rmt(text)
    made = [replace(one, name=n, model=replace(one.model, **size)) for n, size in zip(named, sizes, strict=True)]
    refuses(words, compare.compare, made, tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("rows", "said"), [(0, False), (1, True), (5, True), (6, False)])
def test_what_a_comparison_trains_is_told_first(text, tmp_path, runs_here, capsys, rows, said):
    runs_here(finished)
    compare.compare([rmt(text, test_rows=rows)], tmp_path / "c", seeds=2, baselines=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "3 recipes × 2 seeds: 6 runs",
        "rmt-unwritten: rmt with a memory that is never written, but read in the same way",
        "rmt-wider: rmt without its memory and with wider MLPs: 13,136 parameters, of 13,128 with it",
    ]
    assert lines[8].endswith(
        "rmt-wider at learning rate 1.0e-03, seed 1: validation bits per byte 1.001, 1 s (6 of 6 runs)"
    )
    assert ("scored: 5 rows of the test split; --train.test-rows 0 scores all of it" in lines) == said
    assert lines[-1] == str(tmp_path / "c")


def test_a_text_to_classify_is_one_sample_however_it_is_cut(text, tmp_path):
    for file in (f"{c}/{i}.txt" for c in "ab" for i in range(4)):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file * 9)
    texts = [TextClassesConfig(str(tmp_path), length=64, segment=segment) for segment in (16, 32)]
    read = [samples_per_update(replace(plain(""), data=data)) for data in [*texts, TextConfig(text, segment=32)]]
    assert read == [(2, "rows"), (2, "rows"), (64, "tokens")]


def test_equal_parameters_alone_keep_equal_updates(text, tmp_path, runs_here):
    begun = []
    runs_here(lambda recipe, folder: begun.append((recipe.name, recipe.train.steps)))
    recipes = [plain(text), replace(plain(text), model=LSTMConfig(vocab_size=0, dim=8, layers=1), name="other")]
    with pytest.raises(InputError, match=r"result.json: expected a JSON file, found none"):
        compare.compare(recipes, tmp_path / "c", equal=("parameters",), of_claim=True)
    assert begun == [("lstm", 8), ("other", 8)]
    assert not (tmp_path / "c/budget.json").exists()


def test_everything_that_counts_updates_follows_the_steps():
    schedule = ScheduleConfig("cosine", warmup=10, drop_at=30)
    recipe = replace(plain(""), optim=OptimConfig(schedule=schedule))
    recipe = replace(recipe, train=replace(recipe.train, steps=100, log_every=5, eval_every=50, checkpoint_every=100))
    made = with_steps(recipe, 33)
    train = made.train
    assert (train.steps, train.log_every, train.eval_every, train.checkpoint_every) == (33, 2, 17, 33)
    assert (made.optim.schedule.warmup, made.optim.schedule.drop_at) == (4, 10)
    assert with_steps(recipe, 100) == recipe
    shared = replace(recipe, optim=replace(recipe.optim, schedule=replace(schedule, warmup=0.05)))
    assert with_steps(shared, 33).optim.schedule.warmup == 0.05
    first = replace(recipe, optim=OptimConfig(schedule=ScheduleConfig("step", warmup=1, drop_at=(30, 50))))
    assert with_steps(first, 250).optim.schedule == ScheduleConfig("step", warmup=3, drop_at=(75, 125))
    steady = replace(recipe, optim=OptimConfig(schedule=ScheduleConfig("lra", warmup=10)))
    assert with_steps(steady, 1000).optim == steady.optim
    assert with_steps(steady, 1000).train.eval_every == 500


@pytest.fixture
def measured(monkeypatch):
    """Costs of updates by the recipes' names instead of measured ones; they are set once."""
    costs = {"lstm": 0.5, "rmt": 2.0}

    def times(recipes, jobs):
        return [Seconds(costs.pop(one.name), (0.5,), "CPU time") for one in recipes]

    monkeypatch.setattr(budgets, "update_seconds", times)
    monkeypatch.setattr(budgets, "update_flops", lambda recipes: [costs.pop(one.name) for one in recipes])
    return costs


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        (Budget("time", 0.1), (12, 3)),
        (Budget("flops"), (8, 2)),
        (Budget("samples"), (8, 8)),  # 32 tokens of 2 rows per update, both
        (Budget(), (8, 8)),
    ],
)
def test_steps_follow_from_the_budget_and_are_read_again(text, tmp_path, measured, budget, steps):
    recipes = [plain(text), rmt(text)]
    made, found = budget.apply(recipes, tmp_path)
    assert tuple(one.train.steps for one in made) == steps
    assert budget.kind != "samples" or budget_text(found).endswith("512 tokens per run, those of lstm with its steps")
    again, read = budget.apply(recipes, tmp_path)  # `measured` has no cost any more
    assert again == made
    assert read == json.loads(json.dumps(found))


def test_a_recipe_that_is_added_is_measured_beside_the_first(text, tmp_path, measured):
    recipes = [plain(text), rmt(text)]
    made, _ = Budget("time").apply(recipes, tmp_path)
    measured |= {"lstm": 1.0, "added": 2.0}  # the machine is half as fast as it was
    more, found = Budget("time").apply([*recipes, replace(rmt(text), name="added")], tmp_path)
    assert more[:2] == made
    assert found["recipes"]["added"]["update"] == 1.0
    assert more[2].train.steps == 4
    assert [one["update"] for one in found["recipes"].values()] == [0.5, 1.0, 2.0]
    assert json.loads((tmp_path / "budget.json").read_text()) == found


def test_the_never_written_baseline_of_other_steps_is_named(text, tmp_path, monkeypatch, runs_here):
    """A report took it for missing, because the recipes differ in their steps."""
    cost = {"rmt": 1.0, "rmt-unwritten": 2.0}
    monkeypatch.setattr(budgets, "update_flops", lambda recipes: [cost[one.name] for one in recipes])
    runs_here(finished)
    found = compare.compare([rmt(text, steps=2)], tmp_path / "c", unwritten=True, equal=("flops",), of_claim=True)
    assert [(row["name"], row["baseline_of"], row["steps"]) for row in found["rows"]] == [
        ("rmt", None, 2),
        ("rmt-unwritten", "rmt", 1),
    ]
    (shown,) = read_tasks([tmp_path / "c"])
    assert [row.baseline_of for row in shown.rows] == [(), ("rmt",)]
    assert not any("--unwritten" in line for line in caveats(shown))


@pytest.mark.parametrize(("jobs", "threads"), [(1, 0), (2, 1)])
def test_runs_beside_each_other_have_a_thread_each(text, tmp_path, runs_here, jobs, threads):
    runs_here(finished)
    compare.compare([plain(text, threads=0)], tmp_path / "c", jobs=jobs, of_claim=True)
    written = json.loads((tmp_path / "c/lstm/seed-0/recipe.json").read_text())
    assert written["train"]["threads"] == threads


def test_a_budget_of_something_else_is_refused(text, tmp_path, measured):
    recipes = [plain(text), rmt(text)]
    Budget("time", 0.1).apply(recipes, tmp_path)
    refuses(r"expected the budget .* found one of --equal time --minutes 0.1", Budget("time").apply, recipes, tmp_path)
    wider = replace(recipes[1], model=replace(recipes[1].model, dim=16))
    refuses(r"rmt differs in model.dim \(8, not 16\); name", Budget("time", 0.1).apply, [recipes[0], wider], tmp_path)
    measured |= {"lstm": 0.5, "rmt": 2.0}
    refuses("least one update, found 0.006 and .* lstm", Budget("time", 0.0001).apply, recipes, tmp_path / "other")
    refuses("expected lstm as the first, found rmt; name", Budget("time", 0.1).apply, recipes[::-1], tmp_path)
    two = replace(recipes[1], train=replace(recipes[1].train, devices=2))
    refuses("in one process, found 2 of rmt; use --train.dev", Budget("flops").apply, [recipes[0], two], tmp_path)
    refuses("--minutes: expected --equal time beside it", Budget, "flops", 0.1)
    for minutes in (-1, float("inf")):
        refuses(f"--minutes: expected a number above 0, found {minutes:g}", Budget, "time", minutes)


def test_what_belongs_to_the_cost_may_differ_with_a_budget_only(text):
    recipes = [plain(text), rmt(text, batch_size=4, steps=3)]
    refuses(r"data settings, found that lstm and rmt differ; .* or make the cost equal", check_equal, recipes)
    check_equal(recipes, "time")
    for other in (
        replace(recipes[1], data=replace(recipes[1].data, held_out=0.2)),
        rmt(text, precision="64-true"),
        rmt(text, valid_rows=2),
    ):
        refuses("settings, found that lstm and rmt differ", check_equal, [recipes[0], other], "time")


def test_recipes_are_scored_on_the_same_rows(text):
    check_scored([plain(text), rmt(text)])
    refuses("different batches of lstm and rmt", check_scored, [plain(text, test_rows=2), rmt(text, test_rows=2)])


def test_parameters_are_made_equal_by_the_width_of_mlps(text):
    lstm = replace(plain(text), model=LSTMConfig(vocab_size=256, dim=64, layers=1))
    wide = replace(plain(text), model=TransformerConfig(vocab_size=256, dim=32, layers=2, mlp=999), name="wide")
    narrow = replace(wide, model=replace(wide.model, mlp=9), name="narrow")
    images = replace(registry.load("recipe", "cifar-pvt")(), name="stages")
    images = replace(images, model=replace(images.model, image=32, channels=3, classes=10))
    wanted = parameters(lstm.model)
    assert with_parameters(lstm, wanted, "lstm") == lstm
    made = [with_parameters(one, wanted, "lstm").model for one in (wide, narrow)]
    assert parameters(made[0]) == pytest.approx(wanted, rel=0.005)
    assert made[0] == made[1]
    smaller = replace(images, model=replace(images.model, mlp_ratios=tuple(1 for _ in images.model.mlp_ratios)))
    for first, other in ((images, smaller), (smaller, images)):  # integer ratios per stage, up and down
        made = with_parameters(other, parameters(first.model), "first")
        assert parameters(made.model) == pytest.approx(parameters(first.model), rel=0.05)
    refuses(r"wide: expected a width of its MLPs that gives it 13,000", with_parameters, wide, 13_000, "small")


def learner_of(recipe: Recipe) -> Learner:
    task = recipe.data.build()
    return Learner(devices.connect(recipe.train), complete(recipe, task), task)


def counted(learner: Learner) -> int:
    """The FLOPs of an update after the first. Counting leaves weights, stored caches, states and gradients alone."""
    update(learner)
    before = copy.deepcopy(learner.model)  # a state_dict would commit what its caches are to store
    carried, drawn = [leaf.clone() for leaf in leaves(learner.carried.states)], torch.get_rng_state()
    found = run_flops.count_update_flops(learner)
    stored = before.state_dict()
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(map(torch.equal, leaves(learner.carried.states), carried))
    assert all(torch.equal(value, stored[name]) for name, value in learner.model.state_dict().items())
    assert all(value.any() for name, value in stored.items() if name.endswith("cache"))
    assert all(p.grad is None for p in learner.model.parameters())
    return found


def test_the_flops_of_an_update_are_those_of_its_forwards_and_backwards(text):
    """Memory replay computes three of four segments again."""
    found = {}
    for replayed in (False, True):
        learner = learner_of(rmt(text, rollout=RolloutConfig(segments=4, replay=replayed)))
        found[replayed] = counted(learner)
    model, task = learner.model, learner.task
    forward = task_flops(model, task, task.example()) * 2 * 4  # of rows × segments, without a state
    assert found[False] / forward == pytest.approx(3, rel=0.2)
    batch = task.train_batch(4, 2, 0)
    with torch.no_grad():
        again = count_flops(lambda: task.advance(model, batch, learner.carried.states[0]))
    assert found[True] - found[False] == 3 * again


def test_counting_leaves_stored_caches_as_they_are():
    recipe = registry.load("recipe", "short-listops-cached")()
    data = replace(recipe.data, train_size=20, valid_size=4, test_size=4)
    recipe = replace(recipe, data=data, train=replace(recipe.train, batch_size=4, accelerator="cpu"))
    assert counted(learner_of(recipe)) > 0


def test_updates_are_measured_in_processes_of_their_own(text, monkeypatch, forked_comparisons):
    monkeypatch.setattr(budgets, "SECONDS", 0.0)
    monkeypatch.setattr(budgets, "ROUNDS", 2)
    dear = replace(plain(text, batch_size=8), model=LSTMConfig(vocab_size=0, dim=128, layers=3), name="dear")
    found = budgets.update_seconds([plain(text), dear], jobs=2)
    assert [len(one.rounds) for one in found] == [2, 2]
    assert {one.clock for one in found} == {"CPU time"}
    assert 0 < 2 * found[0].median < found[1].median
    short = plain(text, steps=1)  # more updates are measured than it has
    short = replace(short, optim=OptimConfig(schedule=ScheduleConfig("cosine", warmup=1)))
    assert len({*budgets.update_flops([short, plain(text)])}) == 1
    refuses(r"lstm: .* not be measured: train\.batch_size", budgets.update_flops, [plain(text, batch_size=0)])


def test_seconds_are_those_of_all_updates_of_a_round(text, monkeypatch):
    clock = [0.0]  # an update takes two seconds and computes for one
    monkeypatch.setattr(budgets.loop, "update", lambda learner: clock.append(clock.pop() + 2))
    watch = SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: clock[0] / 2)
    monkeypatch.setattr(budgets, "time", watch)
    monkeypatch.setattr(budgets, "_LEARNERS", [])
    threads = torch.get_num_threads()
    try:
        learner, number = budgets._with_learner(
            to_dict(plain(text, threads=2)), lambda one: (one, torch.get_num_threads())
        )
        assert (learner, number, budgets._warm(learner, 0.0, 3)) == (budgets._LEARNERS[0], 2, "elapsed time")
    finally:
        torch.set_num_threads(threads)
    for kind, seconds, updates, found in (
        ("elapsed time", 5.0, 1, 2),
        ("CPU time", 0.0, 4, 1),
        ("CPU time", 4.0, 1, 1),
    ):
        assert budgets._seconds(learner, kind, seconds, updates) == found
    assert clock == [2 * (3 + 3 + 4 + 2)]


def test_a_comparison_at_equal_time_from_end_to_end(text, tmp_path, measured, capsys, runs_here):
    recipes, children = [plain(text), rmt(text)], runs_here(finished)
    found = compare.compare(recipes, tmp_path / "c", equal=("time",), rates=(1e-3, 1e-1))
    said = capsys.readouterr()
    assert "equal training time: " in said.out
    assert "2 recipes × 2 learning rates, then 1 seed of the best: 4 runs" in said.out
    budget = json.loads((tmp_path / "c/budget.json").read_text())
    assert found["equal"] == {key: budget[key] for key in ("equal", "unit", "budget", "first", "clock")} | {
        "parameters": False
    }
    for row in found["rows"]:
        steps = budget["recipes"][row["name"]]["steps"]
        assert row["steps"] == steps
        update = budget["recipes"][row["name"]]["update"]
        assert abs(steps * update - budget["budget"]) <= update / 2 * (1 + 1e-9)  # the nearest number of steps
        assert row["train_flops"] == 2 * steps
        scores = dict(row["rates"])
        assert row["rate"] == min(scores, key=scores.get)
        assert all(f"{row['rate']:.1e}" in place for place in found["runs"][row["name"]])
    assert [row["steps"] for row in found["rows"]] == [8, 2]
    # `measured` has no cost any more: nothing is measured again
    again = compare.compare(recipes, tmp_path / "c", equal=("time",), rates=(1e-3, 1e-1), of_claim=True)
    assert again["rows"] == found["rows"]
    assert len(children) == 4


def test_flops_are_a_mean_over_all_shapes_of_many_updates(text, monkeypatch):
    """Rows of 1 to 40 tokens, whose cost grows with the square."""
    made = learner_of(plain(text, steps=80))
    lengths, steps = [1 + step * 7 % 40 for step in range(80)], [*range(80)]  # each batch is read once
    monkeypatch.setattr(made, "batches", lambda step: [padded(2, lengths[steps.pop(0)])])
    monkeypatch.setattr(run_flops, "gradients", lambda made, batches: batches[0][0].shape[1])

    def padded(rows: int, length: int) -> list[torch.Tensor]:
        mask = [torch.ones(rows, length, dtype=torch.bool)] if length % 2 else []  # not every batch has a mask
        return [torch.zeros(rows, length), *mask]

    counted = []
    monkeypatch.setattr(run_flops, "count_flops", lambda call: counted.append(call()) or call() + call() ** 2)
    assert run_flops.count_update_flops(made) == pytest.approx(sum(n + n**2 for n in lengths) / 80, rel=0.02)
    assert len(counted) == 8
    assert {1, 40} <= {*counted}


def test_a_budget_that_threads_do_not_change_is_read_with_other_threads(text, tmp_path, measured):
    """As `--jobs` sets them. A budget of time depends on them."""
    for kind in ("flops", "time"):
        (tmp_path / kind).mkdir()
    first = Budget("flops").apply([plain(text, threads=0)], tmp_path / "flops")
    assert Budget("flops").apply([plain(text)], tmp_path / "flops")[1] == first[1]
    measured["lstm"] = 0.5
    Budget("time").apply([plain(text, threads=0)], tmp_path / "time")
    refuses(r"train.threads \(0, not 1\); use the --jobs", Budget("time").apply, [plain(text)], tmp_path / "time")
