"""Controls: evaluations of a trained model with its gated caches emptied, exchanged or closed, to test their use."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import pytree
from mnemos.attention.gated_walk import Walk
from mnemos.data.task import SUPERVISED, Task
from mnemos.memory.gated_cache import caches
from mnemos.modes import evaluating
from mnemos.types import State

from .scores import evaluate

CONTROLS = {
    "emptied": "caches set to zero (caches per stream: before each segment)",
    "exchanged": "caches replaced by noise with each channel's mean and spread (caches per stream: by another row's)",
    "closed": "every gate closed: the attention alone, with the trained weights",
}


def controls(
    model: nn.Module, batches: Callable[[], Iterable[object]], task: Task = SUPERVISED
) -> dict[str, dict[str, float]]:
    """Evaluate a model with gated caches under each control: {"emptied": {"loss", …}, "exchanged": …, "closed": …}.

    Returns {} for a model without gated caches. If emptying and exchanging change nothing, the memory was not used.
    Closing the gates also removes the parameters of the cached branch, so by itself it shows nothing about the memory.
    A cache that is never written has no content to empty or exchange; its only control is "closed". The model is
    restored. Cost: one evaluation per control.
    """
    if not caches(model):
        return {}
    names = CONTROLS if any(cache.grc.write for cache in caches(model)) else ("closed",)
    scores = {}
    with evaluating(model):  # entered first, because it promotes pending cache updates before the caches are copied
        for name in names:
            with _changed(model, name):
                score = evaluate(model, batches(), _ControlledTask(task, name))
            scores[name] = {key: value for key, value in score.items() if key != "count"}
    return scores


class _ControlledTask(Task):
    """A task that empties the caches in the state before each forward, or exchanges them between rows."""

    def __init__(self, task: Task, control: str) -> None:
        self.task, self.control, self.metrics = task, control, task.metrics

    def forward(self, model: nn.Module, batch: object, state: State) -> tuple[Any, State]:
        def change(node: State) -> State:
            if not isinstance(node, Walk) or self.control == "closed":
                return node
            cache = torch.zeros_like(node.cache) if self.control == "emptied" else node.cache.roll(1, 0)
            return node._replace(cache=cache)

        state = pytree.tree_map(change, state, is_leaf=lambda node: isinstance(node, Walk))
        return self.task.forward(model, batch, state)

    def advance(self, model: nn.Module, batch: object, state: State) -> State:
        return self.forward(model, batch, state)[1]

    def loss(self, model: nn.Module, outputs: object, batch: object) -> Tensor:
        return self.task.loss(model, outputs, batch)

    def count(self, batch: object) -> int:
        return self.task.count(batch)

    def resets(self, batch: object) -> Tensor | None:
        return self.task.resets(batch)


@contextlib.contextmanager
def _changed(model: nn.Module, control: str) -> Iterator[None]:
    kept = [(cache.cache.clone(), cache.mix.detach().clone()) for cache in caches(model)]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for cache in caches(model):
                if control == "closed":
                    cache.mix.fill_(-torch.inf)
                elif cache.grc.scope == "shared":
                    empty = control == "emptied"
                    cache.cache.copy_(torch.zeros_like(cache.cache) if empty else _noise(cache.cache, generator))
        yield
    finally:
        with torch.no_grad():
            for cache, (stored, mix) in zip(caches(model), kept, strict=True):
                cache.cache.copy_(stored)
                cache.mix.copy_(mix)


def _noise(cache: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(cache.shape, generator=generator).to(cache)
    return cache.mean(0) + noise * cache.std(0, correction=0)
