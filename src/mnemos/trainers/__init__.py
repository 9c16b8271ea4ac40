"""Rollouts in the trainers of other libraries: states across updates in Transformers' Trainer and in Lightning.

`RolloutTrainer` is imported when it is first used. It imports transformers; so does `RolloutModule` for its `model`.
"""

from typing import TYPE_CHECKING, Any

from .batches import RolloutBatches
from .lightning_module import RolloutModule
from .row_states import Segment

if TYPE_CHECKING:
    from .transformers_trainer import RolloutTrainer as RolloutTrainer

__all__ = ["RolloutBatches", "RolloutModule", "RolloutTrainer", "Segment"]


def _import(name: str) -> Any:
    if name != "RolloutTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .transformers_trainer import RolloutTrainer

    return RolloutTrainer


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name, as Any
    __getattr__ = _import
