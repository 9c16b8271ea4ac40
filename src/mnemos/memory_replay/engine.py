"""The loop of every trainer here: the gradients of one update through its segments, and the states that are carried on.

    Σ_t loss_t,  loss_t, s_t = read(x_t, s_{t−1})        t = 1 … S, gradients through at most `horizon` states

Memory replay and plain back-propagation through time give the same gradients. They differ in the activations that they
keep: of one segment, or of `horizon` segments.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mnemos._compat import pytree
from mnemos.types import InputError, State, collect_auxiliary_losses, detach, map_state, reset

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
        count, no_sync = len(segments), self.no_sync or nullcontext
        horizon, slide = self.horizon or count, self.slide or count
        losses, following = [], None

        # --- the graph of one segment at a time ---
        if self.replays(count):

            def step(segment: Any, state: State) -> tuple[Tensor, State]:
                loss, states = read([segment], state)
                return loss, states[-1]

            with nullcontext() if last else no_sync():
                out = replay(
                    step,
                    segments,
                    state,
                    advance=advance,
                    weights=[1.0] * count,
                    truncate_every=horizon,
                    slide=slide,
                    checkpoints=self.checkpoints,
                    offload=self.offload,
                    verify=self.verify,
                    tolerance=self.tolerance,
                    module=self.module,
                    backward=self.backward,
                    # Entered in all steps but the last; not where it is entered around all of them.
                    no_sync=self.no_sync if last or self.no_sync is None else nullcontext,
                )
            return out.losses, _as_stored(out.next_state)

        # --- the graph of `horizon` segments ---
        for first in range(0, count, horizon):
            stop = min(first + horizon, count)
            with nullcontext() if last and stop == count else no_sync():
                with collect_auxiliary_losses() as auxiliary:
                    loss, states = read(segments[first:stop], state)
                loss = sum((x.to(loss.device) for x in auxiliary), loss)
                if loss.requires_grad:
                    self.backward(loss)
            losses.append(loss.detach())
            if first < slide <= stop:
                following = states[slide - first - 1]
            state = detach(states[-1])
            del loss, states
        return torch.stack(losses), _as_stored(following)


def _as_stored(state: State) -> State:
    """Without gradient, and contiguous: a checkpoint restores such tensors, and others may be rounded differently."""
    return map_state(lambda x: x.detach().contiguous(), state)


class CarriedStates:
    """The states that go on from one rollout to the next, without gradient: one for each set of rows, or micro-batch.

    The trainers' first replayed rollout is compared with its first pass, where `engine.verify` says so, and no other:
    a step that repeats itself once does so again, and comparing takes time.
    """

    def __init__(self, engine: RolloutEngine, sets: int = 1) -> None:
        self.engine = engine
        self.states: list[State] = [None] * sets

    def backward(
        self,
        number: int,
        read: Read,
        segments: Sequence[Any],
        advance: Callable[[Any, State], State] | None = None,
        last: bool = True,
    ) -> Tensor:
        """Add the gradients of a rollout of set `number`, whose state goes on; its losses. See `RolloutEngine.run`."""
        losses, self.states[number] = self.engine.run(read, segments, self.states[number], advance, last)
        if self.engine.verify and self.engine.replays(len(segments)):
            self.engine = replace(self.engine, verify=False)
        return losses

    def state_dict(self) -> list[list[Any]]:
        """The leaves of each state, tensors on the CPU; [] of none. Their structure is the model's to know."""
        every = [[] if state is None else pytree.tree_leaves(state) for state in self.states]
        return [[x.cpu() if isinstance(x, Tensor) else x for x in one] for one in every]

    def load_state_dict(
        self, saved: Sequence[Sequence[Any]], fresh: Callable[[], State], device: torch.device | str
    ) -> None:
        """Go on from a `state_dict`. fresh(): a state with the model's structure. Raises InputError for another's."""
        like, structure = pytree.tree_flatten(fresh()) if any(map(len, saved)) else ([], None)
        if len(saved) != len(self.states):
            raise InputError(f"expected {len(self.states)} carried states, found {len(saved)}; use another checkpoint")
        for number, own in enumerate(saved):
            if own and (len(own) != len(like) or any(map(_differ, own, like))):
                raise InputError(
                    f"expected a state of this model ({len(like)} tensors), found one of another in the checkpoint "
                    f"({len(own)}); resume with the model that was trained"
                )
            on = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in own]
            self.states[number] = pytree.tree_unflatten(on, structure) if own else None


def _differ(saved: Any, own: Any) -> bool:
    """Whether a leaf cannot be one of this model: states may differ in rows, in tokens, and in a float's precision."""
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor):
        return type(saved) is not type(own)
    floats = saved.is_floating_point() and own.is_floating_point()  # autocast, or none, decided how many bits
    return (saved.dim(), saved.shape[2:]) != (own.dim(), own.shape[2:]) or not (floats or saved.dtype == own.dtype)
