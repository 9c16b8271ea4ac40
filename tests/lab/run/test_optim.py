"""Learning rates by their equations, which parameters decay, and optimisers whose state comes back."""

import math

import pytest
import torch
from torch import nn
from train_standins import Toys
from trained_runs import equal

from mnemos.lab.run.optim import (
    Plateau,
    check,
    factor,
    load_optimiser_state,
    make_optimiser,
    optimiser_state,
    parameter_groups,
    set_lr,
)
from mnemos.lab.run.recipe import OptimConfig, ScheduleConfig
from mnemos.types import InputError

KINDS = pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("radam", False), ("adam", True)])


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        (ScheduleConfig(), 10, {1: 1.0, 10: 1.0}),
        (ScheduleConfig(warmup=4), 10, {1: 0.25, 2: 0.5, 4: 1.0, 9: 1.0}),
        # Half a cosine over updates 4 to 12, down to 0.1: 0.1 + 0.9·(1 + cos(π·p))/2.
        (
            ScheduleConfig("cosine", 4, 0.1),
            12,
            {2: 0.5, 4: 1.0, 6: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 8: 0.55, 12: 0.1},
        ),
        (ScheduleConfig("cosine"), 8, {4: 0.5, 8: 0.0}),
        (ScheduleConfig("cosine", 3), 3, {1: 1 / 3, 3: 1.0}),
        # A share of the steps, and at least one: 4 of 16, 1 of 8.
        (ScheduleConfig("cosine", 0.25), 16, {1: 0.25, 4: 1.0, 10: 0.5, 16: 0.0}),
        (ScheduleConfig(warmup=0.01, start=0.5), 8, {1: 1.0, 2: 1.0}),
        # fairseq: 4,000 warm-up updates, then the inverse root.
        (ScheduleConfig("inverse_sqrt", 4000), 10**5, {1000: 0.25, 4000: 1.0, 16000: 0.5, 64000: 0.25}),
        (ScheduleConfig("step", 0, 0.1, 3000), 4000, {1: 1.0, 3000: 1.0, 3001: 0.1, 4000: 0.1}),
        (ScheduleConfig("step", 2, 0.1, (4, 6)), 8, {1: 0.5, 2: 1.0, 4: 1.0, 5: 0.1, 6: 0.1, 7: 0.01, 8: 0.01}),
        # The last 2 of 10 steps: two thirds and a third of the way down would be the line to 0 after the last.
        (ScheduleConfig("trapezoid", 2), 10, {1: 0.5, 2: 1.0, 8: 1.0, 9: 1.0, 10: 0.5}),
        (ScheduleConfig("trapezoid", floor=0.2, fall=0.5), 8, {4: 1.0, 5: 1.0, 7: 0.6, 8: 0.4}),
        # Long Range Arena: min(1, u/w)/√max(u, w).
        (ScheduleConfig("lra", warmup=1000), 5000, {u: min(1, u / 1000) / max(u, 1000) ** 0.5 for u in (1, 999, 5000)}),
    ],
)
def test_schedules(config, steps, expected):
    for update, value in expected.items():
        assert factor(config, update, steps) == pytest.approx(value, rel=1e-12, abs=1e-15)
    for more in (1, steps, 10 * steps):
        assert factor(config, steps + more, steps) == factor(config, steps, steps)


@pytest.mark.parametrize(("patience", "floor"), [(1, 0.0), (2, 0.0), (3, 0.2)])
def test_plateau_is_torchs_own(patience, floor):
    """Against ReduceLROnPlateau, whose patience counts the looks that are borne, not the one that halves."""
    config = OptimConfig("radam", 1e-2, schedule=ScheduleConfig("plateau", patience=patience, floor=floor))
    layer = nn.Linear(2, 2)
    optimiser, other = make_optimiser(layer, config), torch.optim.SGD(layer.parameters(), 1e-2)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        other, factor=0.5, patience=patience - 1, threshold=0.0, min_lr=1e-2 * floor, eps=0.0
    )
    generator = torch.Generator().manual_seed(0)
    losses = (3 / torch.arange(1, 40) ** 0.3 + 0.5 * torch.rand(39, generator=generator)).tolist()
    losses[5] = math.nan
    plateau, rates = Plateau(), set()
    for update, loss in enumerate(losses, 1):
        plateau = plateau.after(loss, config.schedule)
        theirs.step(loss)
        rates.add(rate := set_lr(optimiser, config, update, 40, plateau.factor))
        assert rate == pytest.approx(other.param_groups[0]["lr"], rel=1e-12)
        assert optimiser.param_groups[0]["lr"] == rate
    assert len(rates) > 2


def test_a_plateau_warms_up_and_nothing_else_listens_to_losses():
    config = OptimConfig(lr=1.0, schedule=ScheduleConfig("plateau", warmup=4))
    optimiser = make_optimiser(nn.Linear(2, 2), config)
    assert [set_lr(optimiser, config, u, 9, 0.5) for u in (1, 2, 4, 5)] == [0.125, 0.25, 0.5, 0.5]
    plateau = Plateau()
    for loss in (1.0, 2.0, 3.0, 4.0):
        plateau = plateau.after(loss, ScheduleConfig("cosine", patience=1))
    assert plateau == Plateau()


