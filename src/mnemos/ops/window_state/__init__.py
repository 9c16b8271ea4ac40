"""Softmax attention over a window and the first tokens, and a linear-attention state of all between; see README.md."""

from torch import Tensor

from mnemos.ops.checks import check_mask
from mnemos.ops.precision import full_precision
from mnemos.types import InputError

from .chunked import Tokens, read
from .ring import Ring
from .state import Far, Sizes, WindowState, new_state

__all__ = ["Far", "Ring", "Sizes", "WindowState", "new_state", "window_attention"]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sizes,
    far: Far | None = None,
    state: WindowState | None = None,
    mask: Tensor | None = None,
    sink_q: Tensor | None = None,
    raw: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, WindowState]:
    """Causal attention over the last `window` tokens, the first `sinks`, and a state of the tokens between. y, state.

        y_i = [Σ_near e^{a_ij − m_i} v_j + γ Σ_far φ_q(q_i)·φ_k(k_j) v_j] / [the same sums without v]

    a_ij = q_i·k_j·scale, m_i the largest a_ij of near(i), near(i) = {j : i − w < j ≤ i} ∪ {j < s}, far(i) the other
    j ≤ i. far None: no far tokens. With `far.beta` the far sums follow the delta rule on [v, 1], and a negative far sum
    counts 0 in the denominator. With `far.decay` the far sums are multiplied by e^decay before a token enters them.

    q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, M], T ≥ 1; y [B, T, H, M]. Hk divides H: query head h reads the keys,
    values and state of head h // (H / Hk), without copies of them. state: never changed; None: new rows. Gradients flow
    through it. A sequence may be split into calls anywhere. mask [B, T] bool, True = valid: padding may be anywhere; it
    takes no place in window, sinks and state, and its y is 0. sink_q as q: what meets the sinks that have left the
    window, in place of q. raw: what features are computed of, in place of (q, k).
    Inputs of half precision are computed in float32; S and z are float32, or float64 for float64.

    Cost: O(T·(w + c)·(D + M) + T·F·M) per head, c a block of 64 to 256 tokens. Raises InputError for shapes that do not
    fit.
    """
    _check(q, k, v, sizes, mask)
    b, _, heads, _ = q.shape
    with full_precision(q.device.type):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        sink_q = None if sink_q is None else sink_q.transpose(1, 2)
        raw_q, raw_k = (None, None) if raw is None else (raw[0].transpose(1, 2), raw[1].transpose(1, 2))
        state = new_state(k, v, raw_k, sizes, far) if state is None else state
        if len(state.seen) != b:
            raise InputError(f"expected a state of {b} rows, found {len(state.seen)}; use mnemos.select")
        shape = k.shape[1], heads // k.shape[1]
        sink_q, raw_q = (x if x is None else x.unflatten(1, shape) for x in (sink_q, raw_q))
        y, state = read(Tokens(q.unflatten(1, shape), k, v, sink_q, raw_q, raw_k), sizes, far, state, mask)
    return y.flatten(1, 2).transpose(1, 2), state


def _check(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, mask: Tensor | None) -> None:
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[1] > 0
    if not fits or k.shape[2] != v.shape[2] or not k.shape[2] or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3]:
        raise InputError(
            "expected q [B, T, H, D], k [B, T, Hk, D] and v [B, T, Hk, M], H a multiple of Hk and T at least 1, found "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if sizes.window < 1 or sizes.sinks < 0:
        raise InputError(f"expected a window of at least 1 and sinks of at least 0 tokens, found {sizes[:2]}")
    check_mask(mask, q.shape[:2])
