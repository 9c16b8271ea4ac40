"""Several real processes, on one machine and on two (`train.num_nodes`): they train, stop and resume as one."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
from train_standins import STILL, Toys, work
from trained_runs import numbers, result, same, stopped, weights

from mnemos import InputError
from mnemos.lab.run import checkpoint, devices
from mnemos.lab.run.recipe import TrainConfig

pytestmark = [pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")]

DRIVER = Path(__file__).with_name("train_driver.py")
STEPS = {"steps": 6, "checkpoint_every": 2}  # the sixth is the first that uses the toy's `late`, in one process alone


def launch(folder: Path, toys: Toys, resume: bool = False, moment: str = "", number: int = 0, code: int = 0) -> str:
    """What two processes say, of which the first ends with `code`; at `moment` the first sends itself a signal."""
    ended = processes.launched(_member, str(folder), toys, resume, moment, number)
    said = "".join(end.stderr for end in ended)
    assert ended[0].returncode == code, said
    return said


def _member(folder: str, toys: Toys, resume: bool, moment: str, number: int) -> None:
    first = os.environ["LOCAL_RANK"] == "0"
    work(folder, toys, resume, moment if first else "", number, quiet=False)


def launch_program(folder: Path, toys: Toys, torchrun: bool) -> str:
    """The same by a program that torchrun, or the program itself, starts a second time."""
    program = [sys.executable]
    if torchrun:
        program += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    program += [str(DRIVER), str(folder), json.dumps(vars(toys))]
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


def agree(folder: Path, other: Path, weight_tolerance: float, loss_tolerance: float) -> None:
    ours, theirs = weights(folder), weights(other)
    assert list(ours) == list(theirs)  # the names of the model itself
    torch.testing.assert_close(ours, theirs, rtol=0, atol=weight_tolerance)
    for line, other_line in zip(numbers(folder), numbers(other), strict=True):
        for key in ("loss", "auxiliary_loss", "accuracy", "grad_norm"):
            if key in line:
                assert line[key] == pytest.approx(other_line[key], rel=loss_tolerance)
        assert line.get("tokens") == other_line.get("tokens")


@pytest.mark.parametrize(
    ("language", "launcher"),
    [
        (False, "as torchrun"),
        pytest.param(False, "torchrun", marks=pytest.mark.exhaustive),  # three interpreters import everything
        pytest.param(True, "itself", marks=pytest.mark.exhaustive),
    ],
)
def test_two_ddp_processes_train_as_one(run_apart, tmp_path, language, launcher):
    data = {} if language else {"ignored": 3, "corpus": True}
    model = {**STILL, "auxiliary": 0.3}
    one = Toys(language, model, data, train={**STEPS, "precision": "64-true"})
    two = replace(one, train={**one.train, "devices": 2})
    assert run_apart(tmp_path / "one", one) == 0
    if launcher == "as torchrun":  # stopped, which the first process alone is told, and resumed
        said = launch(tmp_path / "two", two, False, "SIGTERM", 3, code=130) + launch(tmp_path / "two", two, True)
        assert [one["step"] for one in json.loads((tmp_path / "two/run.json").read_text())["resumed"]] == [3]
    else:
        said = launch_program(tmp_path / "two", two, torchrun=launcher == "torchrun")
    assert "Initializing" not in said
    assert "Warning" not in said
    agree(tmp_path / "two", tmp_path / "one", 1e-12, 1e-6)
    assert result(tmp_path / "two")["test"] == pytest.approx(result(tmp_path / "one")["test"], rel=1e-9)


ROLLOUTS = [
    (True, {"segment_length": 5}, 2),
    (True, {"segment_length": 5, "replay": False}, 1),
    (False, {"segments": 3, "horizon": 2, "checkpoints": "sqrt"}, 1),
]


@pytest.mark.parametrize(
    ("strategy", "rows", "rollout", "accumulate"),
    [
        ("ddp", *ROLLOUTS[0]),
        pytest.param("ddp", *ROLLOUTS[1], marks=pytest.mark.exhaustive),
        pytest.param("ddp", *ROLLOUTS[2], marks=pytest.mark.exhaustive),
        pytest.param("fsdp", *ROLLOUTS[0], marks=pytest.mark.exhaustive),
        pytest.param("fsdp", *ROLLOUTS[2], marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_with_rollouts_train_as_one(run_apart, tmp_path, strategy, rows, rollout, accumulate):
    model = {**STILL, "late": strategy == "ddp", "cached": rows, "advances": not rows}
    train = {**STEPS, "precision": "64-true" if strategy == "ddp" else "32-true", "rollout": rollout}
    assert run_apart(tmp_path / "one", Toys(True, model, {"rows": rows}, train=train)) == 0
    train |= {"devices": 2, "strategy": strategy, "accumulate": accumulate}
    assert "Warning" not in launch(tmp_path / "two", Toys(True, model, {"rows": rows}, train=train))
    agree(tmp_path / "two", tmp_path / "one", *((1e-12, 1e-6) if strategy == "ddp" else (2e-6, 1e-5)))


def test_ddp_does_not_warn_of_a_model_whose_parameters_are_all_used(tmp_path):
    model = {**STILL, "cached": False, "advances": True}
    train = {"devices": 2, "steps": 4, "rollout": ROLLOUTS[2][1]}  # in which each process uses every parameter
    assert "unused" not in launch(tmp_path / "one", Toys(True, model, train=train))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> tuple[Path, Toys]:
    toys = Toys(True, {**STILL, "late": False}, train={**STEPS, "devices": 2, "strategy": "fsdp"})
    folder = tmp_path_factory.mktemp("sharded") / "run"
    assert "Warning" not in launch(folder, toys)
    return folder, toys


def test_fsdp_trains_as_one(run_apart, sharded, tmp_path):
    folder, toys = sharded
    assert run_apart(tmp_path / "one", Toys(True, toys.model, train=STEPS)) == 0
    agree(folder, tmp_path / "one", 2e-6, 1e-5)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.exhaustive), "fsdp"])
def test_two_processes_resume_exactly(sharded, tmp_path, strategy):
    whole, toys = sharded
    if strategy == "ddp":  # with dropout
        toys, whole = Toys(True, train={**toys.train, "strategy": strategy}), tmp_path / "whole"
        launch(whole, toys)
    folder = stopped(whole, tmp_path / "run", 6)
    assert len(weights(folder, 4, "generators")) == 2
    launch(folder, toys, resume=True)
    same(folder, whole)


@pytest.mark.exhaustive  # nine processes
def test_a_sharded_checkpoint_loads_at_another_number_of_processes(sharded, tmp_path):
    two, toys = sharded
    train, model = dict(toys.train), toys.model
    for world in (1, 3):  # rows of 8 and 11 in 3 shards are uneven
        processes.together(_loads, checkpoint.path_of(two / "checkpoints", 6), toys, world=world)
    train |= {"devices": 3, "batch_size": 6, "init_from": str(two)}
    still = Toys(True, model, optim={"lr": 1e-30}, train=train)  # a new run, whose updates round to nothing
    ended = processes.launched(_member, str(tmp_path / "three"), still, False, "", 0, world=3)
    assert not any(end.returncode for end in ended), ended
    found, started = weights(tmp_path / "three"), weights(two)
    assert all(torch.equal(found[name], value) for name, value in started.items() if "cache" not in name)


def _loads(rank: int, world: int, saved: Path, toys: Toys) -> None:
    """Weights and the optimiser's state of a checkpoint are the same after they were loaded into shards."""
    from torch.distributed.fsdp import fully_shard

    from mnemos.lab.run.checkpoint import load_model_state, model_state
    from mnemos.lab.run.optim import load_optimiser_state, make_optimiser, optimiser_state

    whole, model = checkpoint.read(saved), toys.recipe().model.build()
    if world > 1:
        fully_shard(model)
        assert len(model.head.weight.to_local()) == len(torch.arange(11).chunk(world)[rank])
    optimiser = make_optimiser(model, toys.recipe().optim, fused=False)
    assert not torch.equal(model_state(model)["head.weight"], whole["model"]["head.weight"])
    load_model_state(model, whole["model"])
    load_optimiser_state(model, optimiser, whole["optimiser"])
    for found, name in ((model_state(model), "model"), (optimiser_state(model, optimiser), "optimiser")):
        assert checkpoint.digest(*checkpoint.encode(found)) == checkpoint.digest(*checkpoint.encode(whole[name]))


