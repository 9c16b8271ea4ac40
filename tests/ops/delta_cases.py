"""Small inputs and comparisons for the delta rule and decayed attention."""

import torch
from linear_attention_cases import weighted

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


def inputs(kind, t, dtype=torch.float64, seed=0, rows=B):
    """A dictionary of leaves, q and k of two heads and v of four, none contiguous; decays from e^-3 to 1."""
    g = torch.Generator().manual_seed(seed)

    def strange(heads, last):
        x = torch.randn(heads, rows, last, t, generator=g, dtype=torch.float64)  # [H, B, last, T] in memory
        return x.permute(1, 3, 0, 2)

    def uniform(*shape):
        return torch.rand(*shape[::-1], generator=g, dtype=torch.float64).permute(*reversed(range(len(shape))))

    given = {"q": strange(SHARED, D), "k": strange(SHARED, D) / D**0.5, "v": strange(H, M)}
    if "delta" in kind:
        given["beta"] = uniform(rows, t, H)
    if kind != "delta":
        given["decay"] = -3 * uniform(rows, t, H, *[D] * ("channel" in kind)) ** 3
    given = {name: x.to(dtype) for name, x in given.items()}
    given["state"] = torch.randn(rows, H, M, D, generator=g, dtype=torch.float64).mT.to(
        torch.promote_types(dtype, torch.float32)
    )
    return {name: x.detach().requires_grad_() for name, x in given.items()}


def holes(t, rows=B):
    """A mask with padding at the start of a row, in the middle and at the end."""
    mask = torch.rand(rows, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, : t // 2] = False
    return mask


def starts(t, rows=B):
    """Resets within rows."""
    return torch.rand(rows, t, generator=torch.Generator().manual_seed(5)) > 0.9


def run(given, **options):
    """y and the state: by the operator of the kind that the inputs are of."""
    call = mnemos.ops.delta_rule if "beta" in given else mnemos.ops.decayed_attention
    return call(**given, **options)


def equations(given, **options):
    """The same by the reference, from the same numbers."""
    return reference_delta_rule(**{"beta": None, **given}, **options)


def compare(found, expected, given, tolerance):
    """Outputs and the gradients of all that is given, relative to the largest of each, or to 1."""
    leaves = list(given.values())
    outputs = zip((*found, *_gradients(found, leaves)), (*expected, *_gradients(expected, leaves)), strict=True)
    for i, (a, b) in enumerate(outputs):
        assert a.isfinite().all(), i
        size = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0, atol=tolerance * max(1.0, size), msg=lambda m, i=i: f"{i}: {m}"
        )


def _gradients(outputs, leaves):
    return torch.autograd.grad(weighted(outputs), leaves, retain_graph=True, materialize_grads=True)
