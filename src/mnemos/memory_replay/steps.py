"""One replayed step: its backward pass, the comparison with the first pass, and what its errors say."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.types import InputError

from .start import HiddenInputs, Snapshot, compact, describe, differentiable, storage_span

# Allowed differences relative to a tensor's norm: kernels may round differently with and without gradient. New random
# numbers for dropout, or a shuffled batch, differ by far more.
_ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
HALF = 2e-2  # for a step that computes in half precision, whatever the dtype of its state


@contextlib.contextmanager
def errors_name_step(t: int, part: str = "") -> Iterator[None]:
    """Inside, an error says in which step it was raised."""
    try:
        yield
    except InputError as error:
        raise InputError(f"step {t}: {error}") from error
    except Exception as error:
        error.add_note(f"in {part}step {t} of the rollout")
        if "through the graph a second time" in str(error):
            error.add_note("one graph is shared by several steps: make a segment's tensors inside the step")
        raise


class _LossAndState(torch.autograd.Function):
    """weight · loss, whose backward also passes to the state the gradient that later steps computed for it.

    One root, so that one call of `backward` does both (two would be refused by DistributedDataParallel). The carried
    gradient is handed on as it is: a GradScaler, which scales the root, has scaled it already, in the last step.
    """

    @staticmethod
    def forward(ctx: Any, weight: float, carried: list[Tensor], loss: Tensor, *state: Tensor) -> Tensor:
        ctx.weight, ctx.carried = weight, carried
        return loss * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, grads[0] * ctx.weight, *ctx.carried


class _LossOfAll(torch.autograd.Function):
    """The loss, whose backward also reaches parameters that are not in its graph, and leaves their gradients alone.

    DistributedDataParallel reduces nothing, not even what other parameters have, until the backward has reached each.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *[None] * ctx.count


def differentiate(
    weight: float,
    loss: Tensor,
    state: list[Any],
    carried: list[Tensor | None],
    backward: Callable[[Tensor], object] | None,
    reduced: list[Tensor] | None,
) -> bool:
    """The backward pass of a step; False if nothing in it requires gradient.

    backward: runs it on one tensor; None is PyTorch's own. reduced: None, or it also reduces gradients over processes,
    so every parameter must take part: those in `reduced`, which a first step without a state may not use, and what
    computed a part of the state that no gradient came back for, which gets zeros.
    """
    reduces = reduced is not None
    roots, grads = [], []
    for x, grad in zip(state, carried, strict=True):
        if isinstance(x, Tensor) and x.requires_grad and (reduces or grad is not None):
            roots.append(x)
            grads.append(torch.zeros_like(x) if grad is None else grad)
    if not roots and not loss.requires_grad:
        if reduces:
            raise InputError(
                "expected a loss or a state that requires gradient, as its backward pass reduces the gradients of all "
                "steps, found none; begin with a segment that has a loss"
            )
        return False
    if reduced:
        loss = _LossOfAll.apply(loss, *reduced)
    device = loss.device.type  # a backward pass uses the dtypes of its forward
    on = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if on else contextlib.nullcontext():
        if backward is not None:
            backward(_LossAndState.apply(weight, grads, loss, *roots))
        elif loss.requires_grad:  # one call with several roots takes half the time of a root that joins them
            torch.autograd.backward([*roots, loss], [*grads, torch.full_like(loss, weight)])
        else:
            torch.autograd.backward(roots, grads)
    return True


