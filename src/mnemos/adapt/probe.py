"""Find out by changing its input whether a module reads the future, or a second sequence.

Most modules do not declare that they are causal. A shared cache holds what all tokens of a call wrote, so a causal
module beside it would read the future.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.modes import evaluating
from mnemos.types import InputError

from .custom import tokens_of
from .example import Seen
from .host import Call, Host, Site

_TOKENS = 8  # T of the random input of a module without an example


def probe(site: Site, host: Host, seen: Seen | None) -> None:
    """Raise InputError if the module is causal, attends to a second sequence, or changes the shape of its tokens.

    seen: the module's call in an example. None: it is called with random tokens [1, 8, D] alone. A copy of the module
    runs, in eval mode, without gradient and at least in single precision; the random generators are restored. A module
    that declares is_causal=False may need more than tokens. Cost: four forwards of the module.
    """
    parameter = next(site.module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        return
    with torch.no_grad(), generators.kept():
        module = copy.deepcopy(site.module)
        if seen is None:
            kind = torch.float32 if parameter is None or not parameter.is_floating_point() else parameter.dtype
            device = torch.device("cpu") if parameter is None else parameter.device
            x = torch.randn(1, _TOKENS, host.sizes(site.module)[0], dtype=kind, device=device)
            first = next(iter(inspect.signature(module.forward).parameters.values()), None)
            by_name = first is not None and first.kind is inspect.Parameter.KEYWORD_ONLY
            args, kwargs = ((), {first.name: x}) if first is not None and by_name else ((x,), {})
            seen = Seen(_TOKENS, x.shape[2], device, args, kwargs)
        if _tokens(seen).dtype in (torch.bfloat16, torch.float16):  # their rounding is as large as what is looked for
            module = module.float()
            args, kwargs = _replaced(seen, _single)
            seen = seen._replace(args=args, kwargs=kwargs)
        try:
            y = _run(module, host, seen, _tokens(seen))
        except InputError:
            raise
        except Exception as error:
            if getattr(site.module, "is_causal", None) is False:
                return
            raise InputError(
                f"{site.name}: expected a module that takes tokens alone, to test whether it is causal, found "
                f"{type(error).__name__}: {error}; give cache() an example= input of the model"
            ) from None
        _check(module, site.name, host, seen, y)


def probe_model(model: nn.Module, example: object) -> None:
    """Raise InputError if the model's outputs on an example do not depend on later tokens, but on earlier ones.

    Then any module of it that is given a shared cache would read the future, although the module alone may be blind to
    it. Models whose first input is no sequence [B, T] of integers or [B, T, D], or whose output has another length, are
    not tested. Cost: three forwards of the model.
    """
    if example is None:
        return
    named = dict(example) if isinstance(example, dict) else {}
    given = [] if named else list(example) if isinstance(example, (tuple, list)) else [example]
    key: Any = next((k for k, v in named.items() if _sequence(v)), None) if named else 0
    values: Any = named or given
    if key is None or not values or not _sequence(values[key]) or values[key].shape[1] < 2:
        return
    x, half = values[key], values[key].shape[1] // 2

    def output(changed: Tensor) -> Tensor | None:
        values[key] = changed
        with evaluating(model):
            y = model(*given, **named)
        y = y[0] if isinstance(y, tuple) else getattr(y, "logits", getattr(y, "last_hidden_state", y))
        return y if isinstance(y, Tensor) and y.dim() == 3 and y.shape[1] == x.shape[1] else None

    with torch.no_grad(), generators.kept():
        found = [output(one) for one in (x, _other(x, slice(half, None)), _other(x, slice(None, half)))]
    values[key] = x
    y, later, earlier = found
    if y is None or later is None or earlier is None:
        return
    eps = 1e3 * torch.finfo(y.dtype if y.dtype in (torch.float32, torch.float64) else torch.bfloat16).eps
    scale = y.abs().max() * min(eps, 0.02)
    if (later - y)[:, :half].abs().max() <= scale < (earlier - y)[:, half:].abs().max():
        raise InputError(
            "expected a model that is not causal, found that its outputs on the example do not depend on later tokens; "
            "a shared cache would show it the future: leave its modules out of where="
        )


def _sequence(value: object) -> bool:
    """Whether an input is a sequence: [B, T] of integers or [B, T, D] of numbers."""
    if not isinstance(value, Tensor):
        return False
    return value.dim() == (3 if value.is_floating_point() else 2) and value.dtype != torch.bool


def _other(x: Tensor, places: slice) -> Tensor:
    """The sequence with other values at some places: random numbers, or integers of the same range."""
    changed = x.clone()
    if x.is_floating_point():
        changed[:, places] = torch.randn_like(x[:, places]) * (x.std() + 1)
    else:
        low, high = int(x.min()), int(x.max())
        changed[:, places] = low + high - x[:, places]  # of the same vocabulary
    return changed


def _single(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _check(module: nn.Module, name: str, host: Host, seen: Seen, y: Tensor) -> None:
    call = host.call(module, seen.args, seen.kwargs)
    x = _tokens(seen)
    if y.shape[:2] != call.x.shape[:2] or y.shape[2] != host.sizes(module)[1]:
        raise InputError(
            f"{name}: expected a module that maps [B, T, {call.x.shape[2]}] to the same shape, found "
            f"{tuple(call.x.shape)} to {tuple(y.shape)}; leave it out of where="
        )
    valid = torch.ones_like(call.x[..., 0], dtype=torch.bool) if call.mask is None else call.mask
    row = int(valid.sum(1).argmax())
    places = valid[row].nonzero().flatten()
    if len(places) < 2:
        if getattr(module, "is_causal", None) is False:
            return
        raise InputError(f"{name}: expected an example with several tokens, to test for causality, found one")
    early, late = places[: len(places) // 2], places[len(places) // 2 :]
    later = _moved(y, _run(module, host, seen, _changed(x, call, row, late)), row, early)
    earlier = _moved(y, _run(module, host, seen, _changed(x, call, row, early)), row, late)
    if earlier and not later:
        raise InputError(
            f"{name}: expected a module that is not causal, found that its outputs do not depend on later tokens; a "
            "shared cache would show it the future: leave it out of where="
        )
    if not earlier and not later and _reads_more(module, host, seen, y):
        raise InputError(
            f"{name}: expected self-attention, found that a token's output depends on another sequence and not on the "
            "other tokens; leave it out of where="
        )


def _tokens(seen: Seen) -> Tensor:
    x = tokens_of(seen.args, seen.kwargs)
    assert x is not None  # its call was read
    return x


def _run(module: nn.Module, host: Host, seen: Seen, x: Tensor) -> Tensor:
    """The module's output [B, T, D] for its call with the tokens exchanged for `x`."""
    before = _tokens(seen)
    args, kwargs = _replaced(seen, lambda value: x if value is before else value)
    with evaluating(module):
        output = module(*args, **kwargs)
    y = output[0] if isinstance(output, tuple) else output
    if not isinstance(y, Tensor) or y.dim() < 2:
        raise InputError(
            f"{type(module).__name__}: expected a module that returns a tensor, or a tuple that starts with one, found "
            f"{type(y).__name__}; leave it out of where="
        )
    return host.call(module, args, kwargs).tokens(y)


