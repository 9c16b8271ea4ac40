"""The scores of distances, and masks: the parts that all paths of relative attention share."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.sinusoids import sinusoids as of_positions
from mnemos.types import Device


def sinusoids(first: int, last: int, dim: int, clamp: int = 0, device: Device = None) -> Tensor:
    """R of distances first, first − 1 … last, [first − last + 1, dim] float32: sines in even channels, cosines in odd.

    clamp > 0: distances are clamped to ±clamp.
    """
    distances = torch.arange(first, last - 1, -1, device=device)
    return of_positions(distances.clamp(-clamp, clamp) if clamp else distances, dim)


def distance_scores(q: Tensor, r: Tensor, n: int) -> Tensor:
    """q_i·r_{i−j} for T queries at positions N − T … N − 1 and all N positions j: [G, X, T, N].

    q [G, X, T, D]; r [G, L, D], where row ℓ has the distance N − 1 − ℓ. L = N + T − 1; or N for causal attention, where
    the results for keys after the query are finite and meaningless. Cost: one product for all of X, X·T·L·D; the shift
    is a view.
    """
    g, x, t, d = q.shape
    if t == 1:
        return torch.bmm(q.reshape(g, x, d), r.mT).view(g, x, 1, -1)[..., :n]
    if torch.compiler.is_exporting():  # the views below would limit the program to some lengths
        scores = torch.bmm(q.reshape(g, x * t, d), r.mT).view(g, x, t, -1)
        column = torch.arange(n, device=q.device) + torch.arange(t - 1, -1, -1, device=q.device)[:, None]
        return scores.gather(3, column.clamp(max=r.shape[1] - 1).expand(g, x, t, n))
    # q_i·r_{i−j} is in row i, column j + T − 1 − i. With one more column in front, a view of the same numbers with rows
    # shorter by one shifts each row by one more than the row before; the first T numbers are dropped.
    scores = torch.bmm(q.reshape(g, x * t, d), F.pad(r, (0, 0, 1, 0)).mT)
    length = r.shape[1]
    return scores.view(g, x, length + 1, t)[:, :, 1:].view(g, x, t, length)[..., :n]


def seen_keys(t: int, n: int, causal: bool, mask: Tensor | None, window: int | None, device: Device) -> Tensor | None:
    """The keys that each of the last T of N positions reads, [B or 1, T, N] bool; None: all keys.

    These are the valid ones (mask [B, N]), not after it (causal) and fewer than `window` before it, and its own.
    """
    # On the CPU the values can be read without waiting for a device: no mask is cheaper than one that is all True.
    if mask is not None and mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all()):
        mask = None
    # An exported program has one form for all lengths.
    far = window is not None and (torch.compiler.is_exporting() or n > window)
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
    """Scores [.., T, N] with −∞ where `seen` (broadcast) is False. In place if no gradient is recorded."""
    if seen is None:
        return scores
    # Adding −∞ is up to twice as fast as masked_fill, forward and backward.
    floor = torch.zeros(seen.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~seen, -torch.inf)
    return scores + floor if torch.is_grad_enabled() else scores.add_(floor)
