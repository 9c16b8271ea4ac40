"""A module that the user names with where=, and no adapter knows: how its calls are read, and what it shows when run.

`Reader` reads calls by the names of arguments. `record_calls` runs a model on an example, to find the sizes of each
attention's input. `probe` changes the input of a named module: most do not declare that they are causal, and would read
the future in a shared cache, or which axis is the batch. A module that reads each token alone does not show either.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.errors import one_line
from mnemos.modes import evaluating
from mnemos.types import InputError

from .host import Call, Host, reach
from .inputs import TEXT_SLOTS, AttentionInput, NamedModule, any_length
from .masks import CAUSAL, LEAVE_OUT, combine, find_visible, refuse_lengths, refuse_mask, valid_tokens

_WIDTHS = ("embed_dim", "dim", "hidden_size", "d_model", "width")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_MASKS = ("attention_mask", "attn_mask", "mask", "key_padding_mask", "src_key_padding_mask", "padding_mask")
_OTHERS = ("key_value_states", "encoder_hidden_states", "context", "memory")  # a second sequence
_TOKENS = ("hidden_states", "x", "query", "src", "inputs", "tokens")
_ADAPTER = "leave it out of where=, or write an adapter (mnemos.register_host)"
_RANDOM = 8  # T of the random input of a module without an example
CallReader = Callable[[nn.Module, tuple, dict], Call]


@dataclass(frozen=True)
class Reader:
    """Reads the calls of a module whose forward has these arguments that may be passed by position.

    The tokens are the first argument that is a tensor [B, T, D], or [B, height, width, D]. A mask whose name contains
    "padding" is True at padding; every other mask is as `valid_tokens` has it. Masks [N, T, T] may be of rows, of heads
    or of windows, so each is judged by itself; those of heads as one are [1, H, T, T] or [B, H, T, T]. A class and no
    closure, so that a cached model can be pickled.
    """

    positional: tuple[str, ...] = ()

    def __call__(self, module: object, args: tuple, kwargs: dict) -> Call:
        """The call's tokens and mask.

        Raises InputError for a causal call, for one with a second sequence or with several packed into a row, and for
        four axes whose second one is as long as the width: they may be a map with its channels first.
        """
        name, call = type(module).__name__, dict(zip(self.positional, args, strict=False)) | kwargs
        # --- the tokens ---
        x = find_tokens(args, kwargs)
        if x is None:
            raise InputError(f"{name}: expected a call with [B, T, D] first, found another; {_ADAPTER}")
        if any(isinstance(call.get(other), Tensor) and call[other] is not x for other in _OTHERS):
            raise InputError(f"{name}: expected self-attention, found a call with a second sequence; {_ADAPTER}")
        if x.dim() == 4 and x.shape[1] in (x.shape[-1], _find_integer(module, _WIDTHS)):
            raise InputError(
                f"{name}: expected tokens [B, height, width, D], found {list(x.shape)}, which may be a map [B, D, "
                'height, width]; write an adapter (mnemos.register_host) with layout="batch" or layout="channels"'
            )
        rows = x if x.dim() == 3 else x.flatten(1, 2)
        # --- its masks ---
        masks = {key: call[key] for key in _MASKS if isinstance(call.get(key), Tensor)}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value is not x and not any(value is mask for mask in masks.values()):
                b, t = rows.shape[:2]
                if (value.dtype == torch.bool and value.shape == (b, t)) or value.shape == (b, 1, 1, t):
                    raise InputError(
                        f"{name}: expected a mask of padding named {', '.join(_MASKS)}, found another; {_ADAPTER}"
                    )
        if call.get("is_causal"):
            raise InputError(CAUSAL)
        refuse_lengths(call)
        valid: Tensor | None = None
        for key, mask in masks.items():
            valid = combine(valid, _read_mask(mask, "padding" in key, rows))
        return Call(rows, valid)


def find_tokens(args: tuple, kwargs: dict) -> Tensor | None:
    """The tokens in a call: the first tensor of 3 or 4 dimensions, by position, then by the usual names, then any."""
    values = args[:1] if args else (*(kwargs[name] for name in _TOKENS if name in kwargs), *kwargs.values())
    return next((x for x in values if isinstance(x, Tensor) and x.dim() in (3, 4) and x.is_floating_point()), None)


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
    elif mask.dim() == 2:  # a bias and −∞, or weights and 0
        added = padding | (mask <= 0).all() | (mask < 0).any()
        mask = torch.where(added, find_visible(mask), mask > 0)
    return valid_tokens(mask, x)


@dataclass(frozen=True)
class Named(Host):
    """The adapter of a named module; its sizes are stored here instead of read from attributes."""

    dim: int = 0
    num_heads: int = 0

    def check(self, module: nn.Module) -> None:
        """Accept any forward: `Reader` finds its arguments by name."""

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """D of the input, D of the output and H."""
        return self.dim, self.dim, self.num_heads


def make_adapter(site: NamedModule, width: int | None, inside: str | None) -> Named:
    """The adapter of a named module. D is `width`, which an example showed, or an attribute of the module.

    H is an attribute of the module, or else 1. inside: a known attention that the module holds. Raises InputError if D
    is unknown, and if the module declares that it is causal: a shared cache would show it the future.
    """
    module = site.module
    if getattr(module, "is_causal", False) is True or reach(module, "is_decoder") is True:
        raise InputError(f"{site.name}: expected an attention that is not causal, found a causal one; {LEAVE_OUT}")
    dim = width or _find_integer(module, _WIDTHS)
    if dim is None:
        hint = "give example=" if inside is None else f"name the attention inside, {inside!r}"
        raise InputError(f"{site.name}: expected a width D, found none of {', '.join(_WIDTHS)}; {hint}")
    heads = _find_integer(module, _HEADS, divides=dim) or 1
    cls = f"{type(module).__module__}:{type(module).__name__}"
    return Named(cls, (), "", "", make_reader(module), input=_without_limit, dim=dim, num_heads=heads)


def make_reader(module: nn.Module) -> Reader:
    """How the calls of a module are read: by the names of its forward's arguments."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return Reader(tuple(one.name for one in parameters if one.kind in by_position))


