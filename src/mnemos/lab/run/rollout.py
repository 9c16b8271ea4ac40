"""The gradients of one update: the batches of its rollout, read by the wrapped model with its loss.

A plain update has one segment. Gradients are summed over processes once per update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos.lab.tasks.metrics import called, sum_functions
from mnemos.lab.tasks.task import Task
from mnemos.memory.gated_cache import accumulate_caches, stored
from mnemos.memory_replay.engine import CarriedStates, RolloutEngine, read_in_turn
from mnemos.memory_replay.steps import HALF
from mnemos.types import Advances, InputError, State, collect_auxiliary_losses, leaves

from .recipe import RolloutConfig, TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Carry:
    """The state that goes into a wrapped model, and those that come out of it, one for each segment.

    The wrappers (precision, DDP, FSDP) copy and convert the tensors and pytrees that are passed to them and back. A
    state must stay as it is, in float32 under bfloat16 weights too, and they leave an object of a class of our own.
    """

    __slots__ = ("after", "before")

    def __init__(self, before: State) -> None:
        self.before = before
        self.after: list[State] = []


class ModelWithLoss(nn.Module):
    """Model and loss in one forward: the module that DDP and FSDP wrap.

    A segment without a counted target needs its new state only, so a model with `advance` reads it by `advance`. With
    several processes (`alone` is False) every segment takes the whole forward: the rows of another process may have
    targets, and all processes must run the same parts of the model.

    searched: DDP searches each forward for parameters without a gradient (see `devices.connect`) and prints a warning
    for each process if there are none. One parameter that is never used prevents the warning. It is not the model's,
    so no optimiser and no checkpoint has it.
    """

    def __init__(self, model: nn.Module, task: Task, alone: bool, searched: bool = False) -> None:
        super().__init__()
        if searched:
            self._never_used = nn.Parameter(torch.zeros(1))
        self.model, self.task = model, task
        self._skips = alone and isinstance(model, Advances)
        self._functions = sum_functions(task.metrics, training=True)

    def reads(self, batch: object) -> bool:
        """Whether a batch takes the model's whole forward, and not `advance`."""
        return not self._skips or self.task.count(batch) > 0

    def forward(
        self,
        batches: Sequence[object],
        carry: Carry,
        weights: tuple[float, float] = (1.0, 0.0),
        visible: bool = False,
        advance: bool = False,
    ) -> tuple[Tensor, ...]:
        """(loss, sums) of successive batches; the states are written to `carry.after`.

        weights: of the losses and of the auxiliary losses. loss: their weighted sum, a scalar. sums, without gradient:
        [weight × Σ auxiliary losses, their number, the sums of the task's metrics]. visible: the last state will get a
        gradient of its own, so something that depends on it is returned too: DDP finds used parameters in this way.
        advance: only compute the new states, by the model's `advance`, and return ().
        """
        added: list[Tensor] = []
        sums: list[Tensor] = []

        def step(batch: object, state: State) -> tuple[Tensor | None, State]:
            if advance or not self.reads(batch):
                return None, self.task.advance(self.model, batch, state)
            with collect_auxiliary_losses() as auxiliary:
                outputs, state = self.task.forward(self.model, batch, state)
                loss = self.task.loss(self.model, outputs, batch)
            added.extend(auxiliary)
            with torch.no_grad():
                functions = self._functions.items()
                found = [x for f, width in functions for x in called(f, width, self.model, outputs, batch)]
            if found:
                sums.append(torch.stack([x.to(loss.device, torch.float32) for x in found]))
            return loss, state

        with collect_auxiliary_losses():  # auxiliary losses that `advance` or a metric adds are dropped
            found, carry.after = read_in_turn(step, ((x, self.task.resets(x)) for x in batches), carry.before)
        if advance:
            return ()
        losses = [loss for loss in found if loss is not None]
        device = leaves(batches[-1])[0].device
        none = torch.zeros((), device=device)
        loss, extra = torch.stack(losses or [none]).sum() * weights[0], none
        if added:
            extra = torch.stack([x.to(loss.dtype) for x in added]).sum() * weights[1]
            loss = loss + extra
        head = torch.stack([extra.detach().to(device, torch.float32), torch.full_like(none, len(added))])
        zeros = torch.zeros(sum(self._functions.values()), device=device)
        summed = torch.cat([head, torch.stack(sums).sum(0) if sums else zeros])
        if not visible:
            return loss, summed
        # DDP finds the used parameters from the tensors that a forward returns. These scalars have no other use.
        return loss, summed, *(x.flatten()[:1].sum() for x in leaves(carry.after[-1]) if x.requires_grad)


