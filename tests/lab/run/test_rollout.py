"""Updates that read in steps: the gradients of one whole sequence, however they are come by and wherever it is cut.

Then what else is read in steps: evaluation in pieces, settings that do not fit, and runs that were stopped.
"""

import contextlib
import dataclasses
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from lightning_fabric.plugins.precision.amp import MixedPrecision
from train_standins import STILL, Swift, Toy, Toys, gradient_norm, train
from trained_runs import lines, same, weights

from mnemos import LinearConfig, SoftmaxConfig, TransformerConfig
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.run import devices, loop, optim
from mnemos.lab.run.learner import Learner, ModelWithLoss, StateBox
from mnemos.lab.run.loop import update
from mnemos.lab.tasks.batch import IGNORE, Batch, pieces
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.lab.tasks.task import SUPERVISED
from mnemos.memory_replay import rollout as replaying
from mnemos.types import InputError, detach, reset


def toys(rows, model=None, precision="64-true", accumulate=1, train=None, **rollout) -> Toys:
    settings = {"precision": precision, "accumulate": accumulate, "rollout": rollout, **(train or {})}
    return Toys(True, model or {}, {"rows": rows}, train=settings)


def run(folder, *arguments, **rollout):
    train(toys(*arguments, train={"steps": 4}, **rollout).recipe(), folder, quiet=True)
    return weights(folder, 4)


def learns(recipe, task=None) -> Learner:
    return Learner(devices.connect(recipe.train), recipe, task or recipe.data.build())


def copied(learner: Learner, recipe):
    """The model that it trains, for plain back-propagation."""
    model = recipe.model.build().double()
    model.load_state_dict(learner.model.state_dict())
    return model


