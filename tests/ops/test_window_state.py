"""Attention with a window, sinks and a state: oracle, blocks and single tokens agree in values and gradients."""

import pytest
import torch
from kernel_cases import same_bits_on_any_threads
from refusals import refuses
from torch.autograd import forward_ad

from mnemos.native import instruction_set, instruction_sets
from mnemos.ops.linear.feature_maps import Hedgehog, elu
from mnemos.ops.window_state import Far, Ring, Sizes, window_attention
from mnemos.ops.window_state.reference import ReferenceRow, reference_sums
from mnemos.ops.window_state.ring import kernel_step
from mnemos.types import leaves, map_state

STATES = ("none", "linear", "hedgehog", "delta")
FORGETTING = [(state, False) for state in STATES] + [(state, True) for state in STATES[1:]]
SCALE, DECAY = 0.4, -0.3


def draw(b, t, heads, kv, d, m, dtype=torch.float64):
    """Inputs with gradients; q, k, v are no contiguous tensors."""
    torch.manual_seed(t + d)
    shapes = {"q": (heads, d), "sink_q": (heads, d), "raw_q": (heads, d), "k": (kv, d), "raw_k": (kv, d), "v": (kv, m)}
    found = {name: torch.randn(b, h, t, width).transpose(1, 2) for name, (h, width) in shapes.items()}
    found |= {"query_map": torch.randn(heads, d, d), "key_map": torch.randn(kv, d, d)}
    found |= {"gamma": torch.rand(heads), "beta": torch.rand(kv)}
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


def far_of(state, x, forgets=False):
    beta, decay = x["beta"] if state == "delta" else None, DECAY if forgets else 0.0
    if state == "linear":
        return Far(elu, elu, x["gamma"], None, decay)
    maps = Hedgehog(x["query_map"]), Hedgehog(x["key_map"])
    return None if state == "none" else Far(*maps, x["gamma"], beta, decay)


def oracle_maps(state, x):
    def by(weight):
        def features(vector, head):
            if state == "linear":
                return torch.where(vector > 0, vector + 1, torch.exp(vector.clamp(max=0)))
            y = weight[head].double() @ vector
            return torch.cat([torch.exp(y - y.abs().amax()), torch.exp(-y - y.abs().amax())])

        return features

    return None if state == "none" else (by(x["query_map"]), by(x["key_map"]), x["gamma"])


def read(x, sizes, far, cuts, mask):
    """The operator over calls that end at the cuts."""
    outputs, state, start = [], None, 0
    for end in (*cuts, x["q"].shape[1]):
        q, k, v, sink_q, raw_q, raw_k = (x[n][:, start:end] for n in ("q", "k", "v", "sink_q", "raw_q", "raw_k"))
        part = None if mask is None else mask[:, start:end]
        y, state = window_attention(q, k, v, sizes, far, state, part, sink_q, (raw_q, raw_k))
        outputs.append(y)
        start = end
    return torch.cat(outputs, 1), state


def first(x, n):
    """The first n tokens, and the weights."""
    return {name: value[:, :n] if value.dim() == 4 else value for name, value in x.items()}


def step(ring, x, i, far, rows=slice(None)):
    """What the ring says of column i."""
    names = ("q", "k", "v", "sink_q", "raw_q", "raw_k")
    q, k, v, sink_q, *raw = (x[n][rows, i : i + 1].transpose(1, 2) for n in names)
    return ring.step(q, k, v, far, sink_q, tuple(raw))


def narrow(x):
    """In float32, without gradients."""
    return map_state(lambda leaf: leaf.detach().float() if leaf.is_floating_point() else leaf, x)


def oracle(x, sizes, maps, far, width, mask):
    """y, S and z token by token."""
    (b, t, heads, _), (kv, m) = x["q"].shape, x["v"].shape[2:]
    outputs, rows, rates = [], [], (None, 0.0) if far is None else (far.beta, far.decay)
    for r in range(b):
        row = ReferenceRow(sizes[:2], torch.zeros(kv, width, m), torch.zeros(kv, width))
        for i in range(t):
            valid = mask is None or bool(mask[r, i])
            token = tuple(x[n][r, i] for n in ("q", "k", "v", "sink_q", "raw_q", "raw_k"))
            y = row.read(token, sizes.scale, sizes.softcap, maps, *rates) if valid else torch.zeros(heads, m).double()
            outputs.append(y)
        rows.append(row)
    y = torch.stack(outputs).unflatten(0, (b, t))
    return y, torch.stack([row.s for row in rows]), torch.stack([row.z for row in rows])


