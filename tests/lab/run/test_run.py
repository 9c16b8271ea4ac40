"""A run's updates against their definitions, what it leaves in its folder, says and refuses, and auxiliary losses."""

import gc
import json
import os
import signal
import time
import warnings

import pytest
import torch
from train_standins import STILL, Toy, Toys, gradient_norm, look, train
from trained_runs import equal, lines, weights

from mnemos.lab.errors import Interrupted, TrainingFailed
from mnemos.lab.run import checkpoint, devices, learner
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.progress import RUN_NUMBER, RunNumber
from mnemos.lab.run.recipe import ScheduleConfig
from mnemos.lab.run.run import Run
from mnemos.lab.run.session import carry_out
from mnemos.lab.tasks.batch import row_count
from mnemos.ops import dense_layer
from mnemos.types import InputError


def quiet(folder, *kinds, **train_settings):
    """Train a `Toys` of these kinds (language, model, data, optim) with other settings; the content of result.json."""
    return train(Toys(*kinds, train=train_settings).recipe(), folder, quiet=True)


@pytest.mark.parametrize("quiet", [True, False])
def test_an_interrupt_is_answered_at_once(tmp_path, capfd, quiet):
    said = []

    def interrupt(*_):
        capfd.readouterr()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        said.append(capfd.readouterr().err)

    with pytest.raises(Interrupted):
        train(Toys().recipe(), tmp_path, on_evaluation=interrupt, quiet=quiet)
    assert said == ["" if quiet else "\nstopping as soon as a checkpoint can be saved; the next Ctrl-C ends at once\n"]


def test_an_interrupt_is_obeyed_where_nobody_reads_what_it_says(tmp_path, monkeypatch):
    write = os.write

    def broken(file, data):
        if file == 2:
            raise BrokenPipeError
        return write(file, data)

    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(Interrupted, match=rf"saved after update 5; continue with: mnemos train --resume {tmp_path}$"):
        train(Toys().recipe(), tmp_path, on_evaluation=lambda *_: signal.raise_signal(signal.SIGINT))
    assert checkpoint.steps(tmp_path / "checkpoints")


@pytest.mark.parametrize("language", [True, False])
def test_a_run_leaves_what_it_promises(tmp_path, language):
    recipe = Toys(language).recipe()
    gc.collect()  # what earlier tests left open warns now
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        began = time.perf_counter()
        result = train(recipe, tmp_path / "run", on_evaluation=look, quiet=True)
    assert 0 < result["seconds"] < time.perf_counter() - began
    assert devices.peak_bytes(torch.device("cpu")) > 50 * 2**20, "PyTorch takes more bytes"
    assert [f"{w.filename}: {w.message}" for w in found] == []
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(result) == {
        "recipe", "seed", "steps", "test", "valid", "majority", "parameters", "seconds", "peak_bytes", "tokens",
        "metric", "metrics", "reference", "epoch_seconds", "scored_rows", "scored_targets", "unit",
    }  # fmt: skip
    assert set(result["test"]) == set(result["valid"]) == {"loss", "accuracy"}
    assert result["majority"] == (None if language else 0.4)
    assert result["parameters"] == sum(p.numel() for p in recipe.model.build().parameters())
    folder = tmp_path / "run"
    trained = lines(folder, "train")
    assert [line["step"] for line in trained] == [2, 4, 6, 8, 10, 12]
    assert set(trained[0]) == {"kind", "step", "loss", "accuracy", "lr", "grad_norm", "seconds", "tokens"}
    assert [line["step"] for line in lines(folder, "valid")] == [4, 8, 12]
    assert set(lines(folder, "valid")[0]) == {"kind", "step", "loss", "accuracy", "seconds"}
    assert lines(folder, "valid")[-1]["loss"] == result["valid"]["loss"]
    assert [(line["step"], len(line["layers"])) for line in lines(folder, "gates")] == [(4, 1), (8, 1), (12, 1)]
    assert trained[-1]["tokens"] == result["tokens"]
    batches = [recipe.data.build().train_batch(i, 4, 0) for i in range(12)]
    assert result["tokens"] == sum(b.inputs.numel() if b.mask is None else int(b.mask.sum()) for b in batches)
    assert checkpoint.steps(folder / "checkpoints") == [12, 8]
    # A finished run is not trained again.
    assert train(recipe, folder, resume=True, quiet=True) == result


