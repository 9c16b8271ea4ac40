"""The delta rule and decayed attention beside the code of Transformers."""

import importlib

import pytest
import torch
from torch.nn import functional as F

from mnemos import libraries
from mnemos.ops import decayed_attention, delta_rule

B, T, SHARED, H, D, M = 2, 75, 2, 4, 16, 8


def inputs(channels=False, heads=SHARED):
    """q, k of length 1, v, beta, decay, state: leaves."""
    g = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(B, T, heads, D, generator=g), dim=-1) for _ in range(2))
    v, beta = torch.randn(B, T, H, M, generator=g), torch.rand(B, T, H, generator=g)
    decay = -torch.rand(B, T, H, *[D] * channels, generator=g)
    state = torch.randn(B, H, D, M, generator=g)
    return [x.requires_grad_() for x in (q, k, v, beta, decay, state)]


def same(ours, theirs, given, tolerance=2e-5):
    """y, the state and the gradients of both, relative to the largest number."""
    g = torch.Generator().manual_seed(1)
    above = [torch.randn(x.shape, generator=g) for x in ours]
    grads = [torch.autograd.grad(found, given, above) for found in (ours, theirs)]
    for a, b in zip((*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        close = tolerance * max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=close)


def of_transformers(model, name):
    pytest.importorskip("transformers", reason="needs transformers")
    libraries.transformers()
    found = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    return getattr(found, "__wrapped__", found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_gated_delta_of_transformers(name):
    q, k, v, beta, decay, state = given = inputs()
    keys = [x.repeat_interleave(H // SHARED, 2) for x in (q, k)] if "recurrent" in name else (q, k)
    function = of_transformers("qwen3_next", name)
    theirs = function(*keys, v, g=decay, beta=beta, initial_state=state, output_final_state=True)
    same(delta_rule(*given), theirs, given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_kimi_delta_attention_of_transformers(name):
    q, k, v, beta, decay, state = given = inputs(channels=True, heads=H)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": False}
    theirs = of_transformers("kimi_linear", name)(q, k, v, decay, beta, **options)
    same(delta_rule(*given), theirs, given)


@pytest.mark.slow
def test_mamba_2_of_transformers():
    """Its B and C are our k and q, dt·x the values and dt·A the decays; its state is [B, H, M, D]."""
    c, b, x, dt, _, state = inputs()
    given = [z.detach().requires_grad_() for z in (c, b, x, dt, state)]
    c, b, x, dt, state = given
    a = -torch.linspace(0.5, 4, H)
    scan = of_transformers("mamba2", "mamba2_chunk_scan")
    y, end = scan(x, dt, a, b, c, 32, initial_states=state.mT, return_final_states=True)
    same(decayed_attention(c, b, x * dt[..., None], dt * a, state, scale=1.0), (y, end.mT), given)
