import math
import os
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mnemos import tree_file
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.run import checkpoint
from mnemos.lab.run.checkpoint import load_model_state, model_state
from mnemos.types import InputError


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


def everything() -> dict:
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "numbers": (1, -2, 0.1, 1e-300, math.pi, math.inf, float("nan"), True, None, "text é"),
        "nested": [[], (), {}, {"a": [{"b": (torch.tensor(3, dtype=torch.int64),)}]}],
        "types": {
            str(dtype): torch.ones(2, 3).to(dtype)
            for dtype in (
                torch.bool,
                torch.uint8,
                torch.int32,
                torch.int64,
                torch.float16,
                torch.bfloat16,
                torch.float64,
            )
        },
        "odd": [base.t(), base[:, 1], base[1:], base, base, torch.zeros(0, 3), torch.zeros(()), torch.empty(2, 0)],
    }


def test_everything_comes_back(tmp_path):
    checkpoint.write(tmp_path / "a", everything())
    assert alike(checkpoint.read(tmp_path / "a"), everything())
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("value", [object(), {1: 2}, np.float32(1), {"a": {1, 2}}, torch.nn.ReLU()])
def test_what_cannot_be_kept_is_refused(value):
    with pytest.raises(TypeError):
        checkpoint.encode(value)


def test_damage_is_found_wherever_it_is(tmp_path):
    path = tmp_path / "a"
    checkpoint.write(path, {"x": torch.arange(50.0), "y": {"z": torch.ones(3, 5)}, "n": 7, "f": 0.1})
    good = path.read_bytes()
    value = checkpoint.read(path)
    choose = random.Random(0)
    places = [*range(0, 10), *choose.sample(range(10, len(good)), 100)]
    messages = []
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << choose.randrange(8)
        path.write_bytes(bad)
        try:
            assert alike(checkpoint.read(path), value)  # a byte that says nothing: a space, an unused name
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 0.9 * len(places)
    assert all(message.startswith(str(path)) and "\n" not in message for message in messages)
    for length in [0, 7, 100, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(InputError, match="damaged"):
            checkpoint.read(path)
    path.write_bytes(good + b"more")
    with pytest.raises(InputError, match="damaged"):
        checkpoint.read(path)


def test_other_files_are_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(InputError, match="expected a checkpoint"):
        checkpoint.read(tmp_path / "other")
    with pytest.raises(InputError, match=r"none: .*no such"):
        checkpoint.read(tmp_path / "none")
    with pytest.raises(InputError, match="damaged"):
        checkpoint.read(tmp_path)


def test_newest_passes_over_what_is_damaged_and_says_so(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    for step in (1, 2, 30):
        checkpoint.write(checkpoint.path_of(tmp_path, step), {"step": step})
    (tmp_path / "step-00000099.safetensors.bak").write_text("not ours")
    assert checkpoint.newest(tmp_path) == (30, {"step": 30}, [])
    checkpoint.path_of(tmp_path, 30).write_bytes(b"")
    step, value, notes = checkpoint.newest(tmp_path)
    assert (step, value) == (2, {"step": 2})
    assert len(notes) == 1
    assert "step-00000030.safetensors: " in notes[0]
    assert notes[0].endswith("step-00000002.safetensors")
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


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step-00000001.safetensors"
    checkpoint.write(path, {"a": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingFailed, match=r"No space left.*, then resume the run"):
        checkpoint.write(path, {"a": 2})
    with pytest.raises(InputError, match=r"No space left.*; free disk space$"):  # of whoever has no run to resume
        tree_file.write(path, {"a": 2})
    monkeypatch.undo()
    assert checkpoint.read(path) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_order_of_a_write(tmp_path, monkeypatch):
    """The content is on disk before the name is, and the name before the write returns."""
    order = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, o=original, n=name: (order.append(n), o(*args))[1])
    checkpoint.write(tmp_path / "a", {"a": torch.ones(2)})
    assert order == ["fsync", "replace", "fsync"]


def test_another_models_weights_are_refused():
    saved = model_state(nn.Linear(3, 2))
    with pytest.raises(InputError, match=r"'weight' of shape \(3, 3\), found \(2, 3\)"):
        load_model_state(nn.Linear(3, 3), saved)
    with pytest.raises(InputError, match="have no 'bias'"):
        load_model_state(nn.Linear(3, 2), {"weight": saved["weight"]})
    with pytest.raises(InputError, match="have a 'bias'"):
        load_model_state(nn.Linear(3, 2, bias=False), saved)


def test_tied_weights_stay_tied(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    checkpoint.write(tmp_path / "a", model_state(model))
    assert os.path.getsize(tmp_path / "a") < 4 * (4 * 4 + 2 * 4) + 700
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = other[0].weight
    load_model_state(other, checkpoint.read(tmp_path / "a"))
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)
