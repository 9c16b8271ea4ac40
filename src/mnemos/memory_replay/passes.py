"""Memory replay back-propagation (Memformer, Algorithm 1): the passes of one rollout."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import pytree, share_buffers
from mnemos.types import AuxiliaryLosses, InputError, State, collect_auxiliary_losses

from . import step_states
from .step_start import Buffers, Generators, StatePool, StepStart, Store, compact
from .step_states import BatchRows
from .verification import StateComparison


@dataclass(frozen=True)
class ReplayResult:
    """The result of `replay`, detached; the gradients are in the parameters' .grad.

    loss: Σ_t weights[t] · losses[t]. losses [S], in the widest of their dtypes. state: the state after the last step.
    state_grad: the gradient of the given state, with its structure; None for leaves without gradient and for state
    None. A scaler scales it like every .grad. next_state: the state after step `slide`; by default `state`.
    aux: per step what it returned beside loss and state, or None.
    """

    loss: Tensor
    losses: Tensor
    state: State
    state_grad: State
    next_state: State
    aux: list[Any]


@dataclass(frozen=True)
class Plan:
    """The arguments of one rollout, checked.

    limit_of(steps): the number of states that a pass over so many steps stores. horizon: the number of steps that
    gradient flows through. compares: whether replayed steps are compared with the first pass, up to the
    relative difference `tolerance` or, for None, to rounding. reduces: whether gradients are reduced over processes;
    no_sync: a context in which they are not. The others are those of `replay`.
    """

    step: Callable[[Any, State], Any]
    advance: Callable[[Any, State], State] | None
    segments: Sequence[Any]
    weights: list[float]
    rows: BatchRows
    limit_of: Callable[[int], int]
    horizon: int
    slide: int
    compares: bool
    tolerance: float | None
    module: nn.Module | None
    backward: Callable[[Tensor], object] | None
    reduces: bool
    no_sync: Callable[[], AbstractContextManager[object]]
    generators: Generators


@dataclass(frozen=True)
class _Later:
    """What a replayed step passes to the one before it: its state (if compared), its gradient, its buffers."""

    leaves: list[object]
    structure: Any
    gradients: list[Tensor | None]
    buffers: list[object]


class ReplayPasses:
    """The passes of one rollout, and what they share."""

    store: Store
    next_state: State = None

    def __init__(self, plan: Plan, state: State) -> None:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise InputError("replay: expected gradient to be enabled, found it switched off; leave no_grad first")
        self.plan = plan
        self.generators = plan.generators
        self.comparison = StateComparison(plan.tolerance, plan.advance is not None, plan.module)
        broadcast_buffers(plan.module)
        self.buffers = Buffers(plan.module)
        self.given, structure = pytree.tree_flatten(state)
        self.fresh = state is None
        if not self.fresh:
            step_states.check_leaves(self.given, 0)
        self.given = [x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in self.given]
        taken = self.generators.take()
        self.start = self.end = StepStart(_detach(self.given), structure, taken, self.buffers.take())
        count = len(plan.segments)
        self.losses, self.first_losses = _Losses(count), _Losses(count)  # of the replayed steps; of the first pass
        self.aux: list[Any] = [None] * count
        self.gradients: list[Tensor | None] = []  # of the given state
        self.has_gradient = False

    def run(self) -> None:
        """Run the rollout, in parts of `horizon` steps between which no gradient flows."""
        count, horizon = len(self.plan.segments), self.plan.horizon
        for first in range(0, count, horizon):
            self.first, self.last = first, first + horizon >= count
            stop = min(first + horizon, count)
            self.limit = self.plan.limit_of(stop - first)
            later = self._sweep(first, stop, self.end, None)
            if first == 0:
                self.gradients = later.gradients
            self._put(self.end)
        if not self.has_gradient:
            raise InputError("replay: expected a loss that requires gradient, found none; was it detached?")

    def result(self) -> ReplayResult:
        """The result of the rollout, which has been run."""
        losses = self.losses.values
        assert losses is not None
        wide = torch.promote_types(losses.dtype, torch.float32)
        loss = (losses * torch.tensor(self.plan.weights, dtype=wide, device=losses.device)).sum()
        end = pytree.tree_unflatten(self.end.leaves, self.end.structure)
        start = None if self.fresh else pytree.tree_unflatten(self.gradients, self.start.structure)
        following = end if self.plan.slide == len(self.plan.segments) else self.next_state
        return ReplayResult(loss=loss, losses=losses, state=end, state_grad=start, next_state=following, aux=self.aux)

    def undo(self) -> None:
        """Restore generators and buffers after an error."""
        self.buffers.find()  # the failing step may have added one
        self.buffers.forget()
        self._put(self.start)

    def _put(self, saved: StepStart) -> None:
        """Restore the generators and buffers that a step starts from."""
        self.generators.put(saved.generators)
        self.buffers.put(saved.buffers)

    def _sweep(self, start: int, stop: int, saved: StepStart, later: _Later | None) -> _Later:
        """Replay the steps stop − 1 … start, with their backward passes. saved: what step `start` starts from."""
        if stop - start == 1:
            return self._replay(start, saved, later)
        width = -(-(stop - start) // self.limit)
        starts = range(start, stop, width)
        stored = self._forward(saved, starts)
        for first in reversed(starts):
            later = self._sweep(first, min(first + width, stop), stored.pop(), later)
        self.comparison.settle()  # what is not compared yet keeps its states in memory
        assert later is not None
        return later

    @torch.no_grad()
    def _forward(self, saved: StepStart, starts: range) -> list[StepStart]:
        """What each of the steps `starts` starts from; `saved` is that of the first of them."""
        self._put(saved)
        stored, leaves, structure = [saved], Store.fetch(saved.leaves), saved.structure
        state, pool = pytree.tree_unflatten(leaves, structure), StatePool(len(starts) - 1)
        for t in range(starts[0], starts[-1]):
            versions, incoming, before = step_states.count_writes(leaves), leaves, structure
            state = self._reset(t, state, leaves, structure)
            if self.plan.advance is None:
                loss, state, _ = self._call_step(t, state)
                if self.plan.compares:
                    self.first_losses.note(t, loss)
            else:
                state = self._call_advance(t, state)
            leaves, structure = self._leaves(t, state, incoming, structure)
            step_states.check_untouched(incoming, versions, leaves, t)
            if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
                leaves = _detach(leaves)  # a step may enable gradient inside
                state = pytree.tree_unflatten(leaves, structure)
            if t + 1 in starts:
                # The pool has memory for states of one structure.
                own = self.store.keep(compact(leaves, incoming, pool if structure == before else None))
                buffers = self.buffers.take(stored[-1].buffers)
                stored.append(StepStart(own, structure, self.generators.take(), buffers))
        return stored

    def _replay(self, t: int, saved: StepStart, later: _Later | None) -> _Later:
        """Run one step with its graph, and its backward pass."""
        self._put(saved)
        torch.clear_autocast_cache()  # PyTorch 2.9 reuses weights that were cast without gradient
        leaves = self._incoming(t, saved)
        final = self.last and t == self.first
        with nullcontext() if final else self.plan.no_sync():
            state = pytree.tree_unflatten(leaves, saved.structure)
            state = self._reset(t, state, leaves, saved.structure)
            versions, given = step_states.count_writes(leaves), pytree.tree_leaves(state)
            loss, state, aux = self._call_step(t, state)
            outgoing, structure = self._leaves(t, state, leaves, saved.structure)
            step_states.check_untouched(leaves, versions, outgoing, t)
            step_states.check_attached(given, outgoing, t)
            self.losses.note(t, loss)
            self.aux[t] = _detach_outputs(aux, t)
            if t + 1 == self.plan.slide:
                self.next_state = pytree.tree_unflatten(compact(_detach(outgoing), leaves), structure)
            if later is None:
                later = _Later([], structure, [None] * len(outgoing), [])
                self.end = StepStart(
                    compact(_detach(outgoing), leaves),
                    structure,
                    self.generators.take(),
                    self.buffers.take(saved.buffers),
                )
            else:
                step_states.check_repeated(structure, later.structure, t)
                if self.plan.compares:
                    self._compare(t, loss.detach(), outgoing, later)
            if t == self.first:
                self.comparison.settle()  # before the last gradients are added and reduced
            del state, aux, given
            self._differentiate(t, loss, outgoing, later.gradients, final and self.plan.reduces)
            del loss, outgoing
        torch.clear_autocast_cache()
        gradients = [x.grad if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]
        values = _detach(leaves) if self.plan.compares else []
        return _Later(values, saved.structure, gradients, saved.buffers)

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
        wanted = [step_states.differentiable(x) and not x.requires_grad for x in views]
        return [x.detach().requires_grad_() if want else x for x, want in zip(views, wanted, strict=True)]

    def _differentiate(
        self, t: int, loss: Tensor, state: list[object], carried: list[Tensor | None], reduced: bool
    ) -> None:
        try:
            done = differentiate(self.plan.backward, self.plan.weights[t], loss, state, carried, reduced)
        except Exception as error:
            error.add_note(f"in the backward pass of step {t} of the rollout")
            if "through the graph a second time" in str(error):
                error.add_note("one graph is shared by several steps: make a segment's tensors inside the step")
            raise
        self.has_gradient |= done
        if reduced and not done:
            raise InputError(
                f"step {t}: expected a loss or a state that requires gradient, as its backward pass reduces the "
                "gradients of all steps, found none; begin with a segment that has a loss"
            )

    def _compare(self, t: int, loss: Tensor, outgoing: list[object], later: _Later) -> None:
        self.comparison.add(t, "state", outgoing, later.leaves)
        if self.first_losses.values is not None:
            first = self.first_losses.values[t].to(loss)  # in this step's dtype
            self.comparison.add(t, "loss", [loss], [first])
        for name, found, expected in self.buffers.find_changed(later.buffers):
            self.comparison.add(t, name, [found], [expected])

    def _reset(self, t: int, state: State, leaves: list[object], structure: Any) -> State:
        if self.plan.rows.masks[t] is None or state is None:
            return state
        return pytree.tree_unflatten(self.plan.rows.reset(t, leaves, structure, state), structure)

    def _call_step(self, t: int, state: State) -> tuple[Tensor, State, Any]:
        """The loss, with its auxiliary losses, the state and the auxiliary outputs of step t."""
        found, auxiliary = self._call(t, self.plan.step, state)
        if not isinstance(found, tuple) or len(found) not in (2, 3):
            raise InputError(f"step {t}: expected (loss, state) or (loss, state, aux), found {_describe(found)}")
        step_states.check_loss(found[0], t)
        return add_auxiliary(found[0].reshape(()), auxiliary), found[1], found[2] if len(found) == 3 else None

    def _call_advance(self, t: int, state: State) -> State:
        assert self.plan.advance is not None
        found, _ = self._call(t, self.plan.advance, state)
        step_states.check_advanced(found, t)
        return found

    def _call(self, t: int, function: Callable[[Any, State], object], state: State) -> tuple[Any, AuxiliaryLosses]:
        self.buffers.forget()
        segment = self.plan.segments[t]
        self.plan.rows.check_segment(segment, state, t)
        try:
            with collect_auxiliary_losses() as auxiliary:
                return function(segment, state), auxiliary
        except InputError as error:
            raise InputError(f"step {t}: {error}") from error
        except Exception as error:
            if isinstance(error, RuntimeError):
                self.plan.rows.check_segment(segment, state, t, error)
            error.add_note(f"in step {t} of the rollout")
            raise

    def _leaves(self, t: int, state: State, incoming: list[object], before: Any) -> tuple[list[object], Any]:
        """Check a step's new state and flatten it. before: the structure of the incoming state."""
        leaves, structure = pytree.tree_flatten(state)
        step_states.check_leaves(leaves, t)
        if t or not self.fresh:
            step_states.check_structure(structure, before, t)
        if structure == before:
            step_states.check_kinds(incoming, leaves, t)
        if not step_states.have_equal_shapes(incoming, leaves):
            self.plan.rows.check(self.plan.segments[t], incoming, leaves, structure, t)
        return leaves, structure


