"""`replay`, its options, and the checks of its arguments."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from mnemos.types import InputError, State

from .passes import Gradients, Plan, ReplayPasses, ReplayResult, find_no_sync
from .step_start import Generators, Store
from .step_states import Axes, BatchRows, one_per_step

Segment = TypeVar("Segment")


class ReplayOptions(TypedDict, total=False):
    """Further options of `replay`; each is a keyword argument of it.

    batch_axis: the axis of the state's tensors that is the batch, as one number or as a pytree of the state's structure
    with a number per tensor, or None for a tensor without a batch. [layers, B, D] of LSTM and GRU and [M, B, D] have 1.
    Without it the first axis is taken; `resets` raise an error if that may be wrong.
    reset_to: what rows begin again with, instead of zeros: a state whose tensors broadcast to those of the state (such
    as [D] parameters), or a function without arguments that computes one. Parameters of either receive gradient.
    generators: random generators that `step` draws from besides the global ones (torch.Generator, random.Random,
    numpy.random.Generator or RandomState). Each replayed step draws from them what it drew in the first pass.
    tolerance: the difference, relative to a tensor's norm, that `verify` allows. None: that of rounding in the tensor's
    dtype, or in half precision where autocast is on around the call; give 2e-2 if the step uses autocast inside.
    offload: store states in the host's memory (for a GPU), at the cost of one transfer each way per state.
    scaler: a GradScaler. backward: a function to call instead of Tensor.backward, such as Fabric's. Both may scale the
    loss; all gradients are then scaled alike. no_sync: a context in which gradients are not reduced over processes, if
    `module` has another wrapper than DistributedDataParallel or `fully_shard`.
    """

    batch_axis: Axes
    reset_to: State | Callable[[], State]
    generators: Iterable[object] | None
    tolerance: float | None
    offload: bool
    scaler: torch.amp.GradScaler | None
    backward: Callable[[Tensor], object] | None
    no_sync: Callable[[], AbstractContextManager[object]] | None


def replay(
    step: Callable[[Segment, State], tuple[Tensor, State] | tuple[Tensor, State, Any]],
    segments: Iterable[Segment],
    state: State = None,
    *,
    advance: Callable[[Segment, State], State] | None = None,
    weights: Sequence[float] | Tensor | None = None,
    resets: Sequence[Tensor | None] | Tensor | None = None,
    truncate_every: int | None = None,
    slide: int | None = None,
    checkpoints: int | str = "all",
    verify: bool = True,
    module: nn.Module | None = None,
    **options: Unpack[ReplayOptions],
) -> ReplayResult:
    """Exact gradients of Σ_t weights[t] · loss_t through all segments, with the graph of one step in memory at a time.

        loss, state = step(segment, state)      # one step of any recurrent model; loss a scalar
        loss, state, aux = step(segment, state) # the same, with anything to keep beside it

    A first pass without gradient stores the states. Then every step, beginning with the last, is run again from its
    state and with the same random numbers. One backward pass of its loss, and of its new state with the gradient that
    later steps computed for it, adds to the parameters' .grad. This is Algorithm 1 of Memformer (memory replay
    back-propagation). It equals back-propagation through time to rounding, also with dropout. As in a plain loop,
    gradients are added to existing ones, and random generators (PyTorch's on every device, Python's, NumPy's, and those
    of `generators`) and the buffers of `module` have their final values afterwards.

    state: a pytree of tensors (and numbers), or None if the step makes the first one. A state that requires grad, or
    was computed from parameters, receives its gradient. Lists in it may grow from step to step.
    aux: a pytree such as logits or an accuracy. The result's `aux` has one per step, detached, from the run with
    gradient. All of them stay in memory; a view of a larger tensor is copied. An object that is no pytree, but holds
    a tensor with its graph, is an error.
    Auxiliary losses that layers add inside `step` (`mnemos.add_auxiliary_loss`) are part of loss_t and count once;
    those added inside `advance` are dropped.
    advance(segment, state) -> state: computes the state alone, for a faster first pass. It must return the same state
    as `step` and draw a prefix of the random numbers that `step` draws. Each step then starts with the generators as
    the previous `advance` left them. With dropout, the gradients are exact, but for other dropout masks than those of
    a plain loop.
    weights [S]: of the losses, numbers without gradient. None: 1/S each, the mean.
    resets: per step None or a mask [B]: rows of the incoming state that are set to zeros, or to `reset_to`, before the
    step, so that no gradient crosses.
    truncate_every=k: no gradient crosses from step t to t − 1 if t % k == 0; 1 is truncated back-propagation. Each k
    steps are then a replay of their own.
    slide=n: the result's `next_state` is the state after n steps. A rollout of segments n … S + n − 1 that starts from
    it overlaps with this one: a sliding window, as in Algorithm 1, which pops the oldest memory (n = 1). It recomputes
    all of its other states, because the weights have changed. None: rollouts share no segment, n = S.
    checkpoints: the number of states in memory at a time. "all": S. An integer n ≥ 2: n per level, with log_n(S)
    levels, each of which costs one more first pass. "sqrt": √S, two levels.
    verify: compare the state (and, without `advance`, the loss) of each replayed step with the first pass, and raise an
    error that names the step if they differ: random numbers of other generators would make gradients wrong without
    notice. A tensor that is about zero because its summands cancel may differ by their rounding: then switch it off.
    Cost: a comparison of the state per step.
    module: the model, with its wrappers. Its buffers, and tensors that are plain attributes, are restored before every
    replayed step, compared as the state is, and updated once. Its gradients are restored after an error.
    DistributedDataParallel or `fully_shard` in it reduce gradients once per rollout. It is found automatically if
    `step` is a module, a module's method, or a `functools.partial` of one.
    options: see `ReplayOptions`.

    Hooks of parameters and tensors (`register_hook`, `register_post_accumulate_grad_hook`) run in every step's backward
    pass, on that step's part of the gradient. A hook that is linear in the gradient gives what it gives in a plain
    loop; one that clips, takes a sign or steps an optimiser does not. Apply such a function to .grad after `replay`.

    Cost, with a forward of 1 and a backward of 2: 4S − 1 without `advance` (plain back-propagation: 3S), and
    3S + f·(S − 1) if `advance` costs a fraction f of a forward. Memory: the graph of one step, and the stored states,
    each with copies of the buffers of `module` that the step changed, and 5 kB per random generator that it used.

    Raises InputError, with the number of the step, for a state whose structure or batch size changes, that is detached
    or changed in place, for a replayed step that differs from the first pass, for a loss that is no scalar, and for
    impossible arguments. Errors of `step` or of its backward pass get a note with the step's number. After an error the
    generators, and the buffers and gradients of `module`, are as before the call; gradients that `fully_shard` has not
    reduced are lost. A loss that is not finite raises no error, because GradScaler handles it.
    """
    unknown = options.keys() - ReplayOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"replay() got an unexpected keyword argument {min(unknown)!r}; see mnemos.memory_replay.ReplayOptions"
        )
    _check_types(step, advance, module)
    tolerance, offload = options.get("tolerance"), options.get("offload", False)
    for name, value in (("verify", verify), ("offload", offload)):
        if not isinstance(value, bool):
            raise InputError(f"replay: expected {name} to be True or False, found {value!r:.60}")
    if tolerance is not None and (not isinstance(tolerance, int | float) or tolerance is True or not tolerance >= 0):
        raise InputError(f"replay: expected a tolerance from 0 on, found {tolerance!r:.60}")
    found = _as_sequence(segments)
    count = len(found)
    horizon = _read_horizon(truncate_every, count)
    module = _find_owner(step) if module is None else module
    no_sync = options.get("no_sync") or find_no_sync(module)
    plan = Plan(
        step=step,
        advance=advance,
        segments=found,
        weights=_read_weights(weights, count),
        rows=BatchRows(options.get("batch_axis"), resets, options.get("reset_to"), count),
        limit_of=_read_checkpoints(checkpoints),
        horizon=horizon,
        slide=_read_slide(slide, count),
        compares=verify and min(horizon, count) > 1,
        tolerance=None if tolerance is None else float(tolerance),
        module=module,
        backward=_choose_backward(options.get("scaler"), options.get("backward")),
        reduces=no_sync is not None,
        no_sync=no_sync or nullcontext,
        generators=Generators(options.get("generators")),
    )
    passes = ReplayPasses(plan, state)
    leaves = [*passes.given, *plan.rows.given_starts()]
    before = Gradients(module, [x for x in leaves if isinstance(x, Tensor) and x.is_leaf and x.requires_grad])
    passes.store = Store(offload)
    try:
        passes.run()
        return passes.result()
    except BaseException:
        before.put_back()
        passes.undo()
        raise


def _check_types(step: object, advance: object, module: object) -> None:
    """Raise InputError for arguments of the wrong type."""
    for name, value in (("step", step), ("advance", advance)):
        if not callable(value) and not (name == "advance" and value is None):
            raise InputError(f"replay: expected {name} to be a function of (segment, state), found {value!r:.60}")
    if module is not None and not isinstance(module, nn.Module):
        raise InputError(f"replay: expected module to be a torch.nn.Module, found {_kind(module)}")


def _as_sequence(segments: object) -> Any:
    """The segments as a sequence."""
    if hasattr(segments, "__getitem__") and hasattr(segments, "__len__"):
        found = segments
    elif isinstance(segments, Iterable):
        found = list(segments)
    else:
        raise InputError(
            f"replay: expected segments to go through, as in replay(step, segments), found {_kind(segments)}"
        )
    if not len(found):
        raise InputError("replay: expected at least one segment, found none")
    return found


def _read_checkpoints(checkpoints: int | str) -> Callable[[int], int]:
    """The number of states that a pass over so many steps stores."""
    if checkpoints == "all":
        return lambda steps: steps
    if checkpoints == "sqrt":
        return lambda steps: max(2, math.isqrt(steps - 1) + 1)
    if not isinstance(checkpoints, int) or checkpoints < 2:  # True is 1
        raise InputError(f'replay: expected checkpoints "all", "sqrt" or an integer from 2 on, found {checkpoints!r}')
    return lambda steps: checkpoints


def _read_horizon(truncate_every: int | None, steps: int) -> int:
    """The number of steps that gradient flows through."""
    if truncate_every is None:
        return steps
    if not isinstance(truncate_every, int) or isinstance(truncate_every, bool) or truncate_every < 1:
        raise InputError(f"replay: expected truncate_every of at least 1, found {truncate_every!r}")
    return truncate_every


def _read_slide(slide: int | None, steps: int) -> int:
    """The number of steps from the start of this rollout to that of the next one."""
    if slide is None:
        return steps
    if not isinstance(slide, int) or isinstance(slide, bool) or not 1 <= slide <= steps:
        raise InputError(
            f"replay: expected slide from 1 to {steps}, the number of segments, found {slide!r}; use None for rollouts "
            "that share no segment"
        )
    return slide


def _choose_backward(
    scaler: torch.amp.GradScaler | None, backward: Callable[[Tensor], object] | None
) -> Callable[[Tensor], object] | None:
    """The function that runs a backward pass; None is PyTorch's own."""
    if scaler is not None and backward is not None:
        raise InputError("replay: expected a scaler or a backward, found both; let the backward scale")
    if scaler is not None:
        return lambda root: scaler.scale(root).backward()
    return backward


def _read_weights(weights: Iterable[float | Tensor] | None, count: int) -> list[float]:
    """The weights of the losses, as numbers."""
    found = one_per_step("weights", [1 / count] * count if weights is None else weights, count)
    if any(isinstance(weight, Tensor) and weight.requires_grad for weight in found):
        raise InputError(
            "replay: expected weights without gradient, found some that require it; "
            "multiply the loss by them inside the step"
        )
    try:
        return [float(weight) for weight in found]  # type: ignore[arg-type]  # None raises the error
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"replay: expected a number as the weight of each segment, found {found!r:.60}") from None


def _find_owner(step: Callable[..., object]) -> nn.Module | None:
    """The module that `step` belongs to, or None."""
    called = _innermost(step)
    found = called if isinstance(called, nn.Module) else getattr(called, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def _innermost(function: Callable[..., object]) -> Callable[..., object]:
    """The function inside of `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _kind(value: object) -> str:
    """The name of a value's type."""
    return "None" if value is None else type(value).__name__
