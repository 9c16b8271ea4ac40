"""The attention masks of hosts: which tokens are valid, and which masks are refused, in eager mode and in graphs."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mnemos._compat import assert_in_graph, write_count
from mnemos.modes import in_graph, records_values
from mnemos.types import InputError, describe

T = TypeVar("T")
# An additive mask hides a key by −20 or lower, and of a query that is lowered as a whole, a key 20 below its highest:
# exp(−20) is nothing in float32. And any at −100 or lower, because a query may have all its keys hidden.
_LOWERED = 20.0
_HIDDEN = -100.0
_JUDGED = "_mnemos_judged"  # attribute of a mask: what was read of it, see `read_once`
DECODERS = "a causal decoder needs an adapter, mnemos.register_host(mnemos.hosts.DecoderHost(...))"
LEAVE_OUT = f"a shared cache would show it the future: leave it out of where=; {DECODERS}"
CAUSAL = f"a cached attention: expected a call without a causal mask, found that it was called causally; {LEAVE_OUT}"
PACKED = (
    "an attention with a memory: expected one sequence per row, found several packed into one ({}); they would see "
    "each other through the memory: give each sequence a row of its own"
)
_APART = PACKED.format("the mask hides a token from the next valid one")
_BLOCKS = PACKED.format("the mask divides a row's tokens into parts that do not see each other")
LENGTHS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens")  # where each of several sequences begins


def valid_tokens(mask: object, x: Tensor) -> Tensor | None:
    """The valid tokens [B, T] by a host's attention mask, [B, T] or [B, 1, Q, T], of x [B, T, D]. None: no mask.

    A mask is bool (True = attend), of ones and zeros, or, with four dimensions, additive. A token is valid if at least
    one query may attend to it. Where tokens are seen by others, one that it alone sees is padding. An additive mask
    hides a key 20 below zero, or below the highest key of its query if that is lower: a bias that raises keys hides no
    other, and one that lowers a key by 20 for all queries is taken for padding. Raises InputError for other shapes, and
    for a mask that `refuse_mask` refuses.
    """
    if mask is None:
        return None
    b, t = x.shape[:2]
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != t or mask.shape[0] not in (1, b):
        raise InputError(f"expected an attention mask [{b}, {t}] or [{b}, 1, Q, {t}], found {describe(mask)}")
    if mask.dim() == 2:
        return (mask if mask.dtype == torch.bool else mask > 0).expand(b, t)
    if not mask.numel():
        return None
    kept = _find_shown(mask, False)[0].any(2).any(1)
    allowed, alone = _judge(mask, x, False)
    if alone is not None:
        kept = kept & ~alone
    return combine(kept.expand(b, t), allowed)


def own_tokens(mask: Any, x: Tensor, seen: int) -> Tensor | None:
    """Which of x [B, T, D] are valid, [B, T] bool; None: all. seen: the number of keys before them.

    mask: None, [B, N], or [1 or B, 1 or H, T, N] with N ≥ T keys, of booleans (True = attend), integers, or floats that
    are added to the scores. A token is valid if it may attend to itself: floats above −20. Raises InputError for
    another mask, and for one that hides the valid token before a valid one, 20 below the token itself, as it does where
    sequences are packed into one row. Under torch.compile no value is read, and the graph raises RuntimeError for
    packed sequences when it runs.
    """
    if mask is None:
        return None
    b, t = x.shape[:2]
    dims = mask.dim() if isinstance(mask, Tensor) else 0
    if dims not in (2, 4) or mask.shape[-1] < t or mask.shape[0] not in (1, b) or (dims == 4 and mask.shape[2] != t):
        raise InputError(
            f"expected an attention mask [{b}, 1, {t}, N] or [{b}, N], found {describe(mask)}; load the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    # Keys after the last query are those of a static cache that has no token there yet.
    first = min(seen, mask.shape[-1] - t)
    if dims == 2:
        return (mask[:, first : first + t] > 0).expand(b, t)
    pairs = mask[:, 0]
    itself = pairs.diagonal(first, 1, 2)
    valid = find_visible(itself).expand(b, t)
    if t > 1:  # beside a token's own position, because biases grow with positions
        last = torch.where(valid, torch.arange(t, device=x.device), -1).cummax(1).values[:, :-1]  # -1: none so far
        scores = pairs[:, 1:].expand(b, -1, -1).gather(2, (first + last.clamp(min=0))[..., None])[..., 0]
        hidden = valid[:, 1:] & (last >= 0) & ~find_visible(scores, base=itself[:, 1:])
        # Padding right behind the last token sees it in a sliding window, and does not where sequences are packed.
        rows = pairs.expand(b, -1, -1).gather(1, (last + 1)[..., None].expand(-1, -1, pairs.shape[-1]))
        behind = rows.gather(2, (first + last.clamp(min=0))[..., None])[..., 0]
        packed = (hidden & ~find_visible(behind, base=itself.expand(b, -1).gather(1, last + 1))).any()
        if torch.compiler.is_compiling():
            assert_in_graph(~packed, _APART)
        elif packed:
            raise InputError(_APART)
    return valid


def combine(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The tokens [B, T] that are valid by two masks; None: all are."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other


def refuse_mask(mask: Tensor | None, x: Tensor, hides: bool = False) -> Tensor | None:
    """Raise InputError if an attention mask [T, T], [B·H, T, T] or [B, H, T, T] of x [B, T, D] is causal or packed.

    A mask is causal if, in some row, a token sees an earlier one that does not see it, and never the reverse. Padding,
    windows and blocks hide in both directions. It is packed if it divides a row's tokens into parts that do not see
    each other: parts that follow one another, or parts whose tokens all see each other. hides: the value by which
    booleans hide, True in PyTorch's modules and False in its functions. A token sees another if one head does. Masks
    [W, T, T] of B = n·W rows, as those of windows, are judged one by one. Here an additive mask hides what is 20 below
    the highest key of its query, as softmax has it: a bias that raises earlier keys by 20 is causal, too.

    Outside of a graph the result is None. A graph (torch.compile, torch.export, torch.jit.trace) gets an assertion,
    which raises RuntimeError when it runs, and the result is a mask [B, T], False everywhere for a mask that is
    refused: nothing of the call is written, also in a format that drops assertions, such as TorchScript or ONNX. Cost
    O(B·H·T²), once per mask: its layers share it.
    """
    return _judge(mask, x, hides)[0]


def refuse_lengths(arguments: dict[str, Any]) -> None:
    """Raise InputError if a call's arguments by name say that several sequences are packed into one row."""
    for name in LENGTHS:
        starts = arguments.get(name)
        if starts is not None and (not isinstance(starts, Tensor) or starts.numel() > 2):
            raise InputError(PACKED.format(f"{name}="))


