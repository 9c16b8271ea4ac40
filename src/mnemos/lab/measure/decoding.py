"""The speed of decoding: seconds per token at any position, and seconds per sequence from a few positions."""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mnemos.generate.fused import DecodeStep
from mnemos.modes import evaluating
from mnemos.types import State, select

from .timing import seconds_of

STEPS = 5  # timed steps per position; their median is the result


def with_state(model: nn.Module, batch: int, position: int, vocab_size: int, step: DecodeStep | None = None) -> float:
    """Seconds of a decoding step at position `position` (from 0) of `batch` rows; the state holds all earlier tokens.

    The median of the last `STEPS` steps up to it. One more step before them is not timed, because the first step after
    a long prefill allocates memory. The tokens before are read once, for one row; all rows continue from its state.
    """
    step = step or model
    with torch.inference_mode(), evaluating(model):
        tokens = _tokens(batch, position + 1, vocab_size)
        first = max(0, position - STEPS)
        state: State = None
        for part in tokens[:1, :first].split(1024, 1) if first else ():
            _, state = model(part, state)
        state = None if state is None else select(state, torch.zeros(batch, dtype=torch.long))

        def advance(i: int) -> None:
            nonlocal state
            _, state = step(tokens[:, i, None], state)

        times = [seconds_of(partial(advance, i)) for i in range(first, position + 1)]
        if not position:  # the first position has no earlier steps: it is repeated
            times += [seconds_of(partial(step, tokens, None)) for _ in range(STEPS)]
    return statistics.median(times[1:])


def without_state(model: nn.Module, batch: int, position: int, vocab_size: int) -> float:
    """Seconds of a decoding step without a state: a forward of all position + 1 tokens."""
    with torch.inference_mode(), evaluating(model):
        tokens = _tokens(batch, position + 1, vocab_size)
        times = []
        for _ in range(3):
            times.append(seconds_of(partial(model, tokens)))
            if sum(times) > 2:
                break
    return min(times)


def whole(seconds: Callable[[int], float], length: int, positions: int = 5) -> float:
    """Seconds to decode `length` tokens, by linear interpolation between the steps at a few positions."""
    at = sorted({round(i * (length - 1) / (positions - 1)) for i in range(positions)})
    times = [seconds(one) for one in at]
    spans = zip(at, at[1:], times, times[1:], strict=False)
    return (times[0] + times[-1]) / 2 + sum((right - left) * (a + b) / 2 for left, right, a, b in spans)


def _tokens(batch: int, length: int, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
