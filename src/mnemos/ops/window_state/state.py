"""What attention with a window, sinks and a state is made of: its sizes, its feature maps and its state."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """window w ≥ 1 and sinks s ≥ 0, in tokens; scale of the scores q·k; softcap c: scores become c·tanh(score / c)."""

    window: int
    sinks: int
    scale: float
    softcap: float | None = None


class Far(NamedTuple):
    """How a state holds the tokens between sinks and window.

    query, key: the feature maps [B, H, T, D] -> [B, H, T, F] of H query and of Hk key heads. gamma [H]: the weight γ of
    the far tokens, ≥ 0. beta [Hk]: the rate of the delta rule on [v, 1], with features of keys divided by their length;
    None: sums. decay: the natural logarithm, ≤ 0, of the factor of S and z for each token that enters them.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    gamma: Tensor
    beta: Tensor | None = None
    decay: float = 0.0


class WindowState(NamedTuple):
    """The state of B rows, of constant size; zeros are new rows.

    k [B, Hk, w, D] and v [B, Hk, w, M]: the last w tokens, the newest last. raw [B, Hk, w, D]: what their features are
    computed of; [.., 0] if that is k. sink_k [B, Hk, s, D], sink_v [B, Hk, s, M]: the first s tokens. s [B, Hk, F, M]
    and z [B, Hk, F]: the sums over the tokens between, in float32 at least. seen [B] int64: the tokens of each row.
    """

    k: Tensor
    v: Tensor
    raw: Tensor
    sink_k: Tensor
    sink_v: Tensor
    s: Tensor
    z: Tensor
    seen: Tensor


def new_state(k: Tensor, v: Tensor, raw: Tensor | None, sizes: Sizes, far: Far | None) -> WindowState:
    """The state of new rows for k [B, Hk, T, D], v [B, Hk, T, M] and, if features are not k's, raw [B, Hk, T, D]."""
    b, heads = k.shape[:2]
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    features = 0
    if far is not None:
        features = far.key((k if raw is None else raw)[..., :0, :].to(wide)).shape[-1]
    return WindowState(
        k.new_zeros(b, heads, sizes.window, k.shape[-1]),
        v.new_zeros(b, heads, sizes.window, v.shape[-1]),
        k.new_zeros(b, heads, sizes.window, 0 if raw is None else raw.shape[-1]),
        k.new_zeros(b, heads, sizes.sinks, k.shape[-1]),
        v.new_zeros(b, heads, sizes.sinks, v.shape[-1]),
        v.new_zeros(b, heads, features, v.shape[-1], dtype=wide),
        v.new_zeros(b, heads, features, dtype=wide),
        torch.zeros(b, dtype=torch.int64, device=k.device),
    )
