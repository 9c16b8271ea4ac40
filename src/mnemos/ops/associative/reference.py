"""Associative memory by its equations (ARMT, Rodkin et al. 2024): loops over rows, pairs and features, in float64.

Tests compare the fast path with it, so it shares no code with it and uses only elementary functions.
"""

import math

import torch
from torch import Tensor


def reference_dpfp(x: Tensor, nu: int = 3) -> Tensor:
    """x [.., d] -> [.., 2·nu·d]: each entry of [x⁺ ; x⁻] times the one j places before it, divided by their norm."""
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]):
        zero = torch.zeros((), dtype=torch.float64)
        both = [torch.maximum(e, zero) for e in row] + [torch.maximum(-e, zero) for e in row]
        features = [both[i] * both[(i - j) % len(both)] for j in range(1, nu + 1) for i in range(len(both))]
        square = sum(float(f.detach()) ** 2 for f in features)
        length = torch.sqrt(sum((f * f for f in features), zero)) if square else torch.ones((), dtype=torch.float64)
        rows.append(torch.stack([f / length for f in features]))
    return torch.stack(rows).reshape(*x.shape[:-1], -1)


def reference_associative_read(matrix: Tensor, normaliser: Tensor, q: Tensor, bounded: bool = True) -> Tensor:
    """matrix [B, F, M], normaliser [B, F], q [B, T, F] -> [B, T, M]."""
    rows = []
    for a, z, queries in zip(matrix.double(), normaliser.double(), q.double(), strict=True):
        rows.append(torch.stack([_held(a, z, phi, bounded) for phi in queries]))
    return torch.stack(rows)


def reference_associative_write(
    matrix: Tensor, normaliser: Tensor, k: Tensor, v: Tensor, beta: Tensor, bounded: bool = True
) -> tuple[Tensor, Tensor]:
    """k [B, T, F], v [B, T, M], beta [B, T] -> the new matrix and normaliser."""
    matrices, normalisers = [], []
    one = torch.ones((), dtype=torch.float64)
    for row in range(len(matrix)):
        a, z = matrix[row].double(), normaliser[row].double()
        new_a, new_z = a, z
        keys = k[row].double()
        for phi in keys:
            square = _dot(phi, phi)
            if float(square.detach()) > 0:
                gamma = 1 - _dot(z, phi) / square
                new_z = new_z + min(max(gamma, 0 * one), one) * phi
        for phi, value, strength in zip(keys, v[row].double(), beta[row].double(), strict=True):
            share = one
            if bounded:
                alike = torch.maximum(sum((_dot(other, phi) for other in keys), 0 * one), one)
                share = torch.minimum(torch.maximum(_dot(new_z, phi), one) / alike, one)
            before = _held(a, new_z if bounded else z, phi, bounded)
            new_a = new_a + strength * share * torch.outer(phi, value - before)
        matrices.append(new_a)
        normalisers.append(new_z)
    return torch.stack(matrices), torch.stack(normalisers)


def _held(a: Tensor, z: Tensor, phi: Tensor, bounded: bool) -> Tensor:
    """Aᵀφ/max(zᵀφ, 1); as published Aᵀφ/(zᵀφ + 10⁻⁵)."""
    one = torch.ones((), dtype=torch.float64)
    weight = torch.maximum(_dot(z, phi), one) if bounded else _dot(z, phi) + math.pow(10, -5)
    return sum((phi[i] * a[i] for i in range(len(phi))), torch.zeros_like(a[0])) / weight


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return sum((x[i] * y[i] for i in range(len(x))), torch.zeros((), dtype=torch.float64))
