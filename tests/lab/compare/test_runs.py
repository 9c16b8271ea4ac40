"""The runs of a comparison: their learning rates, their processes, and signals that end them all."""

import math
import multiprocessing
import os
import signal
import threading
from dataclasses import replace

import pytest
from refusals import refuses

from mnemos import registry
from mnemos.atomic import write_json
from mnemos.config import to_dict
from mnemos.lab.compare import arguments, processes
from mnemos.lab.compare.arguments import variants
from mnemos.lab.compare.compare import _check_folder, compare
from mnemos.lab.compare.comparison import summarise
from mnemos.lab.compare.processes import Count, shielded, train_several
from mnemos.lab.compare.runs import Sweep, check_rates, train
from mnemos.lab.errors import Interrupted, TrainingFailed
from mnemos.lab.run import progress, session
from mnemos.lab.run.progress import RUN_NUMBER, RunNumber
from mnemos.types import InputError


@pytest.fixture(scope="module")
def text():
    return registry.load("recipe", "text")()


@pytest.mark.parametrize(
    ("scores", "higher", "best"),
    [
        ({1e-3: 2.0, 1e-2: 1.0, 1e-1: 3.0}, False, 1e-2),
        ({1e-3: 2.0, 1e-2: 1.0, 1e-1: 3.0}, True, 1e-1),
        ({1e-3: None, 1e-2: 0.0}, True, 1e-2),  # a run that failed is worse than a score of 0
        ({1e-3: 1.0, 1e-2: 1.0, 1e-1: 0.5}, True, 1e-3),
        ({1e-3: None, 1e-2: None}, True, None),
    ],
)
def test_the_best_rate(scores, higher, best):
    assert Sweep(scores, higher).best == best


@pytest.mark.parametrize("rates", [(), (0.0,), (math.inf,), (1e-3, 1.01e-3)])
def test_rates_that_cannot_be_swept(rates):
    refuses("--rates: expected", check_rates, rates)


def test_too_many_recipes_are_refused(monkeypatch):
    monkeypatch.setattr(arguments, "MOST", 2)
    varied = variants(["short-listops"], [], [("model.dim", "16,32"), ("train.seed", "1")])
    assert [(one.name, one.model.dim, one.train.seed) for one in varied] == [
        ("short-listops-dim-16-seed-1", 16, 1),
        ("short-listops-dim-32-seed-1", 32, 1),
    ]
    refuses("at most 2 recipes, found 2 × 3 = 6; give", variants, ["a", "b"], [], [("model.dim", "1,2,3")])


VALID = {("text", 1e-3): 2.0, ("text", 1e-2): 1.5, ("text-xl", 1e-3): 1.0, ("text-xl", 1e-2): 1.2}


def write_result(folder, score, **more):
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {})
    scores = {"valid": {"bits per byte": score}, "test": {"loss": 0.0, "bits per byte": -1.0}}
    write_json(folder / "result.json", {"metric": "bits per byte", **scores, "seconds": 1.0, "flops": 1, **more})


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_in_bits_chooses_the_fewest_on_the_validation_split(text, tmp_path, runs_here, capsys, jobs):
    planned = []

    def trained(recipe, folder):
        planned.append((recipe.name, recipe.optim.lr, recipe.train.seed))
        score = VALID.get(planned[-1][:2])
        if score is None:
            raise TrainingFailed("loss is not finite")
        write_result(folder, score)

    runs_here(trained)
    recipes = [replace(text, name=name, train=replace(text.train, seed=5)) for name in ("text", "text-xl")]
    result = train(recipes, tmp_path, 2, (1e-3, 1e-2, 1e-1), jobs)
    assert {name: one.best for name, one in result.sweeps.items()} == {"text": 1e-2, "text-xl": 1e-3}
    assert result.sweeps["text-xl"].scores == {1e-3: 1.0, 1e-2: 1.2, 1e-1: None}
    said = capsys.readouterr()
    assert (
        said.out.count("loss is not finite") == said.out.count("the run failed with exit code 1; the lines above") == 2
    )
    for line in (
        "  text at learning rate 1.0e-02, seed 5: validation bits per byte 1.5, 1 s (3 of 8 runs)",
        "text: learning rate 1.0e-02, the best of 3 on the validation split",
        "text-xl: learning rate 1.0e-03, the best of 3 on the validation split, and the lowest tried",
        "  text-xl at learning rate 1.0e-03, seed 6: validation bits per byte 1, 1 s (8 of 8 runs)",
    ):
        assert said.out.splitlines().count(line) == 1
    assert planned[6:] == [("text", 1e-2, 6), ("text-xl", 1e-3, 6)]
    assert [str(run.relative_to(tmp_path)) for run in result.runs["text"]] == [f"text/1.0e-02/seed-{n}" for n in (5, 6)]
    assert train(recipes, tmp_path, 2, (1e-3, 1e-2), jobs).runs == result.runs
    assert len(planned) == 8, "nothing is trained again"
    capsys.readouterr()
    train(recipes, tmp_path, 3, (1e-3, 1e-2))
    assert [line[-12:] for line in capsys.readouterr().out.splitlines()[-2:]] == ["7 of 8 runs)", "8 of 8 runs)"]
    with pytest.raises(TrainingFailed, match="failed with every learning rate"):
        train(recipes, tmp_path, 2, (1e-1,), jobs)


