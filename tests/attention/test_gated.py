"""GRC attention against float64 oracles written from eq. 2 to 5, for every preset, and its causal walk."""

import itertools

import pytest
import torch
from refusals import refuses
from torch.nn import functional as F

from mnemos import GRC
from mnemos.attention import GatedCacheAttention, SoftmaxAttention
from mnemos.memory.gated_cache import GatedCache
from mnemos.ops.gated_cache import resample
from mnemos.ops.gated_cache.reference import reference_attend, reference_mix, reference_resample, reference_update
from mnemos.ops.gated_cache.resampling import Windows, pool_grid

D, H, TM = 12, 3, 5


def build(causal: bool = False, seed: int = 0, dim: int = D, heads: int = H, **grc) -> GatedCacheAttention:
    torch.manual_seed(seed)
    where = {k: grc.pop(k) for k in ("grid", "prefix", "inner") if k in grc}
    layer = GatedCacheAttention(dim, heads, grc=GRC(**{"length": TM, **grc}), causal=causal, **where).double()
    with torch.no_grad():
        for tensor in itertools.chain(layer.parameters(), layer.buffers()):
            tensor += 0.4 * torch.randn_like(tensor)
    return layer


def weights(layer: GatedCacheAttention) -> dict[str, torch.Tensor]:
    w = {}
    for short, linear in (("u", layer.update_gate), ("r", layer.reset_gate), ("c", layer.candidate)):
        w[f"W_{short}"], w[f"b_{short}"] = linear.weight, linear.bias
    if layer.candidate_norm is not None:
        w["gain"], w["shift"] = layer.candidate_norm.weight, layer.candidate_norm.bias
    return w


