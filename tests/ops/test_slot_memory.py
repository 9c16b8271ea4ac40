"""Slots written and forgotten against the equations, slot by slot: values, gradients, masks, precisions."""

import math

import pytest
import torch
from kernel_cases import holes, kept_bytes

from mnemos.ops import biased_memory_norm, slot_attention, slot_write
from mnemos.ops.slot_memory.reference import (
    reference_biased_memory_norm,
    reference_slot_attention,
    reference_slot_write,
)
from mnemos.types import InputError

SIZES = [(2, 3, 5, 2, 3, 4), (1, 1, 1, 1, 1, 1), (3, 5, 2, 3, 4, 1), (1, 4, 7, 1, 5, 3)]  # B, K, L, H, d, D/H


def inputs(b=2, k=3, tokens=5, h=2, d=3, m=4, seed=0, dtype=torch.float64):
    """memory, q_m, k_m, k_x, v_x, self_logit; none of the four-dimensional ones contiguous."""
    g = torch.Generator().manual_seed(seed)

    def random(rows, n, width):
        return torch.randn(h, rows, width, n, generator=g, dtype=dtype).permute(1, 3, 0, 2)

    memory = torch.randn(b, h * m, k, generator=g, dtype=dtype).mT
    found = memory, random(b, k, d), random(b, k, d), random(b, tokens, d), random(b, tokens, m)
    return [*(x.detach().requires_grad_() for x in found), torch.randn(k, h, generator=g, dtype=dtype).requires_grad_()]


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_a_write_and_its_gradients_are_the_equations(sizes, masked, shift):
    b, _, tokens, *_ = sizes
    given = inputs(*sizes)
    mask = holes(b, tokens, empty_row=True) if masked else None
    logit = given[5] if shift else None
    used = given if shift else given[:5]
    ours = slot_write(*given[:5], mask, 0.4, logit)
    theirs = reference_slot_write(*given[:5], mask, 0.4, logit)
    close(ours, theirs)
    up = torch.randn(ours.mT.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).mT
    # The equations have no use at all for the tokens of a call without a valid one.
    wanted = torch.autograd.grad(theirs, used, up, allow_unused=True, materialize_grads=True)
    for a, b in zip(torch.autograd.grad(ours, used, up), wanted, strict=True):
        close(a, b, 1e-11)
    weights = slot_attention(*given[1:4], mask, 0.4, logit)
    close(weights, reference_slot_attention(*given[1:4], mask, 0.4, logit))
    close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("radius", [None, 1.0, 3.5])
def test_forgetting_and_its_gradients_are_the_equations(radius):
    memory, bias = inputs(2, 3, m=5)[0], torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    ours, theirs = biased_memory_norm(memory, bias, radius), reference_biased_memory_norm(memory, bias, radius)
    close(ours, theirs)
    close(ours.norm(dim=-1), torch.full((2, 3), radius or math.sqrt(10), dtype=torch.float64))
    up = torch.randn(ours.shape, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad(y, (memory, bias), up) for y in (ours, theirs)), strict=True):
        close(a, b)


def test_gradients_are_the_derivatives():
    *given, logit = inputs(2, 2, 3)
    mask = holes(2, 3, empty_row=True)
    assert torch.autograd.gradcheck(lambda *x: slot_write(*x[:5], mask, 0.5, x[5]), (*given, logit))
    assert torch.autograd.gradgradcheck(lambda *x: slot_write(*x, mask, 0.5), tuple(given))
    bias = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(biased_memory_norm, (given[0], bias))


def test_a_slot_that_listens_to_itself_alone_keeps_its_content_exactly():
    memory, q_m, k_m, k_x, v_x, _ = (x.detach().float() for x in inputs())
    kept = slot_write(memory, q_m, k_m, k_x, v_x, self_logit=torch.full((3, 2), 200.0))
    assert torch.equal(kept, memory)
    # Nothing valid to hear is the same, whatever the padding holds.
    poisoned = v_x.index_fill(0, torch.tensor([1]), torch.nan), k_x.index_fill(0, torch.tensor([1]), torch.nan)
    mask = torch.tensor([True, False])[:, None].expand(2, 5)
    written = slot_write(memory, q_m, k_m, poisoned[1], poisoned[0], mask)
    assert torch.equal(written[1], memory[1])
    close(written[0], slot_write(memory, q_m, k_m, k_x, v_x)[0], 1e-6)
    assert not torch.equal(written[0], memory[0])


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_stays_close_and_the_norm_is_wide(low):
    given = [x.detach().float() for x in inputs(2, 6, 9, 2, 8, 8)]
    exact = slot_write(*given[:5])
    close(slot_write(*(x.to(low) for x in given[:5])), exact, 0.05)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = slot_write(*given[:5])
        far = biased_memory_norm(1e20 * given[0], torch.zeros(6, 16))  # whose square is beyond float16 and float32
        assert slot_attention(*given[1:4]).dtype == torch.float32
        normed = biased_memory_norm(given[0], torch.ones(6, 16))
    assert mixed.dtype == torch.float32
    close(mixed, exact, 0.05)
    assert not far.isnan().any()
    assert normed.dtype == torch.float32
    assert torch.equal(normed, biased_memory_norm(given[0], torch.ones(6, 16)))
    half = biased_memory_norm(given[0].to(low), torch.zeros(6, 16))
    assert half.dtype == low
    close(half.double().norm(dim=-1), torch.full((2, 6), 4.0), 0.01)


def test_a_slot_at_nothing_is_guarded():
    memory = torch.zeros(1, 2, 4, requires_grad=True)
    y = biased_memory_norm(memory, torch.zeros(2, 4))
    y.sum().backward()
    assert torch.equal(y, torch.zeros(1, 2, 4))
    assert memory.grad.isfinite().all()


def test_nothing_is_kept_in_the_square_of_the_slots():
    *given, logit = inputs(1, 400, 3)
    assert kept_bytes(lambda: slot_write(*given, self_logit=logit), *given) <= 400 * 8 * 8 * 8


def test_bad_input():
    memory, q_m, k_m, k_x, v_x, logit = (x.detach() for x in inputs())
    given = {"memory": memory, "q_m": q_m, "k_m": k_m, "k_x": k_x, "v_x": v_x}
    for changed, words in (
        ({"memory": memory[:1]}, "q_m"),
        ({"v_x": v_x[..., :2]}, "2 heads of 2"),
        ({"k_m": k_m[:, :1]}, "k_m"),
        ({"mask": torch.ones(2, 5)}, "bool mask"),
        ({"temperature": 0.0}, "temperature above 0, found 0"),
        ({"self_logit": logit.T}, "self_logit"),
    ):
        with pytest.raises(InputError, match=words):
            slot_write(**given | changed)
    for bias, radius, words in ((torch.zeros(8), None, "bias"), (torch.zeros(3, 8), 0.0, "radius above 0")):
        with pytest.raises(InputError, match=words):
            biased_memory_norm(memory, bias, radius)
