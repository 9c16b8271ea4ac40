"""Slots that a row carries: a fresh row's start, resets, frozen rows, and how fast they forget."""

import math

import pytest
import torch

from mnemos.memory import SlotMemory, SlotsConfig
from mnemos.types import leaves, reset, select

B, K, L, D, H = 3, 4, 5, 12, 3


def memory(**fields) -> SlotMemory:
    torch.manual_seed(0)
    return SlotMemory(D, H, SlotsConfig(slots=K, **fields)).double()


def heard(seed: int = 1, rows: int = B) -> torch.Tensor:
    return torch.randn(rows, L, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written(slots: SlotMemory, times: int = 3, mask: torch.Tensor | None = None):
    state = slots.initial_state(B, dtype=torch.float64)
    for i in range(times):
        state = slots(state, heard(i), mask)
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


@pytest.mark.parametrize(("norm", "lost"), [(1.15, 0.048), (3.20, 0.124)])
def test_how_fast_the_papers_slots_forget(norm, lost):
    """A slot of the paper's width that listens to itself alone: what it loses of its distance to the end, a write.

    At ρ = √512 the paper's trained biases lose 5 to 12 % and take 14 to 5 writes for a half; at ρ = 1, more than half
    each write. The start, 0.03·ρ, has a half-life of 23.4.
    """

    def distances(radius: float | None, size: float, writes: int) -> list[float]:
        slots = SlotMemory(512, 8, SlotsConfig(slots=2, radius=radius, self_logit=1000.0)).double()
        with torch.no_grad():
            slots.bias.mul_(size / slots.bias.norm(dim=-1, keepdim=True))
        end = slots.start()
        off = end + 0.05 * slots.radius * torch.nn.functional.normalize(
            torch.randn(2, 512, dtype=torch.float64), dim=-1
        )
        state = slots.initial_state(1, dtype=torch.float64)
        state = state._replace(slots=off[None], writes=state.writes + 1)
        found = []
        with torch.no_grad():
            for _ in range(writes):
                found.append((state.slots[0] - end).norm(dim=-1).mean().item())
                state = slots(state, torch.randn(1, 3, 512, dtype=torch.float64))
        return found

    wide = distances(None, norm, 8)
    assert 1 - (wide[-1] / wide[1]) ** (1 / 6) == pytest.approx(lost, abs=0.004)
    narrow = distances(1.0, norm, 4)
    assert narrow[2] / narrow[1] < 0.5
    start = distances(None, 0.03 * 512**0.5, 27)
    assert next(i for i, d in enumerate(start) if d < 0.5 * start[1]) - 1 == 24  # the first beyond 23.4


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
