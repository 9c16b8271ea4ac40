"""What a model or a module shows when it runs: how its attentions are called, and what their outputs depend on.

`record_calls` runs a model on an example, to find the sizes of each attention's input. `probe` changes the input of a
module that the user names: most modules do not declare that they are causal, or which axis is the batch. A shared cache
holds what all tokens of a row wrote, so a causal module beside it would read the future, and one whose first axis is
time would read other rows. A module that reads each token alone does not show either, so it gets no cache.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.modes import evaluating
from mnemos.types import InputError

from .custom import find_tokens
from .host import Call, Host, Site
from .masks import LEAVE_OUT

_TOKENS = 8  # T of the random input of a module without an example
_TIME = 'write an adapter whose Call says layout="time" (mnemos.register_host), or leave it out of where='
Reads = Callable[[nn.Module, tuple, dict], Call]


class Seen(NamedTuple):
    """The first call of an attention: T and D of its tokens [B, T, D], their device, and the call's arguments."""

    tokens: int
    width: int
    device: torch.device
    args: tuple
    kwargs: dict


def record_calls(
    model: nn.Module, sites: Mapping[Site, Reads], example: object
) -> tuple[dict[str, Seen], dict[str, InputError]]:
    """By name, what each site is first called with when the model is run on `example`, and why a call was refused.

    sites: the function that reads the calls of each. The model runs in eval mode, without gradient; its modes and the
    random generators are restored. Without an example both are empty. Raises InputError if the model fails.
    """
    seen: dict[str, Seen] = {}
    refused: dict[str, InputError] = {}
    if example is None:
        return seen, refused

    def watch(name: str, reads: Reads) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            try:
                x = reads(module, args, kwargs).x
            except InputError as error:
                refused.setdefault(name, error)
            else:
                seen.setdefault(name, Seen(x.shape[1], x.shape[2], x.device, *_copy(args, kwargs)))

        return hook

    handles = [
        site.module.register_forward_pre_hook(watch(site.name, reads), with_kwargs=True)
        for site, reads in sites.items()
    ]
    try:
        with torch.no_grad(), generators.preserve(), evaluating(model):
            if isinstance(example, dict):
                model(**example)
            else:
                model(*(example if isinstance(example, (tuple, list)) else (example,)))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"expected an example= that the model accepts, found that it could not be run on the example "
            f"({type(error).__name__}: {error})"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    return seen, refused


