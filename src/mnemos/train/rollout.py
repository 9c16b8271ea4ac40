"""One update's walk through time: forward and backward over the steps of a rollout, of which a plain update has one.

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

from mnemos.data.batch import Batch, Task, pieces
from mnemos.evaluate.metrics import counted, scored
from mnemos.memory.stored import accumulate_caches, stored
from mnemos.memory_replay import replay
from mnemos.memory_replay.state_checks import HALF
from mnemos.types import InputError, State, detach, leaves, map_state, reset

from .recipe import RolloutConfig, TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Carry:
    """A state on its way in and out of a wrapped model: wrappers convert and copy what they know, but not this.

    weight: of the losses. shown: the state goes on to have a gradient of its own, which DDP has to know of.
    """

    __slots__ = ("shown", "state", "weight")

    def __init__(self, state: State, weight: float = 1.0, shown: bool = False) -> None:
        self.state, self.weight, self.shown = state, weight, shown


class Scored(nn.Module):
    """Model and loss in one forward: what DDP and FSDP wrap.

    A step without a counted target needs its state alone: a model with `advance` reads it so, unless other processes,
    whose rows may have one, wait for the rest of the model (`alone` is False).
    """

    def __init__(self, model: nn.Module, alone: bool) -> None:
        super().__init__()
        self.model = model
        self._skips = alone and hasattr(model, "advance")

    def forward(self, batches: Sequence[Batch], carry: Carry, advance: bool = False) -> tuple[Tensor, ...]:
        """(weight × sum of the negative log-likelihoods, right guesses) of batches that follow one another.

        The new state is left in `carry`. advance: that alone, by the model's own `advance`.
        """
        losses, rights = [], []
        for batch in batches:
            state = carry.state
            if state is not None and batch.reset is not None:
                state = reset(state, batch.reset)
            if advance or (self._skips and not counted(batch.targets)):
                carry.state = self.model.advance(batch.inputs, state, mask=batch.mask)  # type: ignore[operator]
                continue
            logits, carry.state = self.model(batch.inputs, state, mask=batch.mask)
            loss, right, _ = scored(self.model, logits, batch)
            losses.append(loss)
            rights.append(right)
        if advance:
            return ()
        none = [torch.zeros((), device=batch.inputs.device)]
        found = torch.stack(losses or none).sum() * carry.weight, torch.stack(rights or none).sum()
        if not carry.shown:
            return found
        # DDP looks for what has a gradient in what a forward returns. This is never used, but it leads there.
        return *found, *(x.flatten()[:1].sum() for x in leaves(carry.state) if x.requires_grad)


class RolloutGradients:
    """Forward and backward of updates. `wrapped`: a `Scored` as Fabric gives it back, of `model`."""

    def __init__(self, fabric: Fabric, wrapped: Any, model: nn.Module, config: TrainConfig) -> None:
        self._fabric, self._wrapped, self._model = fabric, wrapped, model
        self._config: RolloutConfig = config.rollout
        self._splits = config.accumulate > 1 or config.rollout.segments > 1 or config.rollout.segment_length > 0
        self._caches = bool(stored(model))
        # Fabric's autocast is within the wrapped model, where replay does not see it.
        self._verify = HALF if config.precision.endswith("mixed") else True
        self._stores = any(True for _ in model.buffers())

    def batches(self, task: Task, update: int, config: TrainConfig) -> list[Batch]:
        """What update number `update`, from 0, reads: the batches of its steps, in order."""
        if self._config.segment_length:
            return list(pieces([task.train_batch(update, config.batch_size, config.seed)], self._config.segment_length))
        first, steps = update * self._config.segments, self._config.segments
        return [task.train_batch(first + i, config.batch_size, config.seed) for i in range(steps)]

    def one_cache_update(self) -> contextlib.AbstractContextManager[None]:
        """However an update is split, stored caches are updated once, by all that it read."""
        return accumulate_caches(self._model) if self._caches and self._splits else contextlib.nullcontext()

    def backward(self, batches: list[Batch], state: State, weight: float, last: bool) -> tuple[Tensor, State]:
        """Add the gradients of weight × Σ losses over a micro-batch's steps.

        Returns ([weight × Σ losses, right guesses], the last state, detached and contiguous). last: these are the
        update's last, so that gradients are then summed over processes. Raises InputError for a model without state.
        """
        # A graph of one step is all that there is to keep where no gradient leaves it.
        replayed = self._config.replay and len(batches) > 1 and self._config.horizon != 1
        walk = self._replayed if replayed else self._through_time
        sums, state = walk(batches, state, weight, last)
        if len(batches) > 1 and not leaves(state):
            raise InputError(
                "train.rollout: expected a model that keeps a state, found one whose steps know nothing of each other; "
                "take another attention or model"
            )
        # Contiguous, as a checkpoint gives it back: kernels may round differently for other strides.
        return sums, map_state(lambda leaf: leaf.detach().contiguous(), state)

    def _silent(self, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        return self._fabric.no_backward_sync(self._wrapped, enabled=enabled)

    def _through_time(self, batches: list[Batch], state: State, weight: float, last: bool) -> tuple[Tensor, State]:
        """Plain back-propagation through time: one graph over all steps that gradient flows through."""
        horizon = self._config.horizon or len(batches)
        found = []
        for start in range(0, len(batches), horizon):
            carry = Carry(state, weight)
            with self._silent(not (last and start + horizon >= len(batches))):
                loss, right = self._wrapped(batches[start : start + horizon], carry)
                if loss.requires_grad:
                    self._fabric.backward(loss)
            state = detach(carry.state)
            found.append(torch.stack([loss.detach(), right.to(loss.dtype)]))
        return torch.stack(found).sum(0), state

    def _replayed(self, batches: list[Batch], state: State, weight: float, last: bool) -> tuple[Tensor, State]:
        """Memory replay: the graph of one step at a time."""
        rights = []

        def step(batch: Batch, state: State) -> tuple[Tensor, State]:
            carry = Carry(state, weight, shown=torch.is_grad_enabled())
            loss, right, *_ = self._wrapped([batch], carry)
            if torch.is_grad_enabled():  # once for every step, whatever else is run
                rights.append(right)
            return loss, carry.state

        def advance(batch: Batch, state: State) -> State:
            carry = Carry(state)
            self._wrapped([batch], carry, advance=True)
            return carry.state

        with self._silent(not last):
            out = replay(
                step,
                batches,
                state,
                advance=advance if hasattr(self._model, "advance") else None,
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
        loss = out.losses.sum()
        return torch.stack([loss, torch.stack(rights).sum().to(loss.dtype)]), out.state
