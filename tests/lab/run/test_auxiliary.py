"""Auxiliary losses in the trainer: once per update, however it is split, beside the loss and not in it."""

import pytest
import torch
from test_run import STILL, final, lines
from train_standins import Toys, train

WEIGHT = 0.3
SPLITS = {
    "micro-batches": {"accumulate": 2},
    "segments": {"rollout": {"segment_length": 4, "replay": False}},
    "replayed segments": {"rollout": {"segment_length": 4}, "accumulate": 2},
    "a horizon": {"rollout": {"segment_length": 4, "horizon": 1}},
}


def trained(folder, weight: float = WEIGHT, **settings):
    model = {**STILL, "cached": False, "auxiliary": weight}
    recipe = Toys(True, model, {"rows": True}, train={"precision": "64-true", "log_every": 1, **settings}).recipe()
    return train(recipe, folder, quiet=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trained(folder / "run", steps=4)
    return folder / "run"


def test_it_is_reported_apart_and_changes_the_weights(whole, tmp_path):
    """The toy's loss is WEIGHT · (1 + Σ mix)², and mix begins as zeros."""
    result = trained(tmp_path / "without", 0.0, steps=4)
    first, plain = lines(whole, "train")[0], lines(tmp_path / "without", "train")[0]
    assert first["auxiliary_loss"] == pytest.approx(WEIGHT)
    assert first["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert "auxiliary_loss" not in plain
    assert final(whole, 4)["mix"].sum() < final(tmp_path / "without", 4)["mix"].sum() - 1e-3
    assert "auxiliary_loss" not in result["test"]


def test_its_gradient_is_added_once(tmp_path):
    trained(tmp_path / "run", steps=1)
    recipe = Toys(True, {**STILL, "cached": False, "auxiliary": WEIGHT}, {"rows": True}).recipe()
    torch.manual_seed(0)
    model, batch = recipe.model.build().double(), recipe.data.build().train_batch(0, 4, 0)
    logits, _ = model.eval()(batch.inputs)
    counted = batch.targets != -100
    loss = torch.nn.functional.cross_entropy(logits[counted], batch.targets[counted])
    (loss + WEIGHT * (1 + model.mix.sum()).square()).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    assert lines(tmp_path / "run", "train")[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)


@pytest.mark.parametrize("name", SPLITS)
def test_it_counts_once_however_an_update_is_split(whole, tmp_path, name):
    trained(tmp_path / "run", steps=4, **SPLITS[name])
    tolerance = 1e-3 if name == "a horizon" else 1e-6
    for ours, theirs in zip(lines(tmp_path / "run", "train"), lines(whole, "train"), strict=True):
        assert ours["auxiliary_loss"] == pytest.approx(theirs["auxiliary_loss"], rel=tolerance)
    if name != "a horizon":  # which leaves out gradients of the main loss
        split, same = final(tmp_path / "run", 4), final(whole, 4)
        for key in same:
            torch.testing.assert_close(split[key], same[key], rtol=0, atol=1e-11)
