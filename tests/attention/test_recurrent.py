"""The layers that forget and correct, by their published equations: one token after the other, in float64."""

import copy
import math

import pytest
import torch

import mnemos
from mnemos.attention import DeltaConfig, GatedDeltaConfig, GLAConfig, KimiDeltaConfig, Mamba2Config, RetentionConfig
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


def cut(x, *lengths):
    assert sum(lengths) == len(x)
    return x.split(lengths)


def convolved(layer, inputs):
    """SiLU of the convolution of a row's tokens, written as its sum."""
    w, found = layer.convolution.weight, []
    for t in range(len(inputs)):
        z = sum(w[:, 3 - i] * inputs[t - i] for i in range(4) if t >= i)
        z = z if layer.convolution.bias is None else z + layer.convolution.bias
        found.append(z * torch.sigmoid(z))
    return found


def normed(layer, o, gate, eps=1e-5):
    scale = 1 if layer.norm.weight is None else layer.norm.weight
    return o / (o.square().mean() + eps).sqrt() * scale * gate


def silu(x):
    return x * torch.sigmoid(x)


def length_one(x):
    return x / (x.square().sum() + 1e-6).sqrt()


def softplus(x):
    return torch.log1p(x.exp())


def delta(layer, row):
    w = layer.widths
    (hk, d, h, m), kind = w, layer.decay
    sums, ys = [torch.zeros(d, m, dtype=row.dtype) for _ in range(h)], []
    projected = [layer.input.weight @ x for x in row]
    for x, z in zip(projected, convolved(layer, [x[: 2 * hk * d + h * m] for x in projected]), strict=True):
        q, k, v = cut(z, hk * d, hk * d, h * m)
        beta, *rest = x[2 * hk * d + h * m :].split([h, *{"none": [], "head": [h, h * m], "channel": [d, m]}[kind]])
        if kind == "channel":
            rest = layer.to_decay.weight @ rest[0], layer.to_gate.weight @ rest[1]
        heads = []
        for i in range(h):
            key, n = i // (h // hk), slice(i * m, (i + 1) * m)
            q_i, k_i = (length_one(part[key * d : (key + 1) * d]) for part in (q, k))
            g, gate = torch.zeros(1, dtype=row.dtype), 1
            if kind == "head":
                g, gate = -layer.A_log[i].exp() * softplus(rest[0][i] + layer.dt_bias[i]), silu(rest[1][n])
            elif kind == "channel":
                c = slice(i * d, (i + 1) * d)
                g = -layer.A_log[i].exp() * softplus(rest[0][c] + layer.dt_bias[c])
                gate = torch.sigmoid(rest[1][n])
            s = g.exp().expand(d)[:, None] * sums[i]
            share = torch.sigmoid(beta[i]) * (2 if layer.doubled_beta else 1)
            sums[i] = s + torch.outer(k_i, share * (v[n] - s.T @ k_i))
            heads.append(normed(layer, sums[i].T @ q_i * d**-0.5, gate))
        ys.append(layer.output.weight @ torch.cat(heads))
    return ys, sums


def gla(layer, row):
    h, d, m = HEADS, layer.widths.key_width, layer.widths.value_width
    sums, ys = [torch.zeros(d, m, dtype=row.dtype) for _ in range(h)], []
    for x in row:
        q, k, v, gate, low = cut(layer.input.weight @ x, h * d, h * d, h * m, h * m, 16)
        g = torch.log(torch.sigmoid(layer.to_decay.weight @ low + layer.to_decay.bias)) / 16
        heads = []
        for i in range(h):
            c, n = slice(i * d, (i + 1) * d), slice(i * m, (i + 1) * m)
            sums[i] = g[c].exp()[:, None] * sums[i] + torch.outer(k[c], v[n])
            heads.append(normed(layer, sums[i].T @ q[c] * d**-0.5, silu(gate[n])))
        ys.append(layer.output.weight @ torch.cat(heads))
    return ys, sums


def retention(layer, row):
    """In the parallel form of the paper (eq. 5): y_t = Σ_s γ^{t−s} (q_t e^{itθ})·(k_s e^{isθ})* v_s."""
    h, d, m = HEADS, layer.widths.key_width, layer.widths.value_width
    parts = [cut(layer.input.weight @ x, h * d, h * d, h * m, h * m) for x in row]
    theta = 10000.0 ** -torch.linspace(0, 1, d // 2, dtype=row.dtype)
    sums, ys = [torch.zeros(d, m, dtype=row.dtype) for _ in range(h)], []
    for t, (q, _, _, gate) in enumerate(parts):
        heads = []
        for i in range(h):
            c, n, gamma = slice(i * d, (i + 1) * d), slice(i * m, (i + 1) * m), 1 - 2.0 ** (-5 - i)
            o = torch.zeros(m, dtype=row.dtype)
            for s, (_, k, v, _) in enumerate(parts[: t + 1]):
                turned = torch.polar(torch.ones_like(theta), (t - s) * theta)
                pairs = torch.complex(*q[c].view(-1, 2).T) * torch.complex(*k[c].view(-1, 2).T).conj() * turned
                o = o + gamma ** (t - s) * pairs.real.sum() * v[n]
            heads.append(normed(layer, o * d**-0.5, silu(gate[n]), eps=1e-6))
        ys.append(layer.output.weight @ torch.cat(heads))
    for i in range(h):
        c, n, gamma = slice(i * d, (i + 1) * d), slice(i * m, (i + 1) * m), 1 - 2.0 ** (-5 - i)
        for s, (_, k, v, _) in enumerate(parts):
            turned = torch.complex(*k[c].view(-1, 2).T) * torch.polar(torch.ones_like(theta), s * theta)
            sums[i] = sums[i] + gamma ** (len(parts) - 1 - s) * torch.outer(torch.view_as_real(turned).flatten(), v[n])
    return ys, sums


def mamba2(layer, row):
    w = layer.widths
    (groups, d, h, m), total = w, w.values
    sums, ys = [torch.zeros(d, m, dtype=row.dtype) for _ in range(h)], []
    parts = [cut(layer.input.weight @ x, total, total + 2 * groups * d, h) for x in row]
    for (z, _, a), xbc in zip(parts, convolved(layer, [part[1] for part in parts]), strict=True):
        v, b, c = cut(xbc, total, groups * d, groups * d)
        heads = []
        for i in range(h):
            group, n = i // (h // groups) * d, slice(i * m, (i + 1) * m)
            step = softplus(a[i] + layer.dt_bias[i])
            fade = torch.exp(-layer.A_log[i].exp() * step)
            sums[i] = fade * sums[i] + torch.outer(step * b[group : group + d], v[n])
            heads.append((sums[i].T @ c[group : group + d] + layer.skip[i] * v[n]) * silu(z[n]))
        shared = torch.cat(heads).chunk(groups)
        y = torch.cat([part / (part.square().mean() + 1e-5).sqrt() for part in shared])
        ys.append(layer.output.weight @ (y * layer.norm_weight))
    return ys, sums


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
    wanted = torch.stack([y for ys, _ in rows for y in ys])
    given = mask if masked else None
    first, state = layer(x[:, :5], None, mask[:, :5] if masked else None)
    rest, state = layer(x[:, 5:], state, None if given is None else mask[:, 5:])
    found = torch.cat([first, rest], 1)[mask]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(state.sums, torch.stack([torch.stack(sums) for _, sums in rows]))
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
