"""Tensors that may be sharded: gather them on the CPU for a checkpoint, and distribute them again."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.types import InputError


def full(tensor: Tensor) -> Tensor:
    """The unsharded tensor, detached, on the CPU. Collective if it is sharded: every process must call."""
    whole = getattr(tensor, "full_tensor", None)  # a DTensor; builds of torch without distributed have none
    return (tensor if whole is None else whole()).detach().cpu()


def place(value: Tensor, like: Tensor) -> Tensor:
    """`value` sharded like `like`; a value of another shape, such as a step count, is returned unchanged."""
    if hasattr(like, "full_tensor") and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor

        mesh: Any = like.device_mesh  # type: ignore[attr-defined]
        return distribute_tensor(value.to(like.device), mesh, like.placements)  # type: ignore[attr-defined]
    return value


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, unsharded and on the CPU. Collective if parameters are sharded."""
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def load_model_state(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Load what `model_state` returned. Raises InputError with the first name that does not fit the model."""
    own = model.state_dict()
    check_model_state(own, saved)
    with torch.no_grad():
        model.load_state_dict({name: place(value, own[name]) for name, value in saved.items()})


def check_model_state(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise InputError with the first tensor of a model, by name and shape, that is not among the saved ones, or not
    the model's. Only shapes are read: `own` may be on the meta device.
    """
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            where = "have no" if name not in saved else "have a"
            raise InputError(f"expected this model's weights, found some that {where} {name!r}; use the run's recipe")
        if own[name].shape != saved[name].shape:
            shapes = f"{name!r} of shape {tuple(own[name].shape)}, found {tuple(saved[name].shape)}"
            raise InputError(f"expected this model's weights, {shapes}; use the run's recipe")
