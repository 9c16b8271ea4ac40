"""The files of a run's folder: what is written, by one process at a time, and read again.

Disks that refuse, files that are damaged, data and code that change are one line each, and nothing is half-written.
"""

import errno
import json
import math
import multiprocessing
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
from trained_runs import stopped, weights

from mnemos import atomic
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.errors import TrainingFailed, one_line
from mnemos.lab.run import checkpoint, checks, folder, provenance
from mnemos.lab.run.files import Measurement, Provenance, Result
from mnemos.lab.run.folder import RunFolder
from mnemos.lab.run.learner import Best
from mnemos.lab.run.recipe import differing
from mnemos.lab.run.run import Run
from mnemos.lab.tasks.metrics import ACCURACY
from mnemos.types import InputError

RECIPE = Toys().recipe()
SHORT = Toys(train={"steps": 4, "checkpoint_every": 2})
FEW = ["--data.train-size", "20", "--data.valid-size", "10", "--data.test-size", "10", "--train.accelerator", "cpu"]


def line(kind: str, step: int) -> Measurement:
    return Measurement(kind, step, {"loss": 1.0})


def contents(folder) -> list[tuple[str, int]]:
    return [(one.kind, one.step) for one in Measurement.read_all(folder)]


def about(folder) -> dict:
    return json.loads((folder / "run.json").read_text())