def _judge(mask: Tensor | None, x: Tensor, hides: bool) -> tuple[Tensor | None, Tensor | None]:
    """What `refuse_mask` returns, and the tokens [R, T] that no other sees, R 1 or B; None: there are none."""
    if mask is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.is_meta or not mask.numel():
        return None, None
    if in_graph():
        causal, packed, tokens = _compute_judgement(mask, x.shape[0], hides)
        for refused, message in ((causal, CAUSAL), (packed, _BLOCKS)):
            assert_in_graph(~refused, message)
        return (~(causal | packed)).expand(x.shape[:2]), tokens
    if mask.stride(-2) == 0:  # one row of keys for all queries
        return None, None

    def judge() -> tuple[bool, bool, Tensor | None]:
        causal, packed, tokens = _compute_judgement(mask, x.shape[0], hides)
        is_causal, is_packed, some = torch.stack([causal, packed, tokens.any()]).tolist()
        return is_causal, is_packed, tokens if some else None

    is_causal, is_packed, alone = read_once(mask, _JUDGED, (x.shape[0], hides), judge)
    if is_causal or is_packed:
        raise InputError(CAUSAL if is_causal else _BLOCKS)
    return None, alone


def read_once(mask: Tensor, name: str, key: tuple, read: Callable[[], T]) -> T:
    """What `read` makes of a mask, kept under an attribute of it until it is written to: its layers share it."""
    try:
        writes = write_count(mask)
    except RuntimeError:  # a tensor of inference mode
        writes = None
    if writes is None or records_values():  # unknown: it may have been written to since; or a constant of a trace
        return read()
    key = writes, *key
    kept: tuple[tuple, T] | None = getattr(mask, name, None)
    if kept is None or kept[0] != key:
        kept = key, read()
        setattr(mask, name, kept)
    return kept[1]


