"""Disks that refuse, files that are damaged, data and code that change: one line each, and nothing is half-written."""

import errno
import json
import os
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
from train_standins import Toys, train

from mnemos import atomic
from mnemos.lab.cli import main
from mnemos.lab.errors import TrainingFailed, one_line
from mnemos.lab.run import checkpoint, checks, folder, provenance
from mnemos.lab.run.files import Measurement, Provenance, Result
from mnemos.lab.run.folder import RunFolder
from mnemos.types import InputError

SHORT = Toys(train={"steps": 4, "checkpoint_every": 2})


def line(kind: str, step: int) -> Measurement:
    return Measurement(kind, step, {"loss": 1.0})


@pytest.fixture
def run(tmp_path):
    made = RunFolder.start(tmp_path / "run", SHORT.recipe(), "cpu")
    yield made
    made.close()


@pytest.mark.parametrize("room", [0, 5])
def test_a_line_that_a_full_disk_cuts_is_taken_back(run, monkeypatch, room):
    run.record([line("train", 2)])
    before, write = (run.folder / "metrics.jsonl").read_bytes(), os.write

    left = [room]  # bytes on the disk

    def nearly_full(descriptor, data):
        if not left[0]:
            raise OSError(28, "No space left on device")
        count, left[0] = left[0], 0
        return write(descriptor, data[:count])

    with monkeypatch.context() as full:
        full.setattr(atomic.os, "write", nearly_full)
        with pytest.raises(TrainingFailed, match=r"metrics\.jsonl: .*No space left on device"):
            run.record([line("train", 3)])
    assert (run.folder / "metrics.jsonl").read_bytes() == before
    run.record([line("train", 4)])
    assert [json.loads(text)["step"] for text in (run.folder / "metrics.jsonl").read_text().splitlines()] == [2, 4]


def test_a_disk_that_takes_a_part_at_a_time_gets_the_whole_line(run, monkeypatch):
    write = os.write
    monkeypatch.setattr(atomic.os, "write", lambda d, data: write(d, data[:7]))
    run.record([line("train", 2), line("valid", 2)])
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 2


def _report_on_a_small_disk(folder: str, size: int) -> None:
    sys.dont_write_bytecode = True  # Python would store cut files and later fail to read them
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    raise SystemExit(main(["report", folder, "--out", f"{folder}/report.html"]))


def _listed_to_a_full_disk() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    raise SystemExit(main(["list"]))


def _train_on_a_small_disk(folder: str, size: int) -> None:
    sys.dont_write_bytecode = True  # Python would store cut files and later fail to read them
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    train(SHORT.recipe(), folder, quiet=True)


def test_a_full_disk_is_one_line_and_exit_code_1(tmp_path, forks):
    train(SHORT.recipe(), tmp_path / "run", quiet=True)
    for ended in (
        processes.run(_report_on_a_small_disk, str(tmp_path / "run"), 2000),
        processes.run(_listed_to_a_full_disk),
    ):
        assert ended.returncode == 1, ended.stderr
        assert ended.stderr.startswith("mnemos: ")
        assert ended.stderr.count("\n") == 1, ended.stderr
    assert not (tmp_path / "run/report.html").exists()
    ended = processes.run(_train_on_a_small_disk, str(tmp_path / "other"), 3000)
    assert "TrainingFailed" in ended.stderr


def test_what_the_system_refuses_is_one_line():
    said = one_line(PermissionError(13, "Permission denied", "runs/x"))
    assert said.startswith("runs/x: Permission denied; ")
    assert "does not suffice" in one_line(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50)
    assert "does not suffice" in one_line(refused.value)
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
    assert "one has ended or is silent" in one_line(lost)
    assert one_line(RuntimeError("a fault of ours")) is None


@pytest.fixture
def finished(tmp_path):
    """A run that was stopped after its last checkpoint."""
    train(SHORT.recipe(), tmp_path / "run", quiet=True)
    (tmp_path / "run/result.json").unlink()
    return tmp_path / "run"