def summed(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def close(ours, theirs, tolerance):
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


KINDS = [(True, {"segment_length": 5}), (False, {"segments": 4})]


@pytest.mark.parametrize(
    ("rows", "reading", "horizon", "accumulate", "precision", "tolerance"),
    [
        (*KINDS[0], 0, 1, "64-true", 1e-12),
        (*KINDS[1], 2, 2, "64-true", 1e-12),
        (*KINDS[0], 2, 2, "bf16-mixed", 2e-3),  # where sums are rounded in their order
    ],
)
def test_replay_trains_as_back_propagation_through_time(
    tmp_path, rows, reading, horizon, accumulate, precision, tolerance
):
    """Dropout, noise of Python's and NumPy's and a stored cache: all drawn and written as without replay."""
    found = {}
    for replay in (True, False):
        settings = (rows, {"cached": True}, precision, accumulate)
        found[replay] = run(tmp_path / str(replay), *settings, replay=replay, horizon=horizon, **reading)
    assert found[True]["store.cache"].abs().max() > 0.005
    close(found[True], found[False], tolerance)
    for ours, theirs in zip(lines(tmp_path / "True", "train"), lines(tmp_path / "False", "train"), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for key in ("loss", "grad_norm", "accuracy"):
            assert ours[key] == pytest.approx(theirs[key], rel=max(1e-5, 10 * tolerance))


@pytest.mark.parametrize("replay", [True, False])
def test_the_gradient_is_that_of_the_whole_sequence(replay):
    """Against the model on the sequence in one piece, and the definition of the loss."""
    recipe = toys(True, {**STILL, "cached": False}, replay=replay, segment_length=5).recipe()
    task = recipe.data.build()
    learner = learns(recipe, task)
    model, batch = copied(learner, recipe), task.train_batch(0, 4, 0)
    found = update(learner)
    logits, _ = model(batch.inputs)
    loss = summed(logits, batch.targets) / (batch.targets != IGNORE).sum()
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)  # which is told in float32
    assert found["grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-12)


@pytest.mark.parametrize(("replay", "horizon", "slide"), [(True, 0, 1), (False, 2, 2), (True, 2, 3), (False, 0, 1)])
def test_sliding_updates_are_plain_back_propagation_over_their_windows(replay, horizon, slide):
    """Update u reads batches u·slide … u·slide + 2, from the state after `slide` batches of the update before it."""
    rollout = {"segments": 3, "slide": slide, "replay": replay, "horizon": horizon}
    recipe = toys(False, {**STILL, "cached": False}, **rollout).recipe()
    task = recipe.data.build()
    learner, start = learns(recipe, task), None
    for number in range(4):
        model = copied(learner, recipe)
        batches = [task.train_batch(number * slide + i, 4, recipe.train.seed) for i in range(3)]
        state, losses, count = start, [], sum((b.targets != IGNORE).sum() for b in batches)
        for i, batch in enumerate(batches):
            if horizon and i % horizon == 0 and state is not None:
                state = detach(state)
            state = state if state is None else reset(state, batch.reset)
            logits, state = model(batch.inputs, state)
            losses.append(summed(logits, batch.targets))
            if i + 1 == slide:
                start = detach(state)
        (sum(losses) / count).backward()
        found = update(learner)
        assert found["loss"] == pytest.approx(sum(losses).item() / count.item(), rel=1e-6)
        assert found["grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-10)
        torch.testing.assert_close(learner.carried.states[0].hidden, start.hidden, rtol=1e-12, atol=0)


@pytest.mark.parametrize("replay", [True, False])
def test_a_row_that_starts_in_mid_rollout_has_no_past(monkeypatch, replay):
    """Its own state is fresh, and no gradient reaches what stood before it."""
    recipe = toys(False, {**STILL, "cached": False}, replay=replay, segments=3).recipe()
    task = recipe.data.build()
    batches = [task.train_batch(i, 4, 0) for i in range(3)]
    starts = torch.tensor([[True, True, True, True], [False, True, False, False], [False, False, True, False]])
    batches = [batch._replace(reset=start) for batch, start in zip(batches, starts, strict=True)]
    monkeypatch.setattr(task, "train_batch", lambda i, *_: batches[i])
    learner = learns(recipe, task)
    model, total = copied(learner, recipe), 0.0
    found = update(learner)
    for row in range(4):  # every document of every row on its own
        begins = [*starts[:, row].nonzero().flatten().tolist(), 3]
        for first, end in itertools.pairwise(begins):
            logits, _ = model(torch.cat([b.inputs[row : row + 1] for b in batches[first:end]], 1))
            total = total + summed(logits, torch.cat([b.targets[row] for b in batches[first:end]]))
    loss = total / sum((b.targets != IGNORE).sum() for b in batches)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-12)


def test_the_scaler_scales_the_loss_once(monkeypatch):
    """And not what flows back once more at every step."""
    norms = []
    for replay in (True, False):
        recipe = toys(True, STILL, "16-mixed", segment_length=2, replay=replay).recipe()
        on_cpu = devices.connect(dataclasses.replace(recipe.train, precision="32-true"))
        learner = Learner(on_cpu, recipe, recipe.data.build())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        monkeypatch.setattr(learner.fabric.strategy, "_precision", MixedPrecision("16-mixed", "cpu", scaler))
        monkeypatch.setattr(
            loop,
            "set_lr",
            lambda *given, learner=learner: norms.append(gradients(learner.model)) or optim.set_lr(*given),
        )
        update(learner)
    assert max(gradient.abs().max() for gradient in norms[1]) > 0.01
    for ours, theirs in zip(*norms, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3 * theirs.abs().max().item())


def gradients(model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_compiled_trains_as_eager(monkeypatch, cached):
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: original(model, backend="aot_eager"))
    model, found = {**STILL, "late": False, "cached": cached}, []
    for compiled in (False, True):
        learner = learns(toys(True, model, "32-true", train={"compile": compiled}, segment_length=3).recipe())
        update(learner), update(learner)
        found.append(learner.model.state_dict())
    close(found[1], found[0], 1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_models_own_advance_is_used(tmp_path, monkeypatch, dropout):
    """With dropout it draws a prefix of what the whole step draws, or replay would say that it does not."""
    model, calls = {**STILL, "cached": False, "dropout": dropout}, []
    bptt = run(tmp_path / "bptt", True, model, segment_length=3, replay=False)
    original = Swift.advance

    def advance(self, x, state=None, mask=None):
        calls.append(torch.is_grad_enabled())
        return original(self, x, state, mask)

    monkeypatch.setattr(Swift, "advance", advance)
    advanced = run(tmp_path / "advanced", True, {**model, "advances": True}, segment_length=3)
    assert calls == [False] * 4 * 3  # updates, steps but the last
    if not dropout:
        close(advanced, bptt, 1e-12)


@pytest.mark.parametrize(("replay", "horizon"), [(True, 0), (True, 2), (False, 1)])
def test_a_step_without_a_target_needs_its_state_alone(monkeypatch, replay, horizon):
    """It is read by the model's `advance`, with the same loss and gradients; and so it is where a split is scored."""
    found, evaluated, reads = {}, {}, []
    original = Toy.forward
    monkeypatch.setattr(Toy, "forward", lambda *given, **named: reads.append(0) or original(*given, **named))
    for advances in (False, True):
        model = {**STILL, "cached": False, "late": False, "advances": advances}
        recipe = toys(True, model, segment_length=3, replay=replay, horizon=horizon).recipe()
        task = recipe.data.build()
        batch = task.train_batch(0, 4, 0)
        for piece in (0, 1, 3):
            batch.targets[:, 3 * piece : 3 * piece + 3] = IGNORE
        monkeypatch.setattr(task, "train_batch", lambda *_, batch=batch: batch)
        learner = learns(recipe, task)
        reads.clear()
        done = update(learner)
        weights = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
        found[advances] = {key: done[key] for key in ("loss", "grad_norm")}, weights, len(reads)
        reads.clear()
        evaluated[advances] = evaluate(learner.model, pieces([batch], 3)), len(reads)
    (told, weights, once), (expected, wanted, _) = found[True], found[False]
    assert told == pytest.approx(expected, rel=1e-12)
    close(weights, wanted, 1e-12)
    assert once == 1
    assert evaluated[True] == (pytest.approx(evaluated[False][0], rel=1e-12), 1)
    assert evaluated[False][1] == 4


@pytest.mark.parametrize(("alone", "forwards"), [(True, 0), (False, 1)])
def test_processes_run_the_same_parts_of_a_model(monkeypatch, alone, forwards):
    """Another's rows may have a target: it would wait for this one's share of the weights."""
    reads = []
    original = Toy.forward
    monkeypatch.setattr(Toy, "forward", lambda *given, **named: reads.append(0) or original(*given, **named))
    model = toys(True, {**STILL, "cached": False, "advances": True}).recipe().model.build()
    inputs = torch.ones(2, 3, dtype=torch.int64)
    batch, carry = Batch(inputs, torch.full_like(inputs, IGNORE)), StateBox(None)
    loss, sums = ModelWithLoss(model, SUPERVISED, alone)([batch], carry)
    assert (loss.item(), sums.tolist(), len(reads)) == (0, [0, 0, 0, 0], forwards)
    assert carry.after[-1].seen.tolist() == [3, 3]
    with contextlib.suppress(InputError):  # nothing is counted
        evaluate(model, [batch], total=None if alone else lambda x: x)
    assert len(reads) == 2 * forwards


@pytest.mark.parametrize("cached", [True, False])  # whose buffers name the module, or do not
def test_the_first_update_is_verified(monkeypatch, cached):
    compared, original = [], replaying.compare
    monkeypatch.setattr(replaying, "compare", lambda *given: compared.append(None) or original(*given))
    found = {}
    for verify in (True, False):
        recipe = toys(True, {"cached": cached}, segment_length=3, verify=verify).recipe()
        learner, found[verify] = learns(recipe), []
        for _ in range(3):
            compared.clear()
            update(learner)
            found[verify].append(bool(compared))
    assert found == {True: [True, False, False], False: [False] * 3}


class Kept:
    """A tensor that a graph holds, as long as it does; `most`: the bytes of all at once."""

    now = most = 0

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.count(x.nbytes)

    def __del__(self) -> None:
        self.count(-self.x.nbytes)

    @classmethod
    def count(cls, new: int) -> None:
        cls.now += new
        cls.most = max(cls.most, cls.now)


def norms(recipe, updates: int, hook=None) -> list[float]:
    """The gradients' norms of so many updates, which may be those of a DDP of one process."""

    learner = learns(recipe)
    try:
        if hook is not None:
            learner.wrapped._forward_module.register_comm_hook(None, hook)
        return [update(learner)["grad_norm"] for _ in range(updates)]
    finally:
        del learner
        gc.collect()  # DDP goes before its processes do: the last to let go of them must not hold Python's lock
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")
@pytest.mark.parametrize(
    "rollout", [{"horizon": 2}, pytest.param({"replay": False, "horizon": 2}, marks=pytest.mark.exhaustive)]
)
def test_gradients_are_reduced_once_an_update(rollout):
    recipe = toys(True, None, "32-true", 2, {"strategy": "ddp"}, segment_length=4, **rollout).recipe()
    reduced = []

    def hook(_, bucket):
        reduced.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    norms(recipe, 2, hook)
    assert reduced == [0, 0]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")
def test_buffers_are_shared_before_each_first_pass(monkeypatch):
    """DDP would share them in its first forward, and the replay of that segment start from this process's own."""
    shared = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda x, **_: shared.append(x.shape))
    norms(toys(True, {**STILL, "cached": True}, "32-true", 1, {"strategy": "ddp"}, segment_length=4).recipe(), 2)
    buffers = [x.shape for x in toys(True, STILL).recipe().model.build().buffers()]
    assert buffers
    assert shared == buffers * 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")
@pytest.mark.parametrize(
    "horizon", [pytest.param(0, marks=pytest.mark.exhaustive), 1, pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_what_reaches_the_loss_by_the_state_alone_is_found(monkeypatch, horizon):
    """A writer's weights are in no step's own loss; DDP has to wait for their gradient all the same."""
    original = Toy.forward

    def forward(self, x, state=None, mask=None):
        logits, new = original(self, x, state, mask)
        return logits, new._replace(hidden=(new.hidden[0] + self.late(new.hidden[0]),))

    monkeypatch.setattr(Toy, "forward", forward)
    found = []
    for strategy, replay in (("auto", False), ("ddp", True), ("ddp", False)):
        model, rollout = {**STILL, "late": False, "cached": False}, {"horizon": horizon, "replay": replay}
        found.append(norms(toys(True, model, train={"strategy": strategy}, segment_length=4, **rollout).recipe(), 2))
    assert found[1:] == [pytest.approx(found[0], rel=1e-9)] * 2


def test_activations_do_not_grow_with_the_rollout():
    def kept(distance: int, replay: bool) -> int:
        learner = learns(transformer(distance, rollout={"segment_length": 16, "replay": replay}))
        Kept.now = Kept.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
            update(learner)
        return Kept.most

    short, long = (kept(16 * steps - 7, True) for steps in (4, 16))
    assert long <= 1.01 * short
    assert kept(16 * 16 - 7, False) > 3.5 * kept(16 * 4 - 7, False) > 10 * short / 1.5


def transformer(distance: int, attention=None, **train):
    """A small Transformer on recall: rows of `distance` + 7 tokens."""
    sizes = {"vocab_size": 25, "dim": 16, "layers": 2, "num_heads": 2, "mlp": 32, "max_length": distance + 7}
    model = TransformerConfig(**sizes, attention=attention or LinearConfig())
    recipe = Toys(True, train={"precision": "32-true", **train}).recipe()
    return dataclasses.replace(recipe, model=model, data=RecallConfig(2, 4, 2, rows=16, distance=distance))


@pytest.mark.parametrize(("attention", "segment"), [(LinearConfig(), 7), (SoftmaxConfig(), 9), (LinearConfig(), 100)])
def test_evaluation_in_pieces_is_evaluation_whole(attention, segment):
    recipe = transformer(57, attention)
    torch.manual_seed(0)
    model, task = recipe.model.build().double(), recipe.data.build()
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    whole = evaluate(model, task.batches("test", 5))  # the last batch has one row
    split = evaluate(model, pieces(task.batches("test", 5), segment))
    assert max(seen[4:]) <= segment
    assert split.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-12)
    assert split == whole


def test_training_reads_no_more_than_a_segment_anywhere(tmp_path, monkeypatch):
    lengths = set()
    original = Toy.forward

    def forward(self, x, state=None, mask=None):
        lengths.add((self.training, x.shape[1]))
        return original(self, x, state, mask)

    monkeypatch.setattr(Toy, "forward", forward)
    run(tmp_path / "run", True, segment_length=5)
    assert lengths == {(True, 5), (True, 2), (False, 5), (False, 2)}


def test_fewer_stored_states_change_nothing(tmp_path):
    whole = run(tmp_path / "all", True, segment_length=2)
    close(run(tmp_path / "few", True, segment_length=2, checkpoints=2, offload=True), whole, 1e-12)


def test_pieces():
    mask = torch.ones(3, 7, dtype=torch.bool)
    batch = Batch(torch.arange(21).view(3, 7), -torch.arange(21).view(3, 7), mask)
    found = list(pieces([batch, batch], 3))
    assert [b.inputs.shape for b in found] == [(3, 3), (3, 3), (3, 1)] * 2
    assert [b.reset.tolist() for b in found] == [[first] * 3 for first in (True, False, False)] * 2
    for name in ("inputs", "targets", "mask"):
        assert torch.equal(torch.cat([getattr(b, name) for b in found[:3]], 1), getattr(batch, name))
    assert list(pieces([batch], 0)) == [batch]


def test_models_whose_state_does_not_serve_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    model = TransformerConfig(vocab_size=11, dim=8, num_heads=2, layers=1, mlp=8, attention=SoftmaxConfig())
    with pytest.raises(InputError, match=r"model\.attention\.window"):
        train(dataclasses.replace(toys(False, segments=2).recipe(), model=model), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    original = Toy.forward
    monkeypatch.setattr(Toy, "forward", lambda *given, **named: (original(*given, **named)[0], None))
    with pytest.raises(InputError, match="keeps a state"):
        run(tmp_path / "run", True, segment_length=4)


@pytest.mark.parametrize(
    ("rows", "precision", "rollout", "moment"),
    [
        pytest.param(True, "32-true", {"segment_length": 5}, "mid-update", marks=pytest.mark.exhaustive),
        pytest.param(False, "32-true", {"segments": 3, "horizon": 2}, "mid-update", marks=pytest.mark.exhaustive),
        (False, "bf16-mixed", {"segments": 3, "slide": 1, "horizon": 2}, "SIGTERM"),
    ],
)
def test_killed_and_resumed(run_apart, tmp_path, rows, precision, rollout, moment):
    asked = toys(rows, {"cached": True}, precision, 2, {"steps": 5, "checkpoint_every": 2}, **rollout)
    assert run_apart(tmp_path / "whole", asked) == 0
    assert run_apart(tmp_path / "run", asked, False, moment, 3) == (130 if moment == "SIGTERM" else -9)
    assert run_apart(tmp_path / "run", asked, True) == 0
    same(tmp_path / "run", tmp_path / "whole")
