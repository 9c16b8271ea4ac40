"""A run that is killed and resumed is the run that was not, bit for bit. The processes and the signals are real."""

import functools
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from train_standins import Toys, look, train
from trained_runs import equal, numbers, result, same, stopped, weights

from mnemos.lab.run import checkpoint
from mnemos.lab.run import folder as run_folder
from mnemos.lab.run.recipe import ScheduleConfig
from mnemos.lab.run.weights import final_weights

LANGUAGE = Toys(model={"cached": True}, train={"accumulate": 2, "checkpoint_every": 3, "log_every": 4})
CLASSES = Toys(language=False, model={"cached": True}, optim={"name": "radam"})

# At this rate the validation loss soon rises, and the rate is halved at every other look or so.
PLATEAU = Toys(
    language=True,
    optim={"lr": 0.3, "schedule": ScheduleConfig("plateau", patience=1)},
    train={"eval_every": 1, "checkpoint_every": 2, "log_every": 1, "keep": 12},
)

# Evaluations after 2 and 4 are each the best so far; a checkpoint after 3 knows the first of them, one after 6 both.
BEST = Toys(language=True, train={"keep_best": True, "eval_every": 2, "checkpoint_every": 3})
WHOLE = {"language": LANGUAGE, "classes": CLASSES, "plateau": PLATEAU, "best": BEST}


def moments(numbers, *fast):
    """(moment, number): the n-th update, or the n-th call. Those that are not `fast` are of the exhaustive suite."""
    pairs = [(moment, number) for moment, several in numbers.items() for number in several]
    return [pair if pair in fast else pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in pairs]


# Checkpoints after 3, 6, 9, 12; looks and lines at 4, 8, 12. "fsync" counts files and their folders, "replace" files:
# run.json, metrics.jsonl, recipe.json, then checkpoints. The fourth look is at the test split.
# Batches looked at: three a split, validation after 4, 8, 12, then test.
KILLS = {
    "mid-update": (1, 2, 8), "saved": (3, 12), "half-written": (3, 9), "fsync": (1, 7, 8, 11),
    "replace": (1, 2, 3, 5), "pruning": (9,), "half-a-line": (4, 8), "looking": (2, 3, 4),
    "SIGTERM": (1, 5, 6, 8, 12), "SIGINT": (1, 5, 6, 8, 12), "SIGTERM-looking": (1, 2, 11),
}  # fmt: skip
# The other kinds are among those of `test_killed_again_and_again`.
FAST = ("fsync", 8), ("replace", 1), ("pruning", 9), ("half-a-line", 4), ("SIGINT", 12), ("SIGTERM-looking", 11)


