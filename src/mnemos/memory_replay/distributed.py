"""Replay in several processes: gradients are reduced once a rollout, and buffers are shared once before it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import expect_forward, had_forward, share_buffers, write_count
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


def _ddp_wrappers(module: nn.Module | None) -> list[nn.parallel.DistributedDataParallel]:
    parts = () if module is None else module.modules()
    return [one for one in parts if isinstance(one, nn.parallel.DistributedDataParallel)]


class Wrappers:
    """The DistributedDataParallel of a module, and which of them the step calls where gradients are reduced.

    Raises InputError for one with static_graph, whose reducer fails where a backward pass reduces nothing.
    """

    def __init__(self, module: nn.Module | None) -> None:
        wrappers = _ddp_wrappers(module)
        if any(one.static_graph for one in wrappers):
            raise InputError("replay: expected DistributedDataParallel without static_graph, found it on; leave it out")
        own = [[x for x in one.module.parameters() if x.requires_grad] for one in wrappers]
        self._all = [
            (one, [(x, *_written(x)) for x in parameters]) for one, parameters in zip(wrappers, own, strict=True)
        ]
        self._called: list[nn.parallel.DistributedDataParallel] = []
        self._left: list[nn.parallel.DistributedDataParallel] = []

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Inside, the step runs whose backward pass reduces gradients, but for wrappers that the caller's own no_sync
        holds back.
        """
        active = [(one, expect_forward(one)) for one, _ in self._all if one.require_backward_grad_sync]
        try:
            yield
        finally:
            self._called = [one for one, _ in active if had_forward(one)]
            for one, before in active:
                if one not in self._called:
                    expect_forward(one, before)
                    self._left.append(one)

    def waited_for(self) -> list[Tensor]:
        """The parameters that each one waits for in that backward pass.

        None of one with find_unused_parameters, which looks for those that take no part.
        """
        waiting = [one for one in self._called if not one.find_unused_parameters]
        return [x for one in waiting for x in one.module.parameters() if x.requires_grad]

    def check_reduced(self) -> None:
        """Raise InputError for a wrapper whose parameters have new gradients that nothing has reduced."""
        for one, before in self._all:
            if one in self._left and any(_written(x) != (grad, writes) for x, grad, writes in before):
                name = type(one.module).__name__
                raise InputError(
                    f"replay: expected the first segment to call the DistributedDataParallel of {name}, whose backward "
                    "pass then reduces the gradients of all segments, found that it did not; let step call the wrapper "
                    "and not the model inside it"
                )


def _written(x: Tensor) -> tuple[int | None, int | None]:
    """Which gradient a parameter has, and how often it was written to."""
    return (None, None) if x.grad is None else (id(x.grad), write_count(x.grad))


def broadcast_buffers(module: nn.Module | None) -> None:
    """Broadcast the buffers of process 0 now, as DistributedDataParallel would do at the rollout's first forward.

    Otherwise the replay of the first step would start with other buffers than its first pass.
    """
    for one in _ddp_wrappers(module):
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
