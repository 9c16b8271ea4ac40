"""The gradients of one update: forward and backward over the segments of a rollout. A plain update has one segment.

    Σ_t loss_t,  loss_t, s_t = model(x_t, s_{t−1})        t = 1 … S, gradients through at most `horizon` states

Every path gives the gradients of back-propagation through time, cut after each `horizon`; they differ in what is kept
for it (see `RolloutConfig`). However many steps, gradients are summed over processes once an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos.data.metrics import sum_functions
from mnemos.data.task import Task
from mnemos.memory.stored import accumulate_caches, stored
from mnemos.memory_replay import replay
from mnemos.memory_replay.state_checks import HALF
from mnemos.types import Advances, InputError, State, collect_auxiliary_losses, detach, leaves, map_state, reset

from .recipe import RolloutConfig, TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Carry:
    """Passes a state into and out of a wrapped model. Wrappers convert and copy types that they know, but not this one.

    weight: the factor of the losses; auxiliary: that of the auxiliary losses. shown: the state's gradient is needed
    later, so DDP must find it among the outputs.
    """

    __slots__ = ("auxiliary", "shown", "state", "weight")

    def __init__(self, state: State, weight: float = 1.0, auxiliary: float = 0.0, shown: bool = False) -> None:
        self.state, self.weight, self.auxiliary, self.shown = state, weight, auxiliary, shown


class Scored(nn.Module):
    """The model and its loss in one forward: the module that DDP and FSDP wrap.

    A segment without a counted target needs only the new state, so a model with `advance` reads it by that. With
    several processes (`alone` is False) the whole model runs, because rows of other processes may have targets.
    """

    def __init__(self, model: nn.Module, task: Task, alone: bool) -> None:
        super().__init__()
        self.model, self.task = model, task
        self._skips = alone and isinstance(model, Advances)
        self._functions = sum_functions(task.metrics, training=True)

    def reads(self, batch: Any) -> bool:
        """Whether the whole model runs for a batch."""
        return not self._skips or self.task.count(batch) > 0

    def forward(self, batches: Sequence[Any], carry: Carry, advance: bool = False) -> tuple[Tensor, ...]:
        """(weighted loss, sums) of successive batches.

        loss: weight × Σ losses + auxiliary × Σ auxiliary losses. sums: [auxiliary × Σ auxiliary losses, the number of
        auxiliary losses, the sums of the task's metrics], without gradient. The new state is in `carry` afterwards.
        advance: compute only the state, by the model's `advance`, and return ().
        """
        losses: list[Tensor] = []
        added: list[Tensor] = []
        sums: list[Tensor | None] = []
        with collect_auxiliary_losses():  # drops what `advance` and the metrics add
            for batch in batches:
                state, resets = carry.state, self.task.resets(batch)
                if state is not None and resets is not None:
                    state = reset(state, resets)
                if advance or not self.reads(batch):
                    carry.state = self.task.advance(self.model, batch, state)
                    continue
                with collect_auxiliary_losses() as auxiliary:
                    outputs, carry.state = self.task.forward(self.model, batch, state)
                    losses.append(self.task.loss(self.model, outputs, batch))
                added += auxiliary
                with torch.no_grad():
                    found = [x for function in self._functions for x in function(self.model, outputs, batch)]
                sums.append(torch.stack([x.to(losses[-1].device, torch.float32) for x in found]) if found else None)
        if advance:
            return ()
        device = leaves(batches[-1])[0].device
        none = torch.zeros((), device=device)
        loss, extra = torch.stack(losses or [none]).sum() * carry.weight, none
        if added:
            extra = torch.stack([x.to(loss.dtype) for x in added]).sum() * carry.auxiliary
            loss = loss + extra
        head = torch.stack([extra.detach().to(device, torch.float32), torch.full_like(none, len(added))])
        tail = [x for x in sums if x is not None]
        zeros = torch.zeros(sum(self._functions.values()), device=device)
        summed = torch.cat([head, torch.stack(tail).sum(0) if tail else zeros])
        if not carry.shown:
            return loss, summed
        # DDP finds tensors with a gradient through the outputs of a forward. These values are not used otherwise.
        return loss, summed, *(x.flatten()[:1].sum() for x in leaves(carry.state) if x.requires_grad)


class RolloutGradients:
    """Forward and backward of updates. `wrapped`: `scored` as Fabric gives it back, of `model`."""

    def __init__(
        self, fabric: Fabric, wrapped: Any, scored: Scored, model: nn.Module, task: Task, config: TrainConfig
    ) -> None:
        self._fabric, self._wrapped, self._scored, self._model, self._task = fabric, wrapped, scored, model, task
        self._config: RolloutConfig = config.rollout
        self._splits = config.accumulate > 1 or config.rollout.segments > 1 or config.rollout.segment_length > 0
        self._caches = bool(stored(model))
        # Fabric's autocast is within the wrapped model, where replay does not see it.
        self._verify = HALF if config.precision.endswith("mixed") else True
        self._stores = any(True for _ in model.buffers())

    def forwards(self, micro_batches: Sequence[Sequence[Any]]) -> int:
        """The number of forwards of the whole model in an update of this process; at least 1."""
        return max(1, sum(self._scored.reads(batch) for steps in micro_batches for batch in steps))

    def batches(self, update: int, config: TrainConfig) -> list[Any]:
        """What update number `update`, from 0, reads: the batches of its steps, in order."""
        if self._config.segment_length:
            batch = self._task.train_batch(update, config.batch_size, config.seed)
            return list(self._task.segments(batch, self._config.segment_length))
        first, steps = update * self._config.segments, self._config.segments
        return [self._task.train_batch(first + i, config.batch_size, config.seed) for i in range(steps)]

    def one_cache_update(self) -> contextlib.AbstractContextManager[None]:
        """However an update is split, stored caches are updated once, by all that it read."""
        return accumulate_caches(self._model) if self._caches and self._splits else contextlib.nullcontext()

    def backward(
        self, batches: list[Any], state: State, weights: tuple[float, float], last: bool
    ) -> tuple[Tensor, State]:
        """Add the gradients of a micro-batch's steps: of the losses and the auxiliary losses, by their two `weights`.

        Returns ([weight × Σ losses, and then what `Scored` sums], the last state, detached and contiguous). last: these
        are the update's last, so that gradients are then summed over processes. Raises InputError for a model without
        state.
        """
        # A graph of one step is all that there is to keep where no gradient leaves it.
        replayed = self._config.replay and len(batches) > 1 and self._config.horizon != 1
        walk = self._replayed if replayed else self._through_time
        sums, state = walk(batches, state, weights, last)
        if len(batches) > 1 and not leaves(state):
            raise InputError(
                "train.rollout: expected a model that keeps a state, found one whose steps know nothing of each other; "
                "take another attention or model"
            )
        # Contiguous, as a checkpoint gives it back: kernels may round differently for other strides.
        return sums, map_state(lambda leaf: leaf.detach().contiguous(), state)

    def _silent(self, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        return self._fabric.no_backward_sync(self._wrapped, enabled=enabled)

    def _through_time(
        self, batches: list[Any], state: State, weights: tuple[float, float], last: bool
    ) -> tuple[Tensor, State]:
        """Plain back-propagation through time: one graph over all steps that gradient flows through."""
        horizon = self._config.horizon or len(batches)
        found = []
        for start in range(0, len(batches), horizon):
            carry = Carry(state, *weights)
            with self._silent(not (last and start + horizon >= len(batches))):
                loss, sums = self._wrapped(batches[start : start + horizon], carry)
                if loss.requires_grad:
                    self._fabric.backward(loss)
            state = detach(carry.state)
            found.append(_apart(loss.detach(), sums))
        return torch.stack(found).sum(0), state

    def _replayed(
        self, batches: list[Any], state: State, weights: tuple[float, float], last: bool
    ) -> tuple[Tensor, State]:
        """Memory replay: the graph of one step at a time."""
        found = []

        def step(batch: Any, state: State) -> tuple[Tensor, State]:
            carry = Carry(state, *weights, shown=torch.is_grad_enabled())
            loss, sums, *_ = self._wrapped([batch], carry)
            if torch.is_grad_enabled():  # once for every step, whatever else is run
                found.append(sums)
            return loss, carry.state

        def advance(batch: Any, state: State) -> State:
            carry = Carry(state)
            self._wrapped([batch], carry, advance=True)
            return carry.state

        with self._silent(not last):
            out = replay(
                step,
                batches,
                state,
                advance=advance if isinstance(self._model, Advances) else None,
                weights=[1.0] * len(batches),
                truncate_every=self._config.horizon or None,
                checkpoints=self._config.checkpoints,
                offload=self._config.offload,
                verify=self._verify,
                module=self._model if self._stores else None,
                backward=self._fabric.backward,
                # The last step that is run ends the update's gradients, but only in the last micro-batch.
                no_sync=self._silent if last else contextlib.nullcontext,
            )
        return _apart(out.losses.sum(), torch.stack(found).sum(0)), out.state


def _apart(loss: Tensor, sums: Tensor) -> Tensor:
    """[the loss without the auxiliary losses, *sums]."""
    return torch.cat([(loss - sums[0]).reshape(1), sums])
