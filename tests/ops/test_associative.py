"""Associative memory against its equations, pair by pair: values, gradients, an empty memory, a key written again."""

import itertools

import pytest
import torch
from kernel_cases import agree

from mnemos.ops import associative_read, associative_write, dpfp
from mnemos.ops.associative.reference import reference_associative_read, reference_associative_write, reference_dpfp
from mnemos.types import InputError


def inputs(b=2, f=5, m=3, t=4, seed=0):
    """matrix, normaliser, keys of any length, values, beta."""
    g = torch.Generator().manual_seed(seed)
    matrix, keys, values = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((b, m, f), (b, t, f), (b, m, t))
    )
    normaliser, beta = (torch.rand(*s, generator=g, dtype=torch.float64) for s in ((b, f), (b, t)))
    return [x.detach().requires_grad_() for x in (matrix.mT, 0.7 * normaliser, keys, values.mT, beta)]


def features(keys):
    """Of length 1, and the last of zeros."""
    found = torch.nn.functional.normalize(keys.abs() + 0.1, dim=-1)
    return torch.cat([found[:, :-1], torch.zeros_like(found[:, -1:])], 1) if keys.shape[1] > 1 else found


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("sizes", [(2, 5, 3, 4), (1, 1, 1, 1), (3, 6, 1, 2)])
def test_reads_and_writes_and_their_gradients_are_the_equations(sizes, bounded):
    given = dict(zip(("matrix", "normaliser", "keys", "values", "beta"), inputs(*sizes), strict=True))

    def both(write, read):
        def call(matrix, normaliser, keys, values, beta):
            known = features(keys)
            after = write(matrix, normaliser, known, values, beta, bounded)
            return *after, read(matrix, normaliser, known, bounded)

        return call

    ours, theirs = (associative_write, associative_read), (reference_associative_write, reference_associative_read)
    agree(both(*ours), both(*theirs), given, 1e-12)


@pytest.mark.parametrize("nu", [1, 3])
def test_the_features_are_the_equations_and_have_length_one(nu):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    ours, theirs = dpfp(x, nu), reference_dpfp(x, nu)
    close(ours, theirs)
    close(ours.norm(dim=-1), torch.ones(2, 3))
    assert ours.min() == 0  # an entry and its negative are never both above 0
    up = torch.randn(ours.shape, dtype=torch.float64)
    close(*(torch.autograd.grad((y * up).sum(), x)[0] for y in (ours, theirs)), 1e-10)
    zero = torch.zeros(1, 4, requires_grad=True)
    dpfp(zero, nu).sum().backward()
    assert not dpfp(zero, nu).any()
    assert zero.grad.isfinite().all()
    assert dpfp(x.bfloat16(), nu).dtype == torch.float32


@pytest.mark.parametrize("bounded", [True, False])
def test_an_empty_memory_reads_as_zero_and_a_key_written_again_gets_its_new_value(bounded):
    tolerance = 1e-12 if bounded else 1e-4  # as published a denominator has 10⁻⁵ more
    matrix, normaliser = torch.zeros(1, 6, 2).double(), torch.zeros(1, 6).double()
    keys, one = torch.eye(6).double()[None], torch.ones(1, 1).double()
    assert not associative_read(matrix, normaliser, keys, bounded).any()
    first, second, other = (torch.tensor([[[a, b]]]).double() for a, b in ((1, 2), (-3, 5), (7, 7)))
    after = associative_write(matrix, normaliser, keys[:, :1], first, one, bounded)
    after = associative_write(*after, keys[:, 3:4], other, one, bounded)
    close(associative_read(*after, keys[:, :1], bounded), first, tolerance)
    again = associative_write(*after, keys[:, :1], second, one, bounded)
    close(associative_read(*again, keys[:, :1], bounded), second, tolerance)
    close(associative_read(*again, keys[:, 3:4], bounded), other, tolerance)
    close(again[1], after[1])  # γ = 0
    half = associative_write(*after, keys[:, :1], second, one / 2, bounded)
    close(associative_read(*half, keys[:, :1], bounded), (first + second) / 2, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_write_multiplies_what_is_held_by_at_most_one_and_adds_at_most_its_values(dtype):
    g = torch.Generator().manual_seed(3)
    # Many equal keys, keys that share one feature only, and keys of any kind: the cases that as published multiply A.
    alike, sparse, any_kind = torch.ones(1, 16, 8), torch.eye(8)[None] + 1e-4, torch.rand(1, 16, 8, generator=g)
    for keys in (alike, sparse, any_kind, torch.cat([alike, sparse], 1)):
        keys = torch.nn.functional.normalize(keys, dim=-1).to(dtype)
        values, beta = torch.randn(1, keys.shape[1], 3, generator=g).to(dtype), torch.ones_like(keys[..., 0])
        for scale, size in itertools.product((0.0, 0.01, 1.0, 30.0), (0.0, 1.0)):
            matrix = torch.randn(1, 8, 3, generator=g).to(dtype)
            normaliser = scale * torch.rand(1, 8, generator=g).to(dtype)
            for _ in range(3):
                most = torch.linalg.matrix_norm(matrix, 2) + size * values.norm(dim=-1).sum()
                matrix, normaliser = associative_write(matrix, normaliser, keys, size * values, beta)
                assert torch.linalg.matrix_norm(matrix, 2) <= most * (1 + 1e-6)


def test_refuses_shapes_that_do_not_fit():
    matrix, normaliser, keys, values, beta = (x.detach() for x in inputs())
    for wrong in (
        lambda: associative_read(matrix, normaliser[:, 1:], keys),
        lambda: associative_read(matrix, normaliser, keys[..., 1:]),
        lambda: associative_write(matrix, normaliser, keys, values[:, 1:], beta),
        lambda: associative_write(matrix, normaliser, keys, values, beta[..., None]),
        lambda: dpfp(keys, 0),
    ):
        with pytest.raises(InputError, match="expected"):
            wrong()
