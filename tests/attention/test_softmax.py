"""Softmax attention against eq. 1 written out, its key-value state, and rotary positions."""

import pytest
import torch
from native_kernels import needs_kernels
from refusals import refuses
from torch.utils.flop_counter import FlopCounterMode

import mnemos.attention.softmax
from mnemos.attention import SoftmaxAttention
from mnemos.attention.softmax import attend
from mnemos.ops.positions import Rotary, rotate
from mnemos.ops.softmax_attention.reference import reference_softmax_attention


def layer(**kwargs) -> SoftmaxAttention:
    torch.manual_seed(0)
    return SoftmaxAttention(12, 3, **{"causal": True, **kwargs}).double()


def test_appending_writes_into_one_buffer():
    module = layer().eval()
    with torch.no_grad():
        _, state = module(torch.randn(2, 5, 12, dtype=torch.float64))
        moved = 0
        for _ in range(41):
            before, (_, state) = state, module(torch.randn(2, 1, 12, dtype=torch.float64), state)
            moved += state.k.untyped_storage().data_ptr() != before.k.untyped_storage().data_ptr()
        assert moved <= 4, "room doubles: 41 tokens copy a few times, not 41"


def test_rotary_positions_are_the_published_rotations_with_a_base_and_a_scaling():
    """Pair i at position p turns by p / scaling · base^(−2i/d), written with sines and cosines."""
    x = torch.randn(1, 5, 1, 6, dtype=torch.float64)
    found = rotate(x, Rotary(base=50.0, scaling=4.0).turns(5, 6, torch.tensor([1000])))
    for p in range(5):
        for i in range(3):
            angle = torch.tensor((1000 + p) / 4.0 * 50.0 ** (-2 * i / 6), dtype=torch.float64)
            a, b = x[0, p, 0, 2 * i], x[0, p, 0, 2 * i + 1]
            torch.testing.assert_close(found[0, p, 0, 2 * i], a * angle.cos() - b * angle.sin())
            torch.testing.assert_close(found[0, p, 0, 2 * i + 1], a * angle.sin() + b * angle.cos())
    for base, scaling in ((1.0, 1.0), (2.0, 0.0), (torch.nan, 1.0)):
        refuses("a base above 1 and a scaling above 0, found", Rotary, base, scaling)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "settings", [{"kv_heads": 2}, {"kv_heads": 1, "window": 3}, {"query_key_norm": True}, {"window": 1}]
)
def test_grouped_heads_and_normalised_queries_equal_the_equations(settings, causal):
    """Between its projections; and token by token."""
    torch.manual_seed(0)
    settings = {k: v for k, v in settings.items() if k != "window" or causal}
    module = SoftmaxAttention(16, 4, causal, rotary=True, **settings).double().eval()
    x, mask = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 2] = False
    few = settings.get("kv_heads", 4)
    q, k, v = (part.unflatten(2, (-1, 4)) for part in module.qkv(x).split([16, 4 * few, 4 * few], 2))
    if settings.get("query_key_norm"):
        with torch.no_grad():
            module.query_norm.weight.uniform_(0.5, 2)
            module.key_norm.weight.uniform_(0.5, 2)
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.query_norm.weight
        k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.key_norm.weight
    place = mask.cumsum(1) - 1  # of the valid tokens
    turns = Rotary().turns(1, 4, place.flatten()).view(2, 7, 1, 2)
    q, k = rotate(q, turns), rotate(k, turns)
    rows = [[part[i : i + 1, valid] for part in (q, k, v)] for i, valid in enumerate(mask)]  # a window of valid tokens
    wanted = [module.project(reference_softmax_attention(*row, causal, settings.get("window"))) for row in rows]
    wanted, (y, state) = torch.cat(wanted, 1)[0], module(x, None, mask)
    found = y[mask]
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(y, x, upstream, retain_graph=True) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)
    if causal:
        assert state.k.shape[2] == few
        state, parts = None, []
        for i in range(7):
            y, state = module(x[:, i : i + 1], state, mask[:, i : i + 1])
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, 1)[mask], found)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_heads": 0}, "kv_heads: expected a number that divides the 3 heads, found 0"),
        ({"kv_heads": 2}, "kv_heads: .* found 2"),
        ({"window": 0}, "window: expected at least 1 and causal=True, found window 0"),
        ({"window": 1, "causal": False}, "window: .* found window 1, causal=False"),
    ],
)
def test_heads_and_windows_that_do_not_fit_are_refused(settings, words):
    refuses(words, layer, **settings)
    for kv_heads, window in ((1, 1), (3, None)):
        assert layer(kv_heads=kv_heads, window=window)(torch.ones(1, 2, 12).double())[0].shape == (1, 2, 12)