class _Losses:
    """One loss per step, in the widest dtype so far.

    One tensor for all: many small ones between large ones that are freed would fragment the heap.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.values: Tensor | None = None
        self._slots: Sequence[Tensor] = ()

    def note(self, t: int, loss: Tensor) -> None:
        """Keep the loss of step t."""
        if self.values is None:
            self.values = torch.zeros(self._count, dtype=loss.dtype, device=loss.device)
            self._slots = self.values.unbind()
        elif self.values.dtype != loss.dtype:
            self.values = self.values.to(torch.promote_types(self.values.dtype, loss.dtype))
            self._slots = self.values.unbind()
        self._slots[t].copy_(loss.detach())


def add_auxiliary(loss: Tensor, auxiliary: AuxiliaryLosses) -> Tensor:
    """A step's loss plus the auxiliary losses of its layers, on the loss's device."""
    for added in auxiliary:
        loss = loss + added.to(loss.device)
    return loss


def _describe(found: object) -> str:
    return f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__


def _detach_outputs(aux: Any, t: int) -> Any:
    """Auxiliary outputs, detached and without the memory of other tensors."""
    if aux is None:
        return None
    leaves, structure = pytree.tree_flatten(aux)
    step_states.check_auxiliary(leaves, t)
    return pytree.tree_unflatten(compact(_detach(leaves), []), structure)


def _detach(leaves: list[object]) -> list[object]:
    return [x.detach() if isinstance(x, Tensor) else x for x in leaves]


class _LossAndState(torch.autograd.Function):
    """weight · loss, whose backward also passes to the state the gradient that later steps computed for it.

    One root, so that one backward pass does both (two would be refused by DistributedDataParallel), and the carried
    gradient is handed on as it is: what scales the root (a GradScaler) has already scaled it, in the last step.
    """

    @staticmethod
    def forward(ctx: Any, weight: float, carried: list[Tensor], loss: Tensor, *state: Tensor) -> Tensor:
        ctx.weight, ctx.carried = weight, carried
        return loss.detach() * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, grads[0] * ctx.weight, *ctx.carried


def differentiate(
    backward: Callable[[Tensor], object] | None,
    weight: float,
    loss: Tensor,
    state: list[object],
    carried: list[Tensor | None],
    zero_missing: bool,
) -> bool:
    """The backward pass of a step; False if nothing in it requires gradient.

    backward: the function that runs it on one tensor; None is PyTorch's own. zero_missing: a part of the
    state that no gradient came back for gets zeros, so that every parameter takes part.
    """
    outgoing, gradients = [], []
    for x, gradient in zip(state, carried, strict=True):
        if isinstance(x, Tensor) and x.requires_grad and (zero_missing or gradient is not None):
            outgoing.append(x)
            gradients.append(torch.zeros_like(x) if gradient is None else gradient)
    if not outgoing and not loss.requires_grad:
        return False
    with _without_autocast():
        if backward is not None:
            backward(_LossAndState.apply(weight, gradients, loss, *outgoing))
            return True
        if loss.requires_grad:
            outgoing.append(loss)
            gradients.append(torch.full_like(loss, weight))
        # One call with several roots: it takes half the time of a root that joins them.
        torch.autograd.backward(outgoing, gradients)
    return True


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    """A context without autocast: a backward pass uses the dtypes of its forward."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", accelerator.type if accelerator is not None else "cpu"}
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    if not on:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for kind in on:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def find_no_sync(module: nn.Module | None) -> Callable[[], contextlib.AbstractContextManager[object]] | None:
    """A context in which a module's gradients are not reduced over processes; None if nothing reduces them.

    The module, or parts of it, may be wrapped by DistributedDataParallel (or anything with a `no_sync`) or be sharded
    by `fully_shard`.
    """
    parts = list(_reducing(module)) if module is not None else []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in parts:
                if hasattr(part, "set_requires_gradient_sync"):
                    part.set_requires_gradient_sync(False)
                    stack.callback(part.set_requires_gradient_sync, True)
                else:
                    stack.enter_context(part.no_sync())
            yield

    return no_sync if parts else None


def _reducing(module: nn.Module) -> Iterator[Any]:
    """The outermost modules that reduce gradients."""
    if hasattr(module, "set_requires_gradient_sync") or callable(getattr(type(module), "no_sync", None)):
        yield module
        return
    for child in module.children():
        yield from _reducing(child)


def broadcast_buffers(module: nn.Module | None) -> None:
    """Broadcast the buffers of process 0 now, as DistributedDataParallel would do at the rollout's first forward.

    Otherwise the replay of the first step would start with other buffers than its first pass.
    """
    for part in module.modules() if module is not None else ():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            share_buffers(part)


class Gradients:
    """A copy of the gradients before the rollout, to restore them if it fails."""

    def __init__(self, module: nn.Module | None, others: list[Tensor]) -> None:
        own = list(module.parameters()) if module is not None else []
        self._before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in (*own, *others)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the gradients, in the same tensors."""
        for tensor, grad, value in self._before:
            if grad is not None and value is not None:
                grad.copy_(value)
            tensor.grad = grad
