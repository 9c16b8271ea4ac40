"""The gated cache's kernels against the same function in PyTorch's operations in float64; where they step aside."""

import copy

import pytest
import torch
from native_kernels import needs_kernels
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mnemos import GRC
from mnemos.attention.gated import GatedCacheAttention
from mnemos.ops.gated_cache import native, write

pytestmark = needs_kernels
# rows, tokens, slots, width, heads, ratio, preset, read, scope, whether tokens are masked
CASES = {
    "demo": (3, 26, 25, 64, 4, 0.5, "mnemos", "sample", "shared", True),
    "odd widths, mean": (3, 7, 5, 10, 2, 0.6, "mnemos", "mean", "shared", True),
    "one slot": (2, 9, 1, 24, 3, 1.0, "mnemos", "sample", "shared", False),
    "one row, fewer tokens than slots": (1, 3, 8, 12, 1, 0.5, "mnemos", "sample", "shared", False),
    "paper, several blocks of queries": (2, 70, 66, 36, 2, 0.5, "paper", "mean", "shared", False),
    "paper, masked": (5, 20, 12, 48, 3, 0.5, "paper", "sample", "shared", True),
    "a cache per row": (4, 13, 6, 40, 4, 0.5, "mnemos", "sample", "stream", True),
    "as many tokens as slots": (2, 17, 17, 34, 1, 1.0, "mnemos", "mean", "shared", False),
}


def setting(case):
    """A layer with random weights and cache, its input, mask and state."""
    rows, tokens, slots, width, heads, ratio, preset, read, scope, masked = CASES[case]
    torch.manual_seed(0)
    grc = GRC(length=slots, ratio=ratio, preset=preset, read=read, scope=scope)
    layer = GatedCacheAttention(width, heads, grc=grc).train()
    with torch.no_grad():
        layer.cache.normal_()
        for p in layer.parameters():
            p.add_(0.2 * torch.randn_like(p))
    mask = None
    if masked:
        mask = torch.rand(rows, tokens) > 0.4
        mask[0] = False  # a row that writes nothing
    state = None
    if scope == "stream":
        state = layer.initial_state(rows)
        walk = state.updates._replace(cache=torch.randn_like(state.updates.cache), seen=torch.arange(rows))
        state = state._replace(updates=walk)
    return layer, torch.randn(rows, tokens, width), mask, state


def results(layer, x, mask, state):
    """Outputs, what is pending, and the gradients of everything, by name. The layer does not change."""
    layer = copy.deepcopy(layer).to(x.dtype)
    x = x.clone().requires_grad_()
    if state is not None:
        cache = state.updates.cache.to(x.dtype).requires_grad_()
        state = state._replace(updates=state.updates._replace(cache=cache, partial=state.updates.partial.to(x.dtype)))
    y, new = layer(x, state, mask)
    loss = y.sin()
    loss = (loss if mask is None else loss * mask[..., None]).sum()
    if state is not None:
        loss = loss + new.updates.cache.cos().sum()
    given = {"x": x, **({} if state is None else {"cache": cache}), **dict(layer.named_parameters())}
    found = dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))
    return {"y": y.detach(), "pending": layer.pending, "rows": layer.pending_rows, **found}


def composed(monkeypatch):
    monkeypatch.setattr(native, "takes", lambda *_: False)


def close(found, expected, tolerance=3e-5):
    """Relative to the largest number of each, or to a part of the largest gradient: some are 0 but for rounding."""
    largest = max(v.abs().max().item() for name, v in expected.items() if name not in ("y", "pending", "rows"))
    for name, value in expected.items():
        scale = max(value.abs().max().item(), 1e-2 * largest)
        assert (found[name] - value).abs().max().item() <= tolerance * scale, name


@pytest.mark.each_value
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 2])
def test_equals_the_composition(case, count, variant, threads, poisoned, monkeypatch):
    threads(count)
    layer, x, mask, state = setting(case)
    called = []
    run = native.fused
    monkeypatch.setattr(native, "fused", lambda *given: called.append(1) or run(*given))
    found = results(layer, x, mask, state)
    assert len(called) == 2  # the update and the read
    again = results(layer, x, mask, state)
    assert all(torch.equal(again[name], value) for name, value in found.items())  # in whatever order threads end
    composed(monkeypatch)
    close(found, results(layer, x.double(), mask, state))


def test_intermediates_are_kept_or_computed_again(monkeypatch):
    layer, x, mask, state = setting("demo")
    kept = results(layer, x, mask, state)
    monkeypatch.setattr(native, "_FEW", 0)
    close(results(layer, x, mask, state), kept, 2e-6)


