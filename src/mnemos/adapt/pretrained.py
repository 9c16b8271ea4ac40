"""Cached Hugging Face models on disk: `save_pretrained` writes them as they are, this reads them back."""

from pathlib import Path
from typing import Any

from torch import nn

from mnemos.config import from_dict
from mnemos.memory.grc import GRC
from mnemos.types import InputError

from .branch import HostBranch
from .cache import apply


def from_pretrained(cls: Any, folder: str | Path, **options: Any) -> nn.Module:
    """`cls.from_pretrained(folder, **options)` of a model that had caches when it was saved, caches and all.

        model.save_pretrained(folder)                                 # a model that mnemos.cache() was called on
        model = mnemos.adapt.from_pretrained(ViTForImageClassification, folder)

    The class's own from_pretrained also reads the folder: it gives the host without its caches, and says that their
    weights were not used. Raises InputError where the folder has no cached model.
    """
    model = cls.from_pretrained(folder, **options)
    record = getattr(model.config, "mnemos", None)
    if record is None:
        raise InputError(f"{folder}: expected a model saved with its caches, found none recorded in config.json")
    grc, lengths = from_dict(GRC, record["grc"], "config.json: mnemos.grc"), record["lengths"]
    apply(model, grc, where=list(lengths), lengths=lengths)
    stored = _weights(Path(folder))
    for name, module in model.named_modules():
        if isinstance(module, HostBranch):
            module.load_state_dict(
                {k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(f"{name}.")}
            )
    return model


def _weights(folder: Path) -> dict[str, Any]:
    """The tensors of a folder that belong to caches."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if ".grc." in f".{key}"}  # noqa: SIM118
    if not found:
        raise InputError(f"{folder}: expected the weights of gated caches in *.safetensors, found none; save it again")
    return found
