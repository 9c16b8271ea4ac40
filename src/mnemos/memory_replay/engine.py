"""The loop of every trainer here: the gradients of one update through the segments of its rollout.

    Σ_t loss_t,  loss_t, s_t = read(x_t, s_{t−1})        t = 1 … S, gradients through at most `horizon` states

Memory replay and plain back-propagation through time give the same gradients. They differ in the activations that they
keep: of one segment, or of `horizon` segments.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mnemos.types import State, collect_auxiliary_losses, detach, map_state, reset

from .passes import add_auxiliary
from .rollout import replay

Segment = TypeVar("Segment")
Loss = TypeVar("Loss")
# Reads successive segments: (Σ losses, the state after each segment).
Read = Callable[[Sequence[Any], State], tuple[Tensor, list[State]]]


def read_in_turn(
    step: Callable[[Segment, State], tuple[Loss, State]],
    segments: Iterable[tuple[Segment, Tensor | None]],
    state: State,
) -> tuple[list[Loss], list[State]]:
    """Read segments, each with the mask of the rows [B] that begin anew with it, or None.

    step(segment, state) -> (loss, state). Returns its losses, and the state after each segment.
    """
    losses, states = [], []
    for segment, rows in segments:
        if state is not None and rows is not None:
            state = reset(state, rows)
        loss, state = step(segment, state)
        losses.append(loss)
        states.append(state)
    return losses, states


def detach_contiguous(state: State) -> State:
    """The state as it goes from one rollout to the next, without gradient.

    A checkpoint restores contiguous tensors, and kernels may round other strides differently.
    """
    return map_state(lambda x: x.detach().contiguous(), state)


@dataclass(frozen=True, eq=False)
class RolloutEngine:
    """Adds the gradients of rollouts to the parameters' .grad.

    backward: runs the backward pass of a loss. module, checkpoints, offload, verify, tolerance: see `mnemos.replay`.
    replay: replay the segments, where there are several and gradient crosses between them. Without it, the graph of
    `horizon` segments is kept at a time. horizon: the number of segments through which gradient flows back; 0: all.
    slide: the number of segments from the start of a rollout to that of the next one; 0: all of them.
    no_sync: a context in which gradients are not reduced over processes; None: nothing reduces them, or `module` does
    (see `mnemos.replay`).
    """

    backward: Callable[[Tensor], object] = Tensor.backward
    module: nn.Module | None = None
    replay: bool = True
    horizon: int = 0
    slide: int = 0
    checkpoints: int | str = "all"
    offload: bool = False
    verify: bool = True
    tolerance: float | None = None
    no_sync: Callable[[], AbstractContextManager[object]] | None = None

    def replays(self, count: int) -> bool:
        """Whether a rollout of so many segments is replayed. With horizon 1 each segment is read once in either way."""
        return self.replay and count > 1 and self.horizon != 1

    def run(
        self,
        read: Read,
        segments: Sequence[Any],
        state: State,
        advance: Callable[[Any, State], State] | None = None,
        last: bool = True,
    ) -> tuple[Tensor, State]:
        """Add the gradients of Σ_t loss_t; returns (losses, the state that the next rollout starts from).

        read(segments, state) -> (Σ losses, the state after each segment), with gradient. It gets one segment at a time
        where they are replayed, and otherwise those of a horizon. losses: one for each call of `read` with gradient,
        in the order of the segments, detached. advance(segment, state) -> state, for replay. last: whether gradients
        are reduced over processes after this rollout.
        """
        run = self._replay if self.replays(len(segments)) else self._truncate
        losses, following = run(read, segments, state, advance, last)
        return losses, detach_contiguous(following)

    def _replay(
        self,
        read: Read,
        segments: Sequence[Any],
        state: State,
        advance: Callable[[Any, State], State] | None,
        last: bool,
    ) -> tuple[Tensor, State]:
        """Memory replay: the graph of one segment at a time."""
        # Around the whole rollout if another one follows in the update; else replay enters it, in all steps but one.
        around, inside = (nullcontext, self.no_sync) if last or self.no_sync is None else (self.no_sync, nullcontext)
        with around():
            out = replay(
                functools.partial(self._step, read),
                segments,
                state,
                advance=advance,
                weights=[1.0] * len(segments),
                truncate_every=self.horizon or None,
                slide=self.slide or None,
                checkpoints=self.checkpoints,
                offload=self.offload,
                verify=self.verify,
                tolerance=self.tolerance,
                module=self.module,
                backward=self.backward,
                no_sync=inside,
            )
        return out.losses, out.next_state

    def _step(self, read: Read, segment: Any, state: State) -> tuple[Tensor, State]:
        loss, states = read([segment], state)
        return loss, states[-1]

    def _truncate(
        self,
        read: Read,
        segments: Sequence[Any],
        state: State,
        advance: Callable[[Any, State], State] | None,
        last: bool,
    ) -> tuple[Tensor, State]:
        """Plain back-propagation through time: one graph per `horizon` segments."""
        count = len(segments)
        horizon, slide = self.horizon or count, self.slide or count
        losses, following, no_sync = [], None, self.no_sync or nullcontext
        for first in range(0, count, horizon):
            stop = min(first + horizon, count)
            with nullcontext() if last and stop == count else no_sync():
                with collect_auxiliary_losses() as auxiliary:
                    loss, states = read(segments[first:stop], state)
                loss = add_auxiliary(loss, auxiliary)
                if loss.requires_grad:
                    self.backward(loss)
            losses.append(loss.detach())
            if first < slide <= stop:
                following = states[slide - first - 1]
            state = detach(states[-1])
            del loss, states
        return torch.stack(losses), following