def compare(
    hidden: HiddenInputs,
    replayed: Snapshot,
    forward: Snapshot,
    loss: Tensor,
    forward_loss: Tensor | None,
    tolerance: float | None,
) -> None:
    """Raise InputError unless the replay of a step ended as the first pass did, up to rounding.

    forward: the state of the first pass; forward_loss: its loss, None if `advance` computed the state. tolerance:
    relative to a tensor's norm.
    """
    if replayed.structure != forward.structure:
        raise InputError(
            f"expected its replay to give a state of the same structure as the first pass, found "
            f"{replayed.structure!s:.80} instead of {forward.structure!s:.80}; let the structure depend on segment and "
            "state alone"
        )
    pairs = [("state", a, b) for a, b in zip(replayed.leaves, forward.leaves, strict=True)]
    if forward_loss is not None:
        pairs.append(("loss", loss, forward_loss))
    expected_hidden = hidden.complete(forward.hidden)
    for i, (a, b) in enumerate(zip(replayed.hidden, expected_hidden, strict=True)):
        pairs.append((hidden.entry_name(i), a, b))
    for name, a, b in pairs:
        # "": a random generator, which `advance` may have used less.
        if name and a is not b and (difference := _difference(a, b, tolerance)):
            kept = name == "loss" and not any(isinstance(x, Tensor) for x in forward.leaves)
            hint = "return what the model keeps as the state, which has no tensors here, " if kept else ""
            raise InputError(
                f"expected its replay to give the {name} of the first pass, found it different ({difference}); "
                f"{hint}draw from PyTorch's, Python's and NumPy's global generators or give yours as generators=[...], "
                f"name the module whose buffers change, let advance do what step does, give tolerance={HALF} if the "
                "step computes in half precision, or verify=False if it is about zero because its summands cancel"
            )


def _difference(a: Any, b: Any, tolerance: float | None) -> str:
    """How two values differ by more than rounding, or ""."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        same = not isinstance(a, Tensor) and not isinstance(b, Tensor) and (a == b or a != a)
        return "" if same else f"{describe(a)} instead of {describe(b)}"
    # Most replayed steps are equal to the bit, which is seen in a hundredth of the time of a difference.
    if a.layout == b.layout == torch.strided and torch.equal(a, b):
        return ""
    if not differentiable(a):
        return "other values"
    if tolerance is None:
        half = torch.is_autocast_enabled(a.device.type) and a.dtype != torch.float64
        tolerance = HALF if half else _ROUNDING.get(a.dtype, HALF)
    wide = a.dtype if a.dtype in _ROUNDING else torch.float32
    a, b = a.detach().to(wide), b.detach().to(wide)
    # Infinities and NaN must stand at the same positions: a state may hold infinities (a maximum of nothing), and NaN
    # in both passes is visible in the gradient.
    finite = a.isfinite() & b.isfinite()
    if (~(finite | (a == b) | (a.isnan() & b.isnan()))).any():
        return "infinities or NaN at other positions"
    distance, size = float(torch.where(finite, a - b, 0).norm()), float(torch.where(finite, b, 0).norm())
    if distance <= tolerance * size:
        return ""
    ratio = distance / (tolerance * size) if tolerance * size else math.inf
    return f"{ratio:.3g} times what rounding explains"


def check_attached(incoming: list[Any], returned: list[Any]) -> None:
    """Raise InputError if the given state requires gradient and nothing in the returned one does.

    What is returned as it came does not count, for it carries the gradient that it came with. One part without gradient
    beside one that has it is no error: a state may keep what a segment was given.
    """
    carried = {storage_span(x): x.requires_grad for x in incoming if isinstance(x, Tensor)}
    if any(carried.values()):
        attached = [
            x.requires_grad for x in returned if differentiable(x) and x.numel() and storage_span(x) not in carried
        ]
        if attached and not any(attached):
            raise InputError(
                "expected a state that carries gradient, found it detached; return it with its graph, or ask for "
                "truncate_every=1, which is exact for a state that holds only what the segment was given"
            )


def keep_outputs(aux: Any) -> Any:
    """What a step returned beside loss and state, detached and without the memory of other tensors."""
    leaves, structure = pytree.tree_flatten(aux)
    for x in leaves:
        inside = {} if isinstance(x, Tensor) else getattr(x, "__dict__", {})
        if any(isinstance(y, Tensor) and y.grad_fn is not None for y in pytree.tree_leaves(dict(inside))):
            name = type(x).__name__
            raise InputError(  # the graphs of all steps would stay in memory
                f"expected auxiliary outputs made of tensors, found a {name} that holds one with its graph; return its "
                f"tensors, or register {name} with torch.utils._pytree"
            )
    return pytree.tree_unflatten(compact(leaves, []), structure)
