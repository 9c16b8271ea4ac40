"""The gradients of one update: forward and backward over the segments of its rollout. A plain update has one segment.

    Σ_t loss_t,  loss_t, s_t = model(x_t, s_{t−1})        t = 1 … S, gradients through at most `horizon` states

Both methods, memory replay and plain back-propagation through time, give the same gradients, truncated every `horizon`
segments. They differ in the activations that they keep (see `RolloutConfig`). Gradients are summed over processes once
per update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos.lab.tasks.metrics import called, sum_functions
from mnemos.lab.tasks.task import Task
from mnemos.memory.stored import accumulate_caches, stored
from mnemos.memory_replay import replay
from mnemos.memory_replay.verification import HALF
from mnemos.types import Advances, InputError, State, collect_auxiliary_losses, detach, leaves, map_state, reset

from .recipe import RolloutConfig, TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Carry:
    """Passes a state into and out of a wrapped model. The wrappers convert and copy tensors and pytrees, but not this.

    weight: weight of the losses. auxiliary: weight of the auxiliary losses. visible: the new state will get a gradient
    of its own, so the forward must also return something that depends on it: DDP finds used parameters in this way.
    noted: the state after `note_after` batches of the forward; None before it is known.
    """

    __slots__ = ("auxiliary", "note_after", "noted", "state", "visible", "weight")

    def __init__(
        self,
        state: State,
        weight: float = 1.0,
        auxiliary: float = 0.0,
        visible: bool = False,
        note_after: int = 0,
    ) -> None:
        self.state, self.weight, self.auxiliary, self.visible = state, weight, auxiliary, visible
        self.note_after, self.noted = note_after, None

    def reach(self, state: State, batches: int) -> None:
        """Set the state, that after so many batches of the forward."""
        self.state = state
        if batches == self.note_after:
            self.noted = state


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

    def forward(self, batches: Sequence[object], carry: Carry, advance: bool = False) -> tuple[Tensor, ...]:
        """(loss, sums) of successive batches; the new state is written to `carry.state`.

        loss: weight × Σ losses + auxiliary × Σ auxiliary losses, a scalar. sums, without gradient: [auxiliary × Σ
        auxiliary losses, their number, the sums of the task's metrics]. advance: only compute the new state, by the
        model's `advance`, and return ().
        """
        losses: list[Tensor] = []
        added: list[Tensor] = []
        sums: list[Tensor | None] = []
        with collect_auxiliary_losses():  # auxiliary losses that `advance` or a metric adds are dropped
            for count, batch in enumerate(batches, start=1):
                state, resets = carry.state, self.task.resets(batch)
                if state is not None and resets is not None:
                    state = reset(state, resets)
                if advance or not self.reads(batch):
                    carry.reach(self.task.advance(self.model, batch, state), count)
                    continue
                with collect_auxiliary_losses() as auxiliary:
                    outputs, state = self.task.forward(self.model, batch, state)
                    losses.append(self.task.loss(self.model, outputs, batch))
                carry.reach(state, count)
                added += auxiliary
                with torch.no_grad():
                    functions = self._functions.items()
                    found = [x for f, width in functions for x in called(f, width, self.model, outputs, batch)]
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
        if not carry.visible:
            return loss, summed
        # DDP finds the used parameters from the tensors that a forward returns. These scalars have no other use.
        return loss, summed, *(x.flatten()[:1].sum() for x in leaves(carry.state) if x.requires_grad)


class RolloutGradients:
    """Forward and backward of updates. wrapped: `with_loss` (the model with its loss) as Fabric wraps it."""

    def __init__(
        self, fabric: Fabric, wrapped: Any, with_loss: ModelWithLoss, model: nn.Module, task: Task, config: TrainConfig
    ) -> None:
        self._fabric, self._wrapped, self._with_loss, self._model, self._task = fabric, wrapped, with_loss, model, task
        self._config: RolloutConfig = config.rollout
        self._splits = config.accumulate > 1 or config.rollout.segments > 1 or config.rollout.segment_length > 0
        self._caches = bool(stored(model))
        # Fabric enters autocast inside the wrapped model, so replay cannot detect half precision by itself.
        self._verify = HALF if config.precision.endswith("mixed") else True
        self._stores = any(True for _ in model.buffers())
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

    def backward(
        self, batches: list[object], state: State, weights: tuple[float, float], last: bool
    ) -> tuple[Tensor, State]:
        """Add the gradients of a micro-batch's segments; `weights` are those of the losses and auxiliary losses.

        Returns ([weight × Σ losses, then the sums of `ModelWithLoss`], the state that the next update starts from,
        detached and contiguous: the last one, or with `rollout.slide` the one after so many segments). last: the
        update's last micro-batch, after which gradients are summed over processes. Raises InputError for a model
        without state.
        """
        # With horizon 1, plain back-propagation keeps the graph of one segment too, and needs no second forward.
        replayed = self._config.replay and len(batches) > 1 and self._config.horizon != 1
        method = self._replayed if replayed else self._through_time
        sums, state = method(batches, state, weights, last)
        if len(batches) > 1 and not leaves(state):
            raise InputError(
                "train.rollout: expected a model that keeps a state between segments, found one that keeps none; "
                "use another attention or model, or one segment per update"
            )
        # Contiguous, because a checkpoint restores contiguous tensors, and kernels may round other strides differently.
        return sums, map_state(lambda leaf: leaf.detach().contiguous(), state)

    def _without_gradient_sync(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        return self._fabric.no_backward_sync(self._wrapped, enabled=enabled)

    def _through_time(
        self, batches: list[object], state: State, weights: tuple[float, float], last: bool
    ) -> tuple[Tensor, State]:
        """Plain back-propagation through time: one graph per `horizon` segments."""
        horizon = self._config.horizon or len(batches)
        slide = self._config.slide or len(batches)
        found, following = [], None
        for start in range(0, len(batches), horizon):
            carry = Carry(state, *weights, note_after=slide - start)
            with self._without_gradient_sync(not (last and start + horizon >= len(batches))):
                loss, sums = self._wrapped(batches[start : start + horizon], carry)
                if loss.requires_grad:
                    self._fabric.backward(loss)
            state = detach(carry.state)
            following = detach(carry.noted) if start < slide <= start + horizon else following
            found.append(_split_losses(loss.detach(), sums))
        return torch.stack(found).sum(0), following

    def _replayed(
        self, batches: list[object], state: State, weights: tuple[float, float], last: bool
    ) -> tuple[Tensor, State]:
        """Memory replay: the graph of one segment at a time."""
        found = []

        def step(batch: object, state: State) -> tuple[Tensor, State]:
            carry = Carry(state, *weights, visible=torch.is_grad_enabled())
            loss, sums, *_ = self._wrapped([batch], carry)
            if torch.is_grad_enabled():  # replay runs each segment exactly once with gradient
                found.append(sums)
            return loss, carry.state

        def advance(batch: object, state: State) -> State:
            carry = Carry(state)
            self._wrapped([batch], carry, advance=True)
            return carry.state

        with self._without_gradient_sync(not last):
            out = replay(
                step,
                batches,
                state,
                advance=advance if isinstance(self._model, Advances) else None,
                weights=[1.0] * len(batches),
                truncate_every=self._config.horizon or None,
                slide=self._config.slide or None,
                checkpoints=self._config.checkpoints,
                offload=self._config.offload,
                verify=self._verify,
                module=self._model if self._stores else None,
                backward=self._fabric.backward,
                # Processes sum gradients after the last segment of the last micro-batch.
                no_sync=self._without_gradient_sync if last else contextlib.nullcontext,
            )
        return _split_losses(out.losses.sum(), torch.stack(found).sum(0)), out.next_state


def _split_losses(loss: Tensor, sums: Tensor) -> Tensor:
    """[the losses without the auxiliary losses, *sums]."""
    return torch.cat([(loss - sums[0]).reshape(1), sums])
