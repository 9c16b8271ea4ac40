"""Inputs of the kernels, and comparisons with their oracles."""

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


def results(call, given, **options):
    """Outputs and the gradients of all that is given, a dictionary; what comes from above is not contiguous."""
    outputs = call(**given, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    reached = [y for y in outputs if y.requires_grad]
    found = torch.autograd.grad(reached, list(given.values()), weights(reached), materialize_grads=True)
    return [*(y.detach() for y in outputs), *found]


def agree(call, oracle, given, tolerance, **options):
    """Outputs and gradients are finite, and the oracle's in float64, relative to the largest of each, or to 1."""
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    found = results(call, given, **options)
    expected = results(oracle, exact, **{k: v for k, v in options.items() if k != "backend"})
    names = [*(f"output {i}" for i in range(len(found) - len(given))), *given]
    for name, a, b in zip(names, found, expected, strict=True):
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        size = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(
            a.double(), b, rtol=0, atol=tolerance * size, msg=lambda m, name=name: f"{name}: {m}"
        )


def same_bits_on_any_threads(threads, run):
    """Of one thread and of three."""
    threads(1)
    one = run()
    threads(3)
    assert all(map(torch.equal, one, run()))