def test_what_fails_is_left_out_of_a_comparison_that_goes_on(text, tmp_path, runs_here, capsys):
    def trained(recipe, folder):
        if recipe.name == "b" or recipe.train.seed == 1:
            raise TrainingFailed("no")
        write_result(folder, recipe.optim.lr, before={"bits per byte": 8.0})

    runs_here(trained)
    a, b = (replace(text, name=name) for name in "ab")
    found = train([a, b], tmp_path, 3, (1e-3, 1e-2), keep_going=True)
    assert found.runs == {"a": [tmp_path / f"a/1.0e-03/seed-{seed}" for seed in (0, 2)]}
    said = capsys.readouterr().out
    assert (
        "  a at learning rate 1.0e-03, seed 2: validation bits per byte 0.001 (8 before training), 1 s (6 of 6" in said
    )
    for recipes, goes_on in (([a, b], False), ([b], True)):
        with pytest.raises(TrainingFailed, match=r"b: the run failed with every learning rate; give other --rates"):
            train(recipes, tmp_path, 3, (1e-3, 1e-2), tell=False, keep_going=goes_on)
    assert "learning rate 1.0e-03, the best" not in capsys.readouterr().out
    found = train([a, b], tmp_path / "of-one-rate", 2, keep_going=True, tell=False)
    assert found.runs == {"a": [tmp_path / "of-one-rate/a/seed-0"], "b": []}


def test_a_run_without_a_score_is_told_and_summarised(text, tmp_path, runs_here, capsys):
    runs_here(lambda recipe, folder: write_result(folder, None, test={"loss": 0.0, "bits per byte": None}))
    train_several([(text, tmp_path / "text")])
    assert "validation bits per byte none, 1 s (1 of 1 run)" in capsys.readouterr().out
    assert math.isnan(summarise({"text": [tmp_path / "text"]}, tmp_path).rows[0].mean)


def test_runs_that_stopped_early_are_not_of_the_budget(tmp_path, runs_here, capsys):
    runs_here(lambda recipe, folder: write_result(folder, 1.0, stopped_early=recipe.name == "b"))
    (one,) = variants(["short-listops"], ["--data.train-size", "50", "--train.patience", "1"], [])
    found = compare([one, replace(one, name="b")], tmp_path / "run")
    assert found["equal"] == {"equal": "updates", "parameters": False, "early": ["b"]}
    assert "equal batches; but train.patience stopped runs of b before that\n" in capsys.readouterr().out