def _compute_judgement(mask: Tensor, rows: int, hides: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Whether a mask [..., T, T] is causal and whether it is packed, and the tokens [R, T] that no other token sees."""
    t, count = mask.shape[-1], mask.shape[0]
    if mask.dim() == 3:  # [B·H, T, T], or one per window; any other number belongs to heads that all rows share
        owners = rows if rows and count % rows == 0 else count if rows % count == 0 else 1
        mask = mask.unflatten(0, (owners, -1))
    seen, near, level = (x.any(-3) if x.dim() > 2 else x for x in _find_shown(mask, hides))
    seen, near, level = seen.reshape(-1, t, t), near.reshape(-1, t, t), level.reshape(-1, t, 1)
    itself = torch.eye(t, dtype=torch.bool, device=mask.device)
    later = torch.ones(t, t, dtype=torch.bool, device=mask.device).triu(1)
    others = near & ~itself
    # Padding that sees itself alone is no token; in a sequence of two, the last token is seen by itself alone, too.
    token = others.any(-2) | (near.any(-2) & (itself.sum() <= 2))
    one_way = near & ~near.mT & ~level.mT & token[:, None] & token[:, :, None]  # q sees k, and k does not see q
    past, future = (one_way & later.mT).any((-1, -2)), (one_way & later).any((-1, -2))
    edges = others | others.mT | level | level.mT | itself
    shown = (seen & ~itself).any(-2)
    alone = ~shown & shown.any(-1, keepdim=True)
    return (past & ~future).any(), _is_packed(edges, others.any(-2), later), alone


def _is_packed(edges: Tensor, token: Tensor, later: Tensor) -> Tensor:
    """Whether tokens [R, T], of those that edges [R, T, T] join, fall into parts: a scalar of booleans."""
    t = edges.shape[-1]
    pairs = token[:, None] & token[:, :, None]
    missing = pairs & ~edges
    if not in_graph() and not missing.any():
        return missing.any()
    position = torch.arange(t, device=edges.device)
    edges = (edges & pairs) | (position == position[:, None])
    first, last = (x.to(torch.uint8).argmax(-1) for x in (edges, edges.flip(-1)))  # that each token is joined to
    crossed = ((t - 1 - last[:, None] > position[:, None]) & ~later).any(-1)  # whether an edge leads over its end
    count = token.cumsum(-1)
    cut = (~crossed & (count > 0) & (count < count[:, -1:])).any()
    apart = first[:, None] != first[:, :, None]
    whole = (missing == (pairs & apart)).all((-1, -2))  # all tokens of a part see each other
    return cut | (whole & missing.any((-1, -2))).any()


def _find_shown(mask: Tensor, hides: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What a mask [..., Q, N] shows: three masks.

    Keys that it does not lower. Those of them that are not 20 below another key. Queries [..., Q, 1] that it lowers as
    a whole, as the padding of a mask that hides rows by −50: they would see all keys, and show none.
    """
    if not mask.is_floating_point():
        seen = find_visible(mask, hides)
        return seen, seen, torch.zeros_like(seen[..., :1])
    highest = mask.amax(-1, keepdim=True)
    base = highest.clamp(max=0)
    seen = find_visible(mask, base=base)
    low = (highest > _HIDDEN) & (base <= base.amax(-2, keepdim=True) - _LOWERED)
    level = low & seen.all(-1, keepdim=True)
    return seen & ~level, find_visible(mask, base=highest) & ~level, level


def find_visible(mask: Tensor, hides: bool = False, base: Tensor | float = 0.0) -> Tensor:
    """Where a mask shows a key to a query. Booleans hide it by the value `hides`, floats by values 20 below `base`."""
    if mask.dtype == torch.bool:
        return ~mask if hides else mask
    if not mask.is_floating_point():
        return mask > 0
    return (mask > _HIDDEN) & (mask > base - _LOWERED)
