"""A model on disk: safetensors and a configuration in JSON, without pickle."""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from mnemos.atomic import replacing, write_json
from mnemos.config import ModelConfig, from_dict, to_dict
from mnemos.types import InputError

RUN_MODEL = "model"  # the folder of a finished run that holds its model


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `model.safetensors` and `config.json`, each completely or not at all.

    Raises InputError unless the model has a `config` of this library, and for a folder that is a file.
    """
    from safetensors.torch import save_model

    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise InputError(
            f"save: expected a model of this library, found {type(model).__name__}; save its state_dict instead"
        )
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: expected a folder to save in, found a file; name another")
    folder.mkdir(parents=True, exist_ok=True)
    model.state_dict()  # promotes pending caches
    with replacing(folder / "model.safetensors") as temporary:
        save_model(model, str(temporary))
        about = {"model": to_dict(config), "sha256": _digest(temporary)}
    write_json(folder / "config.json", about)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(folder: str | Path) -> Any:
    """The model that `save` wrote, in eval mode. folder: what `save` wrote, or a finished run, whose model it has.

    Raises InputError for a missing, damaged or other folder, and for a run that is not finished.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    folder = Path(folder)
    if (folder / "recipe.json").is_file() and not (folder / "config.json").is_file():
        missing = next((name for name in (RUN_MODEL, "result.json") if not (folder / name).exists()), None)
        if missing is not None:  # a run that is being trained for longer has the model of its earlier end
            raise InputError(
                f"{folder}: expected a finished run, found no {missing} in it; continue the run with "
                "mnemos train --resume"
            )
        folder = folder / RUN_MODEL
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: expected config.json and model.safetensors, as mnemos.save writes them")
    try:
        about = json.loads((folder / "config.json").read_text())
        if not isinstance(about, dict) or not {"model", "sha256"} <= about.keys():
            raise InputError("expected a model and its sha256, as mnemos.save writes them")
        config = from_dict(ModelConfig, about["model"], "model")
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / 'config.json'}: {error}; save again") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{folder / 'config.json'}: line {error.lineno}: not JSON ({error.msg}); save the model again"
        ) from None
    model = config.build()
    if _digest(folder / "model.safetensors") != about["sha256"]:
        raise InputError(
            f"{folder / 'model.safetensors'}: expected the bytes that were saved, found others; save the model again"
        )
    try:
        load_model(model, str(folder / "model.safetensors"))
    except (SafetensorError, RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(
            f"{folder / 'model.safetensors'}: expected this model's weights, found others ({problem}); save it again"
        ) from None
    return model.eval()
