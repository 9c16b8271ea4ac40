"""The states of rows from rollout to rollout, and the gradients of a rollout that starts from them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.memory_replay.engine import RolloutEngine, detach_contiguous, read_in_turn
from mnemos.types import InputError, JSONObject, State

from .batches import RolloutBatch, RolloutBatches, check_description


class Segment(NamedTuple):
    """One segment of every row: input_ids and targets [B, L] int64 (−100 = not counted); mask [B, L] bool, or None."""

    input_ids: Tensor
    targets: Tensor
    mask: Tensor | None = None


SegmentStep = Callable[[Segment, State], tuple[Tensor, State]]
Piece = tuple[Segment, Tensor | None]  # a segment, and the rows [B] that begin a document with it


class RowStates:
    """Where the rows of `RolloutBatches` are: the number of the next batch, and the states, one per set of rows.

    Batch 0, with which documents without a seed begin again, begins all rows.
    """

    def __init__(self, batches: RolloutBatches) -> None:
        self.batches, self._next = batches, 0
        self._states: list[State] = [None] * batches.sets

    def backward(
        self,
        engine: RolloutEngine,
        step: SegmentStep,
        batch: RolloutBatch,
        advance: Callable[[Segment, State], State] | None = None,
    ) -> Tensor:
        """Add the gradients of Σ_t loss_t through the segments of a batch; returns the sum of the losses.

        step(segment, state) -> (loss, state); advance(segment, state) -> state. The rows go on from the state that the
        last batch of their set left, without gradient to it. Raises InputError for a batch that does not follow the
        last one.
        """
        own, given = self._split(batch)

        def read(given: Sequence[Piece], state: State) -> tuple[Tensor, list[State]]:
            losses, states = read_in_turn(step, given, state)
            return torch.stack(losses).sum(), states

        def skip(one: Piece, state: State) -> State:
            assert advance is not None
            return read_in_turn(lambda segment, state: (None, advance(segment, state)), [one], state)[1][0]

        losses, state = engine.run(read, given, self._states[own], None if advance is None else skip)
        self._go_on(own, state)
        return losses.to(torch.promote_types(losses.dtype, torch.float32)).sum()

    def read(self, step: SegmentStep, batch: RolloutBatch) -> Tensor:
        """The sum of the losses of a batch, without gradient; the rows go on."""
        own, given = self._split(batch)
        with torch.no_grad():
            losses, states = read_in_turn(step, given, self._states[own])
        self._go_on(own, detach_contiguous(states[-1]))
        return torch.stack(losses).sum()

    def _split(self, batch: RolloutBatch) -> tuple[int, list[Piece]]:
        """The number of the batch's set of rows, and its segments with the rows that begin a document."""
        index = int(batch["index"])
        if index == 0:
            self._next, self._states = 0, [None] * self.batches.sets
        if index != self._next:
            raise InputError(
                f"expected batch {self._next} of the rows, which follows the last one, found batch {index}; rows go on "
                "from batch to batch, so none can be left out or repeated"
            )
        begins = [mask if bool(mask.any()) else None for mask in batch["resets"].unbind(1)]
        found = segments(batch, self.batches.segment)
        return index % self.batches.sets, list(zip(found, begins, strict=True))

    def _go_on(self, own: int, state: State) -> None:
        self._states[own] = state
        self._next += 1

    def follow(self) -> None:
        """Let the next iteration of the batches begin where the rows are."""
        self.batches.load_state_dict({**self.batches.state_dict(), "place": self._next})

    def state_dict(self) -> JSONObject:
        """What `restore` reads: plain values and tensors."""
        states = [pytree.tree_leaves(state) for state in self._states]
        return {"next": self._next, "data": self.batches.describe(), "states": states}

    def restore(self, saved: JSONObject, fresh: Callable[[], State], device: torch.device) -> None:
        """Go on from a `state_dict`. fresh(): a state with the model's structure.

        Raises InputError if it is of other data, other rows or another model.
        """
        check_description(self.batches, saved["data"])
        like, structure = pytree.tree_flatten(fresh())
        for found in saved["states"] if saved["next"] else ():
            same = len(found) == len(like) and all(_kind(a) == _kind(b) for a, b in zip(found, like, strict=True))
            if not same:
                raise InputError(
                    f"expected a state of this model ({len(like)} tensors), found one of another in the checkpoint "
                    f"({len(found)}); resume with the model that was trained"
                )
        self._next = int(saved["next"])
        self._states = [
            pytree.tree_unflatten([x.to(device) if isinstance(x, Tensor) else x for x in found], structure)
            if found
            else None
            for found in saved["states"]
        ]


def segments(batch: RolloutBatch, length: int) -> list[Segment]:
    """The segments of a rollout; a segment without padding has no mask."""
    ids, targets = batch["input_ids"].split(length, 1), batch["targets"].split(length, 1)
    if "mask" not in batch:
        return [Segment(x, y) for x, y in zip(ids, targets, strict=True)]
    masks = batch["mask"].split(length, 1)
    return [Segment(x, y, None if bool(m.all()) else m) for x, y, m in zip(ids, targets, masks, strict=True)]


def _kind(x: object) -> Any:
    """What must agree in a saved state and one of the model: its rows and tokens may differ in number."""
    return (x.dtype, x.dim(), tuple(x.shape[2:])) if isinstance(x, Tensor) else type(x)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Average the gradients over the processes, with one all-reduce per type of number.

    A parameter without a gradient in every process keeps none. One process: nothing happens.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    world = torch.distributed.get_world_size()
    if world == 1:
        return
    groups: dict[Any, list[Tensor]] = {}
    for x in parameters:
        if x.requires_grad:
            groups.setdefault((x.dtype, x.device), []).append(x)
    for (dtype, device), found in groups.items():
        used = torch.tensor([x.grad is not None for x in found], dtype=dtype, device=device)
        flat = torch.cat([used, *((torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in found)])
        torch.distributed.all_reduce(flat)
        used, rest = flat[: len(found)], flat[len(found) :] / world
        for x, some, mean in zip(found, used.tolist(), rest.split([x.numel() for x in found]), strict=True):
            x.grad = mean.view_as(x).clone() if some else None
