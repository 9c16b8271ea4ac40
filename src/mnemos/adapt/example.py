"""What an example input shows of a model: the tokens that each attention is given."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.modes import evaluating
from mnemos.types import InputError

from .host import Site


class Seen(NamedTuple):
    """T and D of the tokens [B, T, D] that an attention was called with, and where they were."""

    tokens: int
    width: int
    device: torch.device


def tokens_seen(model: nn.Module, sites: list[Site], example: Any) -> dict[str, Seen]:
    """What each of the sites is first called with when the model is run on `example`.

    {} without an example. Run in eval mode, without gradient; modes are put back. Raises InputError where the model
    cannot be run on it.
    """
    if example is None:
        return {}
    seen: dict[str, Seen] = {}

    def watch(name: str, batch_first: bool) -> Any:
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
        raise InputError(f"the model could not be run on the example ({type(error).__name__}: {error})") from None
    finally:
        for handle in handles:
            handle.remove()
    return seen
