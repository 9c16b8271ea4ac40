"""The laws of padding: a row with a mask is the row without its padding, and nothing reads what the padding holds."""

import torch
from torch import Tensor

from .probe import TOKENS, Call, Fault, Probe


def patterns(t: int) -> Tensor:
    """Masks [7, t]: all valid; padding on the left, on the right, in the middle; a few tokens valid; one; none."""
    i, third = torch.arange(t), max(1, t // 3)
    middle = (i < third) | (i >= t - third)
    return torch.stack([i >= 0, i >= third, i < t - third, middle, i % 3 == 1, i == t // 2, i < 0])


def masked_calls(probe: Probe, t: int) -> list[Call]:
    """Calls with masks and without, of many tokens and of one, such that every row is once padded wholly."""
    first, then = patterns(t), patterns(3).roll(1, 0)
    masks = first, None, then, then[:, :1], None
    return [Call(probe.tokens(m.shape[1] if m is not None else 1, 2 + i, 7), m) for i, m in enumerate(masks)]


def padding(probe: Probe, t: int) -> Fault | None:
    """Outputs, calls that follow and gradients of rows with padding are those of each row alone without it."""
    if not probe.rows_independent:
        probe = probe.copy(training=False)
    low, plain = probe.copy(torch.float32), probe.calls(t, 1, 2)
    valid = [Call(x, torch.ones(x.shape[:2], dtype=torch.bool)) for x, _ in plain]
    if fault := probe.compare(probe.run(valid), probe.run(plain), "a mask in which all is valid, against no mask"):
        return fault
    masked = masked_calls(probe, t)
    if t > TOKENS:
        masked = [Call(x[1:4], None if mask is None else mask[1:4]) for x, mask in masked[:2]]
    one_row = [Call(x[2:3], None if mask is None else mask[2:3]) for x, mask in masked]
    square = [Call(probe.tokens(3), patterns(3)[[1, 2, 5]]), *probe.calls(1)]
    for calls, what in (
        (masked, "rows with padding"),
        *([(one_row, "a batch of one row with padding"), (square, "as many rows as tokens")] if t <= TOKENS else []),
    ):
        expected = probe.run(calls, [slice(i, i + 1) for i in range(len(calls[0].x))])
        fault = probe.compare(probe.run(calls), expected, f"{what}, against each row without it")
        if t > TOKENS and not fault:  # of short calls the law of modes says it
            with torch.no_grad():
                found = low.run([Call(x.to(low.dtype), mask) for x, mask in calls])
            fault = low.compare(found, expected, f"float32, without gradients, {what}, against each row without it")
        if not probe.padding_free:
            return Fault("declared padding_free = False, and it is") if t > TOKENS and not fault else None
        if fault:
            return fault
    return None


def hidden(probe: Probe, t: int) -> Fault | None:
    """What the padding holds changes no valid output and no gradient, and gets no gradient."""
    calls = masked_calls(probe, t)[: 2 if t > TOKENS else None]
    base = probe.run(calls)
    for call, gradient in enumerate(x for name, x in base.items() if name.startswith("gradient of x")):
        mask = calls[call].mask
        if mask is not None and gradient[~mask].any():
            return Fault("padding gets a gradient", None, float(gradient[~mask].abs().max()))
    for value in (float("nan"), 100.0, -1e4, float("inf"), -float("inf"))[: None if t == TOKENS else 1]:
        filled = [Call(x if m is None else torch.where(m[..., None], x, value), m) for x, m in calls]
        if fault := probe.compare(probe.run(filled), base, f"padding of {value:g}, against numbers"):
            return fault
    with torch.no_grad():
        if not probe(calls[0].x, None, calls[0].mask)[0].isfinite().all():
            return Fault("outputs of padding are not finite")
    return None