def test_a_run_keeps_its_threads_when_it_is_continued(text, tmp_path):
    """A comparison that goes on with other `--jobs` sets others."""
    write_result(tmp_path / "text", 1.0)
    write_json(tmp_path / "text" / "recipe.json", to_dict(text))
    train_several([(replace(text, train=replace(text.train, threads=text.train.threads + 1)), tmp_path / "text")])
    other = replace(text, train=replace(text.train, batch_size=3))
    refuses(r"one that differs in train\.batch_size", train_several, [(other, tmp_path / "text")])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_runs_with_one_line(text, runs_here, tmp_path, number):
    """It comes while the second run starts, which is not left behind."""

    def unhandled(*_: object) -> None:
        raise AssertionError("the signal ended the command")

    def trained(recipe, folder):
        if recipe.name == "b":
            os.kill(os.getpid(), number)
        return "working"

    before = {each: signal.signal(each, unhandled) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        children = runs_here(trained)
        runs = [(replace(text, name=name), tmp_path / "c" / name / "seed-0") for name in "abcd"]
        with pytest.raises(Interrupted, match="c: interrupted; the same command continues"):
            train_several(runs, jobs=2)
        assert signal.getsignal(number) is unhandled, "the handlers are those of before"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert [(child.terminated, child.joined) for child in children] == [(True, True)] * 2, "no other run begins"


@pytest.mark.parametrize("error", [TrainingFailed("no"), InputError("no"), Interrupted()])
def test_a_run_that_fails_or_was_interrupted_ends_the_others(text, runs_here, tmp_path, error):
    def trained(recipe, folder):
        if recipe.name == "a":
            return "working"
        raise error

    children = runs_here(trained)
    with pytest.raises(type(error)):
        train_several([(replace(text, name=name), tmp_path / name) for name in "abc"], jobs=2)
    assert [(child.terminated, child.joined) for child in children] == [(True, True), (False, True)]


def test_a_signal_that_comes_when_the_last_run_has_ended_is_not_lost(text, runs_here, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_score", lambda run: signal.raise_signal(signal.SIGINT))
    runs_here(lambda recipe, folder: None)
    with pytest.raises(Interrupted, match="interrupted; the same command continues"):
        train_several([(text, tmp_path / "text")])


def test_a_run_that_was_killed_has_no_lines_above(text, runs_here, tmp_path):
    runs_here(lambda recipe, folder: -signal.SIGKILL)
    with pytest.raises(TrainingFailed, match="exit code -9; it was killed, perhaps for want of memory"):
        train_several([(text, tmp_path / "text")])


@pytest.mark.parametrize(("error", "code"), [(Interrupted("a"), 130), (InputError("a"), 2), (OSError("a"), 1)])
def test_a_child_ends_with_a_code_and_one_line(text, capsys, monkeypatch, tmp_path, error, code):
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(processes, "begin_child", lambda: None)  # the tests have no parent of their own
    monkeypatch.setattr(session, "run", failing)
    with pytest.raises(SystemExit) as end:
        processes._run(to_dict(text), str(tmp_path), False, True, None)
    assert end.value.code == code
    assert capsys.readouterr().err.count("\n") == (code != 130), "the parent says how an interrupted one continues"


def test_ctrl_c_of_a_terminal_does_not_end_a_child():
    # Not by get_context, which `forked_comparisons` replaces.
    child = multiprocessing.context.SpawnContext().Process(target=signal.raise_signal, args=(signal.SIGINT,))
    with shielded():
        child.start()
    child.join()
    assert child.exitcode == 0  # 1: KeyboardInterrupt, with a traceback
    assert threading.current_thread() is threading.main_thread()
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_runs_have_their_numbers_also_after_those_that_were_finished_before():
    count = Count(5, begun=1, ended=1)  # they say nothing now: of the data and recipes those say it that begin
    numbers = [RunNumber(2, 5, first=True, new=True), RunNumber(3, 5, new=True), RunNumber(4, 5)]
    assert [count.begin(name) for name in "aba"] == numbers, "the first of all, and of each recipe"


@pytest.mark.parametrize("quiet", [False, True])
def test_the_lines_of_a_run_of_a_comparison_begin_with_its_number(monkeypatch, capsys, quiet):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False)
    token = RUN_NUMBER.set(RunNumber(2, 8))
    try:
        with progress.progress(quiet, "text", 100, 0) as display:
            display.updated(1, {"loss": 1.0, "lr": 1.0}, lambda: 0)
    finally:
        RUN_NUMBER.reset(token)
    said = capsys.readouterr().err
    assert not said if quiet else said.startswith("[2/8] text 1/100") and " of training left " in said


def test_a_comparison_goes_on_beside_its_pages(tmp_path):
    for name in ("text", "report.html", "look.html", "comparison.json", "budget.json", ".DS_Store"):
        (tmp_path / name).touch()
    _check_folder(tmp_path, ["text"], shared=False)
    (tmp_path / "other/seed-0").mkdir(parents=True)
    _check_folder(tmp_path, ["text"], shared=True)
    refuses("a new folder or this comparison, found 'other' in it", _check_folder, tmp_path, ["text"], shared=False)
    _check_folder(tmp_path, ["text", "other"], shared=False)
    (tmp_path / "notes").touch()
    refuses("a new folder or this comparison, found 'notes' in it", _check_folder, tmp_path, ["text"], shared=False)