def _copy(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with copies of their tensors: a module may change its input in place. One stays one."""
    copies = {id(v): v.clone() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())}
    return tuple(copies[id(v)] for v in args), {name: copies[id(v)] for name, v in kwargs.items()}


def probe(site: Site, host: Host, seen: Seen | None) -> None:
    """Raise InputError if the module is causal, mixes no tokens, reads other rows, or changes its tokens' shape.

    seen: the module's call in an example. None: it is called with random tokens [2, 8, D] alone. A copy of the module
    runs, in eval mode, without gradient and at least in single precision; the random generators are restored. A module
    that declares is_causal=False may need more than tokens. Cost: four forwards of the module.
    """
    parameter = next(site.module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        return
    with torch.no_grad(), generators.preserve():
        module = copy.deepcopy(site.module)
        if seen is None:
            kind = torch.float32 if parameter is None or not parameter.is_floating_point() else parameter.dtype
            device = torch.device("cpu") if parameter is None else parameter.device
            x = torch.randn(2, _TOKENS, host.sizes(site.module)[0], dtype=kind, device=device)
            first = next(iter(inspect.signature(module.forward).parameters.values()), None)
            by_name = first is not None and first.kind is inspect.Parameter.KEYWORD_ONLY
            args, kwargs = ((), {first.name: x}) if first is not None and by_name else ((x,), {})
            seen = Seen(_TOKENS, x.shape[2], device, args, kwargs)
        if _find_tokens(seen).dtype in (
            torch.bfloat16,
            torch.float16,
        ):  # their rounding is as large as what is looked for
            module = module.float()
            args, kwargs = _replace_arguments(seen, _to_single)
            seen = seen._replace(args=args, kwargs=kwargs)
        try:
            y = _run(module, host, seen, _find_tokens(seen))
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


def _bound_rounding(x: Tensor) -> float:
    kind = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.bfloat16
    return min(1e3 * torch.finfo(kind).eps, 0.02)


def _to_single(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _check(module: nn.Module, name: str, host: Host, seen: Seen, y: Tensor) -> None:
    call = host.call(module, seen.args, seen.kwargs)
    x = _find_tokens(seen)
    if y.shape[:2] != call.x.shape[:2] or y.shape[2] != host.sizes(module)[1]:
        raise InputError(
            f"{name}: expected a module that maps [B, T, {call.x.shape[2]}] to the same shape, found "
            f"{tuple(call.x.shape)} to {tuple(y.shape)}; leave it out of where="
        )
    valid = torch.ones_like(call.x[..., 0], dtype=torch.bool) if call.mask is None else call.mask
    row = int(valid.sum(1).argmax())
    places = valid[row].nonzero().flatten()
    if len(y) > 1:
        others = torch.arange(len(y), device=y.device) != row
        moved = _run(module, host, seen, _change(x, row, places)) - y
        if moved[others].abs().max() > y.abs().max() * _bound_rounding(y):
            raise InputError(
                f"{name}: expected a module whose rows of a batch do not depend on each other, found that they do, as "
                f"where time leads, [T, B, D]; {_TIME}"
            )
    if len(places) < 2:
        if getattr(module, "is_causal", None) is False:
            return
        raise InputError(f"{name}: expected an example with several tokens, to test for causality, found one")
    early, late = places[: len(places) // 2], places[len(places) // 2 :]
    later = _has_moved(y, _run(module, host, seen, _change(x, row, late)), row, early)
    earlier = _has_moved(y, _run(module, host, seen, _change(x, row, early)), row, late)
    if earlier and not later:
        raise InputError(
            f"{name}: expected a module that is not causal, found that its outputs do not depend on later tokens; "
            f"{LEAVE_OUT}"
        )
    if not earlier and not later:
        raise InputError(
            f"{name}: expected self-attention, or another module that mixes its tokens, found outputs that depend on "
            "no other token of a row; leave it out of where="
        )


def _find_tokens(seen: Seen) -> Tensor:
    x = find_tokens(seen.args, seen.kwargs)
    assert x is not None  # its call was read
    return x


def _run(module: nn.Module, host: Host, seen: Seen, x: Tensor) -> Tensor:
    """The module's output [B, T, D] for its call with the tokens exchanged for `x`."""
    before = _find_tokens(seen)
    args, kwargs = _replace_arguments(seen, lambda value: x if value is before else value)
    with evaluating(module):
        output = module(*args, **kwargs)
    y = output[0] if isinstance(output, tuple) else output
    if not isinstance(y, Tensor) or y.dim() < 2:
        raise InputError(
            f"{type(module).__name__}: expected a module that returns a tensor, or a tuple that starts with one, found "
            f"{type(y).__name__}; leave it out of where="
        )
    return host.call(module, args, kwargs).tokens(y)


def _replace_arguments(seen: Seen, change: Callable[[object], object]) -> tuple[tuple, dict]:
    return tuple(map(change, seen.args)), {name: change(value) for name, value in seen.kwargs.items()}


def _change(x: Tensor, row: int, places: Tensor) -> Tensor:
    """The tokens with others at some places of a row."""
    rows = (x if x.dim() == 3 else x.flatten(1, 2)).clone()
    rows[row, places] = torch.randn_like(rows[row, places]) * (rows.std() + 1)
    return rows.reshape(x.shape)


def _has_moved(before: Tensor, after: Tensor, row: int, places: Tensor) -> bool:
    """Whether outputs at these places differ by more than rounding."""
    scale = before[row].abs().max() + torch.finfo(before.dtype).tiny
    return bool(((after - before)[row, places].abs().max() / scale) > 1e3 * torch.finfo(before.dtype).eps)
