"""Controls: evaluations of a trained model with its stored caches emptied, exchanged or closed, to test their use.

A cache per stream is part of the state; `state_controls` empties and exchanges it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from mnemos.lab.tasks.task import SUPERVISED, Task
from mnemos.memory.gated_cache import caches
from mnemos.modes import evaluating

from .scores import evaluate

CONTROLS = {
    "emptied": "stored caches set to zero",
    "exchanged": "stored caches replaced by noise with each channel's mean and spread",
    "closed": "every gate closed: the attention alone, with the trained weights",
}


def controls(
    model: nn.Module, batches: Callable[[], Iterable[object]], task: Task = SUPERVISED
) -> dict[str, dict[str, float]]:
    """Evaluate a model with gated caches under each control: {"emptied": {"loss", …}, "exchanged": …, "closed": …}.

    batches: called once for each of `control_names`, in order.

    Returns {} for a model without gated caches. If emptying and exchanging change nothing, the memory was not used.
    Closing the gates also removes the parameters of the cached branch, so by itself it shows nothing about the memory.
    Where the model stores no content, because its caches are per stream or never written, the only control is "closed".
    The model is restored. Cost: one evaluation per control.
    """
    scores: dict[str, dict[str, float]] = {}
    if not (names := control_names(model)):
        return scores
    with evaluating(model):  # entered first, because it promotes pending cache updates before the caches are copied
        for name in names:
            with _changed(model, name):
                score = evaluate(model, batches(), task)
            scores[name] = {key: value for key, value in score.items() if key != "count"}
    return scores


def control_names(model: nn.Module) -> list[str]:
    """The controls that `controls` evaluates."""
    if not caches(model):
        return []
    stores = any(cache.grc.write and cache.grc.scope == "shared" for cache in caches(model))
    return list(CONTROLS) if stores else ["closed"]


def legend(names: Iterable[str]) -> str:
    """What the names of these controls mean, in one line."""
    return ", ".join(f"{name} ({CONTROLS[name]})" for name in dict.fromkeys(names))


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