def test_wider_values_than_keys():
    q, k = torch.randn(2, 2, 5, 3, 4, dtype=torch.float64)
    v = torch.randn(2, 5, 3, 6, dtype=torch.float64)
    scores = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / 2, -1)
    torch.testing.assert_close(attend(q, k, v, None, False), torch.einsum("bhij,bjhm->bihm", scores, v))


@pytest.mark.parametrize("t", [15, 16, 40, 64, 65])
@pytest.mark.parametrize("kind", ["whole", "causal", "masked"])
def test_every_length_takes_the_same_values(t, kind):
    """Short sequences without gradient go another way than the fused kernel."""
    q, k, v = torch.randn(3, 2, t, 3, 4, dtype=torch.float64)
    visible = (torch.rand(2, 1, 1, t) < 0.7) | (torch.arange(t) == 0) if kind == "masked" else None
    with torch.no_grad():
        short = attend(q, k, v, visible, kind == "causal")
    torch.testing.assert_close(short, attend(q, k, v, visible, kind == "causal"))


@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_window_streams_at_constant_size(window):
    module = layer(window=window).eval()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    expected, _ = module(x)
    for sizes in ([1] * 9, [4, 1, 4], [2, 7]):
        state, parts = None, []
        for piece in x.split(sizes, 1):
            with torch.no_grad():
                y, state = module(piece, state)
            parts.append(y)
            assert state.k.shape[1] <= max(window - 1, 0)
            if state._room is not None:
                assert state._room.buffer.capacity <= 2 * (window + max(sizes)), "the buffer is bounded too"
        torch.testing.assert_close(torch.cat(parts, 1), expected)
    with torch.no_grad():
        _, state = module(x)
        a, _ = module(x[:, :1], state)
        module(x[:, 1:2], state)
        torch.testing.assert_close(module(x[:, :1], state)[0], a)
        _, longer = layer().eval()(x)  # of the same weights without a window
        torch.testing.assert_close(module(x[:, :1], longer)[0], a)
        more, _ = module(x, state)
        for padding in (3, 10):  # of which the window of 20 must not count any
            mask = torch.tensor([[1] * 9 + [0] * padding] * 2, dtype=torch.bool)
            _, padded = layer().eval()(torch.cat([x, x, x], 1)[:, : 9 + padding], None, mask)
            torch.testing.assert_close(module(x[:, :1], padded)[0], a)
            torch.testing.assert_close(module(x[:, :1], module.branch(padded, 1))[0], a)
            torch.testing.assert_close(module(x, padded)[0], more)
            assert module.pad_to_capacity(padded).k.shape[1] == window - 1
            for state in padded, module.branch(padded, 1), module.pad_to_capacity(padded):
                for i in range(9):
                    y, state = module(x[:, i : i + 1], state)
                    torch.testing.assert_close(y, more[:, i : i + 1])


def test_a_window_keeps_nothing_else_of_a_long_call_in_memory():
    """Nor does a state with few heads keep the queries. Token by token no state is copied but for room."""
    torch.manual_seed(0)
    for module in SoftmaxAttention(16, 4, True, window=5), SoftmaxAttention(16, 8, True, rotary=True, kv_heads=1):
        state, x = None, torch.randn(1, 100, 16)
        for grad in (False, True, False):
            with torch.set_grad_enabled(grad):
                state = module(x, state)[1]
            for part in state.k, state.v:
                assert part.untyped_storage().nbytes() <= 4 * part.nbytes
        moved = 0
        with torch.no_grad():
            for _ in range(40):
                before, state = state, module(x[:, :1], state)[1]
                moved += state.k.untyped_storage().data_ptr() != before.k.untyped_storage().data_ptr()
        assert moved <= 40 / 4


