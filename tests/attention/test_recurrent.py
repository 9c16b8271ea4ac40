"""The layers that forget and correct, by their published equations in float64."""

import copy
import math

import pytest
import torch

import mnemos
from mnemos.attention import DeltaConfig, GatedDeltaConfig, GLAConfig, KimiDeltaConfig, Mamba2Config, RetentionConfig
from mnemos.ops.delta.reference import reference_delta_rule
from mnemos.types import InputError

DIM, HEADS = 12, 4
CONFIGS = {
    "delta": DeltaConfig(key_width=5, doubled_beta=True),
    "gated-delta": GatedDeltaConfig(key_heads=2, key_width=5),
    "kimi-delta": KimiDeltaConfig(key_width=5),
    "gla": GLAConfig(key_width=5),
    "retention": RetentionConfig(key_width=6),
    "mamba2": Mamba2Config(key_heads=2, key_width=5, value_width=7),
}
NAMES = list(CONFIGS)
each = pytest.mark.parametrize("name", NAMES)


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    layer = CONFIGS[name].build(DIM, HEADS).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def tokens(t=13, rows=2, seed=1):
    return torch.randn(rows, t, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(x, *sizes):
    """The parts of [T, C], each with these (heads, channels)."""
    parts = x.split([h * d for h, d in sizes], 1)
    return [part.unflatten(1, size) for part, size in zip(parts, sizes, strict=True)]


def convolved(layer, x):
    """SiLU of the convolution of a row's tokens, written as its sum."""
    w, padded = layer.convolution.weight, torch.cat([x.new_zeros(3, x.shape[1]), x])
    z = sum(w[:, i] * padded[i : i + len(x)] for i in range(4))
    return silu(z if layer.convolution.bias is None else z + layer.convolution.bias)


def finished(layer, o, gate, eps=1e-5):
    scale = 1 if layer.norm.weight is None else layer.norm.weight
    y = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * scale * gate
    return y.flatten(1) @ layer.output.weight.T


def silu(x):
    return x * torch.sigmoid(x)


def length_one(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def softplus(x):
    return torch.log1p(x.exp())


def recurrence(q, k, v, beta, decay, scale=None):
    """Of one row."""
    y, s = reference_delta_rule(*(x if x is None else x[None] for x in (q, k, v, beta, decay)), scale=scale)
    return y[0], s[0]


def delta(layer, row):
    (hk, d, h, m), kind = layer.widths, layer.decay
    mixed, rest = (row @ layer.input.weight.T).tensor_split([2 * hk * d + h * m], 1)
    q, k, v = heads(convolved(layer, mixed), (hk, d), (hk, d), (h, m))
    beta, *rest = rest.split([h, *{"none": [], "head": [h, h * m], "channel": [d, m]}[kind]], 1)
    g, gate = None, 1
    if kind == "head":
        g, gate = -layer.A_log.exp() * softplus(rest[0] + layer.dt_bias), silu(rest[1]).unflatten(1, (h, m))
    elif kind == "channel":
        (step,) = heads(softplus(rest[0] @ layer.to_decay.weight.T + layer.dt_bias), (h, d))
        g, gate = (
            -layer.A_log.exp()[:, None] * step,
            torch.sigmoid(rest[1] @ layer.to_gate.weight.T).unflatten(1, (h, m)),
        )
    beta = torch.sigmoid(beta) * (2 if layer.doubled_beta else 1)
    o, sums = recurrence(length_one(q), length_one(k), v, beta, g)
    return finished(layer, o, gate), sums


def gla(layer, row):
    h, d, m = HEADS, layer.widths.key_width, layer.widths.value_width
    q, k, v, gate, low = heads(row @ layer.input.weight.T, (h, d), (h, d), (h, m), (h, m), (1, 16))
    (g,) = heads(low[:, 0] @ layer.to_decay.weight.T + layer.to_decay.bias, (h, d))
    o, sums = recurrence(q, k, v, None, torch.log(torch.sigmoid(g)) / 16)
    return finished(layer, o, silu(gate)), sums


def retention(layer, row):
    """In the parallel form of the paper (eq. 5): y_t = Σ_s γ^{t−s} (q_t e^{itθ})·(k_s e^{isθ})* v_s."""
    h, d, m = HEADS, layer.widths.key_width, layer.widths.value_width
    q, k, v, gate = heads(row @ layer.input.weight.T, (h, d), (h, d), (h, m), (h, m))
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k))
    theta, t = 10000.0 ** -torch.linspace(0, 1, d // 2, dtype=row.dtype), torch.arange(len(row)).to(row.dtype)
    gamma, apart = 1 - 2.0 ** (-5 - torch.arange(h).to(row.dtype)), t[:, None] - t
    turned = torch.polar(torch.ones_like(theta), apart[..., None] * theta)
    weights = torch.einsum("thc,shc,tsc->hts", q, k.conj(), turned).real * gamma[:, None, None] ** apart
    o = torch.einsum("hts,shm->thm", weights.tril(), v)
    keys = torch.view_as_real(k * torch.polar(torch.ones_like(theta), t[:, None, None] * theta)).flatten(2)
    sums = torch.einsum("hs,shd,shm->hdm", gamma[:, None] ** apart[-1], keys, v)
    return finished(layer, o * d**-0.5, silu(gate), eps=1e-6), sums


def mamba2(layer, row):
    (groups, d, h, m), total = layer.widths, layer.widths.values
    z, xbc, a = (row @ layer.input.weight.T).split([total, total + 2 * groups * d, h], 1)
    v, b, c = heads(convolved(layer, xbc), (h, m), (groups, d), (groups, d))
    step = softplus(a + layer.dt_bias)
    o, sums = recurrence(c, b, step[..., None] * v, None, -layer.A_log.exp() * step, scale=1.0)
    y = ((o + layer.skip[:, None] * v).flatten(1) * silu(z)).unflatten(1, (groups, -1))
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return y.flatten(1) * layer.norm_weight @ layer.output.weight.T, sums


ORACLES = {"gla": gla, "retention": retention, "mamba2": mamba2}


@each
@pytest.mark.each_value
@pytest.mark.parametrize("masked", [True, False])
def test_the_layer_is_its_published_equations(name, masked):
    """Values, gradients and the state, in two calls, with padding anywhere: as if its tokens were not there."""
    layer, x = build(name), tokens().requires_grad_()
    mask = torch.ones(2, 13, dtype=torch.bool)
    if masked:
        mask = torch.rand(2, 13, generator=torch.Generator().manual_seed(5)) > 0.4
        mask[1, :4] = False
    rows = [ORACLES.get(name, delta)(layer, x[i][mask[i]]) for i in range(2)]
    wanted = torch.cat([y for y, _ in rows])
    given = mask if masked else None
    first, state = layer(x[:, :5], None, mask[:, :5] if masked else None)
    rest, state = layer(x[:, 5:], state, None if given is None else mask[:, 5:])
    found = torch.cat([first, rest], 1)[mask]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(state.sums, torch.stack([sums for _, sums in rows]))
    if state.seen is not None:
        assert state.seen.tolist() == mask.sum(1).tolist()
    leaves = [x, *layer.parameters()]
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3), dtype=wanted.dtype)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), leaves) for y in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@each
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_to_rounding(name, dtype):
    """Values and all gradients of a call, and the step after it."""
    half = build(name, dtype)
    wide, x, found = copy.deepcopy(half).float(), tokens().to(dtype), []
    for layer, inputs in ((wide, x.float().requires_grad_()), (half, x.clone().requires_grad_())):
        y, state = layer(inputs[:, :12])
        last, end = layer(inputs[:, 12:], state)
        assert y.dtype == last.dtype == inputs.dtype
        assert end.sums.dtype == torch.float32
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        gradients = torch.autograd.grad((y * weights).sum() + last.sum(), [inputs, *layer.parameters()])
        found.append([y, last, end.sums, *gradients])
    for wanted, ours in zip(*found, strict=True):
        assert (ours.float() - wanted).norm() <= 5 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize(
    "config", [GatedDeltaConfig(key_heads=3), GatedDeltaConfig(key_heads=0), GLAConfig(key_width=-1)]
)
def test_widths_that_do_not_fit_are_refused(config):
    with pytest.raises(InputError, match="expected widths and heads"):
        config.build(DIM, HEADS)


