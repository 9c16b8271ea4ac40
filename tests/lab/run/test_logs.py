"""`train.log`: Weights & Biases and MLflow, by stand-ins, have each number once, also after a run was killed."""

import sys
from types import SimpleNamespace

import pytest

from mnemos import InputError
from mnemos.lab.run.files import Measurement
from mnemos.lab.run.sinks import open_sink


class Logged:
    """What both libraries keep of runs, by id: {(name, step): [values]}."""

    def __init__(self):
        self.runs = {}

    def wandb(self):
        def init(project, name, dir, config, id, resume):
            number = id or f"run-{len(self.runs)}"
            numbers = self.runs.setdefault(number, {})
            run = SimpleNamespace(
                id=number, step=max((step + 1 for _, step in numbers), default=0), finish=lambda: None
            )

            def log(values, step):
                for key, value in values.items():
                    numbers.setdefault((key, step), []).append(value)
                run.step = step

            run.log = log
            assert (project, name, config) == ("mnemos", "run", {"model": {"dim": 8}})
            return run

        return SimpleNamespace(init=init)

    def mlflow(self):
        logged = self

        class MlflowClient:
            def get_experiment_by_name(self, name):
                return None

            def create_experiment(self, name):
                return name

            def create_run(self, experiment, run_name):
                number = f"run-{len(logged.runs)}"
                logged.runs[number] = {}
                return SimpleNamespace(info=SimpleNamespace(run_id=number))

            def log_param(self, run, name, value):
                assert (name, value) == ("model.dim", 8)

            def get_run(self, run):
                return SimpleNamespace(data=SimpleNamespace(metrics={name: 0 for name, _ in logged.runs[run]}))

            def get_metric_history(self, run, name):
                return [SimpleNamespace(step=step) for key, step in logged.runs[run] if key == name]

            def log_metric(self, run, name, value, step):
                logged.runs[run].setdefault((name, step), []).append(value)

            def set_terminated(self, run):
                pass

        return SimpleNamespace(MlflowClient=MlflowClient)


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
    assert numbers.pop(("valid/loss", 10)) == [1.0]
    steps = range(2, 12, 2)
    expected = {("train/loss", step): [float(step)] for step in steps}
    assert numbers == expected | {("train/gates/mix/value", step): [0.5] for step in steps}


def test_a_log_that_is_missing_or_refuses_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"library wandb, .*; run: pip install .*wandb"):
        open_sink("wandb", tmp_path, 0)

    def init(**_):
        raise RuntimeError("no API key\nis configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(InputError, match="found RuntimeError: no API key is configured; set it up"):
        open_sink("wandb", tmp_path, 0)
