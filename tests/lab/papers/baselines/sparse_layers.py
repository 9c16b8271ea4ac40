"""What the tests of BigBird and of Reformer compare with: gradients for one upstream, and tokens."""

import torch


def compare(found, expected, given):
    """Values and gradients are equal."""
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(y, given, upstream, materialize_grads=True) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def spoilt(given, mask):
    """Padding may hold anything: NaN."""
    return [x.detach().masked_fill(~mask[..., None, None], torch.nan).requires_grad_() for x in given]


def tokens(t=41, seed=1, rows=2):
    return torch.randn(rows, t, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