def _find_integer(module: object, names: tuple[str, ...], divides: int | None = None) -> int | None:
    """The first of some attributes that is a positive number, and divides another if one is named."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and (divides or value) % value == 0:
            return value
    return None


def _without_limit(site: NamedModule, t: int | None) -> AttentionInput:
    """As `any_length`, but without a limit: the positions that a model has need not be those of a named module."""
    return any_length(site, t)._replace(slots=t or TEXT_SLOTS, limit=None)


class FirstCall(NamedTuple):
    """The first call of an attention: T and D of its tokens [B, T, D], their device, and the call's arguments."""

    tokens: int
    width: int
    device: torch.device
    args: tuple
    kwargs: dict

    def map(self, fn: Callable[[object], object]) -> "FirstCall":
        """The same with `fn` of each argument."""
        return self._replace(args=tuple(map(fn, self.args)), kwargs={name: fn(v) for name, v in self.kwargs.items()})


def record_calls(
    model: nn.Module, readers: Mapping[NamedModule, CallReader], example: object
) -> tuple[dict[str, FirstCall], dict[str, InputError]]:
    """By name, what each site is first called with when the model is run on `example`, and why a call was refused.

    readers: what reads the calls of each site. The model runs in eval mode, without gradient; its modes and the random
    generators are restored. Without an example both are empty. Raises InputError if the model fails.
    """
    calls: dict[str, FirstCall] = {}
    refusals: dict[str, InputError] = {}
    if example is None:
        return calls, refusals

    def watch(name: str, reader: CallReader) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            try:
                x = reader(module, args, kwargs).x
            except InputError as error:
                refusals.setdefault(name, error)
                return
            # Copies, because a module may change its input in place. One tensor stays one.
            copies = {id(v): v.clone() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())}
            call = FirstCall(x.shape[1], x.shape[2], x.device, args, kwargs)
            calls.setdefault(name, call.map(lambda value: copies[id(value)]))

        return hook

    handles = [
        site.module.register_forward_pre_hook(watch(site.name, reader), with_kwargs=True)
        for site, reader in readers.items()
    ]
    try:
        with torch.no_grad(), generators.preserve(), evaluating(model):
            if isinstance(example, dict):
                model(**example)
            else:
                model(*(example if isinstance(example, (tuple, list)) else (example,)))
    except Exception as error:
        raise InputError(
            f"expected an example= that the model accepts, found {type(error).__name__}: {one_line(error)}"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    return calls, refusals


def probe(site: NamedModule, host: Host, call: FirstCall | None) -> None:
    """Raise InputError if the module is causal, mixes no tokens, reads other rows, or changes its tokens' shape.

    call: the module's call in an example. None: it is called with random tokens [2, 8, D] alone. A copy of the module
    runs, in eval mode, without gradient and at least in single precision; the random generators are restored. A module
    that declares is_causal=False may need more than tokens. Cost: four forwards of the module.
    """
    name, parameter = site.name, next(site.module.parameters(), None)
    declared = getattr(site.module, "is_causal", None) is False
    if parameter is not None and parameter.is_meta:
        return
    with torch.no_grad(), generators.preserve():
        module = copy.deepcopy(site.module)
        # --- the call that is changed ---
        if call is None:
            dtype = torch.float32 if parameter is None or not parameter.is_floating_point() else parameter.dtype
            device = torch.device("cpu") if parameter is None else parameter.device
            random = torch.randn(2, _RANDOM, host.sizes(site.module)[0], dtype=dtype, device=device)
            first = next(iter(inspect.signature(module.forward).parameters.values()), None)
            by_name = first is not None and first.kind is inspect.Parameter.KEYWORD_ONLY
            args, kwargs = ((), {first.name: random}) if first is not None and by_name else ((random,), {})
            call = FirstCall(_RANDOM, random.shape[2], device, args, kwargs)
        x = find_tokens(call.args, call.kwargs)
        assert x is not None  # its call was read
        if x.dtype in (torch.bfloat16, torch.float16):  # their rounding is as large as what is looked for
            module = module.float()
            call = call.map(lambda v: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v)
        try:
            y = _run(module, host, call)
        except InputError:
            raise
        except Exception as error:
            if declared:
                return
            raise InputError(
                f"{name}: expected a module that takes tokens alone, found {type(error).__name__}: {one_line(error)}; "
                "give cache() an example= input of the model"
            ) from None
        # --- its shape ---
        read = host.call(module, call.args, call.kwargs)
        if y.shape[:2] != read.x.shape[:2] or y.shape[2] != host.sizes(module)[1]:
            raise InputError(
                f"{name}: expected a module that maps [B, T, {read.x.shape[2]}] to the same shape, found "
                f"{tuple(read.x.shape)} to {tuple(y.shape)}; leave it out of where="
            )
        # --- other rows: every valid token of one row changes ---
        valid = torch.ones_like(read.x[..., 0], dtype=torch.bool) if read.mask is None else read.mask
        row = int(valid.sum(1).argmax())
        tokens = valid[row].nonzero().flatten()
        if len(y) > 1:
            dtype = y.dtype if y.dtype in (torch.float32, torch.float64) else torch.bfloat16
            rounding = min(1e3 * torch.finfo(dtype).eps, 0.02)
            others = torch.arange(len(y), device=y.device) != row
            if (_run(module, host, call, row, tokens) - y)[others].abs().max() > y.abs().max() * rounding:
                raise InputError(
                    f"{name}: expected rows of a batch that do not depend on each other, found that they do, as where "
                    f'time leads, [T, B, D] (an adapter says layout="time"); {_ADAPTER}'
                )
        # --- causality: the later half of the row's tokens changes, then the earlier half ---
        if len(tokens) < 2:
            if declared:
                return
            raise InputError(f"{name}: expected an example with several tokens, to test for causality, found one")
        early, late = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
        limit = 1e3 * torch.finfo(y.dtype).eps * (y[row].abs().max() + torch.finfo(y.dtype).tiny)
        later = bool((_run(module, host, call, row, late) - y)[row, early].abs().max() > limit)
        earlier = bool((_run(module, host, call, row, early) - y)[row, late].abs().max() > limit)
        if earlier and not later:
            raise InputError(
                f"{name}: expected a module that is not causal, found that its outputs do not depend on later tokens; "
                f"{LEAVE_OUT}"
            )
        if not earlier and not later:
            found = "outputs that depend on no other token of a row; leave it out of where="
            if bool((y[row] == y[row, :1]).all()):  # it may mix them, and multiply the result by zero
                found = (
                    "one output for all tokens, as where its last weights start at zero; load trained weights first, "
                    "or write an adapter (mnemos.register_host)"
                )
            raise InputError(f"{name}: expected self-attention, or another module that mixes its tokens, found {found}")


def _run(module: nn.Module, host: Host, call: FirstCall, row: int = 0, tokens: Tensor | None = None) -> Tensor:
    """The module's output [B, T, D] for its call, with others for some tokens of a row."""
    before = find_tokens(call.args, call.kwargs)
    assert before is not None
    if tokens is not None:
        rows = (before if before.dim() == 3 else before.flatten(1, 2)).clone()
        rows[row, tokens] = torch.randn_like(rows[row, tokens]) * (rows.std() + 1)
        changed = rows.reshape(before.shape)
        call = call.map(lambda value: changed if value is before else value)
    with evaluating(module):
        output = module(*call.args, **call.kwargs)
    y = output[0] if isinstance(output, tuple) else output
    if not isinstance(y, Tensor) or y.dim() < 2:
        raise InputError(
            f"{type(module).__name__}: expected a tensor first, found {type(y).__name__}; leave it out of where="
        )
    return host.call(module, call.args, call.kwargs).tokens(y)