@pytest.fixture(scope="module")
def references(run_apart, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of the run of `WHOLE` that nothing stopped, made when it is first asked for."""

    @functools.cache
    def reference(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "run"
        assert run_apart(folder, WHOLE[name]) == 0
        return folder

    return reference


@pytest.mark.parametrize(("moment", "number"), moments(KILLS, *FAST))
def test_killed_or_stopped_and_resumed(run_apart, references, tmp_path, moment, number):
    """A signal that asks finishes the update, or the look, and saves."""
    folder, asked = tmp_path / "run", moment.startswith("SIG")
    assert run_apart(folder, LANGUAGE, False, moment, number) == (130 if asked else -9)
    assert not (folder / "result.json").exists()
    if asked:
        looking = {1: 4, 2: 4, 11: 12} if "looking" in moment else {}
        assert checkpoint.steps(folder / "checkpoints")[0] == looking.get(number, number)
    begun = (folder / "recipe.json").exists()
    assert begun == ((moment, number) not in [("replace", 1), ("replace", 2), ("replace", 3), ("fsync", 1)])
    assert run_apart(folder, LANGUAGE, begun) == 0
    same(folder, references("language"))


def test_killed_again_and_again(run_apart, references, tmp_path):
    folder = tmp_path / "run"
    assert run_apart(folder, CLASSES, False, "mid-update", 2) == -9
    for moment, number in [("mid-update", 5), ("half-written", 8), ("SIGTERM", 7), ("looking", 1), ("mid-update", 11)]:
        assert run_apart(folder, CLASSES, True, moment, number) == (130 if moment == "SIGTERM" else -9)
    assert run_apart(folder, CLASSES, True) == 0
    same(folder, references("classes"))


STOPS = {"mid-update": (8,), "saved": (6,), "looking": (6,), "half-a-line": (9,), "SIGTERM": (7,)}
STOPS |= {"SIGTERM-looking": (17,)}


@pytest.mark.parametrize(("moment", "number"), moments(STOPS, ("saved", 6), ("SIGTERM-looking", 17)))
def test_what_the_plateau_has_seen_is_kept(run_apart, references, tmp_path, moment, number):
    """Looks 1 to 12, after every update; checkpoints after every other, each before the look at its own update."""
    whole = references("plateau")
    rates = [line["lr"] for line in numbers(whole, "train")]
    assert rates[0] == 0.3
    assert len(set(rates[:6])) > 1 < len(set(rates[6:])), "the rate must be halved before and after the run is stopped"
    assert run_apart(tmp_path / "run", PLATEAU, False, moment, number) == (130 if "SIGTERM" in moment else -9)
    assert run_apart(tmp_path / "run", PLATEAU, True) == 0
    same(tmp_path / "run", whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_every_precision(run_apart, tmp_path, precision):
    toys = Toys(language=True, train={"precision": precision})
    assert run_apart(tmp_path / "whole", toys) == 0
    assert run_apart(tmp_path / "run", toys, False, "mid-update", 6) == -9
    assert run_apart(tmp_path / "run", toys, True) == 0
    same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "damage", ["flipped", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("truncated", "empty"))]
)
def test_goes_on_from_the_newest_good_checkpoint(references, tmp_path, damage, capsys):
    folder = stopped(references("language"), tmp_path / "run")
    newest = checkpoint.path_of(folder / "checkpoints", 12)
    content = bytearray(newest.read_bytes())
    content[-100] ^= 4
    newest.write_bytes({"truncated": content[:-1000], "flipped": content, "empty": b""}[damage])
    train(LANGUAGE.recipe(), folder, resume=True, on_evaluation=look, quiet=True)
    (said,) = [text for text in capsys.readouterr().err.splitlines() if "damaged" in text]
    assert "step-00000012.safetensors: " in said
    assert said.endswith("step-00000009.safetensors")
    about = json.loads((folder / "run.json").read_text())
    assert [entry["step"] for entry in about["resumed"]] == [9]
    same(folder, references("language"))


def test_looking_leaves_no_trace(references, tmp_path):
    often = replace(LANGUAGE, train={**LANGUAGE.train, "eval_every": 1})
    train(often.recipe(), tmp_path / "run", on_evaluation=look, quiet=True)
    assert numbers(tmp_path / "run", "train") == numbers(references("language"), "train")


def bests(folder: Path) -> list[int]:
    return checkpoint.steps(folder / "checkpoints", "best")


def test_the_best_weights_are_those_that_the_checkpoint_knows(run_apart, references, tmp_path):
    every = replace(BEST, train={**BEST.train, "checkpoint_every": 1, "keep": 12})
    assert run_apart(tmp_path / "every", every) == 0
    folder = tmp_path / "run"
    assert run_apart(folder, BEST, False, "saved best", 4) == -9
    assert (checkpoint.steps(folder / "checkpoints"), bests(folder)) == ([3], [4, 2])
    # Stopped before it evaluates again, the run must not end with weights of an evaluation that it does not know.
    assert run_apart(folder, BEST, True, "SIGTERM", 4) == 130
    assert bests(folder) == [2]
    equal(final_weights(folder), weights(tmp_path / "every", 2))
    assert run_apart(folder, BEST, True) == 0
    same(folder, references("best"))
    assert result(folder)["best_step"] == 4
    equal(final_weights(folder), weights(tmp_path / "every", 4))


def test_an_older_checkpoint_finds_its_best_weights(run_apart, references, tmp_path):
    folder = tmp_path / "run"
    assert run_apart(folder, BEST, False, "mid-update", 8) == -9
    assert bests(folder) == [4, 2], "the checkpoint after 3 knows the older one"
    checkpoint.path_of(folder / "checkpoints", 6).write_bytes(b"")
    assert run_apart(folder, BEST, True) == 0
    same(folder, references("best"))


def test_a_run_goes_on_from_before_the_rate_fell(tmp_path):
    """Also where no checkpoint of the schedule is that old."""
    settings = {"steps": 8, "checkpoint_every": 100, "eval_every": 100}
    toys = Toys(language=True, optim={"schedule": ScheduleConfig("trapezoid", fall=0.25)}, train=settings)
    train(toys.recipe(), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [8, 6]
    longer = replace(toys, train={**settings, "steps": 12}).recipe()
    train(longer, tmp_path / "run", resume=True, longer=True)
    train(longer, tmp_path / "whole")
    equal(final_weights(tmp_path / "run"), final_weights(tmp_path / "whole"))


def test_a_clock_that_jumps_changes_no_number(references, tmp_path, monkeypatch):
    jumps, dates = itertools.cycle([4e9, 0.0, 1e9]), itertools.cycle(["2100-01-01T00:00:00", "1970-01-01T00:00:00"])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(run_folder, "now", lambda: next(dates))
    train(LANGUAGE.recipe(), tmp_path / "run", on_evaluation=look, quiet=True)
    (tmp_path / "run/result.json").unlink()
    train(LANGUAGE.recipe(), tmp_path / "run", resume=True, quiet=True)
    assert numbers(tmp_path / "run") == numbers(references("language"))