def test_changed_data_are_refused_unless_accepted_and_changed_code_is_said(finished, monkeypatch, capsys):
    path = checkpoint.path_of(finished / "checkpoints", 4)
    saved = checkpoint.read(path)
    assert {"data", "commit", "source_sha256", "versions"} <= set(saved[provenance.FIELD])
    about = json.loads((finished / "run.json").read_text())
    about["data"] = {"generated": {"settings": {}, "version": 1}}
    checkpoint.write(path, {**saved, provenance.FIELD: {**saved[provenance.FIELD], "data": about["data"]}})
    (finished / "run.json").write_text(json.dumps(about))
    found = {"generated": {"settings": {}, "version": 2}}
    monkeypatch.setattr(folder, "data_read", lambda data: found)
    longer = replace(SHORT.recipe(), train=replace(SHORT.recipe().train, steps=6))
    files = sorted((path, path.read_bytes()) for path in finished.rglob("*") if path.is_file())
    with pytest.raises(InputError, match=r"generated by version 1, found others, generated by version 2.*--accept-ch"):
        train(longer, finished, resume=True, longer=True, quiet=True)
    assert files == sorted((path, path.read_bytes()) for path in finished.rglob("*") if path.is_file())
    monkeypatch.setattr(folder, "source_hash", lambda: "other")
    monkeypatch.setattr(folder, "versions", lambda: {**provenance.versions(), "numpy": "0.1"})
    assert train(SHORT.recipe(), finished, resume=True, quiet=True, accept_changed_data=True)["steps"] == 4
    said = capsys.readouterr().err
    for words in ("the code of mnemos has changed", "numpy has changed, from ", "generated by version 2"):
        assert [words in text for text in said.splitlines()].count(True) == 1, said