def test_what_decays():
    model = Toys().recipe().model.build()
    model.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    model.slot_bias = nn.Parameter(torch.zeros(3, 3))
    model.blocks[0].mix = nn.Parameter(torch.zeros(4, 1))
    decayed, free, gates = parameter_groups(model, 0.1, 3.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == gates["weight_decay"] == 0.0
    assert {names[id(p)] for p in gates["params"]} == {"mix", "blocks.0.mix"}
    assert [group["lr_scale"] for group in (decayed, free, gates)] == [1.0, 1.0, 3.0]
    assert {names[id(p)] for p in decayed["params"]} == {
        "embedding.weight", "blocks.0.weight", "blocks.1.weight", "head.weight", "late.weight",
    }  # fmt: skip
    assert {names[id(p)] for p in free["params"]} == {
        "slot_bias", "blocks.0.bias", "blocks.1.bias", "head.bias", "late.bias",
    }  # fmt: skip


@KINDS
def test_decay_is_decoupled(name, fused):
    """With a gradient of zero a weight shrinks by rate·decay (adam: by nothing), and its moments stay zero."""
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone()
    optimiser = make_optimiser(layer, OptimConfig(name, lr=0.1, weight_decay=0.5), fused)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    torch.testing.assert_close(layer.weight.detach(), before * (1 if name == "adam" else 0.95), rtol=1e-6, atol=0)


@KINDS
def test_state_comes_back_bit_by_bit(name, fused):
    def updates(model, optimiser, first, last):
        for i in range(first, last):
            torch.manual_seed(i)
            for n, parameter in model.named_parameters():
                # The bias has no gradient before update 3: it must not get a state from being restored.
                parameter.grad = None if n == "bias" and i < 3 else torch.randn_like(parameter)
            optimiser.step()

    torch.manual_seed(0)
    model, config = nn.Linear(5, 4), OptimConfig(name, 0.01)
    other = nn.Linear(5, 4)
    optimiser = make_optimiser(model, config, fused)
    updates(model, optimiser, 0, 2)
    state = {k: {n: v.clone() for n, v in entry.items()} for k, entry in optimiser_state(model, optimiser).items()}
    assert set(state) == {"weight"}
    other.load_state_dict(model.state_dict())
    again = make_optimiser(other, config, fused)
    load_optimiser_state(other, again, state)
    updates(model, optimiser, 2, 6)
    updates(other, again, 2, 6)
    equal(model.state_dict(), other.state_dict())
    restored = optimiser_state(other, again)
    for name, entry in optimiser_state(model, optimiser).items():
        equal(entry, restored[name])


def test_a_model_says_rates_of_its_own():
    layer = nn.Linear(2, 2)
    layer.lr_scales = {"bias": 3.0}
    optimiser = make_optimiser(layer, OptimConfig(lr=0.1, weight_decay=0.0))
    assert set_lr(optimiser, OptimConfig(lr=0.1), 1, 9) == 0.1
    rates = {id(p): group["lr"] for group in optimiser.param_groups for p in group["params"]}
    assert (rates[id(layer.weight)], rates[id(layer.bias)]) == (0.1, pytest.approx(0.3))


class Gated(nn.Linear):
    """A layer and its gate."""

    def __init__(self):
        super().__init__(4, 4)
        self.mix = nn.Parameter(torch.zeros(2))


@KINDS
def test_gates_have_a_rate_of_their_own(name, fused):
    """λ moves `gate_lr_scale` times as far as under the others' rate, and nothing else moves differently."""
    moved = {}
    for share in (1.0, 7.0, 0.0):
        torch.manual_seed(0)
        layer, config = Gated(), OptimConfig(name, 1e-3, gate_lr_scale=share, schedule=ScheduleConfig("cosine", 2))
        before = {n: p.detach().clone() for n, p in layer.named_parameters()}
        optimiser = make_optimiser(layer, config, fused)
        for update in range(1, 7):
            assert set_lr(optimiser, config, update, 9) == pytest.approx(1e-3 * factor(config.schedule, update, 9))
            for n, parameter in layer.named_parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * update + len(n))
            optimiser.step()
        moved[share] = {n: p.detach() - before[n] for n, p in layer.named_parameters()}
    torch.testing.assert_close(moved[7.0]["mix"], 7 * moved[1.0]["mix"])
    assert moved[1.0]["mix"].abs().min() > 1e-4
    assert not moved[0.0]["mix"].any()
    for n in ("weight", "bias"):
        assert torch.equal(moved[1.0][n], moved[7.0][n])
        assert torch.equal(moved[1.0][n], moved[0.0][n])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimConfig(betas=(0.9, 1.0)), "optim.betas"),
        (OptimConfig(schedule=ScheduleConfig(warmup=2.5)), "a number of steps, or a share"),
        (OptimConfig(schedule=ScheduleConfig("step")), "drop_at must be at least 0, and 1 for the schedule step"),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(InputError, match=message):
        check(config)
