"""mnemos: memory for transformers. Every layer and model has one form: `y, state = layer(x, state)`.

Names are imported when they are first used: `import mnemos` alone does not load torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "GRC": "mnemos.memory.grc",
    "InputError": "mnemos.errors",
    "Memformer": "mnemos.models.memformer",
    "MemformerConfig": "mnemos.models.memformer",
    "SlotsConfig": "mnemos.memory.slots",
    "State": "mnemos.types",
    "Stream": "mnemos.generate.stream",
    "Transformer": "mnemos.models.transformer",
    "TransformerConfig": "mnemos.models.transformer",
    "add_auxiliary_loss": "mnemos.types",
    "cache": "mnemos.adapt.attach",
    "collect_auxiliary_losses": "mnemos.types",
    "fused_step": "mnemos.generate.fused",
    "detach": "mnemos.types",
    "join": "mnemos.types",
    "load": "mnemos.models.store",
    "recipe": "mnemos.train.recipe",
    "register": "mnemos.registry",
    "register_host": "mnemos.adapt.known_hosts",
    "replay": "mnemos.memory_replay",
    "reset": "mnemos.types",
    "save": "mnemos.models.store",
    "select": "mnemos.types",
    "uncache": "mnemos.adapt.attach",
}
_ROOMS = {
    "adapt",
    "attention",
    "data",
    "evaluate",
    "figures",
    "generate",
    "measure",
    "memory",
    "models",
    "ops",
    "recipes",
    "registry",
    "train",
    "types",
}

__all__ = sorted([*_NAMES, *_ROOMS, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"mnemos.{name}")
    raise AttributeError(f"module 'mnemos' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
