"""Small inputs and comparisons for linear attention, in float64 unless asked otherwise."""

import torch

import mnemos
from mnemos.ops.linear import BACKENDS, LinearState

B, H, D, M = 2, 3, 5, 4
# Those that run float32 and shorter on this processor: "auto" is the first of them alone.
HERE = [
    name
    for name in mnemos.ops.backends("linear_attention")
    if BACKENDS.by_name[name].takes(*torch.zeros(3, 1, 1, 1, 1))
]


def inputs(t, n=None, dtype=torch.float64, seed=0, width=M, rows=B):
    """q, k, v, s, z: leaves, and none of q, k, v contiguous."""
    g = torch.Generator().manual_seed(seed)

    def strange(length, last):
        # [H, B, last, T] in memory
        x = torch.randn(H, rows, last, length, generator=g, dtype=torch.float64).to(dtype)
        return x.permute(1, 3, 0, 2).detach().requires_grad_()

    q, k, v = strange(t, D), strange(n or t, D), strange(n or t, width)
    s = torch.rand(rows, H, D, width, generator=g, dtype=torch.float64)
    z = torch.rand(rows, H, D, generator=g, dtype=torch.float64)
    state = LinearState(s.requires_grad_(), z.requires_grad_())
    return q, k, v, state


def weighted(outputs, seed=9):
    """A loss of all outputs; the gradient of y is not contiguous."""
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o.shape[::-1], generator=g, dtype=torch.float64) for o in outputs]
    return sum((o.double() * w.permute(*reversed(range(w.dim())))).sum() for o, w in zip(outputs, weights, strict=True))


def holes(t, rows=B):
    mask = torch.rand(rows, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, : t // 2] = False
    return mask


def compare(found, expected, given, tolerance=1e-9):
    found_grads = torch.autograd.grad(weighted(found), given, retain_graph=True)
    expected_grads = torch.autograd.grad(weighted(expected), given, retain_graph=True)
    for a, b in zip((*found, *found_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
