"""`train.log`: TensorBoard, Weights & Biases and MLflow have each number once, also after a run was killed."""

import sys
from types import SimpleNamespace

import pytest
import torch
from train_standins import Toys

from mnemos import InputError
from mnemos.lab.run.files import Measurement
from mnemos.lab.run.sinks import open_sink, scalars


def test_tensorboard_has_the_metrics_of_a_resumed_run(run_apart, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, toys = tmp_path / "run", Toys(train={"log": "tensorboard"})
    assert run_apart(folder, toys, False, "half-a-line", 8) == -9  # the newest checkpoint is of update 4
    # In a later process: files of one second are read in the order of the processes' numbers.
    assert run_apart(folder, toys, True) == 0
    written = [
        (name, one.step, value) for one in Measurement.read_all(folder) for name, value in scalars(one.values, one.kind)
    ]
    assert {"train/loss", "train/lr", "valid/loss", "gates/layers/0"} <= {name for name, _, _ in written}
    rounded = sorted((name, step, torch.tensor(value).item()) for name, step, value in written)  # to float32
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = sorted((name, one.step, one.value) for name in events.Tags()["scalars"] for one in events.Scalars(name))
    assert [one[:2] for one in found] == [one[:2] for one in rounded]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in rounded], nan_ok=True)


class Logged:
    """Stands for either library, and keeps what it has of runs, by id: {(name, step): [values]}."""

    def __init__(self):
        self.runs, self.parameters = {}, []

    def add(self, run, name, value, step):
        self.runs[run].setdefault((name, step), []).append(value)

    def wandb(self):
        def init(project, name, dir, config, id, resume):
            assert (project, name, config) == ("mnemos", "run", {"model": {"dim": 8}})
            run = id or self.begin()
            after = max((step + 1 for _, step in self.runs[run]), default=0)
            log = lambda values, step: [self.add(run, name, value, step) for name, value in values.items()]  # noqa: E731
            return SimpleNamespace(id=run, step=after, log=log, finish=lambda: None)

        return SimpleNamespace(init=init)

    def begin(self):
        self.runs["run"] = {}
        return "run"

    def mlflow(self):
        def of_name(run, name):
            return [SimpleNamespace(step=step) for key, step in self.runs[run] if key == name]

        client = SimpleNamespace(
            get_experiment_by_name=lambda name: None,
            create_experiment=lambda name: name,
            create_run=lambda experiment, run_name: SimpleNamespace(info=SimpleNamespace(run_id=self.begin())),
            log_param=lambda run, *given: self.parameters.append(given),
            get_run=lambda run: SimpleNamespace(data=SimpleNamespace(metrics={name: 0 for name, _ in self.runs[run]})),
            get_metric_history=of_name,
            log_metric=self.add,
            set_terminated=lambda run: None,
        )
        return SimpleNamespace(MlflowClient=lambda: client)


@pytest.mark.parametrize("log", ["wandb", "mlflow"])
def test_a_run_that_was_killed_goes_on_in_the_same_log_and_no_number_is_there_twice(log, tmp_path, monkeypatch):
    logged = Logged()
    monkeypatch.setitem(sys.modules, log, getattr(logged, log)())
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text('{"model": {"dim": 8}}')
    lines = [
        Measurement("train", step, {"loss": float(step), "gates": [{"name": "mix", "value": 0.5}]})
        for step in range(2, 12, 2)
    ]
    lines.append(Measurement("valid", 10, {"loss": 1.0}))
    open_sink(log, folder, 0).write(lines[:3])  # killed, after the checkpoint of step 4
    sink = open_sink(log, folder, 4)
    sink.write(lines[2:])
    sink.close()
    (numbers,) = logged.runs.values()
    assert logged.parameters == ([("model.dim", 8)] if log == "mlflow" else [])
    assert numbers.pop(("valid/loss", 10)) == [1.0]
    steps = range(2, 12, 2)
    expected = {("train/loss", step): [float(step)] for step in steps}
    assert numbers == expected | {("train/gates/mix/value", step): [0.5] for step in steps}


def test_a_log_that_refuses_is_one_line(tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("no API key\nis configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(InputError, match="found RuntimeError: no API key is configured; set it up"):
        open_sink("wandb", tmp_path, 0)
