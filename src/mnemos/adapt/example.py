"""Run a model on an example input, to find the sizes of each attention's input."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.modes import evaluating
from mnemos.types import InputError

from .host import Site


class Seen(NamedTuple):
    """T and D of the tokens [B, T, D] that an attention was called with, and their device."""

    tokens: int
    width: int
    device: torch.device


def tokens_seen(model: nn.Module, sites: list[Site], example: object) -> dict[str, Seen]:
    """By name, what each site is first called with when the model is run on `example`; {} if that is None.

    The model runs in eval mode, without gradient; its modes and the random generators are restored. Raises InputError
    if the model fails.
    """
    if example is None:
        return {}
    seen: dict[str, Seen] = {}

    def watch(name: str, batch_first: bool) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() == 3), None)
            if x is not None:
                seen.setdefault(name, Seen(x.shape[1 if batch_first else 0], x.shape[2], x.device))

        return hook

    handles = [
        site.module.register_forward_pre_hook(
            watch(site.name, getattr(site.module, "batch_first", True)), with_kwargs=True
        )
        for site in sites
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
    return seen
