"""The adapter for modules that the user names and no other adapter knows: tokens to tokens of the same shape."""

import inspect
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos.types import InputError

from .host import TEXT_SLOTS, AttentionInput, Call, Host, Site, any_length, argument, reach
from .masks import LEAVE_OUT, LENGTHS, refuse_lengths, refuse_mask, valid_tokens

_WIDTHS = ("embed_dim", "dim", "hidden_size", "d_model", "width")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_MASKS = ("attention_mask", "attn_mask", "mask", "key_padding_mask", "src_key_padding_mask", "padding_mask")
_OTHERS = ("key_value_states", "encoder_hidden_states", "context", "memory")  # a second sequence
_TOKENS = ("hidden_states", "x", "query", "src", "inputs", "tokens")


class Argument(NamedTuple):
    """An argument of a forward: its position (a large number if it has none) and its name."""

    position: int
    name: str

    def of(self, args: tuple, kwargs: dict) -> object:
        """Its value in a call; None if it was not given."""
        return argument(args, kwargs, self.position, self.name)


@dataclass(frozen=True)
class Reader:
    """Reads the calls of a module whose forward has these arguments.

    The tokens are the first argument that is a tensor [B, T, D], or [B, height, width, D]. A mask whose name contains
    "padding" is True at padding; every other mask is as `valid_tokens` has it. Masks [N, T, T] may be of rows, of heads
    or of windows, so each is judged by itself; those of heads as one are [1, H, T, T] or [B, H, T, T]. A class and no
    closure, so that a cached model can be pickled.
    """

    masks: tuple[Argument, ...] = ()
    others: tuple[Argument, ...] = ()
    causal: tuple[Argument, ...] = ()
    lengths: tuple[Argument, ...] = ()

    def __call__(self, module: object, args: tuple, kwargs: dict) -> Call:
        """The call's tokens and mask.

        Raises InputError for a causal call, for one with a second sequence or with several packed into a row, and for
        four axes whose second one is as long as the width: they may be a map with its channels first.
        """
        kind = type(module).__name__
        x = find_tokens(args, kwargs)
        if x is None:
            raise InputError(
                f"{kind}: expected a call with [B, T, D] first, found another; leave it out of where=, or write an "
                "adapter (mnemos.register_host)"
            )
        if any(isinstance(other := one.of(args, kwargs), Tensor) and other is not x for one in self.others):
            raise InputError(
                f"{kind}: expected self-attention, found a call with a second sequence; leave it out of where="
            )
        if x.dim() == 4 and x.shape[1] in (x.shape[-1], _find_width(module)):
            raise InputError(
                f"{kind}: expected tokens [B, height, width, D], found {list(x.shape)}, which may be a map [B, D, "
                'height, width]; write an adapter whose Call says layout="batch" or layout="channels" '
                "(mnemos.register_host)"
            )
        rows = x if x.dim() == 3 else x.flatten(1, 2)
        mask: Tensor | None = None
        for one in self.masks:
            given = one.of(args, kwargs)
            valid = _read_mask(given, "padding" in one.name, rows) if isinstance(given, Tensor) else None
            if valid is not None:
                mask = valid if mask is None else mask & valid
        read = [one.of(args, kwargs) for one in self.masks]
        unread = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v is not x]
        if any(_looks_like_padding(v, rows) and not any(v is one for one in read) for v in unread):
            raise InputError(
                f"{kind}: expected a mask of padding under one of the names {', '.join(_MASKS)}, found one that is "
                "not; write an adapter (mnemos.register_host)"
            )
        if any(one.of(args, kwargs) for one in self.causal):
            raise InputError(
                f"{kind}: expected a call without a causal mask, found that it was called causally; {LEAVE_OUT}"
            )
        refuse_lengths({one.name: one.of(args, kwargs) for one in self.lengths})
        return Call(rows, mask)


def find_tokens(args: tuple, kwargs: dict) -> Tensor | None:
    """The tokens in a call: the first tensor of 3 or 4 dimensions, by position, then by the usual names, then any."""
    named = [kwargs[name] for name in _TOKENS if name in kwargs]
    found = args[:1] if args else (*named, *kwargs.values())
    return next((x for x in found if isinstance(x, Tensor) and x.dim() in (3, 4) and x.is_floating_point()), None)


