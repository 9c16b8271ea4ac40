"""What an example input shows of a model: the tokens that each attention is given."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.types import InputError

from .host import Site


def tokens_seen(model: nn.Module, sites: list[Site], example: Any) -> dict[str, Tensor]:
    """The first tensor [B, T, D] that each of the sites is called with when the model is run on `example`.

    {} without an example. Run in eval mode, without gradient; modes are put back. Raises InputError where the model
    cannot be run on it.
    """
    if example is None:
        return {}
    seen: dict[str, Tensor] = {}

    def watch(name: str, batch_first: bool) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() == 3), None)
            if x is not None:
                seen.setdefault(name, x if batch_first else x.transpose(0, 1))

        return hook

    handles = [
        site.module.register_forward_pre_hook(
            watch(site.name, getattr(site.module, "batch_first", True)), with_kwargs=True
        )
        for site in sites
    ]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
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
        for module, mode in modes:
            module.training = mode
    return seen
