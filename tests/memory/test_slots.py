"""Slots that a row carries: a fresh row's start, resets, frozen rows, and how fast they forget."""

import math

import pytest
import torch

from mnemos.memory import SlotMemory, SlotsConfig
from mnemos.types import leaves, reset, select

B, K, L, D, H = 3, 4, 5, 12, 3


def memory(**fields):
    torch.manual_seed(0)
    return SlotMemory(D, H, SlotsConfig(slots=K, **fields)).double()


def heard(seed=1):
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written(slots, times=3):
    state = slots.initial_state(B, dtype=torch.float64)
    for i in range(times):
        state = slots(state, heard(i))
    return state


@pytest.mark.parametrize("radius", [None, 1.0])
def test_a_fresh_row_starts_at_the_end_of_forgetting(radius):
    slots = memory(radius=radius)
    state = slots.initial_state(B)
    rho = radius or math.sqrt(D)
    wanted = rho * slots.bias / slots.bias.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(slots.contents(state), wanted.expand(B, K, D))
    torch.testing.assert_close(slots.bias.norm(dim=-1), torch.full((K,), 0.03 * rho, dtype=torch.float64))
    assert not any(leaf.any() for leaf in leaves(state))
    assert state.slots.dtype == torch.float64
    assert memory().bfloat16().initial_state(B).slots.dtype == torch.float32
    assert {x.device.type for x in leaves(memory().to("meta").initial_state(B))} == {"meta"}


def test_a_reset_row_equals_a_fresh_one():
    slots = memory()
    state = reset(written(slots), torch.tensor([False, True, False]))
    fresh = slots.initial_state(B, dtype=torch.float64)
    assert torch.equal(slots.contents(state)[1], slots.contents(fresh)[1])
    assert not torch.equal(slots.contents(state)[0], slots.contents(fresh)[0])
    assert torch.equal(slots(state, heard(7)).slots[1], slots(fresh, heard(7)).slots[1])


def test_finished_rows_and_rows_of_padding_stay_exactly_as_they_are():
    slots = memory(self_logit=0.5)
    state = written(slots)
    active, mask = torch.tensor([True, False, True]), torch.ones(B, L, dtype=torch.bool)
    mask[2] = False
    after = slots(state, heard(9), mask, active)
    assert torch.equal(after.slots[1:], state.slots[1:])
    assert torch.equal(after.slots[0], slots(state, heard(9)).slots[0])
    assert after.writes.tolist() == [4, 3, 3]
    # Frozen before its first write, a row is still fresh.
    fresh = slots(slots.initial_state(B, dtype=torch.float64), heard(), None, active)
    assert torch.equal(slots.contents(fresh)[1], slots.start())
    assert fresh.writes.tolist() == [1, 0, 1]
    # Padding beside tokens is not heard.
    mask[2, :2] = True
    poisoned = heard(9).masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(
        slots(state, poisoned, mask).slots[2:], slots(select(state, torch.tensor([2])), heard(9)[2:, :2]).slots
    )


def test_without_forgetting_a_slot_that_hears_nothing_new_stays():
    slots = memory(forgetting=False, self_logit=1000.0)
    state = written(slots, 1)
    again = slots(state, heard(8))
    torch.testing.assert_close(again.slots, state.slots)
    drifting = memory(self_logit=1000.0)
    state = slots.initial_state(B, dtype=torch.float64)._replace(slots=state.slots.roll(1, 1), writes=state.writes)
    assert not torch.allclose(drifting(state, heard(8)).slots, state.slots)


def test_a_memory_that_is_not_written_is_the_start():
    slots = memory(write=False)
    assert torch.equal(slots.contents(written(slots)), slots.start().expand(B, K, D))
    assert [name for name, _ in slots.named_parameters()] == ["bias"]


def test_neither_bias_nor_self_logit_decays():
    from mnemos.lab.run.optim import parameter_groups

    slots = memory(self_logit=1.0)
    decayed = parameter_groups(slots, 0.1)[0]["params"]
    assert {id(p) for p in decayed} == {id(x.weight) for x in (slots.query, slots.key, slots.value)}