def op(case="demo", cache_rows=False):
    """The arguments of `write` for a layer's gates."""
    layer, x, mask, _ = setting(case)
    d, slots = layer.cache_dim, layer.cache.shape[0]
    gates = (layer.update_gate, layer.reset_gate, layer.candidate, layer.candidate_norm)
    weights = [w.detach().requires_grad_() for gate in gates for w in (gate.weight, gate.bias)]
    source = x[..., :d].detach().requires_grad_()
    cache = torch.randn(*((len(x),) if cache_rows else ()), slots, d).requires_grad_()
    return source, cache, weights, mask


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("which", ["new", "mean", "both"])
def test_gradients_of_a_cache_and_of_either_result(which, per_row, monkeypatch):
    source, cache, weights, mask = op(cache_rows=per_row)

    def run():
        found = write(source, cache, weights, mask, mean=True)
        assert found.rows.item() == mask.any(1).sum()
        assert not found.rows.requires_grad
        loss = found.new.sin().sum() if which != "mean" else 0
        loss = loss + (found.mean.cos().sum() if which != "new" else 0)
        return torch.autograd.grad(loss, [source, cache, *weights])

    found = run()
    composed(monkeypatch)
    for a, b in zip(found, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item() + 1e-6)


@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_padding_may_hold_anything(method):
    source, cache, weights, mask = op()
    with torch.no_grad():
        dirty = torch.where(mask[..., None], source, torch.nan)
    clean = torch.where(mask[..., None], source.detach(), 0).requires_grad_()
    dirty.requires_grad_()
    found, expected = (write(x, cache, weights, mask, method, mean=True) for x in (dirty, clean))
    assert torch.equal(found.new, expected.new)
    assert torch.equal(found.new[0], cache)  # a row of padding keeps its cache
    gradients = [torch.autograd.grad(y.new.sin().sum(), [x, *weights]) for y, x in ((found, dirty), (expected, clean))]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert not gradients[0][0][~mask].any()


def test_a_gradient_is_computed_twice_and_differentiated(monkeypatch):
    layer, x, mask, _ = setting("demo")
    layer.writes = False
    x.requires_grad_()
    parameters = [x, *layer.parameters()]

    def penalty():
        y, _ = layer(x, None, mask)
        first = torch.autograd.grad(y.sin().sum(), parameters, retain_graph=True)
        same = torch.autograd.grad(y.sin().sum(), parameters, create_graph=True)
        for a, b in zip(first, same, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        second = torch.autograd.grad(sum(g.square().sum() for g in same), parameters)
        return {str(i): g for i, g in enumerate(second)}

    with sdpa_kernel(SDPBackend.MATH):  # the fused one is differentiable once
        found = penalty()
        composed(monkeypatch)
        expected = penalty()
    close(found, expected, 1e-4)


class Scaled(torch.nn.Linear):
    """Of half the weights, what they would compute."""

    def forward(self, x):
        return 2 * super().forward(x)


def changed(change):
    """What a layer computes once it has been changed."""
    return lambda layer, x: (change(layer), layer(x)[0])[1]


def subclass(layer):
    layer.query.__class__ = Scaled
    layer.query.weight.data /= 2
    layer.query.bias.data /= 2


def own_forward(layer):
    forward = layer.key.forward
    layer.key.forward = lambda x: forward(x)


def backward_hooked(layer, x):
    layer.value.register_full_backward_hook(lambda *_: layer.seen.append("hook"))
    y = layer(x)[0]
    y.sum().backward()
    return y


def autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)[0]


def counted(layer, x):
    with FlopCounterMode(display=False) as counter:
        y = layer(x)[0]
    assert counter.get_total_flops() > 2 * x.shape[0] * x.shape[1] * 4 * x.shape[2] ** 2
    return y


REASONS = {
    "forward hook": changed(lambda layer: layer.query.register_forward_hook(lambda *_: layer.seen.append("hook"))),
    "forward": changed(own_forward),
    "backward hook": backward_hooked,
    "subclass": changed(subclass),
    "float64": lambda layer, x: layer.double()(x.double())[0],
    "autocast": autocast,
    "flops": counted,
    "compile": lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True)(x)[0],
    "vmap": lambda layer, x: torch.vmap(lambda row: layer(row[None])[0][0])(x),
}


@pytest.mark.parametrize("reason", REASONS)
def test_steps_aside(reason, monkeypatch):
    """Whoever observes or changes the branch's operations gets operations, and the same values."""
    layer, x, _, _ = setting("one slot")
    expected, run, layer.seen = layer.eval()(x)[0], native.fused, []

    def fused(kernel, *given):
        if isinstance(kernel, native.Reading):
            layer.seen.append("kernel")
        return run(kernel, *given)

    monkeypatch.setattr(native, "fused", fused)
    found = REASONS[reason](layer, x)
    assert layer.seen == ["hook"] * ("hook" in reason)
    loose = 2e-2 if reason == "autocast" else 1e-5
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=loose, atol=loose)


def test_memory_that_is_not_there_is_not_read():
    source, cache, weights, mask = op()
    kernel = native.Update(None, resampled=False, mean=True)
    assert kernel.fits(source, cache, mask, *weights)
    assert not kernel.fits(source, cache, mask.float(), *weights)
    for given in ((source, cache[None], mask), (source[:0], cache, mask[:0]), (source[:, :0], cache, None)):
        assert not kernel.fits(*given, *weights)
        assert write(given[0], given[1], weights, given[2]).new.shape == (len(given[0]), *cache.shape[-2:])
