"""The scores of distances, and what may be seen: the parts of relative attention that its paths share."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.sinusoids import sinusoids as of_positions
from mnemos.types import Device


def sinusoids(first: int, last: int, dim: int, clamp: int = 0, device: Device = None) -> Tensor:
    """R of distances first, first − 1 … last, [first − last + 1, dim] float32: sines in even channels, cosines in odd.

    clamp > 0: distances beyond ±clamp are taken for it.
    """
    distances = torch.arange(first, last - 1, -1, device=device)
    return of_positions(distances.clamp(-clamp, clamp) if clamp else distances, dim)


def distance_scores(q: Tensor, r: Tensor, n: int) -> Tensor:
    """q_i·r_{i−j} for T queries at places N − T … N − 1 and all N places j: [G, X, T, N].

    q [G, X, T, D]; r [G, L, D], row ℓ of distance N − 1 − ℓ; L = N + T − 1, or N where nobody looks ahead: then what is
    ahead holds other, finite numbers. Cost: one product with all of X at once, X·T·L·D; the shift itself moves nothing.
    """
    g, x, t, d = q.shape
    if t == 1:
        return torch.bmm(q.reshape(g, x, d), r.mT).view(g, x, 1, -1)[..., :n]
    # q_i·r_{i−j} stands in row i, column j + T − 1 − i. With one column more in front, reading the same numbers in rows
    # one shorter shifts each row one further than the last, and the first T numbers fall away.
    scores = torch.bmm(q.reshape(g, x * t, d), F.pad(r, (0, 0, 1, 0)).mT)
    length = r.shape[1]
    return scores.view(g, x, length + 1, t)[:, :, 1:].view(g, x, t, length)[..., :n]


def seen_keys(t: int, n: int, causal: bool, mask: Tensor | None, window: int | None, device: Device) -> Tensor | None:
    """Which of N keys each of the last T places reads, [B or 1, T, N] bool; None: all of them.

    Valid ones (mask [B, N]) that are not after it (causal) and fewer than `window` before it, and always itself.
    """
    # Finding out that nothing is masked is free where the tensor can be looked at without waiting for a device.
    if mask is not None and mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all()):
        mask = None
    far = window is not None and n > window
    if mask is None and not far and (t == 1 or not causal):
        return None
    query = torch.arange(n - t, n, device=device)[:, None]
    key = torch.arange(n, device=device)
    seen = (key <= query) if causal else torch.ones(1, 1, dtype=torch.bool, device=key.device)
    if far:
        assert window is not None
        seen = seen & (key > query - window)
    if mask is None:
        return seen.expand(t, n)[None]
    return (seen & mask[:, None]) | (key == query)


def hidden(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Scores [.., T, N] with −∞ where nothing is seen (`seen` broadcasts). In place but where gradient flows."""
    if seen is None:
        return scores
    # Adding is up to twice as fast as filling in, forward and backward.
    floor = torch.zeros(seen.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~seen, -torch.inf)
    return scores + floor if torch.is_grad_enabled() else scores.add_(floor)
