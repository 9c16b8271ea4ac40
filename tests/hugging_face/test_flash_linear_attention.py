"""`mnemos.fla_on_cpu`: layers of flash-linear-attention on a CPU equal its naive functions, with gradients."""

import importlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F

import mnemos
from mnemos.errors import InputError

HERE = importlib.util.find_spec("fla") is not None
needs_fla = pytest.mark.skipif(not HERE, reason="flash-linear-attention is not installed")
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
LAYERS = {
    "gated delta": ("GatedDeltaNet", {"expand_v": 2}),
    "gated delta, shared keys": ("GatedDeltaNet", {"num_v_heads": 4, "conv_bias": True, "allow_neg_eigval": True}),
    "sigmoid gate": ("GatedDeltaNet", {"output_gate_activation": "sigmoid"}),
    "kimi": ("KimiDeltaAttention", {"expand_v": 2}),
    "kimi, shared keys": ("KimiDeltaAttention", {"num_v_heads": 4, "safe_gate": True, "lower_bound": -5.0}),
}
EACH = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture
def fla():
    with mnemos.fla_on_cpu():
        yield importlib.import_module("fla")


def build(fla, name):
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    layer = getattr(fla.layers, kind)(hidden_size=24, num_heads=2, head_dim=8, layer_idx=0, **options)
    for norm in [layer.o_norm.weight, layer.dt_bias]:
        torch.nn.init.normal_(norm)
    return layer


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def naive(layer, x):
    """The layer from its equations: fla's naive recurrences and gates, torch's convolution."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    def convolve(convolution, x):
        return F.silu(convolution._conv_forward(x.mT, convolution.weight, convolution.bias)[..., : x.shape[1]].mT)

    q = unit(convolve(layer.q_conv1d, layer.q_proj(x)).unflatten(-1, (2, -1)))
    k = unit(convolve(layer.k_conv1d, layer.k_proj(x)).unflatten(-1, (2, -1)))
    v = convolve(layer.v_conv1d, layer.v_proj(x)).unflatten(-1, (layer.num_v_heads, -1))
    beta = layer.b_proj(x).sigmoid() * (2 if layer.allow_neg_eigval else 1)
    gate = layer.g_proj(x).view_as(v)
    if hasattr(layer, "a_proj"):
        g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
        q, k = (x.repeat_interleave(layer.num_v_heads // 2, 2) for x in (q, k))
        y, _ = naive_recurrent_gated_delta_rule(q, k, v, beta, g)
        gate = gate.sigmoid() if layer.o_norm.activation == "sigmoid" else F.silu(gate)
    else:
        g = layer.f_proj(x).unflatten(-1, (layer.num_v_heads, -1))
        bound = {} if layer.lower_bound is None else {"lower_bound": layer.lower_bound}
        g = (naive_kda_lowerbound_gate if bound else naive_kda_gate)(g, layer.A_log, layer.dt_bias, **bound)
        y, _ = naive_recurrent_kda(q, k, v, g, beta)
        gate = gate.sigmoid()
    y = y / (y.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * layer.o_norm.weight * gate
    return layer.o_proj(y.flatten(2))


def gradients(run, inputs):
    outputs = [y for y in run() if y is not None]
    torch.manual_seed(1)
    return [*outputs, *torch.autograd.grad(outputs, inputs, [torch.randn(y.shape) for y in outputs])]


@needs_fla
@EACH
def test_a_training_step_equals_the_naive_functions(fla, name):
    layer, x = build(fla, name), torch.randn(2, 37, 24, requires_grad=True)
    inputs = [x, *layer.parameters()]
    found, wanted = gradients(lambda: [layer(x)[0]], inputs), gradients(lambda: [naive(layer, x)], inputs)
    for y, z in zip(found, wanted, strict=True):  # both are sums in float32, whose errors grow with the largest number
        torch.testing.assert_close(y, z, rtol=0, atol=5e-6 * float(z.detach().abs().max()))


@needs_fla
@EACH
def test_padded_and_packed_rows_are_read_as_rows_of_their_own(fla, name):
    layer, x = build(fla, name), torch.randn(2, 12, 24, requires_grad=True)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    ends = torch.tensor([0, 7, 19])
    inputs = [x, *layer.parameters()]
    apart = gradients(lambda: [torch.cat([naive(layer, x[:1, 5:]), naive(layer, x[1:])], 1)], inputs)

    def padded():
        y = layer(x, attention_mask=mask)[0]
        return [torch.cat([y[:1, 5:], y[1:]], 1)]

    def packed():
        return [layer(torch.cat([x[:1, 5:], x[1:]], 1), cu_seqlens=ends)[0]]

    torch.testing.assert_close(gradients(padded, inputs), apart, **CLOSE)
    torch.testing.assert_close(gradients(packed, inputs), apart, **CLOSE)


@needs_fla
@EACH
def test_pieces_and_single_tokens_after_a_cache_equal_the_whole(fla, name):
    layer, x = build(fla, name).eval(), torch.randn(2, 80, 24)
    cache, outputs = importlib.import_module("fla.models.cache_utils").Cache(), []
    with torch.no_grad():
        for start, end in [(0, 70), (70, 73), (73, 74), (74, 75), (75, 80)]:
            y, _, cache = layer(x[:, start:end], past_key_values=cache, use_cache=True)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), naive(layer, x), **CLOSE)


@needs_fla
@pytest.mark.parametrize("first", [False, True], ids=["keys first", "values first"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_states_of_the_rule_and_their_gradients(fla, packed, first):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    torch.manual_seed(0)
    q, k, v, beta, g, s = (
        torch.randn(2, 9, 3, 5), unit(torch.randn(2, 9, 3, 5)), torch.randn(2, 9, 3, 4),
        torch.rand(2, 9, 3), -torch.rand(2, 9, 3), torch.randn(2, 3, 5, 4),
    )  # fmt: skip
    inputs = [x.requires_grad_() for x in (q, k, v, beta, g, s)]

    def served():
        rows = (x.flatten(0, 1)[None] if packed else x for x in (q, k, v, g, beta))
        y, end = fla.ops.gated_delta_rule.chunk_gated_delta_rule(
            *rows, 0.7, s.mT if first else s, True, state_v_first=first,
            cu_seqlens=torch.tensor([0, 9, 18]) if packed else None,
        )  # fmt: skip
        return [y.view(2, 9, 3, 4), end.mT if first else end]

    wanted = gradients(lambda: naive_recurrent_gated_delta_rule(q, k, v, beta, g, 0.7, s, True), inputs)
    torch.testing.assert_close(gradients(served, inputs), wanted, **CLOSE)


@needs_fla
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_states_of_the_convolution_and_their_gradients(fla, packed):
    torch.manual_seed(0)
    layer = fla.modules.ShortConvolution(6, 4, bias=True, activation="silu")
    x, before = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 6, 4, requires_grad=True)
    inputs = [x, before, *layer.parameters()]

    def served():
        ends = torch.tensor([0, 3, 6]) if packed else None
        rows = x.flatten(0, 1)[None] if packed else x
        y, end = layer(rows, cache=before, output_final_state=True, cu_seqlens=ends)
        return [y.view(2, 3, 6), end]

    def plain():
        whole = torch.cat([before, x.mT], -1)
        y = F.conv1d(whole[..., 1:], layer.weight, layer.bias, groups=6)
        return [F.silu(y).mT, whole[..., -4:]]

    torch.testing.assert_close(gradients(served, inputs), gradients(plain, inputs), **CLOSE)


@needs_fla
@pytest.mark.parametrize("kind", ["rms", "layer", "groups"])
def test_norms_with_a_residual_that_is_handed_on(fla, kind):
    norms = importlib.import_module("fla.modules.norm.layernorm")
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8, requires_grad=True)
    weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    inputs = [x, residual, weight, bias]

    def served():
        if kind == "rms":
            return norms.rms_norm(x, weight, bias, residual, prenorm=True)
        options = {"prenorm": True} | ({"num_groups": 2} if kind == "groups" else {})
        return (norms.group_norm if kind == "groups" else norms.layer_norm)(x, weight, bias, residual, **options)

    def plain():
        whole = x + residual
        if kind == "rms":
            return [F.rms_norm(whole, (8,), weight, 1e-5) + bias, whole]
        if kind == "layer":
            return [F.layer_norm(whole, (8,), weight, bias), whole]
        return [F.group_norm(whole.flatten(0, 1), 2, weight, bias).view(2, 3, 8), whole]

    torch.testing.assert_close(gradients(served, inputs), gradients(plain, inputs), **CLOSE)
    torch.testing.assert_close(  # without a residual, and the sum not returned
        gradients(lambda: [norms.layer_norm(x, weight, None)], [x, weight]),
        gradients(lambda: [F.layer_norm(x, (8,), weight)], [x, weight]),
        **CLOSE,
    )


@needs_fla
@pytest.mark.parametrize("cap", [None, 2.0])
def test_swiglu_and_the_fused_cross_entropy(fla, cap):
    torch.manual_seed(0)
    x, y, up, head, bias = (torch.randn(n, requires_grad=True) for n in [(9, 8), (9, 8), (6, 8), (11, 6), (11,)])
    target = torch.tensor([0, 3, -100, 10, 5, 5, -100, 1, 2])
    inputs = [x, y, up, head, bias]
    loss = fla.modules.FusedLinearCrossEntropyLoss(label_smoothing=0.1, logit_scale=1.5, logit_softcapping=cap)

    def served():
        from fla.modules.activations.ops import swiglu, swiglu_linear

        return [loss(swiglu_linear(x, y, up, None), target, head, bias) * 3, swiglu(x, y)]

    def plain():
        z = F.silu(x) * y
        logits = F.linear(F.linear(z, up), head, bias) * 1.5
        logits = logits if cap is None else cap * (logits / cap).tanh()
        return [F.cross_entropy(logits, target, label_smoothing=0.1) * 3, z]

    torch.testing.assert_close(gradients(served, inputs), gradients(plain, inputs), **CLOSE)
    y = served()[0]
    once, twice = (torch.autograd.grad(y, inputs[:5], retain_graph=True) for _ in range(2))
    torch.testing.assert_close(once, twice)


@needs_fla
@pytest.mark.parametrize("name", ["GatedDeltaNet", "KDA"])
def test_whole_models_train_and_generate(fla, name):
    """Fused norms, SwiGLU and loss: the same as without them."""
    models, found = importlib.import_module("fla.models"), []
    for fused in (True, False):
        torch.manual_seed(0)
        fuse = {"fuse_norm": fused, "fuse_linear_cross_entropy": fused, "fuse_swiglu": fused}
        sizes = {"vocab_size": 50, "hidden_size": 24, "num_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
        config = getattr(models, f"{name}Config")(**sizes, **fuse, fuse_cross_entropy=False)
        model, ids = getattr(models, f"{name}ForCausalLM")(config), torch.randint(3, 50, (2, 20))
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        with torch.no_grad():
            model.eval()
            torch.testing.assert_close(model(ids[:, :9]).logits, model(ids).logits[:, :9], **CLOSE)
            assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 23)
    torch.testing.assert_close(*found, **CLOSE)


@needs_fla
def test_after_the_last_undo_fla_is_as_before():
    first, second = mnemos.fla_on_cpu(), mnemos.fla_on_cpu()
    fla = importlib.import_module("fla")
    layer, x = build(fla, "gated delta"), torch.randn(1, 3, 24)
    second.undo()
    layer(x)
    first.undo()
    with pytest.raises(RuntimeError, match="driver"):
        layer(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="driver"):
        layer.eval()(x)


@needs_fla
def test_what_is_not_served_is_left_to_fla(fla):
    x, norm = torch.randn(2, 3, 8), fla.modules.FusedRMSNormGated(8)
    norm(x, x)
    with pytest.raises(RuntimeError, match="driver"):
        norm(x, x, residual=x)


@pytest.mark.skipif(HERE, reason="flash-linear-attention is installed")
def test_without_fla_the_error_says_what_to_install():
    with pytest.raises(InputError, match="run: pip install flash-linear-attention"):
        mnemos.fla_on_cpu()
