"""The layers that forget and correct equal those of transformers with copied weights: whole, and token by token."""

import importlib

import pytest
import torch

from mnemos.attention import GatedDeltaConfig, KimiDeltaConfig, Mamba2Config
from mnemos.libraries import cache_name, transformers

hf = transformers()

DIM = 24


def modelling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def qwen3_next():
    """Key heads of which two value heads have one each; its projections are ordered by key heads."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
    config = hf.Qwen3NextConfig(
        hidden_size=DIM, num_hidden_layers=1, layer_types=["linear_attention"], linear_value_head_dim=8, **sizes
    )
    theirs = modelling("qwen3_next").Qwen3NextGatedDeltaNet(config, 0)
    layer = GatedDeltaConfig(key_heads=2, key_width=6, value_width=8).build(DIM, 4)
    layer.norm.eps = config.rms_norm_eps

    def copied():
        q, k, v, z = theirs.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([6, 6, 16, 16], 1)
        b, a = theirs.in_proj_ba.weight.unflatten(0, (2, -1)).split([2, 2], 1)
        return {
            "input.weight": torch.cat([part.flatten(0, 1) for part in (q, k, v, b, a, z)]),
            "convolution.weight": theirs.conv1d.weight[:, 0],
            "norm.weight": theirs.norm.weight,
            "output.weight": theirs.out_proj.weight,
            "A_log": theirs.A_log,
            "dt_bias": theirs.dt_bias,
        }

    return config, theirs, layer, copied


def kimi_linear():
    config = hf.KimiLinearConfig(
        hidden_size=DIM, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_heads=4, linear_head_dim=6
    )
    theirs = modelling("kimi_linear").KimiLinearDeltaAttention(config, 0)
    layer = KimiDeltaConfig().build(DIM, 4)

    def copied():
        gate = theirs.forget_gate
        parts = (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.b_proj, gate.f_a_proj, theirs.g_a_proj)
        return {
            "input.weight": torch.cat([part.weight for part in parts]),
            "convolution.weight": theirs.conv1d.weight[:, 0],
            "to_decay.weight": gate.f_b_proj.weight,
            "to_gate.weight": theirs.g_b_proj.weight,
            "norm.weight": theirs.o_norm.weight,
            "output.weight": theirs.o_proj.weight,
            "A_log": gate.A_log.flatten(),
            "dt_bias": gate.dt_bias,
        }

    return config, theirs, layer, copied


def mamba2():
    sizes = {"num_heads": 6, "head_dim": 8, "state_size": 10, "n_groups": 2, "chunk_size": 8}
    config = hf.Mamba2Config(hidden_size=DIM, num_hidden_layers=1, **sizes)
    theirs = modelling("mamba2").Mamba2Mixer(config, 0)
    layer = Mamba2Config(key_heads=2, key_width=10).build(DIM, 6)

    def copied():
        return {
            "input.weight": theirs.in_proj.weight,
            "convolution.weight": theirs.conv1d.weight[:, 0],
            "convolution.bias": theirs.conv1d.bias,
            "norm_weight": theirs.norm.weight,
            "output.weight": theirs.out_proj.weight,
            "A_log": theirs.A_log,
            "dt_bias": theirs.dt_bias,
            "skip": theirs.D,
        }

    return config, theirs, layer, copied


@pytest.fixture(params=[qwen3_next, kimi_linear, mamba2])
def layers(request):
    """(configuration, their layer, ours, its weights in our layout), with equal random weights.

    The constructors of transformers leave some weights uninitialised.
    """
    torch.manual_seed(0)
    config, theirs, layer, copied = request.param()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    layer.load_state_dict(copied())
    return config, theirs, layer, copied


def test_outputs_and_gradients(layers):
    """Gradients of the inputs and of every weight."""
    _, theirs, layer, copied = layers
    x, probe = torch.randn(2, 21, DIM, requires_grad=True), torch.randn(2, 21, DIM)
    wanted, (y, _) = theirs(x), layer(x)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    of_x, *gradients = torch.autograd.grad((wanted * probe).sum(), [x, *theirs.parameters()])
    (y * probe).sum().backward()
    torch.testing.assert_close(x.grad, of_x, rtol=1e-3, atol=1e-4)
    with torch.no_grad():  # their gradients, in the layout of our weights
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.copy_(gradient)
    for name, gradient in copied().items():
        torch.testing.assert_close(layer.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-3, msg=name)


def test_a_prefill_and_single_tokens(layers):
    config, theirs, layer, _ = layers
    x, cache, state = torch.randn(2, 15, DIM), hf.DynamicCache(config=config), None
    name = "cache" if cache_name() == "cache" else "cache_params"  # what a layer calls it in 5.24, and before
    with torch.no_grad():
        for part in x.split([9, 1, 1, 4], 1):
            wanted = theirs(part, **{name: cache})
            y, state = layer(part, state)
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    sums = cache.layers[0].recurrent_states
    sums = (sums[0] if isinstance(sums, (dict, list)) else sums).float()
    sums = sums.mT if isinstance(config, hf.Mamba2Config) else sums
    torch.testing.assert_close(state.sums, sums, rtol=1e-4, atol=1e-5)
