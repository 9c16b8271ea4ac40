import json
import multiprocessing

import pytest
from train_standins import Toys

from mnemos.lab.run import checkpoint
from mnemos.lab.run import folder as run_module
from mnemos.lab.run.files import Measurement, Result
from mnemos.lab.run.folder import RunFolder
from mnemos.lab.run.recipe import differing
from mnemos.types import InputError

RECIPE = Toys().recipe()


def line(kind: str, step: int) -> Measurement:
    return Measurement(kind, step, {"loss": 1.0})


def contents(folder) -> list[tuple[str, int]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(entry["kind"], entry["step"]) for entry in lines]


def test_a_new_run_says_what_and_where_it_is(tmp_path):
    run = RunFolder.start(tmp_path / "runs" / "a", RECIPE, "cpu", about=["2 files", "warning: equal files"])
    recipe = json.loads((run.folder / "recipe.json").read_text())
    assert recipe["name"] == "toy"
    assert recipe["model"]["is"] == "toy"
    about = json.loads((run.folder / "run.json").read_text())
    assert set(about) == {
        "commit", "dirty", "versions", "device", "cpu", "threads", "dense", "seed", "data", "command", "started",
        "finished", "resumed", "source_sha256", "warnings",
    }  # fmt: skip
    assert about["warnings"] == ["equal files"]
    assert set(about["versions"]) >= {"mnemos", "torch", "python", "numpy", "lightning-fabric", "pillow"}
    assert about["finished"] is None
    assert run.result is None
    run.finish(Result(test={"loss": 1.0}))
    assert json.loads((run.folder / "run.json").read_text())["finished"] is not None
    assert run.result == Result(test={"loss": 1.0})
    assert not list(run.folder.rglob("*.tmp"))


def test_a_run_is_not_started_twice(tmp_path):
    RunFolder.start(tmp_path / "a", RECIPE, "cpu").close()
    with pytest.raises(InputError, match="--resume"):
        RunFolder.start(tmp_path / "a", RECIPE, "cpu")


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("thesis.tex", "notes.tmp", "checkpoints/step-00000001.safetensors"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=r"found 'notes\.tmp'"):
        RunFolder.start(tmp_path, RECIPE, "cpu")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "notes.tmp",
        "step-00000001.safetensors",
        "thesis.tex",
    ]
    with pytest.raises(InputError, match="found a file"):
        RunFolder.start(tmp_path / "thesis.tex", RECIPE, "cpu")


def test_what_cannot_be_resumed(tmp_path):
    with pytest.raises(InputError, match=r"found no recipe\.json"):
        RunFolder.resume(tmp_path / "none", RECIPE)
    RunFolder.start(tmp_path / "a", RECIPE, "cpu").close()
    other = Toys(optim={"lr": 0.5}).recipe()
    with pytest.raises(InputError, match=r"another optim.lr \(0.01, not 0.5\)"):
        RunFolder.resume(tmp_path / "a", other)
    (tmp_path / "a" / "recipe.json").write_text("{")
    with pytest.raises(InputError, match=r"recipe\.json: .*JSON"):
        RunFolder.resume(tmp_path / "a", RECIPE)


def test_differing():
    assert differing({"a": {"b": 1}}, {"a": {"b": 1}}) is None
    assert differing({"a": {"b": 1}}, {"a": {"b": 2}}) == "a.b (1, not 2)"
    assert differing({"a": 1}, {"a": 1, "c": 2}) == "c (None, not 2)"
    assert differing({"about": "half an hour", "a": 1}, {"about": "an hour", "a": 1}) is None


def test_measurements_are_cut_back_to_a_checkpoint(tmp_path):
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu")
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


def test_a_last_line_without_its_end_is_written_again(tmp_path):
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu")
    (run.folder / "metrics.jsonl").write_text(line("train", 1).to_line().strip())
    run.trim(9)
    assert contents(run.folder) == []


@pytest.mark.parametrize("bad", ["nonsense", '{"kind": "train"}'])
def test_a_damaged_line_is_named(tmp_path, bad):
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu")
    lines = [line("train", 1).to_line().strip(), bad, line("train", 2).to_line().strip()]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"metrics.jsonl: line 2: expected a measurement"):
        run.trim(2)


def _hold(folder: str, ready, done) -> None:
    run = RunFolder.resume(folder, RECIPE)
    ready.set()
    done.wait(30)
    run.close()


def test_one_writer_at_a_time(tmp_path, forks):
    RunFolder.start(tmp_path / "a", RECIPE, "cpu").close()
    context = multiprocessing.get_context("forkserver")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "a"), ready, done))
    process.start()
    assert ready.wait(60)
    with pytest.raises(InputError, match="another process"):
        RunFolder.resume(tmp_path / "a", RECIPE)
    process.kill()  # however it dies, the folder is free
    process.join()
    RunFolder.resume(tmp_path / "a", RECIPE).close()


def test_resuming_elsewhere_is_noted(tmp_path, monkeypatch):
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu")
    assert run.resumed(3, RECIPE.data) == []
    threads = json.loads((run.folder / "run.json").read_text())["threads"]
    monkeypatch.setattr(run_module.torch, "get_num_threads", lambda: threads + 1)
    (note,) = run.resumed(5, RECIPE.data)
    assert f"set OMP_NUM_THREADS={threads}" in note
    resumed = json.loads((run.folder / "run.json").read_text())["resumed"]
    assert [entry["step"] for entry in resumed] == [3, 5]
    assert all({"commit", "dirty"} < set(entry) for entry in resumed)


def test_of_averages_the_last_is_kept(tmp_path):
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu")
    for step in (3, 5):
        run.save_average(step, {"step": step})
    assert checkpoint.steps(run.checkpoints, "averaged") == [5]


def test_a_run_that_starts_again_from_other_weights_says_so(tmp_path):
    """It had no checkpoint yet, and the run that it starts from was trained for longer in the meantime."""
    weights = {"run": "runs/one", "sha256": "1", "tensors": 3}
    run = RunFolder.start(tmp_path / "a", RECIPE, "cpu", weights)
    assert run.resumed(0, RECIPE.data, weights) == []
    (note,) = run.resumed(0, RECIPE.data, {**weights, "sha256": "2"})
    assert note.startswith("the weights of runs/one have changed")
    assert run.resumed(0, RECIPE.data, {**weights, "sha256": "2"}) == []
    run.close()
    about = json.loads((tmp_path / "a/run.json").read_text())
    assert [one.get("weights", {}).get("sha256") for one in (about, *about["resumed"])] == ["1", None, "2", None]
