"""Run a model on an example input, to find the sizes of each attention's input and how it is called."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.modes import evaluating
from mnemos.types import InputError

from .host import Call, Site

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
