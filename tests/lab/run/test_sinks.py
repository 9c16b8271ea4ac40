"""`train.log`: TensorBoard has what metrics.jsonl has, once, also after a run was killed and resumed."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from train_standins import Toys

from mnemos import InputError
from mnemos.lab.run.checks import check_settings
from mnemos.lab.run.files import Measurement
from mnemos.lab.run.sinks import scalars


def killed_and_finished(
    run: Callable[..., int], folder: Path, log: str, kills: list[tuple[str, int]]
) -> list[tuple[str, int, float]]:
    """Train with kills (a checkpoint is saved every fourth update), and return the numbers in metrics.jsonl.

    Returns [(name, step, value)].
    """
    toys = Toys(train={"log": log})
    for resumed, (moment, number) in enumerate(kills):
        assert run(folder, toys, resumed > 0, moment, number) == -9
    assert run(folder, toys, True) == 0
    found = [(name, one.step, value) for one in Measurement.read_all(folder) for name, value in scalars(one)]
    assert {"train/loss", "train/lr", "valid/loss", "gates/layers/0"} <= {name for name, _, _ in found}
    return found


def test_tensorboard_has_the_metrics_of_a_resumed_run(run_apart, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = killed_and_finished(run_apart, tmp_path / "run", "tensorboard", [("half-a-line", 8)])
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = [(name, event.step, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    rounded = sorted((name, step, torch.tensor(value).item()) for name, step, value in wanted)  # to float32
    assert [one[:2] for one in sorted(found)] == [one[:2] for one in rounded]
    assert [one[2] for one in sorted(found)] == pytest.approx([one[2] for one in rounded], nan_ok=True)


def test_a_missing_library_is_one_line_before_the_run(monkeypatch):
    log = "tensorboard"
    monkeypatch.setitem(sys.modules, log, None)  # as if it were not installed
    with pytest.raises(InputError, match=rf"library {log}, .*; run: pip install .*'{log}>="):
        check_settings(Toys(train={"log": log}).recipe(), 1)
    check_settings(Toys().recipe(), 1)


def test_an_unknown_log_is_refused_with_the_name_that_is_alike():
    with pytest.raises(
        InputError, match=r"train.log: expected one of .*found 'tensorbord'; did you mean 'tensorboard'"
    ):
        check_settings(Toys(train={"log": "tensorbord"}).recipe(), 1)
