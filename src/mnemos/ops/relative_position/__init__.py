"""Relative attention (Transformer-XL, Dai et al. 2019): scores from contents and from distances. See README.md."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.errors import InputError
from mnemos.modes import reads_without_waiting
from mnemos.ops.dropout import dropout as drop
from mnemos.ops.padding import zero_invalid
from mnemos.ops.positions import sinusoids as of_positions
from mnemos.ops.signature import Signature
from mnemos.types import Device

__all__ = ["distance_scores", "relative_attention", "seen_keys", "sinusoids"]

CHECK = Signature(
    "relative_attention",
    q="B T H D",
    k="B N H D",
    v="B N H M",
    r="L H D",
    content_bias="H D",
    position_bias="H D",
    mask="B N bool ?",
)


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    causal: bool = True,
    mask: Tensor | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """y_i = Σ_j softmax_j([(q_i + u)·k_j + (q_i + v)·r_{i−j}]/√D)·v_j: eq. of section 3.3, all four terms.

    q [B, T, H, D]: queries at the last T of N positions; k [B, N, H, D], v [B, N, H, M], N ≥ T; y [B, T, H, M].
    r [L, H, D]: the projected vectors of distances. Row ℓ has the distance N − 1 − ℓ, so row N − 1 has distance 0.
    Causal: L ≥ N. Not causal: L ≥ N + T − 1, down to the distance 1 − T of a key after its query.
    content_bias u, position_bias v [H, D]. mask [B, N] bool, True = valid: the q, k and v of an invalid token count as
    zeros, whatever they hold. window: the number of positions a query reads, with its own. A query always reads its own
    position, valid or not. dropout: the fraction of weights dropped.

    Cost: O(B·T·N·H·(D + M)) time and B·H·T·N scores in memory, twice with gradient. Without gradient the scores of
    distances are the bias of PyTorch's fused attention; with gradient that is slower than separate products.
    Raises InputError for shapes that do not fit.
    """
    # --- checks, and padding ---
    CHECK(q=q, k=k, v=v, r=r, content_bias=content_bias, position_bias=position_bias, mask=mask)
    t, n, scale = q.shape[1], k.shape[1], q.shape[3] ** -0.5
    least = n if causal else n + t - 1
    if n < t or r.shape[0] < least:
        raise InputError(
            f"relative_attention: expected k of at least the {t} tokens of q, found {n}, and r of at least {least} "
            f"distances, found {r.shape[0]}"
        )
    if window is not None and window < 1:
        raise InputError(f"relative_attention: expected a window of at least 1 position, found {window}")
    if mask is not None:
        q, k, v = zero_invalid(q, mask[:, n - t :]), zero_invalid(k, mask), zero_invalid(v, mask)

    # --- scores of distances [H, B, T, N], with hidden keys; heads first: one product for all rows ---
    position = ((q + position_bias) * scale).permute(2, 0, 1, 3)
    scores = distance_scores(position, r.transpose(0, 1).to(position.dtype), n)
    scores = hide(scores, seen_keys(t, n, causal, mask, window, q.device))

    # --- and of contents ---
    content = ((q + content_bias) * scale).permute(2, 0, 1, 3)
    k, v = (x.to(content.dtype).permute(2, 0, 1, 3) for x in (k, v))
    # With dropout always this path, so that activation checkpointing draws the same numbers twice.
    if torch.is_grad_enabled() or dropout:
        content, k, v, scores = (x.flatten(0, 1) for x in (content, k, v, scores))
        y = weigh(content, k, v, scores, dropout).unflatten(0, (q.shape[2], -1))
    else:
        y = F.scaled_dot_product_attention(content, k, v, scores, scale=1.0)
    return y.permute(1, 2, 0, 3)


def weigh(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, dropout: float = 0.0) -> Tensor:
    """softmax(q·kᵀ + scores)·v with dropout: q [G, T, D], k [G, N, D], v [G, N, M], scores [G, T, N]."""
    weights = torch.softmax(torch.baddbmm(scores, q, k.mT), -1)
    return torch.bmm(drop(weights, dropout) if dropout else weights, v)


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
    if mask is not None and reads_without_waiting(mask) and bool(mask.all()):
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


def hide(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Scores [.., T, N] with −∞ where `seen` (broadcast) is False. In place if no gradient is recorded."""
    if seen is None:
        return scores
    # Adding −∞ is up to twice as fast as masked_fill, forward and backward.
    floor = torch.zeros(seen.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~seen, -torch.inf)
    return scores + floor if torch.is_grad_enabled() else scores.add_(floor)
