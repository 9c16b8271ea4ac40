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
from .backward import Gradients, broadcast_buffers, joint, suspension, without_autocast
from .moments import Buffers, Moment, Shelf, Store, compact

Segment = TypeVar("Segment")


@dataclass(frozen=True)
class ReplayResult:
    """What a rollout left: all of it detached; the gradients are in the parameters' .grad.

    loss: Σ_t weights[t] · losses[t]. losses [S], in the widest of their types. state: that after the last step.
    state_grad: the gradient with respect to the state given, of its structure, None where no gradient came (and for no
    state); scaled as every .grad is where a scaler scales.
    """

    loss: Tensor
    losses: Tensor
    state: State
    state_grad: State


@dataclass(frozen=True)
class _Later:
    """What a replayed step leaves for the one before it: its state's values, their gradient, and its buffers."""

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
    checkpoints: int | str = "all",
    offload: bool | str | os.PathLike[str] = False,
    verify: bool | float = True,
    module: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
    backward: Callable[[Tensor], object] | None = None,
    no_sync: Callable[[], AbstractContextManager[object]] | None = None,
) -> ReplayResult:
    """Exact gradients of Σ_t weights[t] · loss_t through all segments, with one step's graph alive at a time.

        loss, state = step(segment, state)      # one step of any recurrent model; loss a scalar

    A first pass without gradient stores states; then every step, the last one first, is run again from its state with
    its own random numbers, and one joint backward pass of its loss and of the gradient that the later steps left for
    its state adds to the parameters' .grad. That is Algorithm 1 of Memformer, and equals back-propagation through time
    to rounding, dropout on. Called like the loop it replaces: gradients add up, generators (PyTorch's on every device,
    Python's, NumPy's) and `module`'s buffers end as the loop leaves them.

    state: any pytree of tensors (and numbers), or None for the step to make one. Gradient reaches a state given with
    requires_grad, or made of parameters, as well as one that the step makes of parameters itself.
    Auxiliary losses that layers add inside `step` (`mnemos.add_auxiliary_loss`) are part of loss_t, counted once;
    those that they add inside `advance` are dropped.
    advance(segment, state) -> state: the critical path alone, for the first pass; it must do to the state what `step`
    does and draw a prefix of the random numbers that `step` draws. A step then begins where the advance before it left
    the generators, not a `step`: with dropout, gradients are exact for another draw than the plain loop's.
    weights [S]: of the losses, numbers without gradient; the mean if None.
    resets: for every step None or a mask [B]: rows of the incoming state that are made fresh first (zeros,
    `mnemos.reset`), so that no gradient crosses. The state's tensors must lead with the batch.
    truncate_every=k: no gradient crosses from step t to t − 1 where t % k == 0. Each k steps are then a replay of their
    own, so that 1 is the plain truncated loop.
    checkpoints: states kept at a time. "all": S. An integer n ≥ 2: n a level, of log_n(S) levels, each of which costs
    one more first pass. "sqrt": √S, two levels.
    offload: True keeps stored states in the host's memory (for a GPU), a folder that exists in files below it, one a
    state, gone at the end; a transfer each way a state. Generators' states and buffers stay where they are.
    verify: a replay must give the state (and, without advance, the loss) that the first pass gave, or else an error
    names the step: what is random outside those generators would give wrong gradients silently. A number is the
    difference allowed, of a tensor's norm; True allows rounding: that of half precision where the state's type or
    autocast around this call tells of it, so give 2e-2 where the step has autocast inside. Costs some passes over the
    state a step.
    module: the model, with whatever wraps it: its buffers, and tensors that are plain attributes of it, are put back
    before every replay, compared as the state is and updated once, its gradients are put back after an error, and
    DistributedDataParallel or `fully_shard` in it reduce gradients once a rollout. Found by itself where `step` is a
    module or a module's method, or a `functools.partial` of one.
    scaler: a GradScaler, or `backward`: what to call instead of Tensor.backward (Fabric's); either may scale, for
    .grad's are scaled alike. no_sync: a context that keeps gradients from being reduced, where `module` is wrapped by
    what this function does not know.

    Cost, where a forward is 1 and a backward 2: 4S − 1 without advance (plain back-propagation: 3S), 3S + f·(S − 1)
    with an advance that is a share f of a forward. Memory: one step's graph, and the stored states, each with a copy
    of what the step changed of `module`'s buffers, and about 5 KB for every generator that it draws from.

    Raises InputError, naming the step, for a state that changes its structure, or whose batch is not the segment's, for
    one that has a tensor no more, was detached or changed in place, for a replay that differs from the first pass, and
    for a loss that is no scalar; and for impossible arguments. Errors of `step` itself, or of its backward pass, carry
    its index as a note. After an error generators are as before the call, and so are the buffers and gradients of
    `module` (copied for it where there are any), but for what `fully_shard` holds back unreduced. A loss that is not
    finite is no error: scalers live with it.
    """
    arguments.check(step, advance, module, verify)
    walk = _ReplayPasses(step, segments, state, advance, weights, resets, verify, module)
    walk.keep = arguments.kept(checkpoints)
    walk.backward = arguments.scaled(scaler, backward)
    walk.suspended = no_sync or suspension(walk.module)
    every = arguments.horizon(truncate_every, len(walk.segments))
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
    """One rollout on its way."""

    keep: Callable[[int], int]
    backward: Callable[[Tensor], object]
    suspended: Callable[[], AbstractContextManager[object]] | None
    store: Store

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
        self.start = self.end = Moment(_detached(self.given), structure, generators.take(), self.buffers.taken())
        self.structure = None if self.fresh else structure  # of every state but a None to begin with
        # One tensor each: many small ones, kept among large ones that come and go, would leave the heap in pieces.
        self.losses: Tensor | None = None
        self.passed: Tensor | None = None  # those of the first pass
        self.differentiated = False

    def run(self, every: int) -> ReplayResult:
        """The rollout, in pieces of `every` steps that no gradient leaves."""
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
        return ReplayResult(loss, losses, end, start)

    def put(self, moment: Moment) -> None:
        """Generators and buffers, back to where they stood."""
        generators.put(moment.generators)
        self.buffers.put(moment.buffers)

    def _sweep(self, start: int, stop: int, moment: Moment, later: _Later | None) -> _Later:
        """Backward through the steps stop − 1 … start, from the moment before `start`."""
        if stop - start == 1:
            return self._replay(start, moment, later)
        width = -(-(stop - start) // self.kept)
        starts = range(start, stop, width)
        kept = self._forward(moment, starts)
        for first in reversed(starts):
            later = self._sweep(first, min(first + width, stop), kept.pop(), later)
        assert later is not None
        return later

    @torch.no_grad()
    def _forward(self, moment: Moment, starts: range) -> list[Moment]:
        """The moments before the steps `starts`, the first of which is the given one."""
        self.put(moment)
        kept, leaves, structure = [moment], Store.fetch(moment.leaves), moment.structure
        state, shelf = pytree.tree_unflatten(leaves, structure), self.store.shelf(len(starts) - 1)
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
                leaves = _detached(leaves)  # a step may enable gradient for itself
                state = pytree.tree_unflatten(leaves, structure)
            if t + 1 in starts:
                kept.append(self._moment(leaves, structure, kept[-1], incoming, shelf))
        return kept

    def _moment(
        self, leaves: list[object], structure: object, before: Moment, incoming: list[object], shelf: Shelf | None
    ) -> Moment:
        return Moment(
            self.store.keep(compact(leaves, incoming, shelf)),
            structure,
            generators.take(before.generators),
            self.buffers.taken(before.buffers),
        )

    def _replay(self, t: int, moment: Moment, later: _Later | None) -> _Later:
        """One step with its graph, and its backward pass."""
        self.put(moment)
        torch.clear_autocast_cache()  # PyTorch 2.9 would take a weight cast without gradient for a cast one
        leaves = self._incoming(t, moment)
        final = self.last and t == self.first
        reduced = self.suspended is not None and final
        with self.suspended() if self.suspended is not None and not final else nullcontext():
            state = self._reset(t, pytree.tree_unflatten(leaves, moment.structure))
            versions, given = state_checks.versions_of(leaves), pytree.tree_leaves(state)
            loss, state = self._called(t, self.step, state)
            outgoing, structure = self._leaves(t, state, leaves)
            state_checks.check_untouched(leaves, versions, outgoing, t)
            state_checks.check_attached(given, outgoing, t)
            self.losses = self._noted(self.losses, t, loss)
            if later is None:
                later = _Later([], [None] * len(outgoing), [])
                self.end = Moment(
                    compact(_detached(outgoing), leaves),
                    structure,
                    generators.take(moment.generators),
                    self.buffers.taken(moment.buffers),
                )
            elif self.verify:
                self._compare(t, loss.detach(), outgoing, later)
            if t == self.first:
                self.compared.settle()  # before the last gradients are added, and reduced
            root = joint(self.weights[t], loss, outgoing, later.gradients, reduced)
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
        return _Later(_detached(leaves), gradients, moment.buffers)

    def _incoming(self, t: int, moment: Moment) -> list[object]:
        """The leaves that step t starts from; those that can carry gradient collect it."""
        if t == 0:
            views = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in self.given]
            for x in views:
                if isinstance(x, Tensor) and x.requires_grad:
                    x.retain_grad()
        else:
            views = Store.fetch(moment.leaves)
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
            self.compared.add(t, "loss", [loss], [self.passed[t].to(loss)])  # of its own type, as of its own step
        for name, found, expected in self.buffers.changed(later.buffers):
            self.compared.add(t, name, [found], [expected])

    def _noted(self, losses: Tensor | None, t: int, loss: Tensor) -> Tensor:
        """With the loss of step t; in the widest type that a loss had yet."""
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
        """A step's new state in parts, once it is known to be one."""
        leaves, structure = pytree.tree_flatten(state)
        state_checks.check_leaves(leaves, t)
        if self.structure is None:
            self.structure = structure
        state_checks.check_structure(structure, self.structure, t)
        state_checks.check_kinds(incoming, leaves, t)
        state_checks.check_rows(self.segments[t], incoming, leaves, t)
        return leaves, structure


def _with_auxiliary(loss: Tensor, auxiliary: AuxiliaryLosses) -> Tensor:
    """A step's loss and what its layers added to it, on the loss's device."""
    for added in auxiliary:
        loss = loss + added.to(loss.device)
    return loss


def _said(found: object) -> str:
    return f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__


def _detached(leaves: list[object]) -> list[object]:
    return [x.detach() if isinstance(x, Tensor) else x for x in leaves]
