"""Rollouts in the trainers of other libraries: states across updates in Transformers' Trainer and in Lightning.

Read in this order. `batches` cuts documents into rows of segments, and carries the rows' states; `reader` is a
segment's loss by a model. Then either trainer: `transformers_trainer`, which imports transformers, or
`lightning_module`, which does so for its `model`. How gradients are made of a rollout is in
`mnemos.memory_replay.engine`.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
    from .batches import RolloutBatches as RolloutBatches
    from .batches import Segment as Segment
    from .lightning_module import RolloutModule as RolloutModule
    from .transformers_trainer import RolloutTrainer as RolloutTrainer
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
