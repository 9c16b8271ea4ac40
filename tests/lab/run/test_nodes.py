"""`train.num_nodes`: the program is started once on each machine, which are two processes of one here."""

import os
import socket
from pathlib import Path

import processes
import pytest
import torch
from test_processes import STILL, agree
from test_resume import result
from train_standins import Toys, work

from mnemos import InputError
from mnemos.lab.run import devices, run
from mnemos.lab.run.recipe import TrainConfig

NODES = Toys(False, STILL, train={"precision": "64-true", "num_nodes": 2, "keep_best": True})


def node(folder: str, toys: Toys, sees: bool = True) -> None:
    """Train on one of the machines; `sees`: whether it sees the first one's disk."""
    if not sees:
        run._SHARED_SECONDS = 0.0
        before = run._visible
        run._visible = lambda path: os.environ["NODE_RANK"] == "0" and before(path)
    work(folder, toys, quiet=False)


def on_two(folder: Path, *arguments: object) -> list[processes.Ended]:
    """`node` with each rank; the second has another folder, as where its name has the time of day."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    folders = [str(folder), f"{folder}-a-second-later"]
    started = [processes.Process(node, f, *arguments, **meeting, NODE_RANK=str(i)) for i, f in enumerate(folders)]
    return [process.wait(120) for process in started]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")
def test_two_machines_train_as_one(run_apart, forks, tmp_path):
    one = Toys(False, STILL, train={"precision": "64-true", "keep_best": True})
    assert run_apart(tmp_path / "one", one) == 0
    ended = on_two(tmp_path / "two", NODES)
    assert [end.returncode for end in ended] == [0, 0], ended
    agree(tmp_path / "two", tmp_path / "one", 1e-12, 1e-6)
    assert result(tmp_path / "one")["test"]["loss"] == pytest.approx(result(tmp_path / "two")["test"]["loss"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]  # one folder for both machines


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")
def test_a_folder_that_one_machine_does_not_see(forks, tmp_path):
    for end in on_two(tmp_path / "run", NODES, False):
        assert end.returncode == 1
        assert "InputError: " in end.stderr
        assert "expected a folder that every machine sees" in end.stderr


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
