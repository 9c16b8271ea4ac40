"""Tensors that may be shards: whole and on the CPU for a file, and back to where they belong."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.types import InputError


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, detached, on the CPU. Collective where it is sharded: every process must call."""
    whole = getattr(tensor, "full_tensor", None)  # a DTensor; plain torch may be built without them
    return (tensor if whole is None else whole()).detach().cpu()


def place(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` lies: sharded as it is where it is; others (a step count) stay as they are."""
    if hasattr(like, "full_tensor") and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor

        mesh: Any = like.device_mesh  # type: ignore[attr-defined]
        return distribute_tensor(value.to(like.device), mesh, like.placements)  # type: ignore[attr-defined]
    return value


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its plain name, whole and on the CPU. Collective where parameters are sharded."""
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def load_model_state(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy `model_state`'s tensors back. Raises InputError, with the first name, where they are another model's."""
    own = model.state_dict()
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            where = "have no" if name not in saved else "have a"
            raise InputError(f"expected this model's weights, found some that {where} {name!r}; use the run's recipe")
        if own[name].shape != saved[name].shape:
            shapes = f"{name!r} of shape {tuple(own[name].shape)}, found {tuple(saved[name].shape)}"
            raise InputError(f"expected this model's weights, {shapes}; use the run's recipe")
    with torch.no_grad():
        model.load_state_dict({name: place(value, own[name]) for name, value in saved.items()})
