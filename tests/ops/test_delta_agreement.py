"""The delta rule and decayed attention beside the code of Transformers, flash-linear-attention and ONNX Runtime."""

import importlib
import importlib.util

import pytest
import torch
from torch.nn import functional as F

from mnemos import libraries
from mnemos.ops import decayed_attention, delta_rule, short_convolution

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
    function = of_transformers("qwen3_next", name)
    keys = [x.repeat_interleave(H // SHARED, 2) for x in (q, k)] if "recurrent" in name else (q, k)
    theirs = function(*keys, v, g=decay, beta=beta, initial_state=state, output_final_state=True)
    same(delta_rule(q, k, v, beta, decay, state), theirs, given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_kimi_delta_attention_of_transformers(name):
    q, k, v, beta, decay, state = given = inputs(channels=True, heads=H)
    function = of_transformers("kimi_linear", name)
    theirs = function(q, k, v, decay, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=False)
    same(delta_rule(q, k, v, beta, decay, state), theirs, given)


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


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("rule", ["gated_delta", "gated", "delta"])
def test_onnxruntime_gated_delta_net(rule, channels):
    """Its fused operator: values and the state, which it has transposed."""
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    with torch.no_grad():
        q, k, v, beta, decay, state = inputs(channels)
        if rule == "gated":
            y, end = decayed_attention(q, k, v, decay, state)
        else:
            y, end = delta_rule(q, k, v, beta, None if rule == "delta" else decay, state)
    feeds = {"q": q, "k": k, "v": v, "state": state.mT}
    feeds |= {"decay": decay} if rule != "delta" else {}
    feeds |= {"beta": beta} if rule != "gated" else {}
    order = [name if name in feeds else "" for name in ("q", "k", "v", "", "decay", "beta", "state")]
    found = by_onnxruntime(onnx, runtime, "GatedDeltaNet", order, feeds, {"update_rule": rule})
    torch.testing.assert_close(torch.from_numpy(found[0]), y, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(found[1]).mT, end, rtol=0, atol=1e-5)


def test_onnxruntime_convolution():
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    g = torch.Generator().manual_seed(0)
    x, weight, bias, state = (torch.randn(shape, generator=g) for shape in ((B, T, 24), (24, 4), (24,), (B, 3, 24)))
    y, end = short_convolution(x, weight, bias, state, activation="silu")
    feeds = {"x": x.mT, "weight": weight[:, None], "bias": bias, "state": state.mT}
    found = by_onnxruntime(onnx, runtime, "CausalConvWithState", list(feeds), feeds, {"activation": "silu"})
    torch.testing.assert_close(torch.from_numpy(found[0]).mT, y, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(found[1]).mT, end)


def by_onnxruntime(onnx, runtime, operator, order, feeds, fields):
    """The outputs of one operator of com.microsoft on a CPU."""
    arrays = {name: x.detach().contiguous().numpy() for name, x in feeds.items()}
    info, float32 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    given = [info(name, float32, list(x.shape)) for name, x in arrays.items()]
    outs = [info(name, float32, None) for name in ("y", "end")]
    node = onnx.helper.make_node(operator, order, ["y", "end"], domain="com.microsoft", **fields)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", given, outs), opset_imports=opsets, ir_version=10
    )
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, arrays)
