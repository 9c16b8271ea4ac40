"""Associative memory: an empty one, a key written again, and bounds. Its equations: test_operators_at_random.py."""

import itertools

import pytest
import torch

from mnemos.ops import associative_read, associative_write, dpfp
from mnemos.types import InputError


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("nu", [1, 3])
def test_features_have_length_one_and_nothing_has_none(nu):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    close(dpfp(x, nu).norm(dim=-1), torch.ones(2, 3))
    assert dpfp(x, nu).min() == 0  # an entry and its negative are never both above 0
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
    matrix, normaliser, keys, values, beta = (torch.zeros(s) for s in ((2, 5, 3), (2, 5), (2, 4, 5), (2, 4, 3), (2, 4)))
    for wrong in (
        lambda: associative_read(matrix, normaliser[:, 1:], keys),
        lambda: associative_read(matrix, normaliser, keys[..., 1:]),
        lambda: associative_write(matrix, normaliser, keys, values[:, 1:], beta),
        lambda: associative_write(matrix, normaliser, keys, values, beta[..., None]),
        lambda: dpfp(keys, 0),
    ):
        with pytest.raises(InputError, match="expected"):
            wrong()
