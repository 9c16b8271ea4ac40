"""The backward pass of one step: its root, reduction over processes, and restoring gradients after an error."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import share_buffers


class _LossAndState(torch.autograd.Function):
    """weight · loss, whose backward also passes to the state the gradient that later steps computed for it.

    One root, so that one backward pass does both (two would be refused by DistributedDataParallel), and the carried
    gradient is handed on as it is: what scales the root (a GradScaler) has already scaled it, in the last step.
    """

    @staticmethod
    def forward(ctx: Any, weight: float, carried: list[Tensor], loss: Tensor, *state: Tensor) -> Tensor:
        ctx.weight, ctx.carried = weight, carried
        return loss.detach() * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, grads[0] * ctx.weight, *ctx.carried


def differentiate(
    backward: Callable[[Tensor], object] | None,
    weight: float,
    loss: Tensor,
    state: list[object],
    carried: list[Tensor | None],
    every: bool,
) -> bool:
    """The backward pass of a step; False if nothing in it requires gradient.

    backward: the function that runs it on one tensor; None is PyTorch's own. every: a part of the state that no
    gradient came back for gets zeros, so that every parameter takes part.
    """
    outgoing, gradients = [], []
    for x, gradient in zip(state, carried, strict=True):
        if isinstance(x, Tensor) and x.requires_grad and (every or gradient is not None):
            outgoing.append(x)
            gradients.append(torch.zeros_like(x) if gradient is None else gradient)
    if not outgoing and not loss.requires_grad:
        return False
    with _without_autocast():
        if backward is not None:
            backward(_LossAndState.apply(weight, gradients, loss, *outgoing))
            return True
        if loss.requires_grad:
            outgoing.append(loss)
            gradients.append(torch.full_like(loss, weight))
        # One call with several roots: it takes half the time of a root that joins them.
        torch.autograd.backward(outgoing, gradients)
    return True


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    """A context without autocast: a backward pass uses the dtypes of its forward."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", accelerator.type if accelerator is not None else "cpu"}
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    if not on:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for kind in on:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def suspension(module: nn.Module | None) -> Callable[[], contextlib.AbstractContextManager[object]] | None:
    """A context in which a module's gradients are not reduced over processes; None if nothing reduces them.

    The module, or parts of it, may be wrapped by DistributedDataParallel (or anything with a `no_sync`) or be sharded
    by `fully_shard`.
    """
    parts = list(_reducing(module)) if module is not None else []

    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in parts:
                if hasattr(part, "set_requires_gradient_sync"):
                    part.set_requires_gradient_sync(False)
                    stack.callback(part.set_requires_gradient_sync, True)
                else:
                    stack.enter_context(part.no_sync())
            yield

    return suspended if parts else None


def _reducing(module: nn.Module) -> Iterator[Any]:
    """The outermost modules that reduce gradients."""
    if hasattr(module, "set_requires_gradient_sync") or callable(getattr(type(module), "no_sync", None)):
        yield module
        return
    for child in module.children():
        yield from _reducing(child)


def broadcast_buffers(module: nn.Module | None) -> None:
    """Broadcast the buffers of process 0 now, as DistributedDataParallel would do at the rollout's first forward.

    Otherwise the replay of the first step would start with other buffers than its first pass.
    """
    for part in module.modules() if module is not None else ():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            share_buffers(part)


class Gradients:
    """A copy of the gradients before the rollout, to restore them if it fails."""

    def __init__(self, module: nn.Module | None, others: list[Tensor]) -> None:
        own = list(module.parameters()) if module is not None else []
        self._before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in (*own, *others)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the gradients, in the same tensors."""
        for tensor, grad, value in self._before:
            if grad is not None and value is not None:
                grad.copy_(value)
            tensor.grad = grad
