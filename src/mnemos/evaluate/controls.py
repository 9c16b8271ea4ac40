"""Was the memory used? A trained model is scored again with its caches emptied, exchanged and shut off."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from mnemos.data.batch import Batch
from mnemos.memory.gated_cache import caches

from .metrics import evaluate

CONTROLS = {
    "emptied": "every stored cache set to zero",
    "exchanged": "every stored cache replaced by noise of the same mean and spread in each channel",
    "closed": "every gate shut: the attention alone, with the weights as trained",
}


def controls(model: nn.Module, batches: Callable[[], Iterable[Batch]]) -> dict[str, dict[str, float]]:
    """{"emptied": {"loss", "accuracy"}, "exchanged": …, "closed": …} of a model with gated caches; {} without.

    A memory that can be emptied or exchanged without loss was not used. Closing the gate also takes away the
    parameters of the cached branch, so it alone proves nothing. The model is left as it was.
    """
    if not caches(model):
        return {}
    scores = {}
    for name in CONTROLS:
        with _changed(model, name):
            score = evaluate(model, batches())
        scores[name] = {"loss": score["loss"], "accuracy": score["accuracy"]}
    return scores


@contextlib.contextmanager
def _changed(model: nn.Module, control: str) -> Iterator[None]:
    model.eval()  # promotes what is pending before anything is put aside
    kept = [(cache.cache.clone(), cache.mix.detach().clone()) for cache in caches(model)]
    try:
        with torch.no_grad():
            for cache in caches(model):
                if control == "closed":
                    cache.mix.fill_(-torch.inf)
                else:
                    cache.cache.copy_(torch.zeros_like(cache.cache) if control == "emptied" else _noise(cache.cache))
        yield
    finally:
        with torch.no_grad():
            for cache, (stored, mix) in zip(caches(model), kept, strict=True):
                cache.cache.copy_(stored)
                cache.mix.copy_(mix)


def _noise(cache: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(cache.shape, generator=generator).to(cache)
    return cache.mean(0) + noise * cache.std(0, correction=0)
