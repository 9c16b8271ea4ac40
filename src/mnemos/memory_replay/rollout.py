"""`replay`, its options and its result."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from mnemos.types import State

from . import arguments
from .backward import Gradients, suspension
from .batch import Axes, BatchRows
from .passes import Plan, ReplayPasses
from .random_states import Generators
from .stored_states import Store

Segment = TypeVar("Segment")


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


class ReplayOptions(TypedDict, total=False):
    """Further options of `replay`; each is a keyword argument of it.

    batch_axis: the axis of the state's tensors that is the batch, as one number or as a pytree of the state's structure
    with a number per tensor, or None for a tensor without a batch. [layers, B, D] of LSTM and GRU and [M, B, D] have 1.
    Without it the first axis is taken; `resets` raise an error if that may be wrong.
    reset_to: what rows begin again with, instead of zeros: a state whose tensors broadcast to those of the state (such
    as [D] parameters), or a function without arguments that computes one. Parameters of either receive gradient.
    generators: random generators that `step` draws from besides the global ones (torch.Generator, random.Random,
    numpy.random.Generator or RandomState). Each replayed step draws from them what it drew in the first pass.
    offload: True stores states in the host's memory (for a GPU). An existing folder stores each state in a file there,
    deleted at the end. Both cost one transfer each way per state. States of generators and buffers stay in memory.
    scaler: a GradScaler. backward: a function to call instead of Tensor.backward, such as Fabric's. Both may scale the
    loss; all gradients are then scaled alike. no_sync: a context in which gradients are not reduced over processes, if
    `module` has another wrapper than DistributedDataParallel or `fully_shard`.
    """

    batch_axis: Axes
    reset_to: State | Callable[[], State]
    generators: Iterable[object] | None
    offload: bool | str | os.PathLike[str]
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
    verify: bool | float = True,
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
    notice. A number is the allowed difference, relative to a tensor's norm. True allows rounding, that of half
    precision if the state's dtype or autocast around this call says so; give 2e-2 if the step uses autocast inside.
    A tensor that is about zero because its summands cancel may differ by the rounding of the summands. If a difference
    would be an error, three more runs of the step without gradient measure this rounding (in one process only).
    Cost: a comparison of the state per step.
    module: the model, with its wrappers. Its buffers, and tensors that are plain attributes, are restored before every
    replayed step, verified as the state is, and updated once. Its gradients are restored after an error.
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
    arguments.check(step, advance, module, verify)
    found = arguments.sequence(segments)
    count = len(found)
    module = arguments.owner(step) if module is None else module
    plan = Plan(
        step=step,
        advance=advance,
        segments=found,
        weights=arguments.numbers(weights, count),
        rows=BatchRows(options.get("batch_axis"), resets, options.get("reset_to"), count),
        keep=arguments.kept(checkpoints),
        every=arguments.horizon(truncate_every, count),
        slide=arguments.window_step(slide, count),
        verify=verify,
        module=module,
        backward=arguments.scaled(options.get("scaler"), options.get("backward")),
        suspended=options.get("no_sync") or suspension(module),
        generators=Generators(options.get("generators")),
    )
    passes = ReplayPasses(plan, state)
    leaves = [*passes.given, *plan.rows.given_starts()]
    before = Gradients(module, [x for x in leaves if isinstance(x, Tensor) and x.is_leaf and x.requires_grad])
    passes.store = Store(options.get("offload", False))
    try:
        passes.run()
        return ReplayResult(*passes.result())
    except BaseException:
        before.put_back()
        passes.undo()
        raise
    finally:
        passes.store.close()