def linear(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.T + module.bias


def oracle(layer: GatedCacheAttention, x: torch.Tensor, mask: torch.Tensor, training: bool):
    """What a whole, not causal, shared layer gives for x [B, T, D]: outputs and the mean of C_t over the batch."""
    grc, h, dm = layer.grc, layer.num_heads, layer.cache_dim
    selves, caches_, projected = [], [], []
    for sample, valid in zip(x, mask, strict=True):
        q, k, v = linear(layer.inner.qkv, sample).chunk(3, -1)
        split = lambda z, n: z.reshape(len(z), n, -1)  # noqa: E731
        q, k, v = (split(z, h) for z in (q, k, v))
        o = torch.stack([reference_attend(q[:, i], k[valid][:, i], v[valid][:, i]) for i in range(h)], 1)
        selves.append(o)
        projected.append(linear(layer.inner.output, o.flatten(1)))
        source = (sample if grc.source == "input" else projected[-1])[valid][:, :dm]
        slots = reference_resample(source, layer.cache.shape[0])
        caches_.append(reference_update(slots, layer.cache, weights(layer), grc.candidate))
    mean = torch.stack(caches_).mean(0)
    outputs = []
    for i, sample in enumerate(x):
        read = layer.cache
        if training and grc.read == "mean":
            read = mean
        elif training or grc.inference == "transient":
            read = caches_[i]
        q = linear(layer.query, sample[:, :dm]).reshape(len(sample), h, -1)
        k, v = (linear(m, read).reshape(len(read), h, -1) for m in (layer.key, layer.value))
        o_mem = torch.stack([reference_attend(q[:, j], k[:, j], v[:, j]) for j in range(h)], 1)
        if grc.lift == "pad":
            o_mem = linear(layer.lift, o_mem.flatten(1)).reshape(len(sample), h, -1)
            o_mem = torch.cat([o_mem, o_mem.new_zeros(len(sample), h, layer.dim // h - dm // h)], -1)
            outputs.append(reference_mix(o_mem, projected[i].reshape(len(sample), h, -1), layer.mix).flatten(1))
        else:
            outputs.append(linear(layer.inner.output, reference_mix(o_mem, selves[i], layer.mix).flatten(1)))
    return torch.stack(outputs), mean


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("t", [1, 5, 8])
@pytest.mark.parametrize(
    "settings",
    [{"preset": "paper"}, {"preset": "official"}, {"preset": "mnemos"}, {"preset": "mnemos", "lift": "pad"}],
    ids=lambda settings: "-".join(settings.values()),
)
def test_values_and_gradients_equal_the_equations(settings, t, padded, training):
    layer = build(**settings).train(training)
    x = torch.randn(2, t, D, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, t, dtype=torch.bool)
    if padded:
        mask[1, t // 2 + 1 :] = False
    expected, mean = oracle(layer, x, mask, training)
    wanted = torch.autograd.grad(expected[mask].sin().sum(), [x, *layer.parameters()], allow_unused=True)
    y, _ = layer(x, None, mask if padded else None)
    torch.testing.assert_close(y[mask], expected[mask], rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(y[mask].sin().sum(), [x, *layer.parameters()], allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    if training:
        layer.eval()
        torch.testing.assert_close(layer.cache, mean.detach(), rtol=1e-10, atol=1e-10)


def test_causal_walk_equals_a_slow_one():
    """Blocks on an absolute grid, each row of its own cache; the last block is incomplete."""
    layer = build(causal=True, preset="mnemos", block=3).train()
    x = torch.randn(2, 8, D, dtype=torch.float64)
    outputs = []
    for sample in x:
        o_self, _ = layer.inner.heads(sample[None])
        cache, rows = layer.cache, []
        for start in (0, 3, 6):
            block = sample[start : start + 3]
            q = linear(layer.query, block[:, : layer.cache_dim]).reshape(len(block), H, -1)
            k, v = (linear(m, cache).reshape(TM, H, -1) for m in (layer.key, layer.value))
            rows.append(torch.stack([reference_attend(q[:, j], k[:, j], v[:, j]) for j in range(H)], 1))
            if len(block) == 3:
                slots = reference_resample(block[:, : layer.cache_dim], TM)
                cache = reference_update(slots, cache, weights(layer), layer.grc.candidate)
        mixed = reference_mix(torch.cat(rows), o_self[0], layer.mix)
        outputs.append(linear(layer.inner.output, mixed.flatten(1)))
    torch.testing.assert_close(layer(x)[0], torch.stack(outputs), rtol=1e-10, atol=1e-10)


def test_the_class_token_reads_the_cache_and_is_not_written():
    x = torch.randn(2, 6, D, dtype=torch.float64)
    other = x.clone()
    other[:, 0] += 1
    outputs, stored = [], []
    for z in (x, other):
        layer = build(prefix=1)
        outputs.append(layer(z)[0])
        stored.append(layer.eval().cache)
    torch.testing.assert_close(*stored)
    assert not torch.allclose(outputs[0][:, 0], outputs[1][:, 0])


def test_a_grid_is_resampled_in_two_dimensions_and_convolved():
    layer = build(dim=8, heads=2, preset="official", grid=(4, 6), length=6, resample="grid", prefix=1)
    x = torch.randn(2, 25, 8, dtype=torch.float64)
    with torch.no_grad():
        layer.mix.fill_(-torch.inf)
    extra = layer(x)[0] - layer.inner(x)[0]
    assert extra[:, 0].abs().max() == 0, "the class token is no pixel"
    image = x[:, 1:].transpose(1, 2).reshape(2, 8, 4, 6)
    expected = F.conv2d(image, layer.convolution.weight, layer.convolution.bias, padding=1, groups=layer.cache_dim)
    torch.testing.assert_close(extra[:, 1:], expected.flatten(2).transpose(1, 2))
    pixels = torch.arange(24.0).reshape(1, 24, 1)
    small = resample(pixels, 6, method="grid", grid=(4, 6))
    assert torch.equal(small, F.interpolate(pixels.reshape(1, 1, 4, 6), (2, 3), mode="bilinear").reshape(1, 6, 1))
    # With a mask the valid tokens have the same weights, divided by their sum; where none is near, their mean.
    mask = torch.tensor([[True] * 24, [n in (1, 14, 15) for n in range(24)]])
    each = resample(torch.eye(24)[None], 6, method="grid", grid=(4, 6))[0]
    values = torch.randn(2, 24, 3).masked_fill(~mask[..., None], torch.nan)
    found, sums = resample(values, 6, mask, "grid", (4, 6)), each @ mask.float().T
    assert 0 < (sums[:, 1] == 0).sum() < 6
    for row, valid in enumerate(mask):
        weights = torch.where(sums[:, row, None] > 0, each, 1.0)[:, valid]
        wanted = weights @ values[row, valid] / weights.sum(1, keepdim=True)
        torch.testing.assert_close(found[row], wanted)
    assert resample(values, 24, method="grid", grid=(4, 6)) is values
    convolved = build(dim=8, heads=2, preset="official", grid=(4, 6), length=6)
    assert convolved(x[:, 1:])[0].shape == (2, 24, 8)
    refuses(r"expected tokens of the grid \(4, 6\).*, found 25", convolved, x)
    refuses("nearest, linear or grid, found 'cubic'", resample, values, 6, method="cubic")
    refuses(r"of 24 tokens, found None", resample, values, 6, method="grid")
    refuses(r"of 24 tokens, found \(4, 5\)", resample, values, 6, method="grid", grid=(4, 5))
    refuses(
        "expected slots in the shape of a 4 x 6 grid, found 7; use 6", resample, values, 7, method="grid", grid=(4, 6)
    )
    assert resample(values[:, :6], 6, method="grid", grid=(4, 6)).shape == (2, 6, 3), "slots of a call of another grid"


def test_resampling_takes_each_rows_valid_tokens_alone():
    x = torch.arange(8.0).reshape(1, 8, 1).repeat(3, 1, 1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]).bool()
    nearest = resample(x, 4, mask).squeeze(-1)
    assert nearest.tolist() == [[0, 2, 4, 6], [1, 1, 3, 4], [2, 2, 2, 2]]
    straight = resample(x, 4, mask, "linear").squeeze(-1)
    whole = F.interpolate(x[:1].transpose(1, 2), 4, mode="linear", align_corners=False).flatten()
    torch.testing.assert_close(straight[0], whole)
    three = F.interpolate(torch.tensor([[[1.0, 3.0, 4.0]]]), 4, mode="linear", align_corners=False).flatten()
    torch.testing.assert_close(straight[1], three)
    assert resample(x, 8) is x
    assert pool_grid(x[:1, :6], (2, 3), 2).flatten().tolist() == [2.0, 3.5]  # means of 0, 1, 3, 4 and of 2, 5
    windows = Windows((3, 3), (2, 2))
    assert torch.equal(windows.to_grid(windows.to_windows(x[:1, [0, *range(8)]])), x[:1, [0, *range(8)]])


def test_frozen_keys_are_projected_once_and_refreshed():
    layer = build(inference="frozen", preset="paper").eval()
    calls = []
    layer.key.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 7, D, dtype=torch.float64)
    with torch.no_grad():
        first = layer(x)[0]
        assert torch.equal(layer(x)[0], first)
        assert len(calls) == 1
        layer.cache.add_(1)
        changed = layer(x)[0]
        assert len(calls) == 2
        assert not torch.equal(changed, first)
        layer.key.weight.mul_(2)
        assert not torch.equal(layer(x)[0], changed)
    torch.testing.assert_close(layer(x)[0], layer(x.requires_grad_())[0])
    optimiser = torch.optim.AdamW(layer.parameters(), 0.1, fused=True)  # PyTorch does not count its writes
    layer(x)[0].square().sum().backward()
    optimiser.step()
    with torch.no_grad():
        after = layer(x)[0]
    torch.testing.assert_close(after, layer(x)[0])


def test_a_share_of_the_width_is_rounded_down_but_not_by_float():
    """.29 · 200 is a little less than 58 in float64."""
    assert GatedCacheAttention(200, 2, grc=GRC(length=4, ratio=0.29)).cache.shape == (4, 58)
    assert GatedCacheAttention(200, 4, grc=GRC(length=4, ratio=0.29)).cache.shape == (4, 56)


def test_presets_give_defaults_and_what_is_given_wins():
    grc = GRC(preset="official", candidate="linear", gate_init=0.5).resolved()
    assert (grc.source, grc.candidate, grc.gate_init, grc.lift) == ("output", "linear", 0.5, "pad")
    assert GRC(preset="paper").resolved().read == "mean"
    assert GRC(preset="paper", scope="stream").resolved().read == "sample"
    assert GRC(length=[4, 8]) == GRC(length=(4, 8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GatedCacheAttention(10, 3), "divisible by num_heads"),
        (lambda: GatedCache(10, 3, GRC(length=4)), "found dim 10 and num_heads 3; num_heads may be 1, 2, 5, 10"),
        (lambda: GatedCacheAttention(12, 3, torch.nn.Linear(12, 12)), "HeadAttention, found Linear"),
        (lambda: GatedCacheAttention(12, 3, SoftmaxAttention(12, 4), GRC(length=4)), "3 heads.* found dim 12, 4 heads"),
        (lambda: GatedCacheAttention(12, 3, grc=GRC(length=4), causal=True, prefix=1), "no class token"),
        (lambda: GRC(length="16"), "GRC.length: expected an integer, .*, 'auto' or 'paper', found '16'; change it"),
        (lambda: GRC(length=0), "length"),
        (lambda: GRC(length=(4, 0)), r"at least 1 slot, found \(4, 0\)"),
        (lambda: GRC(length=[4, 0]), r"at least 1 slot, found \(4, 0\)"),
        (lambda: GRC(length=()), "at least 1 slot"),
        (lambda: GRC(block=0), "GRC.block: expected at least 1 token, found 0"),
        (lambda: GRC(ratio=0.0), "GRC.ratio: expected above 0"),
        (lambda: GRC(mix="heads", source="output"), "GRC.mix: .* found 'output' and 'project', which follow it"),
        (lambda: GRC(mix="heads", preset="official", source="input"), "found 'input' and 'pad'"),
        (lambda: GRC(scope="stream", read="mean"), "GRC.read: .* a cache per row"),
        (lambda: GRC(scope="stream", inference="frozen"), "GRC.inference: .* updates every row"),
        (lambda: GatedCacheAttention(12, 3, grc=GRC(length=4, mix="channels")), 'lift="project" mixes its "heads"'),
        (lambda: GatedCacheAttention(12, 3, grc=GRC()), "GRC.length: expected a number of slots .* found 'auto'"),
        (
            lambda: GatedCacheAttention(12, 3, grc=GRC(length=4, ratio=0.2)),
            "one channel for each of 3 heads, found 0.2",
        ),
        (lambda: GatedCacheAttention(12, 3, grc=GRC(length=4, convolution=True)), "convolution=True: .*grid=None"),
        (
            lambda: GatedCacheAttention(12, 3, grc=GRC(length=6, preset="official", ratio=0.75), grid=(2, 3)),
            "official preset's convolution: .*cache width 9",
        ),
        (lambda: GatedCacheAttention(12, 3, grc=GRC(length=4), causal=True, grid=(2, 3)), "no grid and no class"),
        (lambda: GRC(ratio=1.1), "GRC.ratio: expected above 0 and at most 1, found 1.1"),
        (lambda: GRC(source="inptu"), "'input', 'output'"),
        (
            lambda: GatedCacheAttention(12, 3, grc=GRC(length=7, resample="grid"), grid=(4, 6)),
            "4 x 6 grid, found 7; use",
        ),
    ],
)
def test_impossible_settings_are_refused_in_one_line(make, words):
    refuses(words, make)


@pytest.mark.parametrize("preset", ["paper", "mnemos"])
def test_rows_of_padding_leave_a_causal_mean_too(preset):
    x = torch.randn(2, 11, D, dtype=torch.float64)
    mask = torch.tensor([[True], [False]]).expand(2, 11)
    both, alone = build(causal=True, preset=preset), build(causal=True, preset=preset)
    torch.testing.assert_close(both(x, None, mask)[0][:1], alone(x[:1])[0])
    torch.testing.assert_close(both.eval().cache, alone.eval().cache)
