"""What `linearise` added to a decoder and a training changed, in one small file without the decoder: an adapter."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import tree_file
from mnemos.modes import plain_module
from mnemos.types import InputError, JSONObject

from .linearise import is_linearised, linearise, list_linearised, refuse_wrapped, unlinearise

FORMAT = "mnemos state-adapter 1"
_SAMPLED = 64  # numbers of each matrix of the decoder, by which its weights are known again
_FARTHEST = 0.3  # of their distance, in units of their own size: 4-bit weights are .1 away, those of another model 1.4


def save_adapter(model: nn.Module, path: str | Path, about: JSONObject | None = None) -> None:
    """Write the states and low-rank updates of a linearised decoder to a file.

        mnemos.hosts.save_adapter(model, "adapter.safetensors")
        mnemos.hosts.load_adapter(decoder, "adapter.safetensors")      # the decoder as it was before linearise

    about: what else is to stand in the file, as JSON. Save it before `merge_updates`, which changes the decoder's own
    weights. Raises InputError if nothing of the model is linearised, and if PEFT has wrapped its states.
    """
    model = plain_module(model, "hosts.save_adapter")
    refuse_wrapped(model, "save_adapter")
    states = list_linearised(model)
    if not states:
        raise InputError("expected a model that mnemos.linearise() was called on, found none of its states")
    weights = {name: value for name, value in model.named_parameters() if ".linearised." in f".{name}"}
    kept = {"states": states, "weights": weights, "samples": _sample(model), "about": about or {}}
    tree_file.write(Path(path), kept, FORMAT)


def load_adapter(model: nn.Module, path: str | Path) -> JSONObject:
    """Linearise a decoder as the one that `save_adapter` wrote, with its trained weights; returns `about`.

    The decoder's own weights may be rounded (half precision, 4 bits); packed integers are not compared. Raises
    InputError, and leaves the model as it was, for another file, a model that is linearised or cannot be, and a decoder
    with other weights than the adapter was trained on.
    """
    kept: Any = tree_file.read(Path(path), FORMAT, "copy it again")
    model = plain_module(model, "hosts.load_adapter")
    if any(is_linearised(module) for module in model.modules()):
        raise InputError(
            "load_adapter: expected a decoder as it was trained, found a linearised one; call mnemos.unlinearise"
        )

    # --- are these the weights that it was trained on? ---
    own, wanted = _sample(model), kept["samples"]
    if differ := own.keys() ^ wanted.keys():
        raise InputError(
            f"{path}: expected the decoder that it was trained on, found another architecture ({min(differ)} is of one)"
        )
    pairs = [(own[name], x) for name, x in wanted.items() if own[name].is_floating_point()]
    apart = sum(float((mine - x).square().sum()) for mine, x in pairs)
    distance = (apart / sum(float(x.square().sum()) for _, x in pairs)) ** 0.5
    if not distance <= _FARTHEST:
        raise InputError(
            f"{path}: expected the weights of the decoder that it was trained on, found others, at a distance of "
            f"{distance:.2f} of their size; load {kept['about'].get('name', 'that decoder')}"
        )

    # --- its states ---
    try:
        for one in kept["states"]:
            report = linearise(model, **one["settings"], where=one["names"], full=one.get("full"))
            if left := [skipped for skipped in report.left if skipped.name in one["names"]]:
                raise InputError(f"{path}: expected to linearise {left[0].name}, found that {left[0].why}")
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in kept["weights"].items():
                parameters[name].copy_(value)
    except (InputError, KeyError, RuntimeError) as error:
        if any(is_linearised(module) for module in model.modules()):
            unlinearise(model)
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: expected weights that fit its own states, found others ({error})") from None
    about: JSONObject = kept["about"]
    return about


def _sample(model: nn.Module) -> dict[str, Tensor]:
    """Numbers of each matrix of the decoder itself, evenly spaced, in float32; of quantised ones, as they are."""
    samples = {}
    for name, value in model.named_parameters():
        if value.ndim > 1 and ".linearised." not in f".{name}":
            flat = value.detach().flatten()
            some = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].cpu()
            samples[name] = some.float() if some.is_floating_point() else some.clone()
    return samples
