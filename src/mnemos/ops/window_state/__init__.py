"""Softmax attention over a window and the first tokens, and a linear-attention state of all between; see README.md.

Read `window_attention` here, then `read_blocks` in chunked.py; ring.py computes single tokens of a stream.
"""

import torch
from torch import Tensor

from mnemos.errors import InputError
from mnemos.ops.padding import valid_first
from mnemos.ops.precision import full_precision
from mnemos.ops.signature import Signature

from .chunked import Far, Sizes, Tokens, WindowState, gather, new_state, read_blocks
from .ring import Ring

__all__ = ["Far", "Ring", "Sizes", "WindowState", "new_state", "window_attention"]

CHECK = Signature(
    "window_attention", "; H is a multiple of K", q="B T H D", k="B T K D", v="B T K M", mask="B T bool ?"
)
TOGETHER = 512  # tokens that are computed at once


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
    # --- checks ---
    n = CHECK(q=q, k=k, v=v, mask=mask)
    if not n["T"] or not n["K"] or n["H"] % n["K"]:
        raise InputError(f"window_attention: expected T at least 1 and H a multiple of K, found {n}")
    if sizes.window < 1 or sizes.sinks < 0:
        raise InputError(f"expected a window of at least 1 and sinks of at least 0 tokens, found {sizes[:2]}")
    if state is not None and len(state.seen) != n["B"]:
        raise InputError(f"expected a state of {n['B']} rows, found {len(state.seen)}; use mnemos.select")

    # --- heads before tokens, the query heads of a key head together; padding is zeros, as 0 times NaN is NaN ---
    group = n["K"], n["H"] // n["K"]
    raw_q, raw_k = (None, None) if raw is None else raw
    q, k, v, sink_q, raw_q, raw_k = (  # type: ignore[assignment]
        x if x is None else x.transpose(1, 2) for x in (q, k, v, sink_q, raw_q, raw_k)
    )
    queries = [x if x is None else x.unflatten(1, group) for x in (q, sink_q, raw_q)]
    with full_precision(q.device.type):
        state = new_state(k, v, raw_k, sizes, far) if state is None else state
        tokens = Tokens(queries[0], k, v, queries[1], queries[2], raw_k)  # type: ignore[arg-type]
        if mask is not None:
            padding = ~mask[:, None, :, None]
            tokens = tokens.map(lambda x: x.masked_fill(padding if x.dim() == 4 else padding[:, :, None], 0))

        # --- pieces of a call, in each of which the valid tokens of a row come first ---
        outputs = []
        for start in range(0, n["T"], TOGETHER):
            piece = slice(start, start + TOGETHER)
            part = tokens.map(lambda x: x[..., piece, :]) if n["T"] > TOGETHER else tokens  # noqa: B023
            if mask is None:
                y, state = read_blocks(part, sizes, far, state, None)
            else:
                order = valid_first(mask[:, piece])
                part = part.map(lambda x: gather(x, order))  # noqa: B023
                y, state = read_blocks(part, sizes, far, state, mask[:, piece].sum(1))
                y = gather(y, order.argsort(1)).masked_fill(~mask[:, None, None, piece, None], 0)
            outputs.append(y)
    y = torch.cat(outputs, -2) if len(outputs) > 1 else y
    return y.flatten(1, 2).transpose(1, 2), state
