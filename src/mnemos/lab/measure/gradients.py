"""Ways to compute the gradient of a rollout, and the bytes that autograd keeps: the baselines of replay."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mnemos.memory_replay.rollout import replay
from mnemos.types import State, leaves


def through_time(step: Callable[[Any, State], tuple[Tensor, State]], segments: Sequence[Tensor]) -> None:
    """Back-propagation through time: one graph over all segments."""
    total, state = torch.zeros(()), None
    for segment in segments:
        loss, state = step(segment, state)
        total = total + loss / len(segments)
    total.backward()


# The model is one step of a rollout, `loss, state = model(segment, state)`; `state = model.advance(segment, state)`
# computes its state alone. Every way adds the gradient of the mean loss to the parameters' gradients.
WAYS: dict[str, Callable[[Any, Sequence[Tensor]], Any]] = {
    "through time": through_time,
    "torch.utils.checkpoint": lambda model, segments: through_time(
        partial(checkpoint, model, use_reentrant=False), segments
    ),
    "replay": replay,
    "replay, advance": lambda model, segments: replay(model, segments, advance=model.advance),
    "replay, advance, sqrt": lambda m, segments: replay(m, segments, advance=m.advance, checkpoints="sqrt"),
}


def check_ways(model: nn.Module, segments: Sequence[Tensor]) -> None:
    """Raise AssertionError if two ways compute different gradients. Clears the parameters' gradients."""
    wanted: list[Tensor] = []
    for name, way in WAYS.items():
        way(model, segments)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        wanted = wanted or gradients
        for a, b in zip(gradients, wanted, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7, f"{name}: other gradients"


def most_saved(run: Callable[[], object]) -> int:
    """The largest number of bytes that autograd held in saved tensors at once: distinct storages, without parameters.

    Tensors that torch.utils.checkpoint recomputes are not seen here; the peak of the process includes them.
    """
    uses: dict[int, int] = {}  # by storage
    sizes: dict[int, int] = {}
    most = total = 0

    class Saved:
        def __init__(self, x: Tensor) -> None:
            nonlocal most, total
            self.x, self.key = x, x.untyped_storage().data_ptr()
            uses[self.key] = uses.get(self.key, 0) + 1
            if uses[self.key] == 1 and not isinstance(x, nn.Parameter) and not x.is_leaf:
                sizes[self.key] = x.untyped_storage().nbytes()
                total += sizes[self.key]
                most = max(most, total)

        def __del__(self) -> None:
            nonlocal total
            uses[self.key] -= 1
            if not uses[self.key]:
                total -= sizes.pop(self.key, 0)

    with saved_tensors_hooks(Saved, lambda h: h.x):
        run()
    gc.collect()
    return most


def state_bytes(state: State) -> int:
    """Bytes of a state's tensors."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))
