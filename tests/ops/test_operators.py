"""Laws over the operators: of padding, cut and empty calls, of states that go back, and of PyTorch's own machinery."""

import functools
import itertools
from contextlib import nullcontext

import pytest
import torch
from kernel_cases import holes, results
from native_kernels import needs_kernels
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mnemos import ops
from mnemos.lab.papers.baselines.bigbird import block_sparse_attention, draw_random_blocks
from mnemos.lab.papers.baselines.reformer import draw_rotations, reformer_attention
from mnemos.native.codes import FEATURE_MAPS
from mnemos.ops.softmax_attention import softmax_attention
from mnemos.ops.window_state import Far, Sizes, window_attention
from mnemos.types import leaves

B, T, H, D, M = 3, 9, 2, 4, 5
MASK = torch.ones(B, T, dtype=torch.bool)
MASK[0, :3] = MASK[1, 4:6] = MASK[2] = False
SUMS = ("s", H, D, M), ("z", H, D)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


A = -drawn(D, M).exp()


def delta(q, k, v, beta, decay, state, **how):
    return ops.delta_rule(q, k, v, beta, decay, state, **how)


def undecayed(q, k, v, beta, state, **how):
    return ops.delta_rule(q, k, v, beta, None, state, **how)


def linear(q, k, v, s, z, **how):
    return ops.linear_attention(q, k, v, state=(s, z), **how)


def linear_of_keys(k, v, s, z, **how):
    return None, ops.linear_attention(drawn(len(k), 4, H, D), k, v, False, state=(s, z), **how)


def scan(x, dt, b, c, state, **how):
    return ops.selective_scan(x, dt, A.to(dt.dtype), b, c, None, state, **how)


def slots(k_x, v_x, state, **how):
    return None, ops.slot_write(state, drawn(len(k_x), 3, H, D), drawn(len(k_x), 3, H, D, seed=1), k_x, v_x, **how)


def relative(q, k, v, **how):
    return ops.relative_attention(q, k, v, drawn(q.shape[1], H, D), drawn(H, D), drawn(H, D), **how), None


def block_sparse(q, k, v, **how):
    blocks = draw_random_blocks(H, q.shape[1])
    return block_sparse_attention(q, k, v, blocks, block=1, **how), None


def reformer(q, v, **how):
    rotations = draw_rotations(2, H, D, 4, torch.Generator().manual_seed(0))
    return reformer_attention(q, v, rotations, 2, **how), None


def window(q, k, v, **how):
    far = Far(F.softplus, F.softplus, torch.ones(H))
    return window_attention(q, k, v, Sizes(3, 1, 0.5), far, **how)


QKV = ("q", H, D), ("k", H, D), ("v", H, M)
OPERATORS = {  # the inputs of tokens, each with the shape of one, then those of rows
    delta: ((*QKV, ("beta", H), ("decay", H, D)), (("state", H, D, M),)),
    ops.decayed_attention: ((*QKV, ("decay", H)), (("state", H, D, M),)),
    linear: (QKV, SUMS),
    linear_of_keys: (QKV[1:], SUMS),
    scan: ((("x", D), ("dt", D), ("b", M), ("c", M)), (("state", D, M),)),
    ops.short_convolution: ((("x", D),), (("state", 2, D), ("weight", 3))),
    slots: ((("k_x", H, D), ("v_x", H, M)), (("state", 3, H * M),)),
    relative: (QKV, ()),
    block_sparse: (QKV, ()),
    reformer: ((QKV[0], QKV[2]), ()),
    window: (QKV, ()),
}
WITH_BACKENDS = [delta, ops.decayed_attention, linear, linear_of_keys, scan, ops.short_convolution]
CASES = [(op, {"backend": b}) for op in WITH_BACKENDS for b in ("native", "chunked")]
CASES += [(op, {}) for op in OPERATORS if op not in WITH_BACKENDS]
OPERATORS[undecayed] = (*QKV, ("beta", H)), (("state", H, D, M),)


def name(case):
    return "-".join([case[0].__name__, *case[1].values()])


def given(op, b=B, t=T):
    """Inputs of b rows of t tokens."""
    tokens, rows = OPERATORS[op]
    found = {label: drawn(b, t, *shape, seed=i) for i, (label, *shape) in enumerate(tokens)}
    for label in {"beta", "dt"} & set(found):
        found[label] = found[label].sigmoid()
    if "decay" in found:
        found["decay"] = -found["decay"].abs()
    found |= {label: drawn(D if label == "weight" else b, *shape) for label, *shape in rows}
    return found | ({"z": found["z"].abs()} if "z" in found else {})