def _read_mask(mask: Tensor, padding: bool, x: Tensor) -> Tensor | None:
    b, t = x.shape[:2]
    if mask.dim() == 3 and mask.shape[1] == 1 and mask.shape[0] in (1, b):
        mask = mask[:, 0]
    if mask.shape[-2:] == (t, t) and not (padding and mask.shape == (b, t)):  # by query and key, unless it has rows
        # Whose mask each of several is, is not known here, and must not depend on B: they are judged one by one.
        shown = refuse_mask(mask[:, None] if mask.dim() == 3 else mask, x, hides=padding)
        if mask.shape == (b, t):  # as many rows as tokens: it may be either
            mask = mask if shown is None else mask.bool() & shown
        elif mask.dim() == 2 or (mask.dim() == 3 and len(mask) != b):
            return shown
        mask = mask[:, None] if mask.dim() == 3 else mask
    if not mask.is_floating_point():
        mask = ~mask.bool() if padding else mask.bool()
    elif mask.dim() == 2:  # 0 and −∞, or 1 and 0
        added = padding | (mask <= 0).all()
        mask = torch.where(added, mask > -1, mask > 0)
    return valid_tokens(mask, x)


def _looks_like_padding(value: Tensor, x: Tensor) -> bool:
    """Whether an argument has the form of a mask of padding: booleans [B, T], or anything [B, 1, 1, T]."""
    b, t = x.shape[:2]
    return (value.dtype == torch.bool and value.shape == (b, t)) or value.shape == (b, 1, 1, t)


@dataclass(frozen=True)
class Custom(Host):
    """A host whose sizes are stored here instead of read from attributes."""

    found: tuple[int, int] = (0, 0)

    def check(self, module: nn.Module) -> None:
        """Accept any forward: `Reader` finds its arguments by name."""

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """D of the input, D of the output and H."""
        dim, heads = self.found
        return dim, dim, heads


def make_host(site: Site, width: int | None) -> Custom:
    """A host for a named module. D is `width`, which an example showed, or an attribute of the module.

    H is an attribute of the module, or else 1. Raises InputError if D is unknown, and if the module declares that it
    is causal: a shared cache would show it the future.
    """
    module = site.module
    if getattr(module, "is_causal", False) is True or reach(module, "is_decoder") is True:
        raise InputError(f"{site.name}: expected an attention that is not causal, found a causal one; {LEAVE_OUT}")
    dim = width or _find_width(module)
    if dim is None:
        raise InputError(
            f"{site.name}: expected a width D, found none of {', '.join(_WIDTHS)}; "
            "give cache() an example= input of the model"
        )
    heads = next((n for name in _HEADS if (n := _find_integer(module, name)) and dim % n == 0), 1)
    kind = f"{type(module).__module__}:{type(module).__name__}"
    return Custom(kind, (), "", "", make_reader(module), place=_without_limit, found=(dim, heads))


def make_reader(module: nn.Module) -> Reader:
    """How the calls of a module are read: by the names of its forward's arguments."""
    names = list(inspect.signature(type(module).forward).parameters.values())[1:]

    def among(wanted: tuple[str, ...]) -> tuple[Argument, ...]:
        keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        declared = {p.name: 10**6 if p.kind in keyword else i for i, p in enumerate(names)}
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names)
        return tuple(Argument(declared.get(n, 10**6), n) for n in wanted if n in declared or open_ended)

    return Reader(among(_MASKS), among(_OTHERS), among(("is_causal",)), among(LENGTHS))


def _find_width(module: object) -> int | None:
    return next((n for name in _WIDTHS if (n := _find_integer(module, name))), None)


def _find_integer(module: object, name: str) -> int | None:
    value = reach(module, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _without_limit(site: Site, seen: int | None) -> AttentionInput:
    """As `any_length`, but without a limit: the positions that a model has need not be those of a named module."""
    return any_length(site, seen)._replace(slots=seen or TEXT_SLOTS, limit=None)
