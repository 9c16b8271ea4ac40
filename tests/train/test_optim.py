import math

import pytest
import torch
from torch import nn
from train_standins import Toys

from mnemos.train.optim import factor, load_optimiser_state, make_optimiser, optimiser_state, parameter_groups, set_rate
from mnemos.train.recipe import OptimConfig, ScheduleConfig
from mnemos.types import InputError


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
        # fairseq: 4,000 warm-up updates, then the inverse root.
        (ScheduleConfig("inverse_sqrt", 4000), 10**5, {1000: 0.25, 4000: 1.0, 16000: 0.5, 64000: 0.25}),
        (ScheduleConfig("step", 0, 0.1, 3000), 4000, {1: 1.0, 3000: 1.0, 3001: 0.1, 4000: 0.1}),
        (ScheduleConfig("step", 2, 0.1, 3), 4, {1: 0.5, 2: 1.0, 3: 1.0, 4: 0.1}),
    ],
)
def test_schedules(config, steps, expected):
    for update, value in expected.items():
        assert factor(config, update, steps) == pytest.approx(value, rel=1e-12, abs=1e-15)


def test_long_range_arenas_rate():
    config = ScheduleConfig("lra", warmup=1000)
    for update in (1, 10, 500, 999, 1000, 1001, 2000, 5000):
        rate = 0.05 * factor(config, update, 5000)
        assert rate == pytest.approx(0.05 * min(1, update / 1000) / math.sqrt(max(update, 1000)), rel=1e-12)
    assert 0.05 * factor(config, 1000, 5000) == pytest.approx(1.5811388e-3, rel=1e-7)
    assert 0.05 * factor(config, 5000, 5000) == pytest.approx(7.0710678e-4, rel=1e-7)


def test_the_copy_tasks_rate_is_given_to_the_optimiser():
    config = OptimConfig("radam", rate=1e-3, schedule=ScheduleConfig("step", floor=0.1, drop_at=3000))
    optimiser = make_optimiser(nn.Linear(2, 2), config)
    assert set_rate(optimiser, config, 3000, 5000) == 1e-3
    assert set_rate(optimiser, config, 3001, 5000) == pytest.approx(1e-4)
    assert [group["lr"] for group in optimiser.param_groups] == [pytest.approx(1e-4)] * 2


def test_what_decays():
    model = Toys().recipe().model.build()
    model.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    model.slot_bias = nn.Parameter(torch.zeros(3, 3))
    model.blocks[0].mix = nn.Parameter(torch.zeros(4, 1))
    decayed, free = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    assert {names[id(p)] for p in decayed["params"]} == {
        "embedding.weight", "blocks.0.weight", "blocks.1.weight", "head.weight", "late.weight",
    }  # fmt: skip
    assert {names[id(p)] for p in free["params"]} == {
        "mix", "blocks.0.mix", "slot_bias", "blocks.0.bias", "blocks.1.bias", "head.bias", "late.bias",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "radam", "adam"])
@pytest.mark.parametrize("fused", [True, False])
def test_decay_is_decoupled(name, fused):
    """With a gradient of zero a weight shrinks by rate·decay (adam: by nothing), and its moments stay zero."""
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone()
    optimiser = make_optimiser(layer, OptimConfig(name, rate=0.1, decay=0.5), fused)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    torch.testing.assert_close(layer.weight.detach(), before * (1 if name == "adam" else 0.95), rtol=1e-6, atol=0)


def test_settings_reach_the_optimiser():
    optimiser = make_optimiser(nn.Linear(2, 2), OptimConfig("adamw", 0.05, (0.9, 0.98), 1e-9, 0.1))
    group = optimiser.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.05, (0.9, 0.98), 1e-9, 0.1)
    assert group["fused"]


@pytest.mark.parametrize("name", ["adamw", "radam", "adam"])
@pytest.mark.parametrize("fused", [True, False])
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
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name, entry in optimiser_state(model, optimiser).items():
        for key, value in entry.items():
            assert torch.equal(value, optimiser_state(other, again)[name][key])


def test_state_of_another_model_is_refused():
    layer = nn.Linear(2, 2)
    with pytest.raises(InputError, match="found a state of 'other'"):
        load_optimiser_state(layer, make_optimiser(layer, OptimConfig()), {"other": {"step": torch.tensor(1.0)}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimConfig(rate=0), "optim.rate must be above 0, found 0"),
        (OptimConfig(rate=float("nan")), "optim.rate"),
        (OptimConfig(betas=(0.9, 1.0)), "optim.betas"),
        (OptimConfig(decay=-1), "optim.decay"),
        (OptimConfig(clip=-1), "optim.clip"),
        (OptimConfig(schedule=ScheduleConfig(warmup=-1)), "optim.schedule.warmup"),
        (OptimConfig(schedule=ScheduleConfig(floor=2)), "optim.schedule.floor"),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(InputError, match=message):
        make_optimiser(nn.Linear(2, 2), config)
