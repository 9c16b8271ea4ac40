"""Replay in several processes: gradients are reduced once a rollout, and buffers are shared once before it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import expect_forward, had_forward, share_buffers
from mnemos.types import InputError


def find_no_sync(module: nn.Module | None) -> Callable[[], contextlib.AbstractContextManager[object]] | None:
    """A context in which a module's gradients are not reduced over processes; None if nothing reduces them.

    The module, or parts of it, may be wrapped by DistributedDataParallel (or anything with a `no_sync`) or be sharded
    by `fully_shard`.
    """
    parts = list(_reducing(module)) if module is not None else []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in parts:
                if hasattr(part, "set_requires_gradient_sync"):  # fully_shard
                    part.set_requires_gradient_sync(False)
                    stack.callback(part.set_requires_gradient_sync, True)
                else:
                    stack.enter_context(part.no_sync())
            yield

    return no_sync if parts else None


def _reducing(module: nn.Module) -> Iterator[Any]:
    """The outermost modules that reduce gradients."""
    if hasattr(module, "set_requires_gradient_sync") or callable(getattr(type(module), "no_sync", None)):
        yield module
        return
    for child in module.children():
        yield from _reducing(child)


def ddp_wrappers(module: nn.Module | None) -> list[nn.parallel.DistributedDataParallel]:
    """The DistributedDataParallel that a module is, or holds."""
    parts = () if module is None else module.modules()
    return [one for one in parts if isinstance(one, nn.parallel.DistributedDataParallel)]


def parameters_waited_for(wrappers: list[nn.parallel.DistributedDataParallel]) -> list[Tensor]:
    """The parameters that each DistributedDataParallel waits for in the backward pass that reduces gradients.

    None of one with find_unused_parameters, which looks for those that take no part.
    """
    waiting = [one for one in wrappers if not one.find_unused_parameters]
    return [x for one in waiting for x in one.module.parameters() if x.requires_grad]


@contextlib.contextmanager
def forwards_required(wrappers: list[nn.parallel.DistributedDataParallel]) -> Iterator[None]:
    """Raise InputError unless each wrapper's forward is called inside: without it a backward reduces no gradient."""
    for one in wrappers:
        expect_forward(one)
    yield
    if not all(map(had_forward, wrappers)):
        raise InputError(
            "expected a call of the DistributedDataParallel in module=, which then reduces the gradients of all steps, "
            "found none; let step call the wrapper in place of the model inside it"
        )


def broadcast_buffers(module: nn.Module | None) -> None:
    """Broadcast the buffers of process 0 now, as DistributedDataParallel would do at the rollout's first forward.

    Otherwise the replay of the first step would start with other buffers than its first pass.
    """
    for one in ddp_wrappers(module):
        share_buffers(one)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Average the gradients over the processes, with one all-reduce per type of number.

    A parameter without a gradient in every process keeps none. One process: nothing happens.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    world = torch.distributed.get_world_size() if several else 1
    groups: dict[Any, list[Tensor]] = {}
    for x in parameters if world > 1 else ():
        if x.requires_grad:
            groups.setdefault((x.dtype, x.device), []).append(x)
    for (dtype, device), own in groups.items():
        used = torch.tensor([x.grad is not None for x in own], dtype=dtype, device=device)
        flat = torch.cat([used, *((torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in own)])
        torch.distributed.all_reduce(flat)
        used, rest = flat[: len(own)], flat[len(own) :] / world
        for x, some, mean in zip(own, used.tolist(), rest.split([x.numel() for x in own]), strict=True):
            x.grad = mean.view_as(x).clone() if some else None
