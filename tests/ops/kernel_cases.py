"""Inputs and comparisons for the compiled backend of linear attention."""

import torch

from mnemos.ops.linear import LinearState, linear_attention
from mnemos.ops.linear.reference import reference_elu, reference_relu

REFERENCES = {"elu": reference_elu, "relu": reference_relu}


def strange(shape, g, dtype=torch.float32):
    """A leaf whose axes lie elsewhere in memory: with gaps, or, if its width is odd, the last one too."""
    b, t, h, d = shape
    if d % 2:
        x = torch.randn(h, b, d, t, generator=g).to(dtype).permute(1, 3, 0, 2)
    else:
        x = torch.randn(h, t, b, d + 3, generator=g).to(dtype).permute(2, 1, 0, 3)[..., 1:-2]
    return x.detach().requires_grad_()


def inputs(b, t, h, d, m, dtype=torch.float32, seed=0):
    """q, k, v, s, z: leaves, none of q, k, v, s contiguous."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (strange((b, t, h, width), g, dtype) for width in (d, d, m))
    s, z = torch.rand(b, h, d, m, generator=g), torch.rand(b, h, d, generator=g)
    s = s.mT.contiguous().mT.detach()
    return q, k, v, s.requires_grad_(), z.requires_grad_()


def holes(b, t):
    mask = torch.rand(t, b, generator=torch.Generator().manual_seed(4)).T > 0.3
    mask[0, : t // 2] = False
    return mask


def weights(outputs, seed=9):
    """What comes from above, not contiguous."""
    g = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(o.shape[::-1], generator=g).permute(*reversed(range(o.dim()))) for o in outputs]
    return [w.to(o.dtype) for w, o in zip(drawn, outputs, strict=True)]


def gradients(outputs, given):
    """Of a loss of all outputs."""
    return torch.autograd.grad(outputs, given, weights(outputs))


def close(found, expected, tolerance):
    """Relative to the largest of each, and finite."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        a, b = a.detach().double(), b.detach().double()
        assert a.isfinite().all(), i
        assert a.shape == b.shape
        size = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, size), msg=lambda m, i=i: f"{i}: {m}")


def run(given, backend, **options):
    """y, s, z and the gradients of all that is given."""
    q, k, v, s, z = given
    y, state = linear_attention(q, k, v, state=LinearState(s, z), backend=backend, **options)
    outputs = (y, *state)
    return [*outputs, *gradients(outputs, given)]


def exactly(given):
    """The same leaves in float64."""
    return [x.detach().double().requires_grad_() for x in given]