class RolloutGradients:
    """Forward and backward of updates. wrapped: `with_loss` (the model with its loss) as Fabric wraps it.

    carried: the states that each micro-batch's rows go on from, where the task carries them.
    """

    def __init__(
        self, fabric: Fabric, wrapped: Any, with_loss: ModelWithLoss, model: nn.Module, task: Task, config: TrainConfig
    ) -> None:
        self._wrapped, self._with_loss, self._model, self._task = wrapped, with_loss, model, task
        self._config: RolloutConfig = config.rollout
        self._splits = config.accumulate > 1 or config.rollout.segments > 1 or config.rollout.segment_length > 0
        self._caches = bool(stored(model))
        engine = RolloutEngine(
            lambda loss: fabric.backward(loss),
            module=model if any(True for _ in model.buffers()) else None,
            replay=config.rollout.replay,
            horizon=config.rollout.horizon,
            slide=config.rollout.slide,
            checkpoints=config.rollout.checkpoints,
            offload=config.rollout.offload,
            verify=config.rollout.verify,
            # Fabric enters autocast inside the wrapped model, so replay cannot detect half precision by itself.
            tolerance=HALF if config.precision.endswith("mixed") else None,
            no_sync=lambda: fabric.no_backward_sync(wrapped),
        )
        self.carried = CarriedStates(engine, config.accumulate)
        self._kept: dict[int, object] = {}  # batches of the last update, by index

    def forwards(self, micro_batches: Sequence[Sequence[object]]) -> int:
        """The number of whole forwards of an update on this process; at least 1."""
        return max(1, sum(self._with_loss.reads(batch) for steps in micro_batches for batch in steps))

    def batches(self, update: int, config: TrainConfig) -> list[object]:
        """The batches of update number `update` (from 0), one per segment, in order."""
        if self._config.segment_length:
            batch = self._task.train_batch(update, config.batch_size, config.seed)
            return list(self._task.segments(batch, self._config.segment_length))
        first, steps = update * self._config.stride, self._config.segments
        # Batches that the next update reads again are kept: a task may have to start a pass anew to go back to them.
        kept, self._kept = self._kept, {}
        found = {
            i: kept[i] if i in kept else self._task.train_batch(i, config.batch_size, config.seed)
            for i in range(first, first + steps)
        }
        if self._config.stride < steps:
            self._kept = found
        return list(found.values())

    def accumulating_caches(self) -> contextlib.AbstractContextManager[None]:
        """Context of an update: stored caches are written once, from all of its micro-batches and segments."""
        return accumulate_caches(self._model) if self._caches and self._splits else contextlib.nullcontext()

    def backward(self, number: int, batches: list[object], weights: tuple[float, float], last: bool) -> Tensor:
        """Add the gradients of the segments of micro-batch `number`.

        weights: of the losses and of the auxiliary losses. Returns [weight × Σ losses, then the sums of
        `ModelWithLoss`]. The micro-batch's next update starts from the last state, or with `rollout.slide` from the one
        after so many segments. last: the update's last micro-batch, after which gradients are summed over processes.
        Raises InputError for a model without state.
        """
        replayed = self.carried.engine.replays(len(batches))
        all_sums: list[Tensor] = []

        def read(batches: Sequence[object], state: State) -> tuple[Tensor, list[State]]:
            carry = Carry(state)
            loss, sums, *_ = self._wrapped(batches, carry, weights, visible=replayed and torch.is_grad_enabled())
            if torch.is_grad_enabled():  # each segment is read exactly once with gradient
                all_sums.append(sums)
            return loss, carry.after

        def advance(batch: object, state: State) -> State:
            carry = Carry(state)
            self._wrapped([batch], carry, advance=True)
            return carry.after[-1]

        losses = self.carried.backward(
            number, read, batches, advance if isinstance(self._model, Advances) else None, last
        )
        if len(batches) > 1 and not leaves(self.carried.states[number]):
            raise InputError(
                "train.rollout: expected a model that keeps a state between segments, found one that keeps none; "
                "use another attention or model, or one segment per update"
            )
        if not self._task.carries_state:
            self.carried.states[number] = None
        if replayed:
            losses, all_sums = losses.sum()[None], [torch.stack(all_sums).sum(0)]
        # the losses without the auxiliary losses, which are the first of the sums
        return torch.stack(
            [torch.cat([(loss - sums[0])[None], sums]) for loss, sums in zip(losses, all_sums, strict=True)]
        ).sum(0)