def compare_gradients(loss, expected, inputs, tolerance):
    """Those of two losses are equal; float32 in units of the largest, where that is more than 1."""
    both = (torch.autograd.grad(one, inputs, materialize_grads=True) for one in (loss, expected))
    for found, wanted in zip(*both, strict=True):
        largest = float(wanted.abs().max().clamp(min=1)) if wanted.dtype == torch.float32 else 1.0
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.each_value
@pytest.mark.parametrize(("state", "forgets"), FORGETTING)
@pytest.mark.parametrize(
    ("sizes", "t", "cuts", "padded"),
    [
        (Sizes(4, 2, SCALE), 19, (1, 7, 8), False),
        (Sizes(6, 3, SCALE, 1.5), 23, (10, 11), True),
        (Sizes(1, 0, SCALE), 9, (4,), True),
    ],
)
def test_blocks_are_the_oracle(state, forgets, sizes, t, cuts, padded):
    x = draw(2, t, 4, 2, 3, 2)
    mask = torch.rand(2, t, generator=torch.Generator().manual_seed(1)) > 0.35 if padded else None
    far = far_of(state, x, forgets)
    y, end = read(x, sizes, far, cuts, mask)
    expected, s, z = oracle(x, sizes, oracle_maps(state, x), far, end.s.shape[2], mask)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close((end.s, end.z), (s, z), rtol=1e-11, atol=1e-11)
    weight, upstream = torch.randn_like(expected), torch.randn_like(s)
    losses = [(a * weight).sum() + (b * upstream).sum() + c.sum() for a, b, c in ((y, end.s, end.z), (expected, s, z))]
    compare_gradients(*losses, list(x.values()), 1e-10)


@pytest.mark.parametrize("forgets", [False, True])
def test_the_recurrence_is_the_equation_of_double_sums(forgets):
    x = draw(1, 17, 4, 2, 3, 2)
    x |= {"raw_q": x["q"], "raw_k": x["k"]}
    sizes, maps = Sizes(5, 2, SCALE), oracle_maps("hedgehog", x)
    far = far_of("hedgehog", x, forgets)
    y, _, _ = oracle(x, sizes, maps, far, 6, None)
    decay = DECAY if forgets else 0.0
    found = reference_sums(x["q"][0], x["k"][0], x["v"][0], sizes[:2], SCALE, None, maps, x["sink_q"][0], decay)
    torch.testing.assert_close(y[0], found)


