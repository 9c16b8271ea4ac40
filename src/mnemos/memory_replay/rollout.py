"""Memory replay back-propagation (Memformer, Algorithm 1): exact gradients through all segments, a graph at a time."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mnemos._compat import forget_weights, pytree, write_count
from mnemos.errors import near_arguments
from mnemos.types import InputError, State, collect_auxiliary_losses

from .distributed import Wrappers, broadcast_buffers, find_no_sync
from .start import (
    HiddenInputs,
    Pool,
    RowResets,
    Snapshot,
    check_untouched,
    compact,
    cut,
    describe,
    differentiable,
    fetch,
    flatten,
)
from .steps import check_attached, compare, differentiate, errors_name_step, keep_outputs

Segment = TypeVar("Segment")


@dataclass(frozen=True)
class ReplayResult:
    """The result of `replay`, detached; the gradients are in the parameters' .grad.

    loss: Σ_t weights[t] · losses[t]. losses [S], in the widest of their dtypes. state: the state after the last step.
    state_grad: the gradient of the argument `state`, with its structure; None for leaves without gradient and for state
    None. A scaler scales it like every .grad. next_state: the state after step `slide`; by default `state`.
    aux: per step what it returned beside loss and state, or None.
    """

    loss: Tensor
    losses: Tensor
    state: State
    state_grad: State
    next_state: State
    aux: list[Any]


@near_arguments
def replay(
    step: Callable[[Segment, State], tuple[Tensor, State] | tuple[Tensor, State, Any]],
    segments: Iterable[Segment],
    state: State = None,
    *,
    advance: Callable[[Segment, State], State] | None = None,
    weights: Sequence[float] | Tensor | None = None,
    resets: Iterable[Tensor | None] | Tensor | None = None,
    reset_to: State | Callable[[], State] = None,
    batch_axis: Any = None,
    truncate_every: int | None = None,
    slide: int | None = None,
    checkpoints: int | str = "all",
    verify: bool = True,
    tolerance: float | None = None,
    module: nn.Module | None = None,
    generators: Iterable[object] | None = None,
    offload: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    backward: Callable[[Tensor], object] | None = None,
    no_sync: Callable[[], AbstractContextManager[object]] | None = None,
) -> ReplayResult:
    """Exact gradients of Σ_t weights[t] · loss_t through all segments, with the graph of one step in memory at a time.

        loss, state = step(segment, state)      # one step of any recurrent model; loss a scalar
        loss, state, aux = step(segment, state) # the same, with anything to keep beside it

    A first pass without gradient stores the states. Then every step, beginning with the last, is run again from its
    state and with the same random numbers. One backward pass of its loss, and of its new state with the gradient that
    later steps computed for it, adds to the parameters' .grad. This is Algorithm 1 of Memformer. It equals
    back-propagation through time to rounding, also with dropout. Random generators (PyTorch's on every device,
    Python's, NumPy's and `generators`) and the buffers of `module` end as after a plain loop.

    state: a pytree of tensors (and numbers), or None if the step makes the first one; lists in it may grow. One that
    requires grad, or was computed from parameters, receives its gradient.
    aux: a pytree such as logits, kept for each step, detached, in the result's `aux`.
    Auxiliary losses that layers add inside `step` (`mnemos.add_auxiliary_loss`) are part of loss_t and count once.
    advance(segment, state) -> state: the state alone, for a faster first pass. It must draw the same random numbers as
    `step`, in the same order, but may stop earlier. Each step then starts with the generators as the previous `advance`
    left them. So with dropout the masks are not those of a plain loop, and the gradients are exact for these masks.
    weights [S]: of the losses, numbers without gradient. None: 1/S each, the mean.
    resets: per step None or a mask [B]: rows of the incoming state that are set to zeros, or to `reset_to`, before the
    step, so that no gradient crosses. reset_to: a state whose tensors broadcast to those of the state (such as [D]
    parameters), or a function without arguments that computes one. Parameters of either receive gradient.
    batch_axis: the axis of the state's tensors that is the batch, one number or a pytree of the state's structure with
    a number, or None, for each tensor. [layers, B, D] of LSTM and GRU has 1. None: the first axis. "none": no tensor
    has one, so segments of any shape fit, and there are no rows to reset.
    truncate_every=k: no gradient crosses from step t to t − 1 if t % k == 0; 1 is truncated back-propagation.
    slide=n: the result's `next_state` is the state after n steps, from which the rollout of segments n … S + n − 1
    starts: a sliding window, as in Algorithm 1 (n = 1). None: rollouts share no segment, n = S.
    checkpoints: the number of states in memory at a time. "all": S. An integer n ≥ 2: n per level, with log_n(S)
    levels, each of which costs one more first pass. "sqrt": √S, two levels.
    verify: compare the state (and, without `advance`, the loss) of each replayed step with the first pass, and raise an
    error that names the step if they differ: random numbers of other generators would make gradients wrong without
    notice. tolerance: the difference, relative to a tensor's norm, that it allows. None: that of rounding in the
    tensor's dtype, or in half precision if autocast is on around the call. If it is on only inside `step`, give 2e-2.
    module: the model, with its wrappers. Its buffers, and tensors that are plain attributes, are restored before every
    replayed step, compared as the state is, and updated once. DistributedDataParallel or `fully_shard` in it reduce
    gradients once per rollout. None: it is found if `step` is a module, a method of one, or `functools.partial` of it.
    generators: that `step` draws from besides the global ones (torch.Generator, random.Random, numpy.random.Generator
    or RandomState). offload: store states in the host's memory, at one transfer each way.
    scaler: a GradScaler. backward: a function to call instead of Tensor.backward, such as Fabric's. Both may scale the
    loss; all gradients are then scaled alike. no_sync: a context in which gradients are not reduced over processes, if
    `module` has another wrapper than DistributedDataParallel or `fully_shard`, or if you reduce them yourself.

    Hooks of parameters and tensors run in every step's backward pass, on that step's part of the gradient: apply what
    is not linear in it, such as clipping, to .grad afterwards.

    Cost, with a forward of 1 and a backward of 2: 4S − 1 without `advance` (plain back-propagation: 3S), and
    3S + f·(S − 1) if `advance` costs a fraction f of a forward. Memory: the graph of one step, and the stored states,
    each with copies of the buffers of `module` that the step changed, and 5 kB per random generator that it used.

    Raises InputError, with the number of the step, for a state that is detached or changed in place, for a replayed
    step that differs from the first pass, for a loss that is no scalar, and for impossible arguments. Errors of `step`
    or of its backward pass get a note with the step's number. After an error the generators, and the buffers of
    `module`, are as before the call; .grad may have the gradients of some steps. A loss that is not finite raises no
    error, because GradScaler handles it.
    """
    # --- the arguments, checked ---
    pieces: Any = segments
    if isinstance(segments, Iterable) and not (hasattr(segments, "__getitem__") and hasattr(segments, "__len__")):
        pieces = list(segments)  # of a generator; a data set that is read by index stays one
    count = len(pieces) if hasattr(pieces, "__len__") else -1  # −1: not iterable, refused below
    loss_weights: list[Any] = [1 / max(1, count)] * count if weights is None else list(weights)
    masks = [None] * count if resets is None else list(resets)
    horizon = count if truncate_every is None else truncate_every
    slide = count if slide is None else slide
    # isqrt(S − 1) + 1 is ⌈√S⌉. At least 2, as with 1 no state would be stored on the way.
    limits = {"all": max(2, count), "sqrt": max(2, math.isqrt(max(0, count - 1)) + 1)}
    limit: Any = limits.get(checkpoints, checkpoints) if isinstance(checkpoints, str) else checkpoints
    two_backwards = scaler is not None and backward is not None
    reset_has_graph = any(isinstance(x, Tensor) and x.grad_fn is not None for x in pytree.tree_leaves(reset_to))
    grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    for holds, expectation, value in (
        (callable(step), "step to be a function of (segment, state)", step),
        (advance is None or callable(advance), "advance to be a function of (segment, state)", advance),
        (module is None or isinstance(module, nn.Module), "module to be a torch.nn.Module", module),
        (count >= 0, "segments to go through, as in replay(step, segments)", segments),
        (count > 0, "at least one segment", count),
        (len(loss_weights) == count, f"weights for {count} segments", len(loss_weights)),
        (
            not any(isinstance(w, Tensor) and w.requires_grad for w in loss_weights),
            "weights without gradient; multiply the loss",
            weights,
        ),
        (len(masks) == count, f"resets for {count} segments", len(masks)),
        (
            not isinstance(batch_axis, str) or batch_axis == "none",
            'batch_axis to be a number, a pytree of numbers or "none"',
            batch_axis,
        ),
        (
            not isinstance(batch_axis, str) or all(mask is None for mask in masks),
            'no resets with batch_axis="none", which says that the state has no rows',
            "masks",
        ),
        (reset_to is None or resets is not None, "resets with reset_to", resets),
        (
            callable(reset_to) or not reset_has_graph,
            "reset_to without a graph, or a function that computes it",
            reset_to,
        ),
        (type(horizon) is int and horizon > 0, "truncate_every of at least 1", truncate_every),
        (type(slide) is int and 0 < slide <= count, f"slide from 1 to {count}, the number of segments", slide),
        (type(limit) is int and limit > 1, 'checkpoints "all", "sqrt" or an integer from 2 on', checkpoints),
        (not two_backwards, "a scaler or a backward, as a backward can scale", "both"),
        (grad_enabled, "gradient to be enabled", "it switched off"),
    ):
        if not holds:
            raise InputError(f"replay: expected {expectation}, found {value!r:.60}")

    # --- what the loop reads and fills ---
    loss_weights = list(map(float, loss_weights))
    if scaler is not None:
        backward = lambda root: scaler.scale(root).backward()  # noqa: E731
    module = module_of(step) if module is None else module
    wrappers = Wrappers(module if no_sync is None else None)
    no_sync = no_sync or find_no_sync(module)
    row_resets = RowResets(masks, reset_to, batch_axis)
    hidden = HiddenInputs(module, () if generators is None else generators)
    broadcast_buffers(module)
    with errors_name_step(0):
        leaves, structure = flatten(state)
    initial = final = Snapshot(leaves, structure, hidden.capture())
    losses: list[Any] = [None] * count
    forward_losses: list[Any] = [None] * count  # of the first pass
    aux: list[Any] = [None] * count
    scalars = Pool(2 * count)  # memory for the losses of both passes, each as leaf 0
    state_grad: State = None
    next_state: State = None
    any_gradient = False
    state_grads: Any = None  # the gradient of the new state of step t, which the later steps computed
    expected: Any = None  # the new state of step t as the first pass computed it, for `verify`

    def run(function: Callable[..., Any], t: int, leaves: list[Any], structure: Any) -> tuple[Any, list[Any], Any, Any]:
        """Call step or advance on segment t: (loss with auxiliary losses, leaves, their structure, aux)."""
        hidden.mark_changed()
        writes = [write_count(x) if isinstance(x, Tensor) else None for x in leaves]
        state, reset_leaves = row_resets.apply(t, leaves, structure)
        piece = pieces[t]  # read once: a data set may draw random numbers when it is read
        row_resets.check_segment(piece, reset_leaves)
        with collect_auxiliary_losses() as auxiliary:
            result = function(piece, state)
        is_tuple = isinstance(result, tuple) and len(result) in (2, 3)
        loss: Any = result[0] if is_tuple else None
        scalar = isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
        # A pair from `advance` is refused only if its first entry is a scalar without axes: a state may be a pair, too,
        # whose first tensor has one element.
        if function is advance and (result is None or (scalar and not loss.dim())):
            actual = "None" if result is None else "(loss, state)"
            raise InputError(f"expected advance to return the new state alone, found {actual}")
        if function is not advance and not scalar:
            actual = describe(loss) if is_tuple else type(result).__name__
            raise InputError(
                f"expected (loss, state) or (loss, state, aux), with loss a scalar tensor of floats, found {actual}"
            )
        outgoing, structure = flatten(result if function is advance else result[1])
        check_untouched(leaves, writes, outgoing)
        if torch.is_grad_enabled():
            check_attached(reset_leaves, outgoing)
        if function is advance:
            return None, outgoing, structure, None
        loss = loss.reshape(())
        for x in auxiliary:
            loss = loss + x.to(loss.device)
        return loss, outgoing, structure, keep_outputs(result[2]) if len(result) == 3 else None

    # --- Algorithm 1 ---
    try:
        # A part is `horizon` steps (`truncate_every`), or all. No gradient crosses from part to part: each is replayed
        # alone, from its last step t to its first. The stack has the stored states, each as (the step that starts from
        # it, its Snapshot), the latest on top.
        for part_begin in range(0, count, horizon):
            stack, t, state_grads = [(part_begin, final)], min(part_begin + horizon, count) - 1, None
            while stack:  # step t is differentiated next; the nearest stored state before it is that of step `at`
                at, start = stack[-1]
                hidden.restore(start.hidden)

                # First pass: from step `at` to step t without gradient; it stores up to `limit` states on the way. If
                # that is every state, it runs once in a part; else again between each two stored states.
                if at < t:
                    stride = -(-(t + 1 - at) // limit)  # rounded up
                    stored_count = (t - at) // stride
                    leaves, structure, pool = fetch(start.leaves), start.structure, Pool(stored_count)
                    for i in range(at, at + stored_count * stride):
                        with errors_name_step(i), torch.no_grad():
                            incoming, incoming_structure = leaves, structure
                            loss, leaves, structure, _ = run(advance or step, i, leaves, structure)
                            forward_losses[i] = None if loss is None else scalars.copy(0, loss.detach())
                            if (i + 1 - at) % stride == 0:
                                pool_or_none = pool if incoming_structure == structure else None
                                copies = compact(leaves, incoming, pool_or_none, offload)
                                values = hidden.capture(stack[-1][1].hidden)
                                stack.append((i + 1, Snapshot(copies, structure, values)))
                    # Else these names would keep memory alive through the backward passes.
                    del leaves, incoming, loss, copies, pool, pool_or_none
                    continue

                # Step t again, from the same state and with the same random numbers, now with its graph. The state is
                # detached from step t − 1; `state_grads` takes its gradient there. The first step of a part passes no
                # gradient to its state, except step 0, whose state is the caller's.
                stack.pop()
                forget_weights()  # those that the pass without gradient has cast or computed, as they have no graph
                source = initial.leaves if t == 0 else fetch(start.leaves)
                leaves = cut(source, needs_grad=t == 0 or t > part_begin, of_caller=t == 0)
                last_backward = t == part_begin and part_begin + horizon >= count
                # Gradients are reduced over processes once: in the last backward pass of all.
                with nullcontext() if last_backward or no_sync is None else no_sync():
                    with errors_name_step(t):
                        with wrappers.called() if last_backward else nullcontext():
                            loss, outgoing, structure, aux[t] = run(step, t, leaves, start.structure)
                        losses[t] = scalars.copy(0, loss.detach())
                        if t + 1 == slide < count:
                            next_state = pytree.tree_unflatten(compact(outgoing, leaves), structure)
                        if state_grads is None:
                            # The last step of the part: no later step gives its new state a gradient. The first pass
                            # stopped before it, so the state that the part ends with is computed only now.
                            final = Snapshot(compact(outgoing, leaves), structure, hidden.capture(start.hidden))
                            state_grads = [None] * len(outgoing)
                        elif verify:
                            replayed = Snapshot(outgoing, structure, hidden.capture(expected.hidden))
                            compare(hidden, replayed, expected, losses[t], forward_losses[t], tolerance)
                    # One backward pass of weight · loss, and of the new state with the gradient that later steps have
                    # computed for it. It leaves the gradient of the state that step t started from in `leaves`.
                    with errors_name_step(t, "the backward pass of "):
                        reduced = wrappers.waited_for() if last_backward and no_sync is not None else None
                        any_gradient |= differentiate(loss_weights[t], loss, outgoing, state_grads, backward, reduced)
                    del loss, outgoing  # the graph goes before the next one is made
                forget_weights()
                state_grads = [x.grad if differentiable(x) else None for x in leaves]
                # The state that step t started from is what step t − 1 must end with. With `leaves`, because those of
                # `start` may be offloaded.
                expected = start._replace(leaves=leaves)
                t -= 1
            if part_begin == 0:
                state_grad = pytree.tree_unflatten(state_grads, initial.structure)
            hidden.restore(final.hidden)
        if not any_gradient:
            raise InputError("replay: expected a loss that requires gradient, found none; was it detached?")
        wrappers.check_reduced()
    except BaseException:
        hidden.capture()  # finds tensors that the failed step added, which `restore` then removes
        hidden.restore(initial.hidden)
        raise

    # --- the result ---
    wide = functools.reduce(torch.promote_types, (x.dtype for x in losses))
    stacked = torch.stack([x.to(wide) for x in losses])
    weighted = stacked * stacked.new_tensor(loss_weights, dtype=torch.promote_types(wide, torch.float32))
    state = pytree.tree_unflatten(final.leaves, final.structure)
    return ReplayResult(weighted.sum(), stacked, state, state_grad, state if slide == count else next_state, aux)


def module_of(step: Any) -> nn.Module | None:
    """The module that `step` is, or is a method of, also inside functools.partial; None: none."""
    while isinstance(step, functools.partial):
        step = step.func
    owner = step if isinstance(step, nn.Module) else getattr(step, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
