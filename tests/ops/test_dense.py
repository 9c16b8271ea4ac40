"""Dense layers by oneDNN: values and gradients of any shapes and strides, and what stays with PyTorch."""

import copy
import functools
import json
import random
import re

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import kept_bytes
from sources import SOURCE
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mnemos
from mnemos import InputError, _compat
from mnemos.ops import dense, dense_layer
from mnemos.ops.dense_layer import FIXED, NEVER, Choice, Linear, choice, using

needs_onednn = pytest.mark.skipif(dense_layer.why_no_onednn() != "", reason="this PyTorch has no oneDNN")
pytestmark = needs_onednn


@pytest.fixture
def calls(monkeypatch):
    """What oneDNN multiplies: the shapes of x and of the weight."""
    seen, product = [], dense_layer._product

    def counted(x, weight, bias):
        seen.append((tuple(x.shape), tuple(weight.shape)))
        return product(x, weight, bias)

    monkeypatch.setattr(dense_layer, "_product", counted)
    return seen


@pytest.fixture
def always(monkeypatch):
    """oneDNN computes products of any size, and their gradients."""
    monkeypatch.setattr(dense_layer, "_few_rows", lambda x: False)
    monkeypatch.setattr(dense_layer, "WIDE", 0)
    with using(Choice(1, 1, 1)):
        yield


# ---- values and gradients ----


def oracle(x, weight, bias, dy):
    """y, dx, dW and db, in float64: the sums as they are written."""
    x, weight, dy = x.double(), weight.double(), dy.double()
    y = torch.einsum("...i,oi->...o", x, weight)
    rows, columns = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dx, dw = torch.einsum("...o,oi->...i", dy, weight), torch.einsum("ro,ri->oi", columns, rows)
    return [y if bias is None else y + bias.double(), dx, dw, columns.sum(0)]


def tensor(draw, *shape):
    """Numbers of this shape: contiguous, or a view of more, or of fewer, numbers."""
    view = draw.choice(["whole", "whole", "transposed", "expanded", "part", "part of the last axis", "every second"])
    if view == "transposed":
        return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    if view == "expanded" and shape[0]:
        return torch.randn(1, *shape[1:]).expand(shape)
    if view == "part":
        return torch.randn(shape[0] + 3, *shape[1:])[2 : 2 + shape[0]]
    if view == "part of the last axis":
        return torch.randn(*shape[:-1], shape[-1] + 5)[..., 1 : 1 + shape[-1]]
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2] if view == "every second" else torch.randn(shape)


