"""A model on disk: safetensors and its configuration, no pickle."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from mnemos.config import ModelConfig, from_dict, to_dict, write_json
from mnemos.types import InputError


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `model.safetensors` and `config.json` (each whole or not at all). The model must have a `config`."""
    from safetensors.torch import save_model

    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise InputError(
            f"save takes a model of this library, found {type(model).__name__}; save its state_dict instead"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.state_dict()  # promotes pending caches
    temporary = folder / "model.safetensors.tmp"
    save_model(model, str(temporary))
    temporary.replace(folder / "model.safetensors")
    write_json(folder / "config.json", to_dict(config))


def load(folder: str | Path) -> Any:
    """The model that `save` wrote, in eval mode. Raises InputError for a missing, damaged or foreign folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    folder = Path(folder)
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: expected config.json and model.safetensors, as mnemos.save writes them")
    try:
        config = from_dict(ModelConfig, json.loads((folder / "config.json").read_text()))
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / 'config.json'}: {error}; save again") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{folder / 'config.json'}: line {error.lineno}: not JSON ({error.msg}); save the model again"
        ) from None
    model = config.build()
    try:
        load_model(model, str(folder / "model.safetensors"))
    except (SafetensorError, RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(
            f"{folder / 'model.safetensors'}: not this model's weights ({problem}); save it again"
        ) from None
    return model.eval()