def loss(op, how, inputs, mask=None):
    y, state = op(**inputs, mask=mask, **how)
    parts = leaves(state) + ([] if y is None else [y if mask is None else y[mask]])
    return sum((x * drawn(*x.shape)).sum() for x in parts), parts


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_what_an_invalid_token_holds_changes_nothing(case, transformed):
    op, how = case
    found = []
    for holds in (0.0, torch.nan, torch.inf):
        inputs = given(op)
        for label, *_ in OPERATORS[op][0]:
            inputs[label][~MASK] = holds
        if transformed:
            grads, parts = torch.func.grad(lambda x: loss(op, how, x, MASK), has_aux=True)(inputs)
        else:
            inputs = {label: x.requires_grad_() for label, x in inputs.items()}
            total, parts = loss(op, how, inputs, MASK)
            total.backward()
            grads = {label: x.grad for label, x in inputs.items()}
        for label, *_ in OPERATORS[op][0]:
            assert not grads[label][~MASK].any(), label
        found.append([*parts, *grads.values()])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# An encoder's call of nothing returns its values; a window has at least one token.
FROM_NOTHING = [c for c in CASES if c[0] not in (block_sparse, reformer, window)]


@pytest.mark.parametrize("sizes", [(2, 0), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("case", FROM_NOTHING, ids=name)
def test_calls_of_no_tokens_or_no_rows_have_gradients_of_zeros(case, sizes):
    op, how = case
    inputs = {label: x.requires_grad_() for label, x in given(op, *sizes).items()}
    total, parts = loss(op, how, inputs)
    assert all(x.isfinite().all() for x in parts)
    if sizes == (2, 0) and op in WITH_BACKENDS and op is not linear_of_keys:  # a state goes through
        assert torch.equal(parts[0], inputs["s" if op is linear else "state"])
    total.backward()
    for label, x in inputs.items():
        assert x.grad is not None, label
        state = label in ("state", "s", "z")
        assert x.grad.any() == (state and sizes == (2, 0)), label  # a state goes through


NAMES = {linear: "linear_attention", linear_of_keys: "linear_attention", delta: "delta_rule", scan: "selective_scan"}
OFTEN = (linear_of_keys, "chunked"), (ops.short_convolution, "chunked")  # PyTorch's operations have all derivatives
ONCE = [c for c in CASES if c[1] and (c[0], c[1]["backend"]) not in OFTEN]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("case", ONCE, ids=name)
def test_a_second_derivative_is_refused_by_the_operators_own_name(case, counted):
    op, how = case
    inputs = {label: x.requires_grad_() for label, x in given(op).items()}
    # A counter sees registered operators, which eager calls are not.
    with FlopCounterMode(display=False) if counted else nullcontext():
        gradients = torch.autograd.grad(loss(op, how, inputs)[0], list(inputs.values()), create_graph=True)
        with pytest.raises(RuntimeError, match=f"^{NAMES.get(op, op.__name__)} is differentiable once"):
            sum(x.square().sum() for x in gradients).backward()


STATEFUL = [c for c in CASES if c[1] and c[0] is not linear_of_keys]


@pytest.mark.parametrize("case", STATEFUL, ids=name)
def test_a_call_may_be_cut_anywhere(case):
    """Also into calls of no token, and where a chunk ends; with padding, and gradients through the states."""
    op, how = case
    tokens, rows = ([label for label, *_ in labels] for labels in OPERATORS[op])
    mask, found = holes(B, 70), []
    for cuts in ([0, 70], [0, 1, 2, 2, 63, 64, 70]):
        inputs = {label: x.requires_grad_() for label, x in given(op, t=70).items()}
        parts, state = [], [inputs[label] for label in rows]
        for a, b in itertools.pairwise(cuts):
            part = {label: inputs[label][:, a:b] for label in tokens} | dict(zip(rows, state, strict=True))
            y, after = op(**part, mask=mask[:, a:b], **how)
            state = leaves(after) + state[len(leaves(after)) :]  # a weight stays
            parts.append(y)
        outputs = [torch.cat(parts, 1)[mask], *leaves(after)]
        total = sum((x * drawn(*x.shape)).sum() for x in outputs)
        found.append([*outputs, *torch.autograd.grad(total, list(inputs.values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * max(1.0, float(b.detach().abs().max())))


@pytest.mark.parametrize("case", STATEFUL, ids=name)
def test_what_is_passed_in_stays_and_an_output_may_be_changed(case):
    op, how = case
    inputs = {label: x.requires_grad_() for label, x in given(op, t=70).items()}
    copies = [x.detach().clone() for x in inputs.values()]
    first = next(iter(inputs.values()))
    (once,) = torch.autograd.grad(op(**inputs, **how)[0].sum(), first)
    y, _ = op(**inputs, **how)
    y.mul_(2)  # the backward does not read it
    torch.testing.assert_close(torch.autograd.grad(y.sum(), first)[0], 2 * once)
    assert all(map(torch.equal, inputs.values(), copies))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("case", [*STATEFUL, *((undecayed, {"backend": b}) for b in ("native", "chunked"))], ids=name)
@torch.no_grad()
def test_what_is_not_finite_reaches_no_earlier_token_no_other_head_and_no_other_row(case, value):
    op, how = case
    clean, _ = op(**given(op, t=70), **how)
    for label in {"q", "k", "v", "x", "b", "c"} & {label for label, *_ in OPERATORS[op][0]}:
        inputs = given(op, t=70)
        inputs[label][0, 21].view(-1)[1] = value
        y, state = op(**inputs, **how)
        torch.testing.assert_close(y[:, :21], clean[:, :21])
        torch.testing.assert_close(y[1:], clean[1:])
        assert not y[0, 21].isfinite().all()
        if label in "qkv":
            torch.testing.assert_close(y[:, :, 1:], clean[:, :, 1:])
        if label in "qc":
            torch.testing.assert_close(y[:, 22:], clean[:, 22:])
        elif op is not ops.short_convolution:
            assert not y[0, 69].isfinite().all()
            assert not leaves(state)[0][0].isfinite().all()


# ---- PyTorch's own machinery ----


@pytest.mark.parametrize("t", [1, 20])
@pytest.mark.parametrize("case", [c for c in CASES if c[1]], ids=name)
def test_transforms_have_the_derivatives_of_a_backward(case, t):
    op, how = case
    inputs = given(op, t=t)
    of_rows = torch.vmap(torch.func.grad(lambda x: loss(op, how, x)[0]), randomness="same")
    found = of_rows({label: torch.stack([x, x / 2]) for label, x in inputs.items()})
    for number, part in enumerate((inputs, {label: x / 2 for label, x in inputs.items()})):
        plain = {label: x.requires_grad_() for label, x in part.items()}
        loss(op, how, plain)[0].backward()
        for label, x in plain.items():
            torch.testing.assert_close(found[label][number], x.grad, rtol=1e-4, atol=1e-4, msg=label)


@needs_kernels
@pytest.mark.parametrize("case", [c for c in STATEFUL if c[1]["backend"] == "native"], ids=name)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@torch.no_grad()
def test_a_trace_computes_other_inputs(case):
    """torch.jit.trace records operators: it does not see a kernel that is called directly."""
    op, how = case
    inputs = given(op)

    def call(*x):
        return tuple(leaves(op(**dict(zip(inputs, x, strict=True)), **how)))

    other = [x * 0.5 for x in inputs.values()]
    for a, b in zip(torch.jit.trace(call, tuple(inputs.values()))(*other), call(*other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("case", STATEFUL, ids=name)
def test_compiled_whole_equals_eager(case, monkeypatch):
    op, how = case
    monkeypatch.setattr("mnemos.ops.delta.chunked.CHUNK", 2)  # the halves of a chunk take PyTorch's compiler seconds
    torch._dynamo.reset()
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for t in (70 if how["backend"] == "native" else 3, 1):
        dtype = torch.float32 if how["backend"] == "native" else torch.float64
        inputs = {label: x.to(dtype).requires_grad_() for label, x in given(op, t=t).items()}
        both = (results(call, inputs, mask=holes(B, t), **how) for call in (compiled, op))
        for a, b in zip(*both, strict=True):
            assert torch.equal(a, b) if how["backend"] == "native" else torch.allclose(a, b, rtol=1e-9, atol=1e-9)


VALID = holes(B, 70)
REGISTERED = {  # PyTorch's operator: ours, its arguments from ours, and the inputs that may be of half precision
    "delta_rule": (delta, lambda q, k, v, beta, decay, state: (q, k, v, beta, decay, state, D**-0.5), "qkv"),
    "short_convolution": (
        functools.partial(ops.short_convolution, mask=VALID, activation="silu"),
        lambda x, weight, state: (x, weight, None, state, VALID, None, "silu"),
        ("x", "weight", "state"),
    ),
    "selective_scan": (
        functools.partial(scan, mask=VALID),
        lambda x, dt, b, c, state: (x, dt, A, b, c, None, state, VALID, None),
        "x",
    ),
    "linear_attention": (linear, lambda q, k, v, s, z: (q, k, v, s, z, None, FEATURE_MAPS["elu"], 1e-6), "qkv"),
    "linear_attention_bidirectional": (
        functools.partial(linear, causal=False, mask=VALID),
        lambda q, k, v, s, z: (q, k, v, s, z, VALID, FEATURE_MAPS["elu"], 1e-6),
        "qkv",
    ),
    "softmax_attention": (
        functools.partial(softmax_attention, mask=VALID, window=5, scale=0.5),
        lambda q, k, v: (q, k, v, VALID, True, 5, 0.5),
        "",
    ),
}


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", REGISTERED)
def test_the_operators_are_registered_as_pytorch_wants_them(label, dtype):
    """And compute what the calls compute that skip PyTorch's dispatcher."""
    ours, arguments, half = REGISTERED[label]
    kinds = {**{op.__name__: op for op in OPERATORS}, "softmax_attention": relative}
    inputs = given(kinds[getattr(ours, "func", ours).__name__], t=70)
    inputs = {name: x.to(dtype if name in half else torch.float32) for name, x in inputs.items()}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    operator = getattr(torch.ops.mnemos, label)
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operator, arguments(**inputs), test_utils=checks)
    count = len(leaves(ours(**inputs)))
    both = results(lambda **x: operator(*arguments(**x))[:count], inputs), results(ours, inputs)
    assert all(map(torch.equal, *both))