@torch.no_grad()
@pytest.mark.parametrize("settings", [{"rotary": True}, {"window": 5, "query_key_norm": True}], ids=str)
@pytest.mark.parametrize("branched", [False, True])
def test_a_state_is_read_on_with_and_without_autocast(settings, branched):
    torch.manual_seed(0)
    module, x = SoftmaxAttention(16, 4, True, **settings), torch.randn(2, 8, 16)
    wanted = module(x)[0][:, 4:]
    for first in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            state = None
            for part in x[:, :4].split([3, 1], 1):  # the second has room in a buffer
                state = module(part, state)[1]
        state = module.branch(state, 1) if branched else state
        with torch.autocast("cpu", torch.bfloat16, enabled=not first):
            for i in range(4, 8):
                y, state = module(x[:, i : i + 1], state)
                assert (y[:, 0] - wanted[:, i - 4]).norm() < 0.03 * wanted[:, i - 4].norm()


def test_dropout_is_not_lost_without_gradient():
    """Activation checkpointing runs its first pass without gradient: both passes must draw alike."""
    torch.manual_seed(0)
    module = SoftmaxAttention(12, 3, dropout=0.5).train()
    x = torch.randn(2, 32, 12)
    with torch.no_grad():
        torch.manual_seed(1)
        first = module(x)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(module(x)[0], first)
    torch.manual_seed(2)
    assert not torch.allclose(module(x)[0], first)


# --- our kernels, which long calls in float32 take ---


@pytest.fixture
def kernel_calls(monkeypatch):
    """A list that has an entry for every call of the kernels, which also small calls take."""
    calls, attention = [], mnemos.attention.softmax.softmax_attention
    monkeypatch.setattr(mnemos.attention.softmax, "LEAST", 0)
    monkeypatch.setattr(
        mnemos.attention.softmax, "softmax_attention", lambda *args: calls.append(args) or attention(*args)
    )
    return calls


def long_layer(**settings):
    torch.manual_seed(0)
    return SoftmaxAttention(32, 4, **{"causal": True, "rotary": True, **settings})


SETTINGS = [{}, {"window": 30}, {"kv_heads": 2, "query_key_norm": True}, {"causal": False}]


@needs_kernels
@pytest.mark.parametrize("padded", ["", "ends", "holes"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_long_calls_equal_those_in_double_precision(settings, padded, kernel_calls):
    """Of one call, and of two with a state between them."""
    module = long_layer(**settings)
    x, mask = torch.randn(2, 100, 32), torch.ones(2, 100, dtype=torch.bool)
    mask[0, :23] = mask[1, 75:] = False
    if padded == "holes":  # within a window, which counts valid tokens
        mask[:, 28:33] = mask[:, 62:70] = False
    above = torch.randn(2, 100, 32) * mask[..., None]
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        whole = module.to(dtype)(leaf, None, mask if padded else None)[0]
        grads = torch.autograd.grad(whole, [leaf, *module.parameters()], above.to(dtype))
        parts, state = [], None
        for part, marks in zip(leaf.chunk(2, 1), mask.chunk(2, 1), strict=True) if module.causal else ():
            y, state = module(part, state, marks if padded else None)
            parts.append(y)
        second = torch.autograd.grad(torch.cat(parts, 1), leaf, above.to(dtype)) if parts else ()
        outputs = [y[mask] if padded else y for y in (whole, *([torch.cat(parts, 1)] if parts else []))]
        found.append([*outputs, *grads, *second])
        if dtype == torch.float32:
            assert len(kernel_calls) == (0 if padded == "holes" and module.window else 3 if module.causal else 1)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5 * max(1.0, float(b.detach().abs().max())))


@needs_kernels
def test_compilers_counters_and_transforms_see_pytorchs_operations(kernel_calls):
    module, x = long_layer().requires_grad_(False), torch.randn(2, 100, 32)
    expected = module(x)[0]
    assert len(kernel_calls) == 1
    torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x)[0], expected)
    torch.testing.assert_close(torch.func.vmap(lambda row: module(row[None])[0][0])(x), expected)
    torch.func.grad(lambda x: module(x)[0].sum())(x)
    with FlopCounterMode(display=False):
        module(x)
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
    module.dropout = 0.1
    module(x)
    assert len(kernel_calls) == 1