def test_what_the_first_process_refuses_all_do(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    said = launch(tmp_path, Toys(True, train={"devices": 2}), code=1)
    assert "expected a new or empty folder" in said
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


ONE = Toys(False, STILL, train={**STEPS, "precision": "64-true", "keep_best": True})
NODES = replace(ONE, train={**ONE.train, "num_nodes": 2})


def on_two(folder: Path, toys: Toys) -> list[processes.Ended]:
    """`work` with each rank; the second has another folder, as where its name has the time of day."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    folders = [str(folder), f"{folder}-a-second-later"]
    started = [processes.Process(work, f, toys, **meeting, NODE_RANK=str(i)) for i, f in enumerate(folders)]
    return [process.wait(120) for process in started]


def test_two_machines_train_as_one(run_apart, forks, tmp_path):
    assert run_apart(tmp_path / "one", ONE) == 0
    ended = on_two(tmp_path / "two", NODES)
    assert [end.returncode for end in ended] == [0, 0], ended
    agree(tmp_path / "two", tmp_path / "one", 1e-12, 1e-6)
    assert result(tmp_path / "one")["test"]["loss"] == pytest.approx(result(tmp_path / "two")["test"]["loss"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]  # one folder for both machines


TORCHRUN = {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
SLURM = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("told", "config", "words"),
    [
        (TORCHRUN, TrainConfig(devices=4), "torchrun started 8 processes, 4 per machine.*found 4 and 1; set"),
        (SLURM, TrainConfig(devices=8), r"srun started 8 .* --train.devices 4 --train.num_nodes 2$"),
        ({}, TrainConfig(num_nodes=2), "MASTER_ADDR, MASTER_PORT, NODE_RANK .*found no MASTER_ADDR"),
        ({"MASTER_ADDR": "here", "MASTER_PORT": "1"}, TrainConfig(num_nodes=2), "found no NODE_RANK"),
    ],
)
def test_processes_that_are_not_those_of_the_recipe_are_one_line(monkeypatch, told, config, words):
    for name in {*TORCHRUN, *SLURM, "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        devices.connect(config)


def test_a_run_that_goes_on_keeps_its_number_of_processes(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as refused:
        devices.connect(TrainConfig(devices=2), "runs/it")
    advice = str(refused.value).partition("; ")[2]
    assert "mnemos train runs/it/recipe.json --from runs/it --train.devices N" in advice
    assert "own number of processes, 2" in advice
    assert "set --train.devices" not in advice  # which --resume refuses


def test_a_program_trains_once_with_several_processes(monkeypatch):
    """To meet again at the same address may wait without end."""
    monkeypatch.setattr(devices, "_left", [])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda: None)
    devices.part()
    with pytest.raises(InputError, match="expected one training with several processes in a program"):
        devices.connect(TrainConfig(devices=2, accelerator="cpu"))
    assert devices.connect(TrainConfig(accelerator="cpu")).world_size == 1


def test_float16_is_refused_on_a_cpu():
    """Fabric would train in bfloat16, without the scaler that leaves out updates that are not finite."""
    for run, where in (("runs/it", "--from runs/it --train.precision 32-true$"), (None, "needs a GPU$")):
        with pytest.raises(InputError, match=where):
            devices.connect(TrainConfig(precision="16-mixed", accelerator="cpu"), run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_run_of_another_machine_is_told_how_a_new_one_starts_from_it():
    for run, where in (("runs/it", " in a new run: mnemos train runs/it/recipe.json --from runs/it"), (None, "")):
        with pytest.raises(InputError, match=rf"change train\.accelerator or train\.devices{where}$"):
            devices.connect(TrainConfig(accelerator="cuda"), run)
