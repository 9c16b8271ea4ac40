"""The attention masks of hosts: which tokens are valid, and whether a mask is causal, in eager mode and in graphs."""

import torch
from torch import Tensor

from mnemos._compat import assert_in_graph, write_count
from mnemos.types import InputError

# An additive mask hides what it lowers by as much: beside any other token, exp(−100) is nothing in float32.
_HIDDEN = -100.0
_JUDGED = "_mnemos_causal"  # attribute of a mask: ((writes to it, rows, hides), whether it is causal)
CAUSAL = (
    "a cached attention: expected a call without a causal mask, found that it was called causally; a shared cache "
    "would show it the future: leave it out with where="
)


def valid_tokens(mask: object, x: Tensor) -> Tensor | None:
    """The valid tokens [B, T] by a host's attention mask, [B, T] or [B, 1, Q, T], of x [B, T, D]. None: no mask.

    A mask is bool (True = attend), of ones and zeros, or, with four dimensions, additive. A token is valid if at least
    one query may attend to it. Raises InputError for other shapes, and for a causal mask as `refuse_causal` does.
    """
    if mask is None:
        return None
    b, t = x.shape[:2]
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != t or mask.shape[0] not in (1, b):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"expected an attention mask [{b}, {t}] or [{b}, 1, Q, {t}], found {found}")
    if mask.dim() == 2:
        return (mask if mask.dtype == torch.bool else mask > 0).expand(b, t)
    kept = visible(mask, hides=False).any(2).any(1).expand(b, t)
    return both(kept, refuse_causal(mask, x))


def both(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The tokens [B, T] that are valid by two masks; None: all are."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other


def refuse_causal(mask: Tensor | None, x: Tensor, hides: bool = False) -> Tensor | None:
    """Raise InputError if an attention mask [T, T], [B·H, T, T] or [B, H, T, T] of x [B, T, D] is causal.

    A mask is causal if, in some row, a token sees an earlier one that does not see it, and never the reverse. Padding,
    windows and blocks hide in both directions. hides: the value by which booleans hide, True in PyTorch's modules and
    False in its functions.

    Outside of a graph the result is None. A graph (torch.compile, torch.export, torch.jit.trace) has no values; it gets
    an assertion, which raises RuntimeError when it runs, and the result is a mask [B, T] that is True, but False
    everywhere for a causal mask. Then nothing of the call is written, so that a format that drops assertions, such as
    TorchScript or ONNX, does not show the future either. Cost O(B·H·T²), once per mask: its layers share the verdict.
    """
    if mask is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.is_meta:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        allowed = ~_causal(mask, x.shape[0], hides)
        assert_in_graph(allowed, CAUSAL)
        return allowed.expand(x.shape[:2])
    if _judged(mask, x.shape[0], hides):
        raise InputError(CAUSAL)
    return None


def _judged(mask: Tensor, rows: int, hides: bool) -> bool:
    """Whether a mask with values is causal. The verdict stays with the mask until it is written to."""
    if mask.stride(-2) == 0:  # one row of keys for all queries
        return False
    try:
        writes = write_count(mask)
    except RuntimeError:  # a tensor of inference mode
        writes = None
    kept = getattr(mask, _JUDGED, None)
    key = writes, rows, hides
    if kept is None or writes is None or kept[0] != key:
        kept = key, bool(_causal(mask, rows, hides))
        setattr(mask, _JUDGED, kept)
    return bool(kept[1])


def _causal(mask: Tensor, rows: int, hides: bool) -> Tensor:
    """Whether a mask [..., T, T] is causal: a scalar of booleans."""
    seen = visible(mask, hides)
    t = mask.shape[-1]
    if mask.dim() == 3 and mask.shape[0] % rows == 0:
        seen = seen.unflatten(0, (rows, -1))
    seen = seen.any(-3) if seen.dim() > 2 else seen
    seen = seen.reshape(-1, t, t)
    itself = torch.eye(t, dtype=torch.bool, device=mask.device)
    # Padding that sees itself alone is no token; in a sequence of two, the last token is seen by itself alone, too.
    token = (seen & ~itself).any(-2) | (seen.any(-2) & (itself.sum() <= 2))
    one_way = seen & ~seen.mT & token[:, None] & token[:, :, None]  # q sees k, and k does not see q
    later = torch.ones(t, t, dtype=torch.bool, device=mask.device).triu(1)
    past, future = (one_way & later.mT).any((-1, -2)), (one_way & later).any((-1, -2))
    return (past & ~future).any()


def visible(mask: Tensor, hides: bool = False) -> Tensor:
    """Where a mask lets a query see a key; hides: the value by which booleans hide."""
    if mask.dtype == torch.bool:
        return ~mask if hides else mask
    return mask > _HIDDEN if mask.is_floating_point() else mask > 0