@pytest.fixture
def run(tmp_path):
    made = RunFolder.start(tmp_path / "run", RECIPE, "cpu")
    yield made
    made.close()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of `SHORT`, which no test changes."""
    place = tmp_path_factory.mktemp("done") / "run"
    train(SHORT.recipe(), place, quiet=True)
    return place


@pytest.fixture
def unfinished(done, tmp_path):
    """The same, stopped after its last checkpoint."""
    return stopped(done, tmp_path / "run")


# With null for a score that was not finite.
WRITTEN = {
    "recipe": "toy", "seed": 3, "steps": 4, "test": {"loss": 1.5, "accuracy": None}, "valid": {"loss": 2.0},
    "scored_rows": {"valid": 8, "test": 8}, "metric": "accuracy", "metrics": {}, "reference": {"a guess": 0.1},
    "majority": None, "parameters": 12, "seconds": 1.25, "peak_bytes": 0, "tokens": 96, "unit": "tokens",
    "update_flops": 10.0, "epoch_seconds": None, "best_step": 2, "flops": 5, "state_bytes": 0,
    "controls": {"emptied": {"loss": 1.75}}, "along": {"metric": "loss", "x": "place", "values": [[0, 1.0]]},
}  # fmt: skip


def test_a_result_is_read_and_written_back(tmp_path):
    (tmp_path / Result.FILE).write_text(json.dumps(WRITTEN))
    found = Result.read(tmp_path)
    assert (found.split, found.score("loss"), found.score("loss", "emptied"), found.best_step) == ("test", 1.5, 1.75, 2)
    assert math.isnan(found.score("accuracy")), "null in the file"
    assert found.artifacts == {"along": WRITTEN["along"]}
    assert (found.rollout_segments, found.stopped_early, found.before, found.assessed) == (1, False, {}, True)
    found.write(tmp_path)
    written = json.loads((tmp_path / Result.FILE).read_text())
    assert math.isnan(written["test"].pop("accuracy"))
    assert written == WRITTEN | {"test": {"loss": 1.5}}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((Result, json.dumps(WRITTEN | {"controls": {"emptied": wrong}})) for wrong in (5, None)),
        *((Result, json.dumps(WRITTEN | wrong)) for wrong in ({"seconds": True}, {"along": {}})),
        *((Provenance, text) for text in ("", "[]", '{"resumed": [1]}', '{"data": 5}', '{"started": 5}', "\0")),
    ],
)
def test_a_damaged_file_is_named(tmp_path, kind, text):
    (tmp_path / kind.FILE).write_text(text)
    with pytest.raises(InputError, match=rf"{kind.FILE}: .*expected .*, found .*; start a new run in another folder"):
        kind.read(tmp_path)


def test_the_last_of_a_runs_data_counts_and_what_is_not_known_is_kept(tmp_path):
    resumed = [{"step": 2, "data": {"sha256": "b"}}, {"step": 4}]
    known = {"commit": None, "dirty": None, "data": {"sha256": "a"}, "resumed": resumed, "finished": None}
    written = known | {"host": "x"}
    (tmp_path / Provenance.FILE).write_text(json.dumps(written))
    found = Provenance.read(tmp_path)
    assert found.latest("data") == {"sha256": "b"}
    assert found.latest("weights") is None
    replace(found, finished="now").write(tmp_path)
    assert about(tmp_path) == written | {"finished": "now"}


def test_a_run_assesses_the_model_that_it_trained(tmp_path, monkeypatch):
    """It is built once; a run that was killed before it was assessed is assessed from its checkpoint, and equals it."""
    recipe, built = SHORT.recipe(), []
    build = type(recipe.model).build
    monkeypatch.setattr(type(recipe.model), "build", lambda self: built.append(torch.empty(0).device) or build(self))
    run = Run.open(recipe, tmp_path / "run", quiet=True)
    assert not Result.exists(tmp_path / "run")
    trained = run.train()
    assert (trained.steps, trained.assessed) == (4, False)
    assessed = run.assess()
    assert [device.type for device in built] == ["meta", "cpu", "cpu"], "for the checks; once; to save, without values"
    assert assessed.assessed
    assert Result.read(tmp_path / "run") == assessed
    assert {kind for kind, _ in contents(tmp_path / "run")} == {"train", "valid"}
    trained.write(tmp_path / "run")
    again = Run.open(recipe, tmp_path / "run", resume=True, quiet=True)
    assert again.train() == trained
    assert replace(again.assess(), seconds=0) == replace(assessed, seconds=0)


def test_what_is_drawn_between_opening_and_training_changes_nothing(tmp_path):
    found = []
    for draws in (0, 5):
        run = Run.open(Toys(train={"steps": 2}).recipe(), tmp_path / str(draws), quiet=True)
        torch.rand(draws)
        run.train()
        found.append(checkpoint.digest(*checkpoint.encode(weights(tmp_path / str(draws), 2, "generators"))))
    assert found[0] == found[1]


def test_a_score_that_is_not_finite_is_never_the_best():
    none = Best().after(2, {"accuracy": math.nan}, ACCURACY)
    assert (none.step, none.since) == (0, 1)
    best = none.after(4, {"accuracy": 0.25}, ACCURACY).after(6, {"accuracy": math.inf}, ACCURACY)
    assert (best.step, best.score, best.since) == (4, 0.25, 1)


def test_a_new_run_says_what_and_where_it_is(tmp_path):
    run = RunFolder.start(tmp_path / "runs" / "a", RECIPE, "cpu", about=["2 files", "warning: equal files"])
    recipe = json.loads((run.folder / "recipe.json").read_text())
    assert (recipe["name"], recipe["model"]["is"]) == ("toy", "toy")
    written = about(run.folder)
    assert set(written) == {
        "commit", "dirty", "versions", "device", "cpu", "threads", "dense", "seed", "data", "command", "started",
        "finished", "resumed", "source_sha256", "warnings",
    }  # fmt: skip
    assert written["warnings"] == ["equal files"]
    assert set(written["versions"]) >= {"mnemos", "torch", "python", "numpy", "lightning-fabric", "pillow"}
    assert written["finished"] is None
    assert run.result is None
    run.finish(Result(test={"loss": 1.0}))
    assert about(run.folder)["finished"] is not None
    assert run.result == Result(test={"loss": 1.0})
    assert not list(run.folder.rglob("*.tmp"))


def test_what_is_there_is_left_alone(run, tmp_path):
    with pytest.raises(InputError, match="--resume"):
        RunFolder.start(run.folder, RECIPE, "cpu")
    (tmp_path / "a/checkpoints").mkdir(parents=True)
    names = ["checkpoints/step-00000001.safetensors", "notes.tmp", "thesis.tex"]
    for name in names:
        (tmp_path / "a" / name).write_text("mine")
    with pytest.raises(InputError, match=r"found 'notes\.tmp'"):
        RunFolder.start(tmp_path / "a", RECIPE, "cpu")
    assert sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*") if p.is_file()) == names
    with pytest.raises(InputError, match="found a file"):
        RunFolder.start(tmp_path / "a/thesis.tex", RECIPE, "cpu")


def test_what_cannot_be_resumed(run, tmp_path):
    run.close()
    with pytest.raises(InputError, match=r"found no recipe\.json"):
        RunFolder.resume(tmp_path / "none", RECIPE)
    with pytest.raises(InputError, match=r"another optim.lr \(0.01, not 0.5\)"):
        RunFolder.resume(run.folder, Toys(optim={"lr": 0.5}).recipe())
    (run.folder / "recipe.json").write_text("{")
    with pytest.raises(InputError, match=r"recipe\.json: .*JSON"):
        RunFolder.resume(run.folder, RECIPE)
    assert differing({"a": 1}, {"a": 1, "c": 2}) == "c (None, not 2)"
    assert differing({"about": "half an hour", "a": 1}, {"about": "an hour", "a": 1}) is None


def test_measurements_are_cut_back_to_a_checkpoint(run):
    for step in (2, 4, 6):
        run.record([line("train", step)])
        run.record([line("valid", step), line("gates", step)])
    path = run.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')
    run.trim(4)
    # The look at update 4 comes after its checkpoint: it is taken again.
    assert contents(run.folder) == [("train", 2), ("valid", 2), ("gates", 2), ("train", 4)]
    run.close()
    run.record([line("valid", 4)])
    assert contents(run.folder)[-1] == ("valid", 4)
    path.write_text(line("train", 1).to_line().strip())
    run.trim(9)
    assert contents(run.folder) == [], "a last line without its end is written again"
    path.write_text(line("valid", 0).to_line())
    run.trim(0)
    assert contents(run.folder) == [], "the look before the first update is taken again"


@pytest.mark.parametrize("bad", ["nonsense", '{"kind": "train"}'])
def test_a_damaged_line_is_named(run, bad):
    lines = [line("train", 1).to_line().strip(), bad, line("train", 2).to_line().strip()]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"metrics.jsonl: line 2: expected a measurement"):
        run.trim(2)


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
    assert contents(run.folder) == [("train", 2), ("train", 4)]


def _hold(folder: str, ready, held) -> None:
    run = RunFolder.resume(folder, RECIPE)
    ready.set()
    held.wait(30)
    run.close()


def test_one_writer_at_a_time(run, forks):
    run.close()
    context = multiprocessing.get_context("forkserver")
    ready, held = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(run.folder), ready, held))
    process.start()
    assert ready.wait(60)
    with pytest.raises(InputError, match="another process"):
        RunFolder.resume(run.folder, RECIPE)
    process.kill()  # however it dies, the folder is free
    process.join()
    RunFolder.resume(run.folder, RECIPE).close()


def test_a_folder_that_could_not_be_opened_is_not_left_locked(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, opened in (
        ("write_json", lambda: RunFolder.start(tmp_path / "run", RECIPE, "cpu")),
        ("remove_temporary", lambda: RunFolder.resume(tmp_path / "run", RECIPE)),
    ):
        with monkeypatch.context() as disk:
            disk.setattr(folder, name, full)
            with pytest.raises(OSError, match="No space"):
                opened()
        opened().close()


def test_resuming_elsewhere_is_noted(run, monkeypatch):
    assert run.resumed(3, RECIPE.data) == []
    threads = about(run.folder)["threads"]
    monkeypatch.setattr(folder.torch, "get_num_threads", lambda: threads + 1)
    (note,) = run.resumed(5, RECIPE.data)
    assert f"set OMP_NUM_THREADS={threads}" in note
    resumed = about(run.folder)["resumed"]
    assert [entry["step"] for entry in resumed] == [3, 5]
    assert all({"commit", "dirty"} < set(entry) for entry in resumed)


def test_of_averages_the_last_is_kept(run):
    for step in (3, 5):
        run.save_average(step, {"step": step})
    assert checkpoint.steps(run.checkpoints, "averaged") == [5]


def test_a_run_that_starts_again_from_other_weights_says_so(tmp_path):
    """It had no checkpoint yet, and the run that it starts from was trained for longer in the meantime."""
    source = {"run": "runs/one", "sha256": "1", "tensors": 3}
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu", source)
    assert run.resumed(0, RECIPE.data, source) == []
    (note,) = run.resumed(0, RECIPE.data, {**source, "sha256": "2"})
    assert note.startswith("the weights of runs/one have changed")
    assert run.resumed(0, RECIPE.data, {**source, "sha256": "2"}) == []
    run.close()
    found = about(tmp_path / "a")
    assert [one.get("weights", {}).get("sha256") for one in (found, *found["resumed"])] == ["1", None, "2", None]


def _on_a_small_disk(size: int, command: str, folder: str) -> None:
    sys.dont_write_bytecode = True  # Python would store cut files and later fail to read them
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if command == "report":
        raise SystemExit(main(["report", folder, "--out", f"{folder}/report.html"]))
    train(SHORT.recipe(), folder, quiet=True)


def test_a_full_disk_is_one_line_and_exit_code_1(done, tmp_path, forks):
    ended = processes.run(_on_a_small_disk, 2000, "report", str(done))
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("mnemos: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert not (done / "report.html").exists()
    ended = processes.run(_on_a_small_disk, 3000, "train", str(tmp_path / "other"))
    assert "TrainingFailed" in ended.stderr


def test_what_the_system_refuses_is_one_line():
    said = one_line(PermissionError(13, "Permission denied", "runs/x"))
    assert said.startswith("runs/x: Permission denied; ")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50)
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
    for error, words in (
        *((error, "does not suffice") for error in (MemoryError(), refused.value)),
        (lost, "one has ended or is silent"),
    ):
        assert words in one_line(error)
    assert one_line(RuntimeError("a fault of ours")) is None


def test_changed_data_are_refused_unless_accepted_and_changed_code_is_said(unfinished, monkeypatch, capsys):
    of_version = lambda number: {"generated": {"settings": {}, "version": number}}  # noqa: E731
    (unfinished / "run.json").write_text(json.dumps(about(unfinished) | {"data": of_version(1)}))
    monkeypatch.setattr(folder, "data_read", lambda data: of_version(2))
    longer = replace(SHORT.recipe(), train=replace(SHORT.recipe().train, steps=6))
    files = sorted((path, path.read_bytes()) for path in unfinished.rglob("*") if path.is_file())
    with pytest.raises(InputError, match=r"generated by version 1, found others, generated by version 2.*--accept-ch"):
        train(longer, unfinished, resume=True, longer=True, quiet=True)
    assert files == sorted((path, path.read_bytes()) for path in unfinished.rglob("*") if path.is_file())
    monkeypatch.setattr(folder, "source_hash", lambda: "other")
    monkeypatch.setattr(folder, "versions", lambda: {**provenance.versions(), "numpy": "0.1"})
    assert train(SHORT.recipe(), unfinished, resume=True, quiet=True, accept_changed_data=True)["steps"] == 4
    said = capsys.readouterr().err
    for words in ("the code of mnemos has changed", "numpy has changed, from ", "generated by version 2"):
        assert [words in text for text in said.splitlines()].count(True) == 1, said


def test_what_counts_as_changed():
    made = {"generated": {"settings": {"rows": 5}, "version": 1}}
    upgraded = {"generated": {"settings": {"rows": 5, "new": 0}, "version": 1}}
    provenance.check_data("runs/x", made, upgraded)
    before = {"commit": "a" * 40, "source_sha256": "1", "versions": {"torch": "2.12", "numpy": "2.4", "timm": None}}
    assert provenance.changes(before, {**before, "commit": "b" * 40, "dirty": True}) == []
    (said,) = provenance.changes(before, {**before, "versions": {**before["versions"], "torch": "2.13"}})
    assert said.startswith("torch has changed, from 2.12 to 2.13: ")


def test_a_finished_run_on_a_disk_that_cannot_be_written_is_read(done, monkeypatch):
    def closed(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("unlink", "write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, closed)
    found = train(SHORT.recipe(), done, resume=True, quiet=True)
    assert found == json.loads((done / "result.json").read_text())


def test_a_lost_metrics_file_is_said(unfinished, capsys):
    (unfinished / "metrics.jsonl").unlink()
    train(SHORT.recipe(), unfinished, resume=True, quiet=True)
    assert "metrics.jsonl: expected the measurements up to update 4, found no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({part: None}, "expected") for part in ("recipe", "model", "optimiser", "generators")),
        *(({"counters": wrong}, "update 4, found one of another update") for wrong in ({"step": 2}, 5)),
        ({"recipe": to_dict(Toys(train={"seed": 1}).recipe())}, r"step-00000004\.safetensors: .*another recipe"),
    ],
)
def test_a_checkpoint_without_a_part_or_of_another_run_is_one_line(unfinished, change, words):
    path = checkpoint.path_of(unfinished / "checkpoints", 4)
    saved = checkpoint.read(path) | change
    checkpoint.write(path, {name: value for name, value in saved.items() if value is not None})
    checkpoint.prune(unfinished / "checkpoints", 4, 1)
    with pytest.raises(InputError, match=words) as refused:
        train(SHORT.recipe(), unfinished, resume=True, quiet=True)
    assert "\n" not in str(refused.value)


def test_a_damaged_checkpoint_is_named_when_it_is_passed_over(unfinished, capsys):
    checkpoint.path_of(unfinished / "checkpoints", 4).write_bytes(b"short")
    train(SHORT.recipe(), unfinished, resume=True, quiet=True)
    (said,) = [text for text in capsys.readouterr().err.splitlines() if "damaged" in text]
    assert "step-00000004.safetensors: " in said
    assert said.endswith("step-00000002.safetensors")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["--model.dim", "1000000"], "fits into the free memory"),
        (["--model.dim", str(10**20)], "expected sizes of which tensors can be made"),
        (["--train.devices", "1000"], "train.devices: expected at most"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line_and_leaves_no_folder(fields, words, tmp_path, refused):
    assert words in refused("train", "short-listops", *FEW, *fields, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_whose_first_update_needs_too_much_memory_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("mnemos.lab.run.loop.update", lambda learner: torch.empty(2**50))
    with pytest.raises(TrainingFailed, match="does not suffice"):
        train(SHORT.recipe(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_frozen_weights_need_no_room_for_gradients(monkeypatch):
    monkeypatch.setattr(checks, "free_bytes", lambda device: 40_000)
    with torch.device("meta"):
        model = torch.nn.Linear(99, 100)  # 10,000 weights: 40 kB, and 120 kB of gradients and moments
    config = SHORT.recipe().train
    with pytest.raises(InputError, match="10,000 parameters"):
        checks.check_memory(model, config, torch.device("cpu"))
    checks.check_memory(model.requires_grad_(False), config, torch.device("cpu"))


def changed(text: str, field: str, value: object) -> str:
    """A JSON text with another value in a field."""
    return json.dumps(json.loads(text) | {field: value})


@pytest.mark.parametrize(
    ("command", "name", "damage"),
    [
        ("report", "result.json", lambda text: "[" * 100_000),
        ("report", "run.json", lambda text: changed(text, "resumed", 5.0)),
        ("report", "metrics.jsonl", lambda text: changed(text.splitlines()[0], "step", 10**30)),
        ("report", "metrics.jsonl", lambda text: changed(text.splitlines()[0], "loss", 10**400)),
        ("--resume", "result.json", lambda text: changed(text, "test", {})),
        ("eval", "recipe.json", lambda text: "9" * 5000),
    ],
)
def test_a_damaged_file_of_a_run_is_one_line(text_run, tmp_path, command, name, damage, refused):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    (run / name).write_text(damage((run / name).read_text()))
    assert name in refused(*(("train",) if command == "--resume" else ()), command, run)
