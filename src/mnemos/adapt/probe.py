"""Find out by changing its input whether a module reads the future, or a second sequence.

Most modules do not declare that they are causal. A shared cache holds what all tokens of a call wrote, so a causal
module beside it would read the future.
"""

import copy
from collections.abc import Callable

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

    seen: the module's call in an example. None: it is called with random tokens [1, 8, D] alone; if it raises, nothing
    is found out. A copy of the module runs, in eval mode and without gradient; the random generators are restored.
    Cost: four forwards of the module.
    """
    parameter = next(site.module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        return
    with torch.no_grad(), generators.kept():
        module = copy.deepcopy(site.module)
        if seen is None:
            kind = torch.float32 if parameter is None or not parameter.is_floating_point() else parameter.dtype
            device = None if parameter is None else parameter.device
            x = torch.randn(1, _TOKENS, host.sizes(site.module)[0], dtype=kind, device=device)
            seen = Seen(x.shape[1], x.shape[2], x.device, (x,), {})
            try:
                _run(module, host, seen, x)
            except Exception:  # it needs more arguments than tokens, which only an example can show
                return
        _check(module, site.name, host, seen)


def _check(module: nn.Module, name: str, host: Host, seen: Seen) -> None:
    call = host.call(module, seen.args, seen.kwargs)
    x = _tokens(seen)
    y = _run(module, host, seen, x)
    if y.shape[:2] != call.x.shape[:2] or y.shape[2] != host.sizes(module)[1]:
        raise InputError(
            f"{name}: expected a module that maps [B, T, {call.x.shape[2]}] to the same shape, found "
            f"{tuple(call.x.shape)} to {tuple(y.shape)}; leave it out of where="
        )
    valid = torch.ones_like(call.x[..., 0], dtype=torch.bool) if call.mask is None else call.mask
    row = int(valid.sum(1).argmax())
    places = valid[row].nonzero().flatten()
    if len(places) < 2:
        return
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
        raise InputError(f"{type(module).__name__}: expected a tensor, or a tuple that starts with one")
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
    """Whether the output depends on another argument that is a sequence [B, S, D]."""
    x = _tokens(seen)

    def other(value: object) -> bool:
        return isinstance(value, Tensor) and value is not x and value.dim() == 3 and value.is_floating_point()

    if not any(map(other, (*seen.args, *seen.kwargs.values()))):
        return False
    args, kwargs = _replaced(seen, lambda v: torch.randn_like(v) if other(v) else v)  # type: ignore[call-overload]
    moved = _run(module, host, seen._replace(args=args, kwargs=kwargs), x)
    return bool((moved - y).abs().max() > 1e3 * torch.finfo(y.dtype).eps * (y.abs().max() + 1e-30))