STARTS = {  # the widths of heads in 4·heads channels, the heads of keys in 256, least rate, its biases in 256 heads
    DeltaConfig(): (4, 4, 256, None, 0),
    GatedDeltaConfig(): (4, 8, 256, 0.01, 256),
    KimiDeltaConfig(): (4, 4, 256, 1.0, 1024),
    GLAConfig(): (2, 4, 256, None, 0),
    RetentionConfig(): (4, 8, 256, None, 0),
    Mamba2Config(): (128, 8, 1, 1.0, 256),
}


@pytest.mark.each_value
@pytest.mark.parametrize("config", list(STARTS), ids=lambda config: config.name)
def test_widths_and_starts_are_the_published_ones(config):
    torch.manual_seed(0)
    layer, (d, m, keys, least, biases) = config.build(1024, 256), STARTS[config]
    assert layer.widths == (keys, d, 256, m)
    if least is not None:
        rate, step = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
        assert (rate.numel(), step.numel()) == (256, biases)
        assert least <= rate.min() < least + 0.4 < 15.6 < rate.max() <= 16
        assert abs(rate.mean() - (least + 16) / 2) < 0.8
        assert 0.99e-3 <= step.min() < 1.1e-3 < 0.09 < step.max() <= 0.101
        assert abs(step.log().mean() + math.log(100)) < 0.25
    if layer.convolved:
        w = layer.convolution.weight
        assert 0.499 < w.abs().max() <= 0.5
        assert abs(w.std() - 12**-0.5) < 0.01
    if isinstance(config, Mamba2Config):
        assert bool((layer.skip == 1).all())
        assert 0.49 < layer.convolution.bias.abs().max() <= 0.5


@pytest.mark.parametrize("whole", [False, True])
def test_retention_starts_as_published_alone_and_in_a_model(whole):
    """Each projection by itself is Xavier-uniform with a gain of 2^−2.5: RetNet has a matrix for each."""
    layer, shrunk = RetentionConfig().build(48, 4), 1.0
    if whole:
        model = mnemos.Transformer(vocab_size=9, dim=48, layers=2, num_heads=4, attention=RetentionConfig())
        layer, shrunk = model.blocks[1].attention, 0.5
    for part in layer.input.weight.split([48, 48, 96, 96]):
        bound = 2**-2.5 * (6 / (48 + len(part))) ** 0.5
        assert 0.98 * bound < part.abs().max() <= bound
        assert abs(part.std() / bound - 3**-0.5) < 0.02
    bound = shrunk * (6 / (48 + 96)) ** 0.5
    assert 0.98 * bound < layer.output.weight.abs().max() <= bound * (1 + 1e-6)
