"""Sequences of unequal lengths, packed: against the equations, a sequence at a time, on every backend."""

import functools
import itertools

import pytest
import torch

import mnemos
from mnemos.ops import linear_attention_varlen
from mnemos.ops.linear import LinearState
from mnemos.ops.linear.feature_maps import favor, random_projection
from mnemos.ops.linear.reference import reference_elu, reference_linear_attention, reference_polynomial, reference_relu
from mnemos.types import InputError

H, D, M = 2, 5, 4
LENGTHS = [5, 0, 40, 1]
OFFSETS = torch.tensor([0, *itertools.accumulate(LENGTHS)])
MAPS = {"elu": reference_elu, "relu": reference_relu, "polynomial": reference_polynomial}
PLAIN = mnemos.ops.backends("linear_attention")


def inputs(dtype, features=D):
    g = torch.Generator().manual_seed(0)
    total, n = sum(LENGTHS), len(LENGTHS)
    q, k, v = (torch.randn(H, total, w, generator=g).to(dtype).transpose(0, 1) for w in (D, D, M))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    s = torch.rand(n, H, features, M, generator=g, dtype=wide)
    z = torch.rand(n, H, features, generator=g, dtype=wide)
    return [x.detach().requires_grad_() for x in (q, k, v, s, z)]


def weights(outputs):
    g = torch.Generator().manual_seed(9)
    return [torch.randn(o.shape, generator=g).to(o.dtype) for o in outputs]


@pytest.mark.each_value
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("backend", [*PLAIN, "auto"])
def test_equals_the_equations(backend, name):
    dtype = torch.float32 if backend == "native" else torch.float64
    if name == "polynomial":  # its D(D+1)/2 features are not the reference's D²: from a state of nothing
        q, k, v, _, _ = given = inputs(dtype)
        given, state = given[:3], None
    else:
        q, k, v, s, z = given = inputs(dtype)
        state = LinearState(s, z)
    y, end = linear_attention_varlen(q, k, v, OFFSETS, name, state, eps=0.1, backend=backend)
    exact = [x.detach().double().requires_grad_() for x in given]
    rows = []
    for i, (a, b) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        if a == b:
            continue
        before = None if state is None else (exact[3][i : i + 1], exact[4][i : i + 1])
        part = [x[None, a:b] for x in exact[:3]]
        rows.append(reference_linear_attention(*part, phi=MAPS[name], state=before, eps=0.1))
    wanted = torch.cat([row[0][0] for row in rows])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad(y, given, weights([y]))
    expected = torch.autograd.grad(wanted, exact, [w.double() for w in weights([y])], materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    if state is not None:
        used = [i for i, length in enumerate(LENGTHS) if length]
        torch.testing.assert_close(end.s[used].double(), torch.cat([row[1] for row in rows]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(end.z[used].double(), torch.cat([row[2] for row in rows]), rtol=1e-4, atol=1e-4)
        assert torch.equal(end.s[1], state.s[1])  # the sequence without a token


@pytest.mark.parametrize("backend", PLAIN)
def test_a_cut_sequence_is_resumed_from_its_state(backend):
    q, k, v, _, _ = inputs(torch.float32)
    projection = random_projection(7, D, torch.Generator().manual_seed(0))
    phi = functools.partial(favor, projection=projection)
    whole, end = linear_attention_varlen(q, k, v, OFFSETS, phi, backend=backend)
    first = torch.cat([torch.arange(0, 3), torch.arange(5, 25)])
    rest = torch.cat([torch.arange(3, 5), torch.arange(25, 46)])
    a, state = linear_attention_varlen(*(x[first] for x in (q, k, v)), torch.tensor([0, 3, 3, 23, 23]), phi)
    b, state = linear_attention_varlen(*(x[rest] for x in (q, k, v)), torch.tensor([0, 2, 2, 22, 23]), phi, state)
    torch.testing.assert_close(a, whole[first])
    torch.testing.assert_close(b, whole[rest])
    torch.testing.assert_close(state.s, end.s)


def test_a_wrong_call_says_what_was_expected():
    q, k, v, s, z = inputs(torch.float32)
    wrong = {
        "rise from 0 to 46": (q, k, v, torch.tensor([0, 9, 5, 46])),
        "found \\[0, 45\\]": (q, k, v, torch.tensor([0, 45])),
        "int32 or int64": (q, k, v, torch.tensor([0.0, 46.0])),
        "\\[total, H, D\\]": (q[None], k, v, OFFSETS),
        "expected k": (q, k[:-1], v, OFFSETS),
        "for 4 sequences": (q, k, v, OFFSETS, "elu", (s[:2], z[:2])),
        "did you mean 'relu'": (q, k, v, OFFSETS, "rely"),
    }
    for message, given in wrong.items():
        with pytest.raises(InputError, match=message):
            linear_attention_varlen(*given)
