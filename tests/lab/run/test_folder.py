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

import processes
import pytest
import torch
from refusals import refuses
from train_standins import Toys, train
from trained_runs import stopped, weights

from mnemos import atomic, libraries
from mnemos.lab.cli import main
from mnemos.lab.errors import TrainingFailed, one_line
from mnemos.lab.run import checkpoint, folder, provenance
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
        *((Provenance, text) for text in ("", "[]", '{"resumed": [1]}')),
    ],
)
def test_a_damaged_file_is_named(tmp_path, kind, text):
    (tmp_path / kind.FILE).write_text(text)
    refuses(rf"{kind.FILE}: .*expected .*, found .*; start a new run in another folder", kind.read, tmp_path)


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
    assert recipe["name"] == "toy"
    written = about(run.folder)
    assert set(written) == {
        "commit", "dirty", "versions", "device", "cpu", "threads", "dense", "seed", "data", "command", "started",
        "finished", "resumed", "source_sha256", "warnings",
    }  # fmt: skip
    assert written["warnings"] == ["equal files"]
    assert written["finished"] is None
    run.finish(Result(test={"loss": 1.0}))
    assert about(run.folder)["finished"] is not None
    assert Result.read(run.folder) == Result(test={"loss": 1.0})
    assert not list(run.folder.rglob("*.tmp"))


def test_what_is_there_is_left_alone(run, tmp_path):
    refuses("--resume", RunFolder.start, run.folder, RECIPE, "cpu")
    (tmp_path / "a/checkpoints").mkdir(parents=True)
    names = ["checkpoints/step-00000001.safetensors", "notes.tmp", "thesis.tex"]
    for name in names:
        (tmp_path / "a" / name).write_text("mine")
    refuses(r"found 'notes\.tmp'", RunFolder.start, tmp_path / "a", RECIPE, "cpu")
    assert sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*") if p.is_file()) == names
    refuses("found a file", RunFolder.start, tmp_path / "a/thesis.tex", RECIPE, "cpu")


def test_what_cannot_be_resumed(run, tmp_path):
    run.close()
    refuses(r"found no recipe\.json", RunFolder.resume, tmp_path / "none", RECIPE)
    refuses(r"another optim.lr \(0.01, not 0.5\)", RunFolder.resume, run.folder, Toys(optim={"lr": 0.5}).recipe())
    (run.folder / "recipe.json").write_text("{")
    refuses(r"recipe\.json: .*JSON", RunFolder.resume, run.folder, RECIPE)
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
    path.write_text(line("valid", 0).to_line())
    run.trim(0)
    assert contents(run.folder) == [], "the look before the first update is taken again"


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
    refuses("another process", RunFolder.resume, run.folder, RECIPE)
    process.kill()  # however it dies, the folder is free
    process.join()
    RunFolder.resume(run.folder, RECIPE).close()


def test_a_run_that_starts_again_from_other_weights_says_so(tmp_path, capsys):
    """It had no checkpoint yet, and the run that it starts from was trained for longer in the meantime."""
    source = {"run": "runs/one", "sha256": "1", "tensors": 3}
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu", source)
    for sha256, changed in (("1", False), ("2", True), ("2", False)):
        run.newest({**source, "sha256": sha256})
        assert ("the weights of runs/one have changed" in capsys.readouterr().err) == changed
    run.close()
    found = about(tmp_path / "a")
    assert [one.get("weights", {}).get("sha256") for one in (found, *found["resumed"])] == ["1", None, "2", None]


def _on_a_small_disk(done: str, other: str) -> None:
    libraries.vl_convert().javascript_bundle = str  # it would take seconds, and is not written
    sys.dont_write_bytecode = True  # Python would store cut files and later fail to read them
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    code = main(["report", done, "--out", f"{done}/report.html"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    with pytest.raises(TrainingFailed):
        train(SHORT.recipe(), other, quiet=True)
    raise SystemExit(code)


def test_a_full_disk_is_one_line_and_exit_code_1(done, tmp_path, forks):
    ended = processes.run(_on_a_small_disk, str(done), str(tmp_path / "other"))
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("mnemos: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert not (done / "report.html").exists()


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


def test_changed_data_are_refused_and_changed_code_is_said(unfinished, monkeypatch, capsys):
    of_version = lambda number: {"generated": {"settings": {}, "version": number}}  # noqa: E731
    (unfinished / "run.json").write_text(json.dumps(about(unfinished) | {"data": of_version(1)}))
    monkeypatch.setattr(folder, "data_read", lambda data: of_version(2))
    longer = replace(SHORT.recipe(), train=replace(SHORT.recipe().train, steps=6))
    files = sorted((path, path.read_bytes()) for path in unfinished.rglob("*") if path.is_file())
    with pytest.raises(InputError, match=r"generated by version 1, found others, generated by version 2; put"):
        train(longer, unfinished, resume=True, longer=True, quiet=True)
    assert files == sorted((path, path.read_bytes()) for path in unfinished.rglob("*") if path.is_file())
    monkeypatch.undo()
    versions, threads = provenance.versions(), about(unfinished)["threads"]
    monkeypatch.setattr(provenance, "source_hash", lambda: "other")
    monkeypatch.setattr(provenance, "versions", lambda: {**versions, "numpy": "0.1"})
    (unfinished / "run.json").write_text(json.dumps(about(unfinished) | {"threads": threads + 1, "data": {}}))
    assert train(SHORT.recipe(), unfinished, resume=True, quiet=True)["steps"] == 4
    said = capsys.readouterr().err
    for words in ("the code of mnemos (commit ", "numpy (", f"set OMP_NUM_THREADS={threads + 1}"):
        assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["--model.dim", str(10**20)], "expected sizes of which tensors can be made"),
        (["--train.devices", "1000"], "train.devices: expected at most"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line_and_leaves_no_folder(fields, words, tmp_path, refused):
    assert words in refused("train", "short-listops", *FEW, *fields, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def changed(text: str, field: str, value: object) -> str:
    """A JSON text with another value in a field."""
    return json.dumps(json.loads(text) | {field: value})


@pytest.mark.parametrize(
    ("command", "name", "damage"),
    [
        ("report", "result.json", lambda text: "[" * 100_000),
        ("report", "metrics.jsonl", lambda text: changed(text.splitlines()[0], "step", 10**30)),
        ("--resume", "result.json", lambda text: changed(text, "test", 5)),
        ("eval", "recipe.json", lambda text: "9" * 5000),
    ],
)
def test_a_damaged_file_of_a_run_is_one_line(text_run, tmp_path, command, name, damage, refused):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    (run / name).write_text(damage((run / name).read_text()))
    assert name in refused(*(("train",) if command == "--resume" else ()), command, run)


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