def check(seed):
    """Values and gradients of a random call, beside PyTorch's own."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    width, out = (draw.choice([1, 2, 16, 64, draw.randint(1, 300)]) for _ in range(2))
    leading = [draw.choice([0, 1, 1, draw.randint(1, 9), draw.randint(1, 40)]) for _ in range(draw.randint(0, 3))]
    x, weight = tensor(draw, *leading, width), tensor(draw, out, width)
    if draw.randint(0, 9) == 0:
        x = weight  # of one storage
    bias, dy = draw.choice([None, tensor(draw, out)]), tensor(draw, *x.shape[:-1], out)
    needed = [draw.choice([True, True, False]) for _ in range(3)]
    leaves = [
        None if z is None else z.detach().requires_grad_(n) for z, n in zip((x, weight, bias), needed, strict=True)
    ]
    wanted = [z for z in leaves if z is not None and z.requires_grad]

    def run(function):
        y = function(*leaves)
        grads = torch.autograd.grad(y, wanted, dy) if wanted else ()
        return [y.detach(), *grads]

    def of_wanted(y, *grads):
        return [y, *[grad for z, grad in zip(leaves, grads, strict=True) if z is not None and z.requires_grad]]

    right = of_wanted(*oracle(x, weight, bias, dy))
    magnitudes = of_wanted(*oracle(x.abs(), weight.abs(), None if bias is None else bias.abs(), dy.abs()))
    for one, theirs, true, sums in zip(run(dense), run(F.linear), right, magnitudes, strict=True):
        assert one.shape == theirs.shape == true.shape
        if not torch.equal(one, theirs):  # those of PyTorch itself may have larger errors
            # A few numbers may all be sums that cancel, without an error in proportion to them.
            largest = float((true if true.numel() >= 64 else sums).abs().max())
            error, own = (float((z.double() - true).abs().max()) for z in (one, theirs))
            assert error <= max(3 * own, 1e-6 * largest), seed
            assert error <= 2e-6 * largest, seed


@pytest.mark.parametrize("part", [*range(4), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(4, 100))])
def test_values_and_gradients_of_any_shape_and_stride(part, always):
    for seed in range(50 * part, 50 * (part + 1)):
        check(seed)


def tensors(rows=3, width=20, out=7, grad=True):
    g = torch.Generator().manual_seed(0)
    shapes = (rows, width), (out, width), (out,)
    return tuple(torch.randn(shape, generator=g).requires_grad_(grad) for shape in shapes)


def test_onednn_computes_the_product_and_both_gradients(always, calls):
    x, weight, bias = tensors()
    dense(x, weight, bias).sum().backward()  # the gradient is one number, expanded
    assert calls == [((3, 20), (7, 20)), ((7, 3), (20, 3))]
    del calls[:]
    dense(x, weight, bias).square().sum().backward()
    assert calls == [((3, 20), (7, 20)), ((3, 7), (20, 7)), ((7, 3), (20, 3))]


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_only_what_a_gradient_needs_is_kept(always, needed):
    x, weight, bias = tensors()
    x.requires_grad_(needed[0]), weight.requires_grad_(needed[1])
    read = [t for t, n in ((x, needed[1]), (weight, needed[0])) if n]
    assert kept_bytes(lambda: dense(x, weight, bias)) == sum(4 * t.numel() for t in read)
    dense(x, weight, bias).square().sum().backward()
    assert [t.grad is not None for t in (x, weight, bias)] == [*needed, True]


def test_nothing_of_an_earlier_weight_is_kept(always):
    x, weight, bias = tensors(grad=False)
    before = dense(x, weight, bias)
    weight.mul_(2)
    torch.testing.assert_close(dense(x, weight, bias), 2 * (before - bias) + bias)
    weight.requires_grad_()
    y = dense(x.requires_grad_(), weight, bias)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_errors_are_those_of_pytorch(always):
    x, weight, bias = tensors()
    mixed = (x.double(), weight, bias), (x, weight, bias.double())
    for wrong in ((x, weight[:, 1:], bias), (x, weight, bias[1:]), *mixed):
        with pytest.raises(RuntimeError) as theirs:
            F.linear(*wrong)
        with pytest.raises(RuntimeError) as found:
            dense(*wrong)
        assert str(found.value) == str(theirs.value)


# ---- derivatives of derivatives, and all that rewrites or counts operations ----


def test_second_derivatives(always):
    def penalty(function):
        x, weight, bias = tensors()
        y = function(x, weight, bias)
        grads = torch.autograd.grad(y.pow(3).sum(), [x, weight, bias], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), [x, weight, bias])

    for found, expected in zip(penalty(dense), penalty(F.linear), strict=True):
        assert (found - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.filterwarnings("ignore")  # of what is deprecated
def test_transforms_and_modes_see_pytorchs_operation(always, calls):
    x, weight, bias = tensors(grad=False)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(torch.vmap(dense, (0, None, None))(x, weight, bias), expected)
    torch.func.grad(lambda w: dense(x, w, bias).sum())(weight)
    tangent = torch.func.jvp(lambda z: dense(z, weight, bias), (x,), (x,))[1]
    torch.testing.assert_close(tangent, x @ weight.t())
    with torch.autograd.forward_ad.dual_level():
        dual = dense(torch.autograd.forward_ad.make_dual(x, x), weight, bias)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, x @ weight.t())
    with torch.autocast("cpu"):
        assert dense(x, weight, bias).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        dense(x, weight.clone().requires_grad_(), bias).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 3 * 20 * 7
    for where in ("meta", torch.device("cpu")):
        with torch.device(where):  # a mode, too
            assert dense(x, weight, bias).shape == (3, 7)
    assert dense(x.to("meta"), weight.to("meta")).is_meta
    with torch.backends.mkldnn.flags(enabled=False):
        dense(x, weight, bias)
    for wide in (torch.float64, torch.bfloat16):
        assert dense(x.to(wide), weight.to(wide)).dtype == wide
    traced = torch.jit.trace(dense, (x, weight, bias), check_trace=False)
    assert torch.equal(traced(x, weight, bias), expected)
    assert calls == []


@pytest.mark.slow
def test_compiled_and_exported(always, calls):
    layer = Linear(20, 7)
    x = tensors()[0]
    expected = F.linear(x, layer.weight, layer.bias)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    program = torch.export.export(layer, (x.detach(),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.testing.assert_close(program.module()(x[:2]), expected[:2])
    assert calls == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(always, calls, reentrant):
    layers, x = nn.Sequential(Linear(20, 30), nn.ReLU(), Linear(30, 20)), tensors()[0]
    expected = torch.autograd.grad(layers(x).square().sum(), list(layers.parameters()))
    del calls[:]
    checkpoint(layers, x, use_reentrant=reentrant).square().sum().backward()
    assert len(calls) == 8  # two products, the same again, and four gradients
    for parameter, grad in zip(layers.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


# ---- the layer ----


def test_the_layer_is_a_linear_layer(always, calls):
    torch.manual_seed(1)
    plain = nn.Linear(20, 7)
    torch.manual_seed(1)
    layer = Linear(20, 7)
    assert repr(layer) == repr(plain)
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), plain.parameters(), strict=True))
    x = tensors(grad=False)[0]
    torch.testing.assert_close(copy.deepcopy(layer)(x), plain(x))
    assert len(calls) == 1
    layer.__class__ = nn.Linear
    assert torch.equal(layer(x), plain(x))
    assert len(calls) == 1


# ---- the choice ----


def forget(patch):
    """What was measured, or read from the variable."""
    patch.setattr(dense_layer._state, "choice", None)
    patch.setattr(dense_layer._state, "least", dense_layer.LEAST)


@pytest.fixture
def unmeasured(monkeypatch):
    """As in a new process, without the variable."""
    monkeypatch.delenv(dense_layer.VARIABLE, raising=False)
    forget(monkeypatch)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return monkeypatch


def test_all_layers_of_this_library_are_dense():
    plain = {path.name for path in SOURCE.rglob("*.py") if re.search(r"nn\.Linear\(", path.read_text())}
    assert plain == {"gated_cache.py"}  # where a Projection takes its initial values from one


def test_the_choice_is_measured_once(unmeasured, threads):
    found = iter([2**25, 2**24, 2**26, 2**24, NEVER])
    unmeasured.setattr(dense_layer, "_least_gain", lambda *_: next(found))
    for number, least in ((2, 2**23), (1, NEVER)):  # one row alone, for which one thread has nothing to gain
        threads(number)
        forget(unmeasured)
        assert choice() == choice() == Choice(least, 2**24, 2**26 if number == 2 else NEVER)
    unmeasured.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    forget(unmeasured)
    assert choice() == FIXED["blas"]


def test_a_gain_begins_where_a_call_costs_less_than_it_saves(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(dense_layer.time, "perf_counter", lambda: now[0])
    calls = [functools.partial(lambda seconds: now.__setitem__(0, now[0] + seconds), s) for s in (6e-5, 1e-4, 1.07e-4)]
    assert dense_layer._least_gain(2**24, calls[0], calls[1], 3.5e-5) == 2**24  # half the time, 45 µs more a call
    assert dense_layer._least_gain(2**24, calls[0], calls[1], 9.5e-5) == 2**26
    assert dense_layer._least_gain(2**24, calls[2], calls[1], 0.0) == NEVER  # too little to be sure of
    assert dense_layer._least_gain(64, calls[0], calls[1], 0.0) == dense_layer.LEAST


def test_the_variable_fixes_the_choice(unmeasured, threads, calls):
    threads(2)
    unmeasured.setattr(dense_layer, "measure", lambda: pytest.fail("measured"))
    large, small, row = torch.ones(64, 512), torch.ones(4, 512), torch.ones(1, 2048)
    weight, wide = torch.ones(256, 512), torch.ones(512, 2048)
    dense(small, weight)  # nothing that needs a choice
    for name, computed in (("onednn", 2), ("blas", 0)):
        unmeasured.setenv(dense_layer.VARIABLE, name)
        forget(unmeasured)
        del calls[:]
        dense(large, weight), dense(row, wide), dense(small, weight)
        assert len(calls) == computed
        assert mnemos.ops.which("dense", large, weight) == name
        assert mnemos.ops.which("dense", small, weight) == "blas"
    threads(1)
    assert mnemos.ops.which("dense", row, wide) == "blas"
    assert mnemos.ops.backends("dense") == ["onednn", "blas"]
    unmeasured.setenv(dense_layer.VARIABLE, "mkl")
    forget(unmeasured)
    with pytest.raises(InputError, match="MNEMOS_DENSE: expected blas or onednn, found 'mkl'"):
        dense(large, weight)


def test_gradients_of_few_rows_and_narrow_weights_are_pytorchs(threads, calls):
    threads(2)
    weight = torch.ones(2048, 1024, requires_grad=True)
    with using(FIXED["onednn"]):
        for rows in (16, 17):
            dense(torch.ones(rows, 1024, requires_grad=True), weight).square().sum().backward()
        forward = [((rows, 1024), (2048, 1024)) for rows in (16, 17)]
        assert calls == [*forward, ((17, 2048), (1024, 2048)), ((2048, 17), (1024, 17))]
        dense(torch.ones(0, 1024, requires_grad=True), weight).sum().backward()  # no row of a large weight
        assert len(calls) == 4
        del calls[:]
        narrow = torch.ones(64, 64, requires_grad=True)
        dense(torch.ones(2048, 64, requires_grad=True), narrow).square().sum().backward()
        assert len(calls) == 2


def test_a_choice_is_written_and_read():
    for one in (*FIXED.values(), Choice(NEVER, 2**22, 2**24)):
        assert Choice.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Choice.from_json({}) == FIXED["blas"]
    for wrong in ([1], {"one_row": 3}, {"few_rows": "many"}, {"many_rows": -1}, {"many_rows": True}):
        with pytest.raises(InputError, match="expected sizes"):
            Choice.from_json(wrong)


def test_a_pytorch_without_onednn_computes_all_by_itself(unmeasured):
    unmeasured.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert _compat.dense_product() is None
    unmeasured.setattr(dense_layer, "_product", None)
    x, weight, bias = torch.randn(64, 512), torch.randn(256, 512), torch.randn(256)
    assert choice() == FIXED["blas"]
    for chosen in FIXED.values():
        with using(chosen):
            assert torch.equal(dense(x, weight, bias), F.linear(x, weight, bias))
            assert mnemos.ops.which("dense", x, weight) == "blas"
    assert mnemos.ops.backends("dense") == ["blas"]
