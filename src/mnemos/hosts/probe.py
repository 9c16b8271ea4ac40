"""What a model or a module shows when it runs: how its attentions are called, and what their outputs depend on.

`first_calls` runs a model on an example, to find the sizes of each attention's input. `probe` and `probe_model` change
the input of a module that the user names: most modules do not declare that they are causal, or which axis is the batch.
A shared cache holds what all tokens of a row wrote, so a causal module beside it would read the future, and one whose
first axis is time would read other rows.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.modes import evaluating
from mnemos.types import InputError

from .custom import tokens_of
from .host import Call, Host, Site
from .masks import LEAVE_OUT

_TOKENS = 8  # T of the random input of a module without an example
Reads = Callable[[nn.Module, tuple, dict], Call]


class Seen(NamedTuple):
    """The first call of an attention: T and D of its tokens [B, T, D], their device, and the call's arguments."""

    tokens: int
    width: int
    device: torch.device
    args: tuple
    kwargs: dict


def first_calls(
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
                seen.setdefault(name, Seen(x.shape[1], x.shape[2], x.device, *_kept(args, kwargs)))

        return hook

    handles = [
        site.module.register_forward_pre_hook(watch(site.name, reads), with_kwargs=True)
        for site, reads in sites.items()
    ]
    try:
        with torch.no_grad(), generators.kept(), evaluating(model):
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


def _kept(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with copies of their tensors: a module may change its input in place. One stays one."""
    copies = {id(v): v.clone() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())}
    return tuple(copies[id(v)] for v in args), {name: copies[id(v)] for name, v in kwargs.items()}


def probe(site: Site, host: Host, seen: Seen | None) -> None:
    """Raise InputError if the module is causal, reads a second sequence or other rows, or changes its tokens' shape.

    seen: the module's call in an example. None: it is called with random tokens [2, 8, D] alone, and must mix them:
    else nothing shows which axis is the batch. A copy of the module runs, in eval mode, without gradient and at least
    in single precision; the random generators are restored. A module that declares is_causal=False may need more than
    tokens. Cost: five forwards of the module.
    """
    parameter = next(site.module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        return
    with torch.no_grad(), generators.kept():
        module = copy.deepcopy(site.module)
        exampled = seen is not None
        if seen is None:
            kind = torch.float32 if parameter is None or not parameter.is_floating_point() else parameter.dtype
            device = torch.device("cpu") if parameter is None else parameter.device
            x = torch.randn(2, _TOKENS, host.sizes(site.module)[0], dtype=kind, device=device)
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
        _check(module, site.name, host, seen, y, exampled)


class _Model:
    """A model and an example of its input. The probe changes the first sequence in it, or else the first tensor."""

    def __init__(self, model: nn.Module, example: object, decoder: bool) -> None:
        self.model = model
        self.named = dict(example) if isinstance(example, dict) else {}
        self.given = [] if self.named else list(example) if isinstance(example, (tuple, list)) else [example]
        self.values: Any = self.named or dict(enumerate(self.given))
        other = ("mask",) if decoder else ("mask", "decoder_")
        keys = [k for k, v in self.values.items() if isinstance(v, Tensor) and v.dim() > 1]
        keys = [k for k in keys if not any(part in str(k) for part in other)]
        self.key: Any = next((k for k in keys if _sequence(self.values[k])), next(iter(keys), None))

    @property
    def x(self) -> Any:
        """What is changed; None: nothing can be."""
        return None if self.key is None else self.values[self.key]

    def output(self, changed: Tensor) -> Tensor | None:
        """The first tensor of the model's output; None: there is none, or the model does not take what is changed."""
        values = {key: changed if value is self.x else value for key, value in self.values.items()}
        try:
            with evaluating(self.model):
                y = self.model(**values) if self.named else self.model(*values.values())
        except Exception:  # the example itself was run before
            return None
        y = y[0] if isinstance(y, tuple) else getattr(y, "logits", getattr(y, "last_hidden_state", y))
        return y if isinstance(y, Tensor) and y.is_floating_point() else None


def probe_model(model: nn.Module, example: object, sites: Mapping[Site, Reads]) -> None:
    """Raise InputError if the model that has these modules is causal, or if their rows are not those of its batch."""
    # Of an encoder and a decoder, the decoder's input does not reach the modules of the encoder.
    run = _Model(model, example, any("decoder" in site.name for site in sites))
    _refuse_causal(run)
    _refuse_other_rows(run, sites)


def _refuse_causal(run: "_Model") -> None:
    """Raise InputError if the model's outputs on an example do not depend on later tokens, but on earlier ones.

    Then any module of it that is given a shared cache would read the future, although the module alone may be blind to
    it. Models whose first input is no sequence [B, T] of integers or [B, T, D], or whose output has another length, are
    not tested. Cost: three forwards of the model.
    """
    x = run.x
    if not _sequence(x) or x.shape[1] < 2:
        return
    half = x.shape[1] // 2
    with torch.no_grad(), generators.kept():
        found = [run.output(one) for one in (x, _other(x, slice(half, None)), _other(x, slice(None, half)))]
    y, later, earlier = found
    if y is None or later is None or earlier is None or y.dim() != 3 or y.shape[1] != x.shape[1]:
        return
    scale = y.abs().max() * _rounding(y)
    if (later - y)[:, :half].abs().max() <= scale < (earlier - y)[:, half:].abs().max():
        raise InputError(
            "expected a model that is not causal, found that its outputs on the example do not depend on later tokens; "
            f"{LEAVE_OUT}"
        )


def _refuse_other_rows(run: "_Model", sites: Mapping[Site, Reads]) -> None:
    """Raise InputError for a module whose rows [B, T, D] are not those of the model's batch, as where time leads.

    The module alone may be blind to other rows, as an MLP is. A row of the model's input is changed: it reaches rows of
    the module's batch as a whole (several, where they are windows). Where time leads, it reaches one column of all.
    Cost: two or three forwards of the model.
    """
    x = run.x
    if x is None or not x.numel():
        return
    seen: list[dict[str, Tensor]] = []

    def output(changed: Tensor) -> Tensor | None:
        calls: dict[str, Tensor] = {}
        seen.append(calls)

        def watch(name: str, reads: Reads, module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.setdefault(name, reads(module, args, kwargs).x.clone())

        handles = [
            site.module.register_forward_pre_hook(partial(watch, site.name, reads), with_kwargs=True)
            for site, reads in sites.items()
        ]
        try:
            return run.output(changed)
        finally:
            for handle in handles:
                handle.remove()

    with torch.no_grad(), generators.kept():
        y = output(x)
        other = output(_other(x, slice(None), 0))
        if _sequence(x) and not _one_row(y, other, 0):  # the model's own batch may be its second axis
            second = output(_other(x, slice(None), 1))
            if not _one_row(y, second, 1):
                return
    for name, before in seen[0].items():
        after = seen[-1].get(name)
        if after is None or after.shape != before.shape:
            continue
        changed = ((after - before).abs() > before.abs().max() * _rounding(before)).any(-1)
        rows, columns = changed.any(1), changed.any(0)
        alone = before.shape[1] == 1 or not columns.all()
        if rows.sum() > 1 and alone and bool((changed == (rows[:, None] & columns)).all()):
            raise InputError(
                f"{name}: expected tokens [B, T, {before.shape[2]}], found {list(before.shape)} with the model's rows "
                f"on the second axis, as where time leads; {_TIME}"
            )


_TIME = 'write an adapter whose Call says layout="time" (mnemos.register_host), or leave it out of where='


def _one_row(before: Tensor | None, after: Tensor | None, axis: int) -> bool:
    """Whether outputs differ in the first row of the batch alone. Outputs of no second axis have the batch first."""
    if before is None or after is None or before.shape != after.shape or before.dim() < 2:
        return axis == 0
    axis = 0 if before.dim() == 2 else axis
    moved = (after - before).abs() > before.abs().max() * _rounding(before)
    return not moved.narrow(axis, 1, moved.shape[axis] - 1).any()


def _rounding(x: Tensor) -> float:
    kind = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.bfloat16
    return min(1e3 * torch.finfo(kind).eps, 0.02)


def _sequence(value: object) -> bool:
    """Whether an input is a sequence: [B, T] of integers or [B, T, D] of numbers."""
    if not isinstance(value, Tensor):
        return False
    return value.dim() == (3 if value.is_floating_point() else 2) and value.dtype != torch.bool


def _other(x: Tensor, places: slice, row: int | None = None) -> Tensor:
    """The sequence with other values at some places: random numbers, or integers of the same range.

    row: the axis of the batch, whose first row alone is changed; None: all rows of the first axis are changed.
    """
    changed = x.clone()
    part = changed[:, places] if row is None else changed.select(row, 0)
    if x.is_floating_point():
        part.copy_(torch.randn_like(part) * (x.std() + 1))
    else:
        part.copy_(int(x.min()) + int(x.max()) - part)  # of the same vocabulary
    return changed


def _single(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _check(module: nn.Module, name: str, host: Host, seen: Seen, y: Tensor, exampled: bool) -> None:
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
    if len(y) > 1:
        others = torch.arange(len(y), device=y.device) != row
        moved = _run(module, host, seen, _changed(x, call, row, places)) - y
        if moved[others].abs().max() > y.abs().max() * _rounding(y):
            raise InputError(
                f"{name}: expected a module whose rows of a batch do not depend on each other, found that they do, as "
                f"where time leads, [T, B, D]; {_TIME}"
            )
    if len(places) < 2:
        if getattr(module, "is_causal", None) is False:
            return
        raise InputError(f"{name}: expected an example with several tokens, to test for causality, found one")
    early, late = places[: len(places) // 2], places[len(places) // 2 :]
    later = _moved(y, _run(module, host, seen, _changed(x, call, row, late)), row, early)
    earlier = _moved(y, _run(module, host, seen, _changed(x, call, row, early)), row, late)
    if earlier and not later:
        raise InputError(
            f"{name}: expected a module that is not causal, found that its outputs do not depend on later tokens; "
            f"{LEAVE_OUT}"
        )
    if not earlier and not later and not exampled:
        raise InputError(
            f"{name}: expected a module that mixes tokens, or to see it called, found one that reads each token alone, "
            "which does not show where its tokens come from; give cache() an example= input of the model"
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
