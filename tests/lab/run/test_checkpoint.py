"""Checkpoints: everything comes back, damage is found, and which of a folder's files are read and kept."""

import math
import os

import pytest
import torch
from torch import nn
from trained_runs import equal

from mnemos import tree_file
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.run import checkpoint
from mnemos.lab.run.checkpoint import load_model_state, model_state
from mnemos.types import InputError

TYPES = "bool uint8 int32 int64 float16 bfloat16 float64"
BASE = torch.arange(12.0).reshape(3, 4)
EVERYTHING = {
    "numbers": (1, -2, 0.1, 1e-300, math.pi, math.inf, float("nan"), True, None, "text é"),
    "nested": [[], (), {}, {"a": [{"b": (torch.tensor(3, dtype=torch.int64),)}]}],
    "types": {name: torch.ones(2, 3).to(getattr(torch, name)) for name in TYPES.split()},
    "odd": [BASE.t(), BASE[:, 1], BASE[1:], BASE, BASE, torch.zeros(0, 3), torch.zeros(()), torch.empty(2, 0)],
}


def alike(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(alike(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(alike, left, right))
    return left == right or (left != left and right != right)


def test_everything_comes_back(tmp_path):
    checkpoint.write(tmp_path / "a", EVERYTHING)
    assert alike(checkpoint.read(tmp_path / "a"), EVERYTHING)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_newest_passes_over_what_is_damaged_and_says_so(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    for step in (1, 2, 30):
        checkpoint.write(checkpoint.path_of(tmp_path, step), {"step": step})
    (tmp_path / "step-00000099.safetensors.bak").write_text("not ours")
    assert checkpoint.newest(tmp_path) == (30, {"step": 30}, [])
    checkpoint.path_of(tmp_path, 30).write_bytes(b"")
    step, value, (note,) = checkpoint.newest(tmp_path)
    assert (step, value) == (2, {"step": 2})
    assert "step-00000030.safetensors: " in note
    assert note.endswith("step-00000002.safetensors")
    for step in (1, 2):
        checkpoint.path_of(tmp_path, step).write_bytes(b"x" * 50)
    with pytest.raises(InputError, match="all 3 checkpoints"):
        checkpoint.newest(tmp_path)


def test_prune_keeps_the_newest_and_nothing_of_a_lost_future(tmp_path):
    for step in (1, 2, 3, 4, 9):
        checkpoint.path_of(tmp_path, step).write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.prune(tmp_path, 4, 2)
    assert checkpoint.steps(tmp_path) == [4, 3]
    assert (tmp_path / "notes.txt").exists()
    checkpoint.path_of(tmp_path, 9).write_text("")
    checkpoint.prune(tmp_path, 9, 1, constant=3)
    assert checkpoint.steps(tmp_path) == [9, 3], "the newest before the rate falls"
    for step in (1, 2, 4, 5, 6):
        checkpoint.path_of(tmp_path, step).write_text("")
    checkpoint.prune(tmp_path, 9, 3, every=2)
    assert checkpoint.steps(tmp_path) == [9, 6, 5, 4], "three of the schedule, with the newest"
    checkpoint.prune(tmp_path, 9, 2, every=2)
    assert checkpoint.steps(tmp_path) == [9, 6]


def test_the_best_weights_of_a_checkpoint_are_kept(tmp_path):
    """The newest that it can know: of its own update too, because a run's end is saved after it is evaluated."""
    for kind, known in (("step", (4,)), ("best", (1, 2, 4, 5, 6))):
        for step in known:
            checkpoint.path_of(tmp_path, step, kind).write_text("")
    checkpoint.prune_best(tmp_path)
    assert checkpoint.steps(tmp_path, "best") == [6, 4, 2]


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step-00000001.safetensors"
    checkpoint.write(path, {"a": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(TrainingFailed, match=r"No space left.*, then resume the run"):
            checkpoint.write(path, {"a": 2})
        with pytest.raises(InputError, match=r"No space left.*; free disk space$"):  # of whoever has no run to resume
            tree_file.write(path, {"a": 2})
    assert checkpoint.read(path) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_another_models_weights_are_refused():
    saved = model_state(nn.Linear(3, 2))
    for model, weights, words in (
        (nn.Linear(3, 3), saved, r"'weight' of shape \(3, 3\), found \(2, 3\)"),
        (nn.Linear(3, 2), {"weight": saved["weight"]}, "have no 'bias'"),
        (nn.Linear(3, 2, bias=False), saved, "have a 'bias'"),
    ):
        with pytest.raises(InputError, match=words):
            load_model_state(model, weights)


def test_tied_weights_stay_tied(tmp_path):
    def tied() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        made[1].weight = made[0].weight
        return made

    model, other = tied(), tied()
    checkpoint.write(tmp_path / "a", model_state(model))
    assert os.path.getsize(tmp_path / "a") < 4 * (4 * 4 + 2 * 4) + 700
    load_model_state(other, checkpoint.read(tmp_path / "a"))
    assert other[1].weight is other[0].weight
    equal(other.state_dict(), model.state_dict())
