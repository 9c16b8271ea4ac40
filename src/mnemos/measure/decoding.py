"""How fast a model writes: seconds a token at any place of a sequence, and a whole sequence from a few of them."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mnemos.generate.stream import Step
from mnemos.modes import evaluating
from mnemos.types import State, select

STEPS = 5  # timed up to a place, of which the median counts


def with_state(model: nn.Module, batch: int, place: int, vocab_size: int, step: Step | None = None) -> float:
    """Seconds of a step that reads token `place` (from 0) of `batch` rows, with everything before it in the state.

    Timed are the last `STEPS` steps up to it; one more goes before them, as the first after a long read makes room.
    What is before them is read once, by one row, whose state all rows then go on from.
    """
    step = step or model
    with torch.inference_mode(), evaluating(model):
        tokens = _tokens(batch, place + 1, vocab_size)
        first = max(0, place - STEPS)
        state: State = None
        for part in tokens[:1, :first].split(1024, 1) if first else ():
            _, state = model(part, state)
        state = None if state is None else select(state, torch.zeros(batch, dtype=torch.long))
        times = []
        for i in range(first, place + 1):
            start = time.perf_counter()
            _, state = step(tokens[:, i, None], state)
            times.append(time.perf_counter() - start)
        if not place:  # the very first has none before it; it is read again
            for _ in range(STEPS):
                start = time.perf_counter()
                step(tokens, None)
                times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def without_state(model: nn.Module, batch: int, place: int, vocab_size: int) -> float:
    """Seconds of a step that computes everything before it anew: a forward of place + 1 tokens."""
    with torch.inference_mode(), evaluating(model):
        tokens = _tokens(batch, place + 1, vocab_size)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            model(tokens)
            times.append(time.perf_counter() - start)
            if sum(times) > 2:
                break
    return min(times)


def whole(seconds: Callable[[int], float], length: int, places: int = 5) -> float:
    """Seconds to write `length` tokens: a step's seconds at a few places, and straight lines between them."""
    at = sorted({round(i * (length - 1) / (places - 1)) for i in range(places)})
    found = [seconds(place) for place in at]
    spans = zip(at, at[1:], found, found[1:], strict=False)
    return (found[0] + found[-1]) / 2 + sum((right - left) * (a + b) / 2 for left, right, a, b in spans)


def _tokens(batch: int, length: int, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
