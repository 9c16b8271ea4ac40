"""The rows of `RolloutBatches`: where they are, the states that they go on from, and the gradients of a rollout."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mnemos.memory_replay.engine import CarriedStates, RolloutEngine, read_in_turn
from mnemos.types import InputError, JSONObject, State

from .batches import RolloutBatch, RolloutBatches


class Segment(NamedTuple):
    """One segment of every row: input_ids and targets [B, L] int64 (−100 = not counted); mask [B, L] bool, or None."""

    input_ids: Tensor
    targets: Tensor
    mask: Tensor | None = None


SegmentStep = Callable[[Segment, State], tuple[Tensor, State]]
Piece = tuple[Segment, Tensor | None]  # a segment, and the rows [B] that begin a document with it


class RowStates:
    """Where the rows of `RolloutBatches` are: the number of the next batch, and the states, one per set of rows.

    Batch 0, with which documents without a seed begin again, begins all rows. engine: adds the gradients.
    """

    def __init__(self, batches: RolloutBatches, engine: RolloutEngine | None = None) -> None:
        self.batches, self._next = batches, 0
        self._carried = CarriedStates(engine or RolloutEngine(), batches.sets)

    def backward(
        self, step: SegmentStep, batch: RolloutBatch, advance: Callable[[Segment, State], State] | None = None
    ) -> Tensor:
        """Add the gradients of Σ_t loss_t through the segments of a batch; returns the sum of the losses.

        step(segment, state) -> (loss, state); advance(segment, state) -> state. The rows go on from the state that the
        last batch of their set left, without gradient to it. Raises InputError for a batch that does not follow the
        last one.
        """

        def read(pieces: Sequence[Piece], state: State) -> tuple[Tensor, list[State]]:
            losses, states = read_in_turn(step, pieces, state)
            return torch.stack(losses).sum(), states

        def skip(piece: Piece, state: State) -> State:
            assert advance is not None
            return read_in_turn(lambda segment, state: (None, advance(segment, state)), [piece], state)[1][0]

        number, pieces = self._split(batch)
        losses = self._carried.backward(number, read, pieces, None if advance is None else skip)
        self._next += 1
        return losses.to(torch.promote_types(losses.dtype, torch.float32)).sum()

    def read(self, step: SegmentStep, batch: RolloutBatch) -> Tensor:
        """The sum of the losses of a batch, without gradient; the rows go on."""
        number, pieces = self._split(batch)
        losses = self._carried.read(number, step, pieces)
        self._next += 1
        return torch.stack(losses).sum()

    def _split(self, batch: RolloutBatch) -> tuple[int, list[Piece]]:
        """The number of the batch's set of rows, and its segments with the rows that begin a document."""
        index = int(batch["index"])
        if index == 0:
            self._next, self._carried.states = 0, [None] * self.batches.sets
        if index != self._next:
            raise InputError(
                f"expected batch {self._next} of the rows, which follows the last one, found batch {index}; rows go on "
                "from batch to batch, so none can be left out or repeated"
            )
        begins = [mask if bool(mask.any()) else None for mask in batch["resets"].unbind(1)]
        return index % self.batches.sets, list(zip(segments(batch, self.batches.segment), begins, strict=True))

    def follow(self) -> None:
        """Let the next iteration of the batches begin where the rows are."""
        self.batches.load_state_dict({**self.batches.state_dict(), "place": self._next})

    def state_dict(self) -> JSONObject:
        """What `restore` reads: plain values and tensors."""
        return {"next": self._next, "data": self.batches.describe(), "states": self._carried.state_dict()}

    def restore(self, saved: JSONObject, fresh: Callable[[], State], device: torch.device) -> None:
        """Go on from a `state_dict`. fresh(): a state with the model's structure.

        Raises InputError if it is of other data, other rows or another model.
        """
        self.batches.check_description(saved["data"])
        self._carried.load_state_dict(saved["states"], fresh, device)
        self._next = int(saved["next"])


def segments(batch: RolloutBatch, length: int) -> list[Segment]:
    """The segments of a rollout; a segment without padding has no mask."""
    ids, targets = batch["input_ids"].split(length, 1), batch["targets"].split(length, 1)
    masks = batch["mask"].split(length, 1) if "mask" in batch else [None] * len(ids)
    masks = [None if m is None or bool(m.all()) else m for m in masks]
    return [Segment(*each) for each in zip(ids, targets, masks, strict=True)]
