"""The states of the rows from rollout to rollout, one update's gradients, and what a checkpoint has of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import pytree
from mnemos.memory_replay import replay
from mnemos.types import InputError, JSONObject, State, map_state, reset

from .batches import Rollout, RolloutBatches, check_described
from .reading import Segment

Step = Callable[[Segment, State], tuple[Tensor, State]]


class RowStates:
    """Where the rows of `RolloutBatches` are: the number of the next batch, and the states, one per set of rows.

    Batch 0, with which documents without a seed begin again, begins all rows.
    """

    def __init__(self, batches: RolloutBatches) -> None:
        self.batches, self._next = batches, 0
        self._states: list[State] = [None] * batches.sets

    def backward(
        self,
        step: Step,
        batch: Rollout,
        module: nn.Module,
        backward: Callable[[Tensor], object],
        advance: Callable[[Segment, State], State] | None = None,
    ) -> Tensor:
        """Add the gradients of Σ_t loss_t through the segments of a batch, by replay; returns the sum of the losses.

        step(segment, state) -> (loss, state). The rows go on from the state that the last batch of their set left,
        without gradient to it. Raises InputError for a batch that does not follow the last one.
        """
        own, given, begins = self._begun(batch)
        out = replay(
            step,
            given,
            self._states[own],
            advance=advance,
            weights=[1.0] * len(given),
            resets=begins,
            module=module,
            backward=backward,
            batch_axis=0,
        )
        self._go_on(own, out.state)
        return out.loss

    def read(self, step: Step, batch: Rollout) -> Tensor:
        """The sum of the losses of a batch, without gradient; the rows go on."""
        own, given, begins = self._begun(batch)
        state, losses = self._states[own], []
        with torch.no_grad():
            for segment, mask in zip(given, begins, strict=True):
                state = state if state is None or mask is None else reset(state, mask)
                loss, state = step(segment, state)
                losses.append(loss)
        self._go_on(own, state)
        return torch.stack(losses).sum()

    def _begun(self, batch: Rollout) -> tuple[int, list[Segment], list[Tensor | None]]:
        """The number of the batch's set of rows, its segments, and per segment the rows that begin a document."""
        index = int(batch["index"])
        if index == 0:
            self._next, self._states = 0, [None] * self.batches.sets
        if index != self._next:
            raise InputError(
                f"expected batch {self._next} of the rows, which follows the last one, found batch {index}; rows go on "
                "from batch to batch, so none can be left out or repeated"
            )
        begins = [mask if bool(mask.any()) else None for mask in batch["resets"].unbind(1)]
        return index % self.batches.sets, segments(batch, self.batches.segment), begins

    def _go_on(self, own: int, state: State) -> None:
        # Contiguous, because a checkpoint restores contiguous tensors, and kernels may round other strides differently.
        self._states[own] = map_state(lambda x: x.detach().contiguous() if isinstance(x, Tensor) else x, state)
        self._next += 1

    def follow(self) -> None:
        """Let the next iteration of the batches begin where the rows are."""
        self.batches.load_state_dict({**self.batches.state_dict(), "place": self._next})

    def saved(self) -> JSONObject:
        """What `restore` reads: plain values and tensors."""
        states = [pytree.tree_leaves(state) for state in self._states]
        return {"next": self._next, "data": self.batches.described(), "states": states}

    def restore(self, saved: JSONObject, fresh: Callable[[], State], device: torch.device) -> None:
        """Go on from what `saved` gave. fresh(): a state with the model's structure.

        Raises InputError if it is of other data, other rows or another model.
        """
        check_described(self.batches, saved["data"])
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


def segments(batch: Rollout, length: int) -> list[Segment]:
    """The segments of a rollout; a segment without padding has no mask."""
    ids, targets = batch["input_ids"].split(length, 1), batch["targets"].split(length, 1)
    if "mask" not in batch:
        return [Segment(x, y) for x, y in zip(ids, targets, strict=True)]
    masks = batch["mask"].split(length, 1)
    return [Segment(x, y, None if bool(m.all()) else m) for x, y, m in zip(ids, targets, masks, strict=True)]


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


def _kind(x: object) -> Any:
    """What must agree in a saved state and one of the model: its rows and tokens may differ in number."""
    return (x.dtype, x.dim(), tuple(x.shape[2:])) if isinstance(x, Tensor) else type(x)
