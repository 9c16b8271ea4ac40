"""The host libraries, imported when a model of theirs is asked for: timm, torchvision, transformers."""

import importlib
import importlib.util
from types import ModuleType

import torch

from mnemos.types import InputError

# What torchvision describes for tracing when it is imported, whether or not its compiled operators could be loaded.
_DESCRIBED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: torch.library.Library | None = None  # operators are forgotten with their library


def timm() -> ModuleType:
    """The module `timm`. Raises InputError, with the install command, where it is missing."""
    torchvision()
    return _imported("timm", "vision")


def torchvision() -> ModuleType:
    """The module `torchvision`. Raises InputError, with the install command, where it is missing.

    Built for another PyTorch (PyPI's beside a CPU-only PyTorch), its compiled operators do not load, and its import
    fails on the first one that it describes. Those are then declared, without an implementation: models, transforms and
    whatever imports torchvision work, and a call of such an operator says that it could not be loaded.
    """
    try:
        return _imported("torchvision", "vision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or "does not exist" not in str(error):
            raise
    global _declared
    if _declared is None:
        _declared = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _DESCRIBED:
            _declared.define(schema)
    return _imported("torchvision", "vision")


def transformers() -> ModuleType:
    """The module `transformers`. Raises InputError, with the install command, where it is missing."""
    if importlib.util.find_spec("torchvision") is not None:
        torchvision()  # transformers imports it where it is installed
    return _imported("transformers", "hf")


def _imported(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise InputError(f"{name} is not installed; run: pip install 'mnemos[{extra}]'") from None