def test_the_first_line_is_the_loss_of_the_first_batch(tmp_path):
    """Against the model and the definition: the mean over the batch's counted targets."""
    recipe = Toys(True, STILL, train={"steps": 1, "log_every": 1, "seed": 5}).recipe()
    train(recipe, tmp_path / "run", quiet=True)
    torch.manual_seed(5)
    model, batch = recipe.model.build(), recipe.data.build().train_batch(0, 4, 5)
    logits, _ = model(batch.inputs)
    counted = batch.targets != -100
    loss = torch.nn.functional.cross_entropy(logits[counted], batch.targets[counted])
    loss.backward()
    (line,) = lines(tmp_path / "run", "train")
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-5)
    assert line["accuracy"] == pytest.approx((logits.argmax(-1) == batch.targets)[counted].float().mean().item())


def test_every_process_draws_its_own_dropout_and_the_same_weights(monkeypatch):
    recipe = Toys(True, STILL).recipe()
    fabric, drawn, weights = devices.connect(recipe.train), [], []
    for rank in (0, 1, 0):
        monkeypatch.setattr(type(fabric), "global_rank", rank)
        learner = Learner(fabric, recipe, recipe.data.build())
        weights.append(torch.cat([p.detach().flatten() for p in learner.model.parameters()]))
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.equal(*weights[:2])


def test_a_line_is_the_mean_over_the_updates_since_the_last_one(tmp_path):
    losses = {}
    for every in (1, 3):
        quiet(tmp_path / str(every), True, STILL, steps=6, log_every=every)
        losses[every] = [line["loss"] for line in lines(tmp_path / str(every), "train")]
    assert losses[3] == pytest.approx([sum(losses[1][:3]) / 3, sum(losses[1][3:]) / 3], rel=1e-6)


