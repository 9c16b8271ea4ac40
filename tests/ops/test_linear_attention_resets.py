"""Resets of causal linear attention, as packed sequences need them: against the equations, on every backend."""

import functools
import itertools

import pytest
import torch
from linear_attention_cases import B, D, compare, holes, inputs

import mnemos
from mnemos.ops import linear_attention, rewindable
from mnemos.ops.linear.feature_maps import favor, random_projection
from mnemos.ops.linear.reference import reference_elu, reference_linear_attention, reference_polynomial, reference_relu
from mnemos.types import InputError

MAPS = {"elu": reference_elu, "relu": reference_relu, "polynomial": reference_polynomial}
BACKENDS = mnemos.ops.backends("linear_attention")
T = 70


def starts(t=T):
    """Rare and frequent ones, two one after the other, and the first token of a row."""
    found = torch.rand(B, t, generator=torch.Generator().manual_seed(3)) < torch.tensor([[0.03], [0.4]])
    found[:, 0] = torch.tensor([False, True])  # row 0 reads its first state
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_resets_equal_the_equations(backend, name, masked):
    dtype = torch.float32 if backend == "native" else torch.float64
    q, k, v, state = inputs(T, dtype=dtype)
    if name == "polynomial":  # its D(D+1)/2 features are not the reference's D²: from a state of nothing
        state = None
    mask = holes(T) if masked else None
    dirty = [x if mask is None else torch.where(mask[..., None, None], x, torch.nan) for x in (k, v)]
    y, end = linear_attention(q, *dirty, True, name, state, mask, 0.1, backend, resets=starts())
    wanted, *sums = reference_linear_attention(
        q, k, v, phi=MAPS[name], state=state, mask=mask, eps=0.1, resets=starts()
    )
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    if state is None:
        compare((y,), (wanted,), (q, k, v), tolerance)
    else:
        compare((y, *end), (wanted, *sums), (q, k, v, *state), tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_equal_each_alone_and_a_cut_call(backend):
    q, k, v, _ = inputs(T, dtype=torch.float32)
    phi = functools.partial(favor, projection=random_projection(7, D, torch.Generator().manual_seed(0)))
    resets, cuts = torch.zeros(B, T, dtype=torch.bool), (0, 5, 6, 40, T)
    resets[0, list(cuts[:-1])] = True
    resets[1, 33] = True
    whole, end = linear_attention(q, k, v, feature_map=phi, backend=backend, resets=resets)
    for a, b in itertools.pairwise(cuts):
        alone, last = linear_attention(*(x[:1, a:b] for x in (q, k, v)), feature_map=phi, backend=backend)
        torch.testing.assert_close(whole[:1, a:b], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end.s[:1], last.s, rtol=1e-4, atol=1e-4)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 5, 34, 34, 35, T)):
        here = (x[:, a:b] for x in (q, k, v))
        y, state = linear_attention(*here, feature_map=phi, state=state, backend=backend, resets=resets[:, a:b])
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    for a, b in zip(state, end, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_half_precision_is_summed_in_float32():
    q, k, v, _ = inputs(T, dtype=torch.bfloat16)
    y, end = linear_attention(q, k, v, resets=starts())
    wanted, s, _ = reference_linear_attention(q, k, v, resets=starts())
    assert (y.dtype, end.s.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(end.s.double(), s, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kept", [(20, 70), (0, 33)])
def test_the_state_goes_back_over_resets(kept):
    q, k, v, state = inputs(T)
    mask, resets = holes(T), starts()
    with rewindable() as calls:
        _, end = linear_attention(q, k, v, state=state, mask=mask, resets=resets)
    found = calls.rewind(end, kept)
    for row, n in enumerate(kept):
        at = slice(row, row + 1)
        _, wanted = linear_attention(
            *(x[at, :n] for x in (q, k, v)),
            state=tuple(x[at] for x in state),
            mask=mask[at, :n],
            resets=resets[at, :n],
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a[at], b, rtol=0, atol=1e-9)


def test_resets_that_do_not_fit_are_refused():
    q, k, v, _ = inputs(7)
    for resets, causal in ((starts(8), True), (starts(7).float(), True), (starts(7), False)):
        with pytest.raises(InputError):
            linear_attention(q, k, v, causal, resets=resets)
