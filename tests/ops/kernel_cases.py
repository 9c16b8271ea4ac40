"""Inputs of the operators, and comparisons with their oracles."""

import torch

from mnemos.types import leaves


def strange(shape, g, dtype=torch.float32):
    """A leaf whose axes lie elsewhere in memory: with gaps, or, if its width is odd, the last one too."""
    b, t, h, d = shape
    if d % 2:
        x = torch.randn(h, b, d, t, generator=g).to(dtype).permute(1, 3, 0, 2)
    else:
        x = torch.randn(h, t, b, d + 3, generator=g).to(dtype).permute(2, 1, 0, 3)[..., 1:-2]
    return x.detach().requires_grad_()


def holes(b, t, empty_row=False):
    """A mask with padding at the start of the first row, in the middle and at the end; the last row may be empty."""
    mask = torch.rand(t, b, generator=torch.Generator().manual_seed(4)).T > 0.3
    mask[0, : t // 2] = False
    if empty_row:
        mask[-1] = False
    return mask


def starts(b, t, share=0.2):
    """Resets within rows, some one after the other, and at the first token of the last row."""
    resets = share > torch.rand(t, b, generator=torch.Generator().manual_seed(5)).T
    resets[-1, :1] = True
    return resets


def folds(folded, b, t, empty_row=False):
    """The options "mask" and "resets" that the word `folded` names."""
    given = {"mask": holes(b, t, empty_row)} if "mask" in folded else {}
    return given | ({"resets": starts(b, t)} if "resets" in folded else {})


FOLDED = ["nothing", "mask", "resets", "mask and resets"]


def weights(outputs):
    """What comes from above, not contiguous."""
    g = torch.Generator().manual_seed(9)
    drawn = [torch.randn(o.shape[::-1], generator=g).permute(*reversed(range(o.dim()))) for o in outputs]
    return [w.to(o.dtype) for w, o in zip(drawn, outputs, strict=True)]


def results(call, given, above=None, **options):
    """Outputs and the gradients of all that is given, a dictionary."""
    outputs = leaves(call(**given, **options))
    above = weights(outputs) if above is None else above
    return [*(y.detach() for y in outputs), *gradients(outputs, given.values(), above)]


def gradients(outputs, given, above, **options):
    """Of all that is given; zeros where no output has any."""
    reached = [(y, w.to(y.dtype)) for y, w in zip(outputs, above, strict=True) if y.requires_grad]
    if not reached:
        return [torch.zeros_like(x) for x in given]
    outputs, above = zip(*reached, strict=True)
    return torch.autograd.grad(outputs, list(given), above, materialize_grads=True, **options)


def exactly(given):
    """The same leaves in float64."""
    return {name: x.detach().double().requires_grad_() for name, x in given.items()}


def close(found, expected, given, tolerance):
    """Finite, and relative to the largest of each, or to 1; of a list, each result to its own tolerance."""
    names = [*(f"output {i}" for i in range(len(found) - len(given))), *given]
    for i, (name, a, b) in enumerate(zip(names, found, expected, strict=True)):
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        size = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        bar = size * (tolerance[i] if isinstance(tolerance, list) else tolerance)
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=bar, msg=lambda m, name=name: f"{name}: {m}")


def agree(call, oracle, given, tolerance, **options):
    """Outputs and gradients are the oracle's in float64, for equal gradients from above."""
    found = results(call, given, **options)
    above = weights(found[: len(found) - len(given)])
    options = {name: value for name, value in options.items() if name != "backend"}
    close(found, results(oracle, exactly(given), above, **options), given, tolerance)


def same_bits_on_any_threads(threads, run):
    """Of one thread and of three."""
    threads(1)
    one = run()
    threads(3)
    assert all(map(torch.equal, one, run()))


def kept_bytes(call, *but):
    """What autograd keeps of a call beside these tensors."""
    mine, kept = {x.untyped_storage().data_ptr() for x in but}, {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, so that no address is given twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return sum(storage.nbytes() for where, storage in kept.items() if where not in mine)
