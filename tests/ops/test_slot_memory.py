"""Slots written and forgotten: what stays exactly, precisions, errors. Equations: test_operators_at_random.py."""

import pytest
import torch
from kernel_cases import kept_bytes

from mnemos.ops import biased_memory_norm, slot_attention, slot_write
from mnemos.types import InputError


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