def _replaced(seen: Seen, change: Callable[[object], object]) -> tuple[tuple, dict]:
    return tuple(map(change, seen.args)), {name: change(value) for name, value in seen.kwargs.items()}


def _changed(x: Tensor, call: Call, row: int, places: Tensor) -> Tensor:
    """The tokens with others at some places of a row."""
    rows = (x if x.dim() == 3 else x.flatten(1, 2)).clone()
    rows[row, places] = torch.randn_like(rows[row, places]) * (rows.std() + 1)
    return rows.reshape(x.shape)


def _moved(before: Tensor, after: Tensor, row: int, places: Tensor) -> bool:
    """Whether outputs at these places differ by more than rounding."""
    scale = before[row].abs().max() + torch.finfo(before.dtype).tiny
    return bool(((after - before)[row, places].abs().max() / scale) > 1e3 * torch.finfo(before.dtype).eps)


def _reads_more(module: nn.Module, host: Host, seen: Seen, y: Tensor) -> bool:
    """Whether the output depends on another argument that is a sequence [B, S, D], beyond the token at its own place.

    A second argument as long as the tokens may be a residual, of which each token reads its own.
    """
    x = _tokens(seen)
    early = y.shape[1] // 2

    def changed(value: Tensor) -> Tensor:
        other = torch.randn_like(value)
        if value.shape[:2] == y.shape[:2]:
            other[:, :early] = value[:, :early]
        return other

    def other(value: object) -> bool:
        return isinstance(value, Tensor) and value is not x and value.dim() == 3 and value.is_floating_point()

    if not any(map(other, (*seen.args, *seen.kwargs.values()))):
        return False
    args, kwargs = _replaced(seen, lambda v: changed(v) if other(v) else v)  # type: ignore[arg-type]
    moved = _run(module, host, seen._replace(args=args, kwargs=kwargs), x)
    return bool((moved - y)[:, :early].abs().max() > 1e3 * torch.finfo(y.dtype).eps * (y.abs().max() + 1e-30))
