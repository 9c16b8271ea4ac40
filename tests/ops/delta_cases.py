"""Small inputs for the delta rule and decayed attention."""

import torch
from kernel_cases import strange

import mnemos
from mnemos.ops.delta import BACKENDS
from mnemos.ops.delta.reference import reference_delta_rule

B, SHARED, H, D, M = 2, 2, 4, 5, 3
KINDS = ["delta", "gated delta", "gated delta per channel", "decayed", "decayed per channel"]
HERE = mnemos.ops.backends("delta_rule")
# The type in which a backend is compared with the equations, and how close it is to them.
EXACT = {
    name: (torch.float64, 1e-9) for name in HERE if BACKENDS.by_name[name].takes(*torch.zeros(3, 1, 1, 1, 1).double())
}
EXACT = {name: EXACT.get(name, (torch.float32, 2e-5)) for name in HERE}


def inputs(kind, t, dtype=torch.float64, rows=B, shared=SHARED, heads=H, d=D, m=M):
    """A dictionary of leaves, none contiguous; decays from e^-3 to 1. The state is float32 or wider."""
    g = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(*shape[::-1], generator=g).permute(*reversed(range(len(shape))))

    given = {"q": strange((rows, t, shared, d), g), "k": strange((rows, t, shared, d), g)}
    given["k"].data.div_(d**0.5)
    given["v"] = strange((rows, t, heads, m), g)
    if "delta" in kind:
        given["beta"] = uniform(rows, t, heads)
    if kind != "delta":
        given["decay"] = -3 * uniform(rows, t, heads, *[d] * ("channel" in kind)) ** 3
    given = {name: x.to(dtype) for name, x in given.items()}
    given["state"] = torch.randn(rows, heads, m, d, generator=g).mT.to(torch.promote_types(dtype, torch.float32))
    return {name: x.detach().requires_grad_() for name, x in given.items()}


def run(backend="auto", **given):
    """y and the state: by the operator of the kind that the inputs are of."""
    call = mnemos.ops.delta_rule if "beta" in given else mnemos.ops.decayed_attention
    return call(**given, backend=backend)


def equations(**given):
    """The same by the reference."""
    return reference_delta_rule(**{"beta": None, **given})