@pytest.mark.parametrize(("language", "accumulate"), [(True, 2), (False, 4)])
def test_micro_batches_train_as_the_whole_batch(tmp_path, language, accumulate):
    # Unevenly many counted targets and valid tokens in the micro-batches, rows reset at different times.
    data = {} if language else {"ignored": 3}
    for name, pieces in {"whole": 1, "split": accumulate}.items():
        quiet(tmp_path / name, language, STILL, data, precision="64-true", accumulate=pieces, steps=4)
    torch.testing.assert_close(weights(tmp_path / "split", 4), weights(tmp_path / "whole", 4), rtol=0, atol=1e-12)
    for ours, theirs in zip(lines(tmp_path / "split", "train"), lines(tmp_path / "whole", "train"), strict=True):
        for key in ("loss", "grad_norm", "accuracy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run_before_the_step(tmp_path):
    models, recipe = [], Toys().recipe()

    def breaking(model, step):
        models.append(model)
        model.broken = step == 8

    with pytest.raises(TrainingFailed, match=r"update 9: .*found loss nan.*optim\.lr.*checkpoint is of update 8"):
        train(recipe, tmp_path / "run", on_evaluation=breaking, quiet=True)
    equal(models[0].state_dict(), weights(tmp_path / "run", 8))
    assert not (tmp_path / "run" / "result.json").exists()
    assert train(recipe, tmp_path / "run", resume=True, quiet=True)["steps"] == 12


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    original = learner.ModelWithLoss.forward

    def forward(self, *arguments, **named):
        loss, right = original(self, *arguments, **named)
        return loss + torch.sqrt(self.model.mix.sum() * 0), right  # 0, with an infinite slope

    monkeypatch.setattr(learner.ModelWithLoss, "forward", forward)
    with pytest.raises(TrainingFailed, match=r"update 1: .*gradient norm nan.*optim\.grad_clip.*no checkpoint"):
        train(Toys().recipe(), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("toys", "message"),
    [
        (Toys(False, {"classes": 4}), r"model\.classes .*4.*3.*model\.classes 3"),
        (Toys(model={"max_length": 11}), r"model\.max_length .*11.*12"),
        (Toys(data={"bad_token": 2}), "training batch 2: .*tokens 0 to 10, found 0 to 11"),
        (Toys(False, data={"bad_label": 3}), "training batch 3: .*targets 0 to 2, found 1 to 3"),
        (Toys(data={"bad_token": 10**6 + 501}), "valid batch 1: .*tokens 0 to 10"),
        (Toys(train={"accumulate": 3}), r"train\.batch_size: .*1 process.*found 4; use 3"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, toys, message):
    with pytest.raises(InputError, match=message) as caught:
        train(toys.recipe(), tmp_path / "run", quiet=True)
    assert "\n" not in str(caught.value)


def test_threads_of_the_recipe_are_used_and_recorded(tmp_path):
    quiet(tmp_path / "a", threads=2, steps=1)
    assert json.loads((tmp_path / "a" / "run.json").read_text())["threads"] == 2
    assert torch.get_num_threads() == 1  # as before the run


def test_a_run_keeps_the_library_of_its_dense_layers(tmp_path):
    """Whatever the process that resumes it, or assesses it, would choose."""
    seen = []

    def look(model, step):
        seen.append(dense_layer.choice())

    def steps(number):
        return Toys(train={"steps": number}).recipe()

    first, other = dense_layer.Choice(dense_layer.NEVER, 2**30, dense_layer.NEVER), dense_layer.FIXED["onednn"]
    with dense_layer.using(first):
        train(steps(4), tmp_path / "a", on_evaluation=look, quiet=True)
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    assert about["dense"] == {"few_rows": None, "many_rows": 2**30, "weight_gradient": None}
    with dense_layer.using(other):
        run = Run.open(steps(4), tmp_path / "a", resume=True, steps=8, quiet=True)
        run.train(on_evaluation=look)
        assert dense_layer.choice() == other
        (tmp_path / "a" / "run.json").write_text(json.dumps(about | {"dense": {"many_rows": "all"}}))
        with pytest.raises(InputError, match="expected sizes"):
            Run.open(steps(8), tmp_path / "a", resume=True, steps=12, quiet=True)
    assert set(seen) == {first}
    assert len(seen) >= 2


def test_a_quick_run_scores_as_many_rows_as_it_says(tmp_path, capsys):
    def scoring(test_rows):
        recipe = Toys(False, train={"steps": 2, "test_rows": test_rows}).recipe()
        return carry_out(Run.open(recipe, tmp_path / str(test_rows))).to_json()

    whole, task = scoring(0), Toys(False).recipe().data.build()
    rows = {split: sum(map(row_count, task.batches(split, 4))) for split in ("valid", "test")}
    assert whole["scored_rows"] == rows
    part = scoring(3)
    assert "5 rows of the test split were scored; mnemos eval" in capsys.readouterr().out
    scoring(9999)
    assert "rows of the test split were scored" not in capsys.readouterr().out, "all of them were"
    assert part["scored_rows"]["valid"] == rows["valid"]
    assert part["scored_rows"]["test"] == 5 < rows["test"]  # batches of four rows and the last of one
    assert part["valid"] == whole["valid"]
    assert part["test"] != whole["test"]


def test_what_the_data_are_is_said_once(tmp_path, capsys):
    task = Toys().recipe().data.build()
    task.about = ("3 rows",)
    for number, quiet, said in (
        (None, False, "toy"),
        (None, True, ""),
        ((1, 2, True), True, "data"),
        ((2, 2), False, ""),
    ):
        before = RUN_NUMBER.set(number and RunNumber(*number))
        Run.open(Toys().recipe(), tmp_path / f"{number} {quiet}", task=task, quiet=quiet).close()
        RUN_NUMBER.reset(before)
        assert capsys.readouterr().out == (f"{said}: 3 rows\n" if said else "")


def test_a_warm_up_that_is_longer_than_the_run_is_a_warning(tmp_path, capsys):
    schedule = ScheduleConfig(name="cosine", warmup=48)
    train(Toys(optim={"schedule": schedule}).recipe(), tmp_path / "a")
    (first,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert "48 steps and the run has 12" in first
    assert "0.25 times optim.lr" in first


# Auxiliary losses: once per update, however it is split, beside the loss and not in it.
WEIGHT = 0.3
SPLITS = {
    "micro-batches": {"accumulate": 2},
    "segments": {"rollout": {"segment_length": 4, "replay": False}},
    "replayed segments": {"rollout": {"segment_length": 4}, "accumulate": 2},
    "a horizon": {"rollout": {"segment_length": 4, "horizon": 1}},
}


def with_auxiliary(folder, weight: float = WEIGHT, **settings):
    model = {**STILL, "cached": False, "auxiliary": weight}
    return quiet(
        folder, True, model, {"rows": True}, **{"precision": "64-true", "log_every": 1, "steps": 4, **settings}
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with_auxiliary(folder / "run")
    return folder / "run"


def test_it_is_reported_apart_and_its_gradient_is_added_once(whole, tmp_path):
    """The toy's loss is WEIGHT · (1 + Σ mix)², and mix begins as zeros."""
    result = with_auxiliary(tmp_path / "without", 0.0)
    first, plain = lines(whole, "train")[0], lines(tmp_path / "without", "train")[0]
    assert first["auxiliary_loss"] == pytest.approx(WEIGHT)
    assert first["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert "auxiliary_loss" not in plain
    assert "auxiliary_loss" not in result["test"]
    recipe = Toys(True, {**STILL, "cached": False, "auxiliary": WEIGHT}, {"rows": True}).recipe()
    torch.manual_seed(0)
    model, batch = recipe.model.build().double(), recipe.data.build().train_batch(0, 4, 0)
    logits, _ = model.eval()(batch.inputs)
    counted = batch.targets != -100
    loss = torch.nn.functional.cross_entropy(logits[counted], batch.targets[counted])
    (loss + WEIGHT * (1 + model.mix.sum()).square()).backward()
    assert first["grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-9)


@pytest.mark.parametrize("name", SPLITS)
def test_it_counts_once_however_an_update_is_split(whole, tmp_path, name):
    with_auxiliary(tmp_path / "run", **SPLITS[name])
    tolerance = 1e-3 if name == "a horizon" else 1e-6
    for ours, theirs in zip(lines(tmp_path / "run", "train"), lines(whole, "train"), strict=True):
        assert ours["auxiliary_loss"] == pytest.approx(theirs["auxiliary_loss"], rel=tolerance)
    if name != "a horizon":  # which leaves out gradients of the main loss
        torch.testing.assert_close(weights(tmp_path / "run", 4), weights(whole, 4), rtol=0, atol=1e-11)


def test_state_is_carried_and_reset(tmp_path, monkeypatch):
    seen = []
    original = Toy.forward

    def forward(self, x, state=None, mask=None):
        if self.training:
            seen.append([0] * 4 if state is None else state.seen.tolist())
            assert state is None or not state.hidden[0].requires_grad
        return original(self, x, state, mask)

    monkeypatch.setattr(Toy, "forward", forward)
    quiet(tmp_path / "run", steps=10)
    expected, task = [0] * 4, Toys(True).recipe().data.build()
    for i, found in enumerate(seen):
        fresh = task.train_batch(i, 4, 0).reset.tolist()
        expected = [0 if row else count for row, count in zip(fresh, expected, strict=True)]
        assert found == expected
        expected = [count + 12 for count in expected]


def test_clipping(tmp_path, monkeypatch):
    norms = []
    original = torch.optim.AdamW.step

    def step(self, *arguments):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for clip in (0.01, 0.0):
        quiet(tmp_path / str(clip), True, {}, {}, {"grad_clip": clip}, steps=4)
    assert norms[:4] == pytest.approx([0.01] * 4, rel=1e-3)
    assert min(norms[4:]) > 0.1
    assert min(line["grad_norm"] for line in lines(tmp_path / "0.01", "train")) > 0.1  # the norm before clipping
