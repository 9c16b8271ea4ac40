"""What an adapter declares about the attention of a causal decoder, and how its calls and masks are read."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos._compat import assert_in_graph
from mnemos.libraries import CACHE_NAMES
from mnemos.types import InputError

from .host import Host, argument, tokens_in
from .masks import PACKED, refuse_lengths, visible

_APART = PACKED.format("the mask hides a token from the one after it")


class DecoderCall(NamedTuple):
    """One call of a decoder's attention: x [B, T, D], the host's mask, and the host's cache (None: new rows)."""

    x: Tensor
    mask: Any
    past: Any


@dataclass(frozen=True)
class DecoderHost(Host):
    """One attention class of causal decoders; its gated cache is updated in blocks and carried on the host's cache.

    call reads the tokens alone. past: the argument with the host's cache, a transformers `Cache`; one of
    `libraries.CACHE_NAMES` stands for all of them. mask: the argument with the attention mask (see `own_tokens`).
    layer: the attribute with the attention's number in the cache.
    """

    call: Any = field(default=tokens_in("hidden_states"), kw_only=True)
    past: str = field(default="past_key_values", kw_only=True)
    mask: str = field(default="attention_mask", kw_only=True)
    layer: str = field(default="layer_idx", kw_only=True)

    def read(self, module: Any, args: tuple, kwargs: dict) -> DecoderCall:
        """The call. Raises InputError where an argument packs several sequences into one row."""
        refuse_lengths(kwargs)
        mask, past = (self.signature.index(name) for name in (self.mask, self.past))
        names = CACHE_NAMES if self.past in CACHE_NAMES else (self.past,)
        given = [argument(args, kwargs, past, name) for name in names]
        return DecoderCall(
            self.call(module, args, kwargs).x,
            argument(args, kwargs, mask, self.mask),
            given[-1] if given[0] is None else given[0],
        )


def own_tokens(mask: Any, x: Tensor, seen: int) -> Tensor | None:
    """Which of x [B, T, D] are valid, [B, T] bool; None: all. seen: the number of keys before them.

    mask: None, [B, N], or [1 or B, 1 or H, T, N] with N ≥ T keys, of booleans (True = attend), integers, or floats that
    are added to the scores. A token is valid if it may attend to itself: floats above −20. Raises InputError for
    another mask, and for one that hides a valid token's predecessor, 20 below the token itself, as it does where
    sequences are packed into one row. Under torch.compile no value is read, and the graph raises RuntimeError for
    packed sequences when it runs.
    """
    if mask is None:
        return None
    b, t = x.shape[:2]
    dims = mask.dim() if isinstance(mask, Tensor) else 0
    if dims not in (2, 4) or mask.shape[-1] < t or mask.shape[0] not in (1, b) or (dims == 4 and mask.shape[2] != t):
        found = list(mask.shape) if dims else type(mask).__name__
        raise InputError(
            f'expected an attention mask [{b}, 1, {t}, N] or [{b}, N], found {found}; load the model with "sdpa" or '
            '"eager" attention (attn_implementation=)'
        )
    # Keys after the last query are places of a static cache that hold no token yet.
    first = min(seen, mask.shape[-1] - t)
    if dims == 2:
        return (mask[:, first : first + t] > 0).expand(b, t)
    pairs = mask[:, 0]
    itself = pairs.diagonal(first, 1, 2)
    valid = visible(itself).expand(b, t)
    if t > 1:  # beside a token's own place, because biases grow with positions
        before = visible(pairs.diagonal(first - 1, 1, 2)[:, 1 - t :], base=itself[:, 1:])
        packed = (valid[:, 1:] & valid[:, :-1] & ~before).any()
        if torch.compiler.is_compiling():
            assert_in_graph(~packed, _APART)
        elif packed:
            raise InputError(_APART)
    return valid