@pytest.mark.parametrize(
    ("state", "forgets"),
    [pytest.param(*one, marks=[pytest.mark.exhaustive] * (one not in FORGETTING[3:5])) for one in FORGETTING],
)
def test_many_blocks_and_single_tokens_in_float32(state, forgets, monkeypatch):
    """Three blocks, far more tokens than a window, and the buffers that change in place."""
    monkeypatch.setattr("mnemos.ops.window_state.chunked.SMALLEST", 24)
    x = draw(1, 60, 2, 1, 5, 3, torch.float32)
    sizes, far = Sizes(9, 2, SCALE), far_of(state, x, forgets)
    y, end = read(x, sizes, far, (), None)
    expected, s, _ = oracle(x, sizes, oracle_maps(state, x), far, end.s.shape[2], None)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(end.s.double(), s, rtol=2e-5, atol=2e-5)
    weight, inputs = torch.randn_like(y), list(x.values())
    compare_gradients((y * weight).sum(), (expected * weight).sum(), inputs, 2e-5)
    x, y = narrow(x), y.detach()
    far = far_of(state, x, forgets)
    before = read(first(x, 31), sizes, far, (), None)[1]
    kept = [leaf.clone() for leaf in leaves(before)]
    ring = Ring(before, sizes)
    for i in range(31, 60):
        one = step(ring, x, i, far).transpose(1, 2)
        torch.testing.assert_close(one, y[:, i : i + 1], rtol=2e-5, atol=2e-5)
    for a, b in zip(leaves(ring.state()), leaves(read(first(x, 60), sizes, far, (40,), None)[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert all(map(torch.equal, leaves(before), kept))


def test_scores_that_would_overflow_and_padding_that_is_not_finite():
    x = narrow(draw(1, 12, 2, 1, 3, 2))
    x["q"], x["k"] = 100 * x["q"], 100 * x["k"]
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, 3] = False
    sizes, far = Sizes(4, 1, 1.0), far_of("hedgehog", x)
    y, _ = read(x, sizes, far, (), mask)
    for name in ("q", "k", "v", "sink_q", "raw_q", "raw_k"):
        x[name] = torch.where(mask[..., None, None], x[name], torch.nan)
    assert torch.equal(read(x, sizes, far, (), mask)[0], y)
    assert bool(y.isfinite().all())


def test_a_negative_far_sum_of_the_delta_rule_counts_nothing():
    x = draw(1, 12, 2, 1, 3, 2)
    sizes, far = Sizes(3, 1, SCALE), far_of("delta", x)
    before = window_attention(x["q"], x["k"], x["v"], sizes, far)[1]
    before = before._replace(z=-torch.ones_like(before.z))
    y, _ = window_attention(x["q"][:, :1], x["k"][:, :1], x["v"][:, :1], sizes, far, before)
    row = ReferenceRow(sizes[:2], before.s[0], before.z[0], 12)
    row.window = [
        (9 + i, before.k[0, :, i].double(), before.v[0, :, i].double(), before.k[0, :, i].double()) for i in range(3)
    ]
    row.sinks = [(0, before.sink_k[0, :, 0], before.sink_v[0, :, 0], before.sink_k[0, :, 0])]
    token = tuple(x[n][0, 0] for n in ("q", "k", "v", "q", "q", "k"))
    torch.testing.assert_close(y[0, 0], row.read(token, SCALE, None, oracle_maps("delta", x), x["beta"]))
    ring = Ring(before, sizes).step(*(x[n][:, :1].transpose(1, 2) for n in ("q", "k", "v")), far, None, None)
    torch.testing.assert_close(ring[0, :, 0], y[0, 0])


@torch.no_grad()
def test_single_tokens_under_autocast_are_in_full_precision():
    x, sizes, found = narrow(draw(1, 12, 2, 1, 3, 2)), Sizes(4, 2, SCALE), []
    far = far_of("linear", x)
    state = read(x, sizes, far, (), None)[1]
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append(step(Ring(state, sizes), x, 0, far))
    assert torch.equal(*found)


def test_sizes_that_do_not_fit():
    x = draw(1, 3, 4, 2, 3, 2)
    q, k, v = (x[name] for name in "qkv")
    _, state = window_attention(q, k, v, Sizes(1, 0, 1.0))
    refuses("window of at least 1", window_attention, q, k, v, Sizes(0, 0, 1.0))
    refuses("sinks of at least 0", window_attention, q, k, v, Sizes(1, -1, 1.0))
    refuses("T at least 1", window_attention, q[:, :0], k[:, :0], v[:, :0], Sizes(1, 0, 1.0))
    twice = (torch.cat([part, part]) for part in (q, k, v))
    refuses("a state of 2 rows, found 1", window_attention, *twice, Sizes(1, 0, 1.0), state=state)
    refuses("multiple of K", window_attention, k, q, v, Sizes(1, 0, 1.0))


@pytest.mark.skipif(not instruction_sets(), reason="needs the native kernels")
@pytest.mark.each_value
@pytest.mark.parametrize(("state", "forgets"), FORGETTING)
@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize(("d", "m", "softcap", "sinks"), [(20, 35, None, 3), (16, 64, 0.7, 0), (3, 5, None, 1)])
@torch.no_grad()
def test_the_kernel_of_single_tokens(state, forgets, name, d, m, softcap, sinks):
    """Against PyTorch's operations in float64, in every buffer."""
    x, sizes = draw(7, 60, 6, 2, d, m), Sizes(11, sinks, SCALE, softcap)
    low = narrow(x)
    before = read(first(x, 21), sizes, far_of(state, x, forgets), (), None)[1]
    rings = Ring(before, sizes), Ring(narrow(before), sizes)
    with instruction_set(name):
        for i in range(21, 60):
            wide, found = (step(*one, i, far_of(state, one[1], forgets)) for one in zip(rings, (x, low), strict=True))
            torch.testing.assert_close(found.double(), wide, rtol=2e-5, atol=2e-5)
    for a, b in zip(*(leaves(ring.state()) for ring in rings), strict=True):
        torch.testing.assert_close(b.to(a.dtype), a, rtol=2e-5, atol=2e-5)
    q, k, v, sink_q = (low[n][:, :1].transpose(1, 2) for n in ("q", "k", "v", "sink_q"))
    assert kernel_step(rings[1], q, k, v, far_of(state, low), sink_q, (q, k)) is not None


@torch.no_grad()
def test_states_of_any_strides_are_written():
    x, sizes = narrow(draw(2, 30, 4, 2, 8, 8)), Sizes(4, 2, SCALE)
    state = read(first(x, 20), sizes, None, (), None)[1]
    last = {name: getattr(state, name).to(memory_format=torch.channels_last) for name in ("k", "v", "sink_v")}
    rings = Ring(state, sizes), Ring(state._replace(**last), sizes)
    for i in range(20, 30):
        assert torch.equal(*(step(ring, x, i, None) for ring in rings))
    assert all(map(torch.equal, *(leaves(ring.state()) for ring in rings)))


@torch.no_grad()
def test_threads_share_a_state_and_the_result_is_the_same(threads):
    x, sizes = narrow(draw(8, 30, 8, 4, 32, 64)), Sizes(9, 2, SCALE)
    far = far_of("delta", x, True)
    assert x["k"].shape[0] * 4 * 64 * 64 >= 2**16  # SERIAL of native/window/window.cpp

    def run():
        ring = Ring(read(x, sizes, far, (), None)[1], sizes)
        return [*(step(ring, x, i, far) for i in range(5)), *leaves(ring.state())]

    same_bits_on_any_threads(threads, run)


@torch.no_grad()
def test_what_the_kernel_of_single_tokens_leaves_to_pytorch():
    """Other rows than the state's are refused, tangents are kept; buffers may be any views."""
    x, sizes = narrow(draw(3, 30, 4, 2, 5, 6)), Sizes(9, 2, SCALE)
    far = far_of("delta", x)
    state = read(x, sizes, far, (), None)[1]
    with pytest.raises(RuntimeError, match="must match"):
        step(Ring(map_state(lambda leaf: leaf[:1], state), sizes), x, 3, far)
    with forward_ad.dual_level():
        dual = x | {"q": forward_ad.make_dual(x["q"], torch.ones_like(x["q"]))}
        assert forward_ad.unpack_dual(step(Ring(state, sizes), dual, 3, far)).tangent is not None
    for maps in ((torch.sigmoid, torch.sigmoid), (elu, torch.sigmoid), (torch.sigmoid, elu)):
        own = Far(*maps, x["gamma"], None, 0.0)
        ring = Ring(read(first(x, 29), sizes, own, (), None)[1], sizes)
        wanted = read(x, sizes, own, (), None)[0][:, 29:].transpose(1, 2)
        torch.testing.assert_close(step(ring, x, 29, own), wanted, rtol=1e-4, atol=1e-5)
    permuted = state._replace(k=state.k.mT.contiguous().mT, s=state.s.mT.contiguous().mT)
    rings = Ring(permuted, sizes), Ring(map_state(lambda leaf: leaf[::2], state), sizes)
    rings[0].map(lambda leaf: leaf[::2])
    wanted = step(Ring(state, sizes), x, 3, far)[::2]
    for ring in rings:
        assert ring.s.is_contiguous()
        assert ring.keys.is_contiguous()
        torch.testing.assert_close(step(ring, x, 3, far, slice(None, None, 2)), wanted)


def test_a_value_that_is_no_number_reaches_no_earlier_block():
    x = draw(1, 300, 2, 1, 5, 3)
    x["v"].data[0, 290] = torch.nan
    y, _ = read(x, Sizes(9, 2, SCALE), far_of("delta", x, True), (), None)
    assert bool(y[:, :256].isfinite().all())
    assert bool(y[:, 290].isnan().all())
