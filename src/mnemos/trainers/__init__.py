"""Rollouts in the trainers of other libraries: states across updates in Transformers' Trainer and in Lightning.

`RolloutTrainer` imports transformers; so does `RolloutModule` for its `model`.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:  # imported when they are first asked for; see `mnemos.face`
    from .batches import RolloutBatches as RolloutBatches
    from .lightning_module import RolloutModule as RolloutModule
    from .row_states import Segment as Segment
    from .transformers_trainer import RolloutTrainer as RolloutTrainer
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
