"""Memory replay back-propagation (Memformer, Algorithm 1), for any recurrent model."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos._compat import pytree
from mnemos.types import AuxiliaryLosses, InputError, State, collect_auxiliary_losses, reset

from . import arguments, state_checks
from .backward import Gradients, backward_root, broadcast_buffers, suspension, without_autocast
from .stored_states import Buffers, StatePool, StepStart, Store, compact

Segment = TypeVar("Segment")


@dataclass(frozen=True)
class ReplayResult:
    """The result of `replay`, detached; the gradients are in the parameters' .grad.

    loss: Σ_t weights[t] · losses[t]. losses [S], in the widest of their dtypes. state: the state after the last step.
    state_grad: the gradient of the given state, with its structure; None for leaves without gradient and for state
    None. A scaler scales it like every .grad. next_state: the state after step `slide`; by default `state`.
    """

    loss: Tensor
    losses: Tensor
    state: State
    state_grad: State
    next_state: State


@dataclass(frozen=True)
class _Later:
    """What a replayed step passes to the one before it: the values and the gradient of its state, and its buffers."""

    leaves: list[object]
    gradients: list[Tensor | None]
    buffers: list[object]


def replay(
    step: Callable[[Segment, State], tuple[Tensor, State]],
    segments: Iterable[Segment],
    state: State = None,
    *,
    advance: Callable[[Segment, State], State] | None = None,
    weights: Sequence[float] | Tensor | None = None,
    resets: Sequence[Tensor | None] | Tensor | None = None,
    truncate_every: int | None = None,
    slide: int | None = None,
    checkpoints: int | str = "all",
    offload: bool | str | os.PathLike[str] = False,
    verify: bool | float = True,
    module: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
    backward: Callable[[Tensor], object] | None = None,
    no_sync: Callable[[], AbstractContextManager[object]] | None = None,
) -> ReplayResult:
    """Exact gradients of Σ_t weights[t] · loss_t through all segments, with the graph of one step in memory at a time.

        loss, state = step(segment, state)      # one step of any recurrent model; loss a scalar

    A first pass without gradient stores the states. Then every step, beginning with the last, is run again from its
    state and with the same random numbers. One backward pass of its loss, together with the gradient that later steps
    computed for its state, adds to the parameters' .grad. This is Algorithm 1 of Memformer (memory replay
    back-propagation). It equals back-propagation through time to rounding, also with dropout. As in a plain loop,
    gradients are added to existing ones, and random generators (PyTorch's on every device, Python's, NumPy's) and the
    buffers of `module` have their final values afterwards.

    state: a pytree of tensors (and numbers), or None if the step makes the first one. A state that requires grad, or
    was computed from parameters, receives its gradient.
    Auxiliary losses that layers add inside `step` (`mnemos.add_auxiliary_loss`) are part of loss_t and count once;
    those added inside `advance` are dropped.
    advance(segment, state) -> state: computes the state alone, for a faster first pass. It must return the same state
    as `step` and draw a prefix of the random numbers that `step` draws. Each step then starts with the generators as
    the previous `advance` left them: with dropout, the gradients are exact, for other random numbers than a plain
    loop's.
    weights [S]: of the losses, numbers without gradient. None: 1/S each, the mean.
    resets: per step None or a mask [B]: rows of the incoming state that are set to zeros before the step
    (`mnemos.reset`), so that no gradient crosses. The first axis of the state's tensors must be the batch.
    truncate_every=k: no gradient crosses from step t to t − 1 if t % k == 0; 1 is truncated back-propagation. Each k
    steps are then a replay of their own.
    slide=n: the result's `next_state` is the state after n steps. A rollout of segments n … S + n − 1 that starts from
    it overlaps with this one: a sliding window, as in Algorithm 1, which pops the oldest memory (n = 1). It recomputes
    all of its other states, because the weights have changed. None: rollouts share no segment, n = S.
    checkpoints: the number of states in memory at a time. "all": S. An integer n ≥ 2: n per level, with log_n(S)
    levels, each of which costs one more first pass. "sqrt": √S, two levels.
    offload: True stores states in the host's memory (for a GPU). An existing folder stores each state in a file there,
    deleted at the end. Both cost one transfer each way per state. States of generators and buffers stay in memory.
    verify: compare the state (and, without `advance`, the loss) of each replayed step with the first pass, and raise an
    error that names the step if they differ: random numbers of other generators would make gradients wrong without
    notice. A number is the allowed difference, relative to a tensor's norm. True allows rounding, that of half
    precision if the state's dtype or autocast around this call says so; give 2e-2 if the step uses autocast inside.
    Cost: some passes over the state per step.
    module: the model, with its wrappers. Its buffers, and tensors that are plain attributes, are restored before every
    replayed step, verified as the state is, and updated once. Its gradients are restored after an error.
    DistributedDataParallel or `fully_shard` in it reduce gradients once per rollout. It is found automatically if
    `step` is a module, a module's method, or a `functools.partial` of one.
    scaler: a GradScaler. backward: a function to call instead of Tensor.backward, such as Fabric's. Both may scale the
    loss; all gradients are then scaled alike. no_sync: a context in which gradients are not reduced over processes, if
    `module` has another wrapper than those above.

    Cost, with a forward of 1 and a backward of 2: 4S − 1 without `advance` (plain back-propagation: 3S), and
    3S + f·(S − 1) if `advance` costs a fraction f of a forward. Memory: the graph of one step, and the stored states,
    each with copies of the buffers of `module` that the step changed, and 5 kB per random generator that it used.

    Raises InputError, with the number of the step, for a state whose structure or batch size changes, that is detached
    or changed in place, for a replayed step that differs from the first pass, for a loss that is no scalar, and for
    impossible arguments. Errors of `step` or of its backward pass get a note with the step's number. After an error the
    generators, and the buffers and gradients of `module`, are as before the call; gradients that `fully_shard` has not
    reduced are lost. A loss that is not finite raises no error, because GradScaler handles it.
    """
    arguments.check(step, advance, module, verify)
    walk = _ReplayPasses(step, segments, state, advance, weights, resets, verify, module)
    walk.keep = arguments.kept(checkpoints)
    walk.backward = arguments.scaled(scaler, backward)
    walk.suspended = no_sync or suspension(walk.module)
    every = arguments.horizon(truncate_every, len(walk.segments))
    walk.slide = arguments.window_step(slide, len(walk.segments))
    before = Gradients(walk.module, [x for x in walk.given if isinstance(x, Tensor) and x.is_leaf and x.requires_grad])
    walk.store = Store(offload)
    try:
        return walk.run(every)
    except BaseException:
        before.put_back()
        walk.put(walk.start)
        raise
    finally:
        walk.store.close()


class _ReplayPasses:
    """The passes of one rollout, and what they share."""

    keep: Callable[[int], int]
    backward: Callable[[Tensor], object]
    suspended: Callable[[], AbstractContextManager[object]] | None
    store: Store
    slide: int
    next_state: State

    def __init__(
        self,
        step: Callable[[Any, State], tuple[Tensor, State]],
        segments: object,
        state: State,
        advance: Callable[[Any, State], State] | None,
        weights: Sequence[float] | Tensor | None,
        resets: Sequence[Tensor | None] | Tensor | None,
        verify: bool | float,
        module: nn.Module | None,
    ) -> None:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise InputError("replay: expected gradient to be enabled, found it switched off; leave no_grad first")
        self.step, self.advance = step, advance
        self.segments = arguments.sequence(segments)
        count = len(self.segments)
        self.weights = arguments.numbers(weights, count)
        self.resets = arguments.each("resets", resets, count)
        self.module = arguments.owner(step) if module is None else module
        self.verify = verify is not False
        self.compared = state_checks.StateComparison(
            None if isinstance(verify, bool) else verify, advance is not None, self.module
        )
        broadcast_buffers(self.module)
        self.buffers = Buffers(self.module)
        self.given, structure = pytree.tree_flatten(state)
        self.fresh = state is None
        if not self.fresh:
            state_checks.check_leaves(self.given, 0)
        self.given = [x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in self.given]
        self.start = self.end = StepStart(_detached(self.given), structure, generators.take(), self.buffers.taken())
        self.structure = None if self.fresh else structure  # of every state, except a first state of None
        # One tensor each: many small ones between large ones that are freed would fragment the heap.
        self.losses: Tensor | None = None
        self.passed: Tensor | None = None  # those of the first pass
        self.differentiated = False

    def run(self, every: int) -> ReplayResult:
        """Run the rollout, in parts of `every` steps between which no gradient flows."""
        count = len(self.segments)
        gradients: list[Tensor | None] = []
        for first in range(0, count, every):
            self.first, self.last = first, first + every >= count
            stop = min(first + every, count)
            self.kept = self.keep(stop - first)
            later = self._sweep(first, stop, self.end, None)
            if first == 0:
                gradients = later.gradients
            self.put(self.end)
        if not self.differentiated:
            raise InputError("replay: expected a loss that requires gradient, found none; was it detached?")
        losses = self.losses
        assert losses is not None
        wide = torch.promote_types(losses.dtype, torch.float32)
        loss = (losses * torch.tensor(self.weights, dtype=wide, device=losses.device)).sum()
        end = pytree.tree_unflatten(self.end.leaves, self.end.structure)
        start = None if self.fresh else pytree.tree_unflatten(gradients, self.start.structure)
        return ReplayResult(loss, losses, end, start, end if self.slide == count else self.next_state)

    def put(self, saved: StepStart) -> None:
        """Restore the generators and buffers that a step starts from."""
        generators.put(saved.generators)
        self.buffers.put(saved.buffers)

    def _sweep(self, start: int, stop: int, saved: StepStart, later: _Later | None) -> _Later:
        """Replay the steps stop − 1 … start, with their backward passes. saved: what step `start` starts from."""
        if stop - start == 1:
            return self._replay(start, saved, later)
        width = -(-(stop - start) // self.kept)
        starts = range(start, stop, width)
        kept = self._forward(saved, starts)
        for first in reversed(starts):
            later = self._sweep(first, min(first + width, stop), kept.pop(), later)
        assert later is not None
        return later

    @torch.no_grad()
    def _forward(self, saved: StepStart, starts: range) -> list[StepStart]:
        """What each of the steps `starts` starts from; `saved` is that of the first of them."""
        self.put(saved)
        kept, leaves, structure = [saved], Store.fetch(saved.leaves), saved.structure
        state, pool = pytree.tree_unflatten(leaves, structure), self.store.pool(len(starts) - 1)
        for t in range(starts[0], starts[-1]):
            versions, incoming = state_checks.versions_of(leaves), leaves
            state = self._reset(t, state)
            if self.advance is None:
                loss, state = self._called(t, self.step, state)
                self.passed = self._noted(self.passed, t, loss)
            else:
                state = self._called(t, self.advance, state)
            leaves, structure = self._leaves(t, state, incoming)
            state_checks.check_untouched(incoming, versions, leaves, t)
            if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
                leaves = _detached(leaves)  # a step may enable gradient inside
                state = pytree.tree_unflatten(leaves, structure)
            if t + 1 in starts:
                kept.append(self._saved_start(leaves, structure, kept[-1], incoming, pool))
        return kept

    def _saved_start(
        self, leaves: list[object], structure: object, before: StepStart, incoming: list[object], pool: StatePool | None
    ) -> StepStart:
        return StepStart(
            self.store.keep(compact(leaves, incoming, pool)),
            structure,
            generators.take(before.generators),
            self.buffers.taken(before.buffers),
        )

    def _replay(self, t: int, saved: StepStart, later: _Later | None) -> _Later:
        """Run one step with its graph, and its backward pass."""
        self.put(saved)
        torch.clear_autocast_cache()  # PyTorch 2.9 reuses weights that were cast without gradient
        leaves = self._incoming(t, saved)
        final = self.last and t == self.first
        reduced = self.suspended is not None and final
        with self.suspended() if self.suspended is not None and not final else nullcontext():
            state = self._reset(t, pytree.tree_unflatten(leaves, saved.structure))
            versions, given = state_checks.versions_of(leaves), pytree.tree_leaves(state)
            loss, state = self._called(t, self.step, state)
            outgoing, structure = self._leaves(t, state, leaves)
            state_checks.check_untouched(leaves, versions, outgoing, t)
            state_checks.check_attached(given, outgoing, t)
            self.losses = self._noted(self.losses, t, loss)
            if t + 1 == self.slide:
                self.next_state = pytree.tree_unflatten(compact(_detached(outgoing), leaves), structure)
            if later is None:
                later = _Later([], [None] * len(outgoing), [])
                self.end = StepStart(
                    compact(_detached(outgoing), leaves),
                    structure,
                    generators.take(saved.generators),
                    self.buffers.taken(saved.buffers),
                )
            elif self.verify:
                self._compare(t, loss.detach(), outgoing, later)
            if t == self.first:
                self.compared.settle()  # before the last gradients are added and reduced
            root = backward_root(self.weights[t], loss, outgoing, later.gradients, reduced)
            del loss, state, outgoing, given
            if root is not None:
                self.differentiated = True
                self._differentiate(t, root)
            elif reduced:
                raise InputError(
                    f"step {t}: expected a loss or a state that requires gradient, as its backward pass reduces the "
                    "gradients of all steps, found none; begin with a segment that has a loss"
                )
        torch.clear_autocast_cache()
        gradients = [x.grad if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]
        return _Later(_detached(leaves), gradients, saved.buffers)

    def _incoming(self, t: int, saved: StepStart) -> list[object]:
        """The leaves that step t starts from; floating ones require gradient."""
        if t == 0:
            views = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in self.given]
            for x in views:
                if isinstance(x, Tensor) and x.requires_grad:
                    x.retain_grad()
        else:
            views = Store.fetch(saved.leaves)
        if t == self.first and t > 0:
            return views
        wanted = [state_checks.differentiable(x) and not x.requires_grad for x in views]
        return [x.detach().requires_grad_() if want else x for x, want in zip(views, wanted, strict=True)]

    def _differentiate(self, t: int, root: Tensor) -> None:
        try:
            with without_autocast():
                self.backward(root)
        except Exception as error:
            error.add_note(f"in the backward pass of step {t} of the rollout")
            if "through the graph a second time" in str(error):
                error.add_note("one graph is shared by several steps: make a segment's tensors inside the step")
            raise

    def _compare(self, t: int, loss: Tensor, outgoing: list[object], later: _Later) -> None:
        self.compared.add(t, "state", outgoing, later.leaves)
        if self.passed is not None:
            self.compared.add(t, "loss", [loss], [self.passed[t].to(loss)])  # in the dtype of this step's loss
        for name, found, expected in self.buffers.changed(later.buffers):
            self.compared.add(t, name, [found], [expected])

    def _noted(self, losses: Tensor | None, t: int, loss: Tensor) -> Tensor:
        """The losses with that of step t, in the widest dtype so far."""
        if losses is None:
            losses = torch.zeros(len(self.segments), dtype=loss.dtype, device=loss.device)
        losses = losses.to(torch.promote_types(losses.dtype, loss.dtype))
        losses[t] = loss.detach()
        return losses

    def _reset(self, t: int, state: State) -> State:
        mask = self.resets[t]
        if mask is None or state is None:
            return state
        leaves, structure = pytree.tree_flatten(state)
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        try:
            for i in at:
                if not leaves[i].dim():
                    raise InputError(
                        "reset: expected a state that leads with the batch, found a tensor of no dimension"
                    )
                leaves[i] = reset(leaves[i], mask)
        except InputError as error:
            raise InputError(f"step {t}: {error}") from None
        return pytree.tree_unflatten(leaves, structure)

    def _called(self, t: int, function: Callable[[Any, State], object], state: State) -> Any:
        try:
            with collect_auxiliary_losses() as auxiliary:
                found = function(self.segments[t], state)
        except InputError as error:
            raise InputError(f"step {t}: {error}") from error
        except Exception as error:
            error.add_note(f"in step {t} of the rollout")
            raise
        if function is self.step:
            if not isinstance(found, tuple) or len(found) != 2:
                raise InputError(f"step {t}: expected (loss, state), found {_said(found)}")
            state_checks.check_loss(found[0], t)
            return _with_auxiliary(found[0].reshape(()), auxiliary), found[1]
        state_checks.check_advanced(found, t)
        return found

    def _leaves(self, t: int, state: State, incoming: list[object]) -> tuple[list[object], object]:
        """Check a step's new state and flatten it."""
        leaves, structure = pytree.tree_flatten(state)
        state_checks.check_leaves(leaves, t)
        if self.structure is None:
            self.structure = structure
        state_checks.check_structure(structure, self.structure, t)
        state_checks.check_kinds(incoming, leaves, t)
        state_checks.check_rows(self.segments[t], incoming, leaves, t)
        return leaves, structure


def _with_auxiliary(loss: Tensor, auxiliary: AuxiliaryLosses) -> Tensor:
    """A step's loss plus the auxiliary losses of its layers, on the loss's device."""
    for added in auxiliary:
        loss = loss + added.to(loss.device)
    return loss


def _said(found: object) -> str:
    return f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__


def _detached(leaves: list[object]) -> list[object]:
    return [x.detach() if isinstance(x, Tensor) else x for x in leaves]