def test_a_finished_run_on_a_disk_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    result = train(SHORT.recipe(), tmp_path / "run", quiet=True)

    def closed(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("unlink", "write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, closed)
    assert train(SHORT.recipe(), tmp_path / "run", resume=True, quiet=True) == result


def test_a_folder_that_could_not_be_opened_is_not_left_locked(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(folder, "write_json", full)
        with pytest.raises(OSError, match="No space"):
            RunFolder.start(tmp_path / "run", SHORT.recipe(), "cpu")
    RunFolder.start(tmp_path / "run", SHORT.recipe(), "cpu").close()
    with monkeypatch.context() as disk:
        disk.setattr(folder, "remove_temporary", full)
        with pytest.raises(OSError, match="No space"):
            RunFolder.resume(tmp_path / "run", SHORT.recipe())
    RunFolder.resume(tmp_path / "run", SHORT.recipe()).close()


def test_a_lost_metrics_file_is_said(finished, capsys):
    (finished / "metrics.jsonl").unlink()
    train(SHORT.recipe(), finished, resume=True, quiet=True)
    assert "metrics.jsonl: expected the measurements up to update 4, found no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", '{"resumed": 5}', '{"resumed": [1]}', '{"data": 5}', '{"started": 5}', "\0"]
)
def test_a_damaged_run_json_is_one_line(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json: expected JSON as a run writes it, found"):
        Provenance.read(tmp_path)
    (tmp_path / "result.json").write_text('{"test": 5}')
    with pytest.raises(InputError, match=r"result\.json: .*found 5 as its 'test'"):
        Result.read(tmp_path)


@pytest.mark.parametrize("part", ["recipe", "model", "optimiser", "generators"])
def test_a_checkpoint_without_a_part_is_one_line(finished, part):
    path = checkpoint.path_of(finished / "checkpoints", 4)
    saved = checkpoint.read(path)
    checkpoint.write(path, {name: value for name, value in saved.items() if name != part})
    checkpoint.prune(finished / "checkpoints", 4, 1)
    with pytest.raises(InputError) as refused:
        train(SHORT.recipe(), finished, resume=True, quiet=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("counters", [{"step": 2}, {}, 5])
def test_a_checkpoint_under_the_name_of_another_update_is_refused(finished, counters):
    path = checkpoint.path_of(finished / "checkpoints", 4)
    checkpoint.write(path, {**checkpoint.read(path), "counters": counters})
    with pytest.raises(InputError, match="expected a checkpoint of update 4, found one of another update"):
        train(SHORT.recipe(), finished, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["--model.dim", "1000000"], "fits into the free memory"),
        (["--model.layers", str(2**31)], "modules, found more"),
        (["--model.dim", str(10**20)], "expected sizes of which tensors can be made"),
        (["--train.devices", "1000"], "train.devices: expected at most"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line_and_leaves_no_folder(fields, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checks, "MOST_MODULES", 2000)  # as 30,000 take some seconds
    small = [
        "--data.train-size",
        "20",
        "--data.valid-size",
        "10",
        "--data.test-size",
        "10",
        "--train.accelerator",
        "cpu",
    ]
    assert main(["train", "short-listops", *small, *fields, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_whose_first_update_needs_too_much_memory_leaves_no_folder(tmp_path, monkeypatch):
    def update(learner):
        torch.empty(2**50)

    monkeypatch.setattr("mnemos.lab.run.loop.update", update)
    with pytest.raises(TrainingFailed, match="does not suffice"):
        train(SHORT.recipe(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    """A finished run of the command line, with every file that reports and resumed runs read."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    few = ["--data.train-size", "20", "--data.valid-size", "10", "--data.test-size", "10", "--train.accelerator", "cpu"]
    assert main(["train", "short-listops", *few, "--train.steps", "1", "--out", str(folder)]) == 0
    return folder


def changed(text: str, field: str, value: object) -> str:
    """A JSON text with another value in a field."""
    return json.dumps(json.loads(text) | {field: value})


@pytest.mark.parametrize(
    ("command", "name", "damage"),
    [
        ("report", "result.json", lambda text: text[: len(text) // 2]),
        ("report", "result.json", lambda text: "[" * 100_000),
        ("report", "result.json", lambda text: '{"steps": ' + "9" * 5000 + "}"),
        ("report", "run.json", lambda text: '{"a":' * 100_000),
        ("report", "result.json", lambda text: changed(text, "metric", {})),
        ("report", "run.json", lambda text: changed(text, "resumed", 5.0)),
        ("report", "metrics.jsonl", lambda text: changed(text.splitlines()[0], "step", 10**30)),
        ("report", "metrics.jsonl", lambda text: changed(text.splitlines()[0], "loss", 10**400)),
        ("report", "metrics.jsonl", lambda text: changed(text.splitlines()[0], "kind", [])),
        ("--resume", "result.json", lambda text: changed(text, "test", {})),
        ("--resume", "result.json", lambda text: changed(text, "controls", {"emptied": 5})),
        ("--resume", "result.json", lambda text: changed(text, "epoch_seconds", "a minute")),
        ("eval", "recipe.json", lambda text: "9" * 5000),
    ],
)
def test_a_damaged_file_of_a_run_is_one_line(complete_run, tmp_path, capsys, command, name, damage):
    run = tmp_path / "run"
    shutil.copytree(complete_run, run)
    (run / name).write_text(damage((run / name).read_text()))
    assert main(["train", command, str(run)] if command == "--resume" else [command, str(run)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mnemos: ")
    assert name in said
    assert said.count("\n") == 1, said


def test_a_report_of_a_number_that_is_none_is_written(complete_run, tmp_path):
    shutil.copytree(complete_run, tmp_path / "run")
    path = tmp_path / "run/result.json"
    path.write_text(changed(path.read_text(), "steps", float("nan")))
    assert main(["report", str(tmp_path / "run")]) == 0


def test_a_batch_that_cannot_fit_is_one_line(tmp_path, capsys):
    few = ["--data.train-size", "20", "--data.valid-size", "10", "--data.test-size", "10", "--train.accelerator", "cpu"]
    assert (
        main(["train", "short-listops", *few, "--train.batch-size", str(10**12), "--out", str(tmp_path / "run")]) == 2
    )
    said = capsys.readouterr().err
    assert said.startswith("mnemos: train.batch_size: expected rows that fit into the free memory")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_frozen_weights_need_no_room_for_gradients(monkeypatch):
    monkeypatch.setattr(checks, "free_bytes", lambda device: 40_000)
    with torch.device("meta"):
        model = torch.nn.Linear(99, 100)  # 10,000 weights: 40 kB, and 120 kB of gradients and moments
    config = SHORT.recipe().train
    with pytest.raises(InputError, match="10,000 parameters"):
        checks.check_memory(model, config, torch.device("cpu"))
    checks.check_memory(model.requires_grad_(False), config, torch.device("cpu"))


def test_a_setting_that_an_upgrade_adds_does_not_change_the_data():
    made = {"generated": {"settings": {"rows": 5}, "version": 1}}
    provenance.check_data("runs/x", made, {"generated": {"settings": {"rows": 5, "new": 0}, "version": 1}})
    with pytest.raises(InputError, match="generated by version 2"):
        provenance.check_data("runs/x", made, {"generated": {"settings": {"rows": 5}, "version": 2}})


def test_a_commit_that_changes_no_source_is_not_said_and_a_library_is_one_line():
    before = {"commit": "a" * 40, "source_sha256": "1", "versions": {"torch": "2.12", "numpy": "2.4", "timm": None}}
    assert provenance.changes(before, {**before, "commit": "b" * 40, "dirty": True}) == []
    (said,) = provenance.changes(before, {**before, "versions": {**before["versions"], "torch": "2.13"}})
    assert said.startswith("torch has changed, from 2.12 to 2.13: ")
