"""The laws of a memory `y, state = layer(x, state)`: each is a function that looks for a counterexample of T tokens.

`check_memory` tries them in the order in which they stand here: what a call may depend on, the state, padding,
gradients, weights.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mnemos.types import (
    Recurrent,
    State,
    collect_auxiliary_losses,
    leaves,
    map_state,
    reset,
    select,
    unshare,
)

from .probe import LAWS as LAWS
from .probe import LONG, ROWS, TOKENS, Call, Fault, Probe, first_line, law
from .weights import autocast, compiles, saving, weights

GRADIENT = 1e-9  # a greater derivative counts as one


def patterns(t: int) -> Tensor:
    """Masks [7, t]: all valid; padding on the left, on the right, in the middle; a few tokens valid; one; none."""
    i, third = torch.arange(t), max(1, t // 3)
    middle = (i < third) | (i >= t - third)
    return torch.stack([i >= 0, i >= third, i < t - third, middle, i % 3 == 1, i == t // 2, i < 0])


def masked_calls(probe: Probe, t: int) -> list[Call]:
    """Calls with masks and without, of many tokens and of one, such that every row is once padded wholly."""
    first, then = patterns(t), patterns(3).roll(1, 0)
    masks = first, None, then, then[:, :1], None
    return [Call(probe.tokens(m.shape[1] if m is not None else 1, 2 + i, 7), m) for i, m in enumerate(masks)]


def _stateful(probe: Probe) -> str:
    return "there is no state" if probe.state_kind == "none" else ""


def _masked(probe: Probe) -> str:
    return "" if probe.takes_mask else "forward has no argument mask"


# ---- what a call may depend on ----


@law("equal calls give equal outputs: nothing is kept outside the state", 1, TOKENS, LONG)
def _repeats(probe: Probe, t: int) -> Fault | None:
    layer, calls, training = probe.layer, probe.calls(t, 1), probe.layer.training

    def settings() -> tuple[object, ...]:
        return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()

    def tensors() -> dict[str, Tensor]:
        buffers = () if training else layer.named_buffers()  # training may keep statistics
        return {name: tensor.clone() for name, tensor in (*layer.named_parameters(), *buffers)}

    set_before, weights_before = settings(), tensors()
    with torch.random.fork_rng(devices=[]):
        # --- the call again: it draws no number in eval mode, and none that matters in training ---
        torch.manual_seed(1)
        first = probe.run(calls)
        drawn = torch.get_rng_state()
        if layer.training != training:
            return Fault("a call changes the mode of the layer")
        if not training:
            torch.manual_seed(1)
            if not torch.equal(drawn, torch.get_rng_state()):
                return Fault("random numbers are drawn in eval mode")
        torch.manual_seed(2)
        if fault := probe.compare(probe.run(calls), first, "the same call again, with another random seed"):
            return fault
        if training and torch.equal(drawn, torch.get_rng_state()):
            return Fault("a call sets the seed of the global random numbers")
        if t > TOKENS:
            return None

        # --- after other calls ---
        others: list[tuple[str, list[Call]]] = [
            ("other tokens", probe.calls(t)[::-1]),
            ("more rows", probe.calls(2, 1, rows=ROWS + 2)),
            ("one row and more tokens", probe.calls(t + 3, rows=1)),
        ]
        if probe.takes_mask:
            others.append(("calls with a mask", [Call(x, patterns(x.shape[1])[1:4]) for x, _ in calls]))
        for what, other in others:
            probe.run([Call(1 + x, mask) for x, mask in other])
            if fault := probe.compare(probe.run(calls), first, f"the same call again, after {what}"):
                return fault
        with torch.no_grad():
            probe.run(calls)
        if fault := probe.compare(probe.run(calls), first, "the same call again, after one without gradients"):
            return fault
        if changed := [name for name, tensor in tensors().items() if not torch.equal(tensor, weights_before[name])]:
            return Fault(f"a call changes {changed[0]}")

        # --- in eval mode, after a call in training mode, unless it keeps statistics of what it is trained on ---
        if probe.rows_independent and probe.eval_as_trained:
            layer.eval()
            before = probe.run(calls)
            layer.train()
            probe.run([Call(1 + x) for x, _ in calls])
            layer.eval()
            fault = probe.compare(probe.run(calls), before, "in eval mode, after a call in training mode")
            layer.train(training)
            if fault:
                return fault
    if set_before != settings():
        return Fault("a call changes a global setting of PyTorch: gradient mode, default dtype or threads")
    return None


@law("float64 in, float64 out and in between", shrinks=False)
def _float64(probe: Probe, t: int) -> Fault | None:
    """Changes of x by 1e-7 and 2e-7: those of the outputs are one to two only if nothing rounds more coarsely."""
    x, direction = probe.tokens(t).double(), probe.tokens(t, 3).double()
    with torch.no_grad():
        outputs = []
        for step in (0, 1e-7, 2e-7):
            y, state = probe(x + step * direction)
            # through the state alone: the second call reads the same tokens
            outputs.append((y, probe(probe.tokens(2, 4).double(), state)[0] if probe.state_kind != "none" else y))
    for (y, once, twice), what in zip(zip(*outputs, strict=True), ("outputs", "outputs of the next call"), strict=True):
        if y.dtype != torch.float64:
            return Fault(f"the {what} of float64 are {y.dtype}".replace("torch.", ""))
        bent, whole = (twice - 2 * once + y).abs().max(), (twice - y).abs().max()
        if bent > 1e-3 * whole or not (whole > 0 or what != "outputs"):
            part = "a part is computed in a" if what == "outputs" else "the state is of"
            return Fault(f"{what} do not follow changes of 1e-7: {part} lower precision", None, float(bent))
    return None


@law("float32, no_grad, inference, eval and training mode: the same", 1, TOKENS, LONG)
def _modes(probe: Probe, t: int) -> Fault | None:
    """The same calls without gradients, in inference mode, in float32, and in the other of training and eval mode."""
    scenarios = [("", probe.calls(t, 1, 2) if t <= TOKENS else probe.calls(t, 1))]
    if probe.takes_mask and 1 < t <= TOKENS:
        scenarios.append(("with a mask", masked_calls(probe, t)))
    own, modes = probe.layer.training, ("without gradients", "", "in inference mode", "weights frozen", "x frozen")
    trainings = (own, not own) if probe.same_modes() else (own,)
    base = [probe.run(calls) for _, calls in scenarios]
    for training, dtype, mode in itertools.product(trainings, dict.fromkeys((probe.dtype, torch.float32)), modes):
        if mode and mode != modes[0] and (dtype != probe.dtype or t > TOKENS):
            continue
        other = probe.copy(dtype, training)
        other.layer.requires_grad_(mode != "weights frozen")
        switch = {"without gradients": torch.no_grad, "in inference mode": torch.inference_mode}.get(mode)
        for (masked, calls), expected in zip(scenarios, base, strict=True):
            words = ["float32" if dtype != probe.dtype else "", mode]
            words += ["" if training == own else "eval" if own else "training", masked]
            with switch() if switch else torch.enable_grad():
                found = other.run([Call(x.to(other.dtype), mask) for x, mask in calls], of_x=mode != "x frozen")
            where = ", ".join(filter(None, words)) or "the same calls again"
            if found and (kind := next(iter(found.values())).dtype) != other.dtype:
                return Fault(f"{where}, the outputs of {other.dtype} are {kind}".replace("torch.", ""))
            if fault := other.compare(found, expected, f"{where}, against the first run"):
                return fault
    return None


@law("every token changes its own output or a later one")
def _reads(probe: Probe, t: int) -> Fault | None:
    x = probe.tokens(t)
    with torch.no_grad():
        before = probe(x)[0]
        for j in range(t):
            other = x.clone()
            other[:, j] += 1
            if torch.equal(before[:, j:], probe(other)[0][:, j:]):
                return Fault(f"token {j} changed, and no output from {j} on", j, 0.0)
    return None


@law(
    "no token changes an earlier output",
    *(TOKENS, LONG),
    needs=lambda probe: "" if probe.causal else "declared: causal = False",
)
def _causal(probe: Probe, t: int) -> Fault | None:
    x, declared = probe.tokens(t), probe.future_free
    if not declared and t <= TOKENS:
        return None
    with torch.no_grad():
        before = probe(x)[0]
        for j in range(t) if t <= TOKENS else (t // 4, t // 2, t * 5 // 8, t - 1):
            other = torch.cat([x[:, :j], probe.tokens(t - j, 3)], 1)
            fault = probe.difference(probe(other)[0][:, :j], before[:, :j], f"tokens from {j} on changed")
            if fault:
                return fault if declared else None
    return None if declared else Fault("declared future_free = False, and no later token changes an output")


@law("no row of a batch changes another, in batches of any size", 1, TOKENS)
def _rows(probe: Probe, t: int) -> Fault | None:
    x = probe.tokens(t)
    other = x.clone()
    other[1] += 1
    with torch.no_grad():
        y = probe(x)[0]
        fault = probe.difference(probe(other)[0][:1], y[:1], "row 1 changed, in row 0")
    if not probe.rows_independent:
        return None if fault or t < TOKENS else Fault("declared rows_independent = False, and no row changes another")
    if fault:
        return fault
    calls, sizes = probe.calls(t, 1, rows=40), (1, 2, 5, 9, 23)
    groups = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    what = "batches of 1, 2, 5, 9 and 23 rows, against 40 rows together"
    return probe.compare(probe.run(calls, groups), probe.run(calls), what)


@law("no tokens and no rows can be read, and change nothing", shrinks=False)
def _lengths(probe: Probe, t: int) -> Fault | None:
    """No tokens change nothing, and no rows are a batch."""
    first, then = probe.calls(t, 2)
    nothing = [Call(first.x[:, :0])]
    if probe.takes_mask:
        nothing.append(Call(first.x[:, :0], torch.ones(ROWS, 0, dtype=torch.bool)))
    expected = probe.run([first, then])
    for none, at in itertools.product(nothing, (0, 1)):
        found = probe.run([*[first][:at], none, *[first, then][at:]])
        outputs = [found.pop(f"output of call {i + 1} of 3") for i in range(3)]
        if outputs.pop(at).shape != none.x.shape:
            return Fault("a call of no tokens: the outputs have another shape than x")
        found |= {f"output of call {i + 1} of 2": y for i, y in enumerate(outputs)}
        if fault := probe.compare(found, expected, "around a call of no tokens, against none"):
            return fault
    if probe.rows_independent or not probe.layer.training:
        masks = [None, patterns(t)[:0]] if probe.takes_mask else [None]
        for mask in masks:
            found = probe.run([Call(first.x[:0], mask), Call(then.x[:0])])
            if found["output of call 1 of 2"].shape != first.x[:0].shape:
                return Fault("a batch of no rows: the outputs have another shape than x")
    return None


# ---- the state ----


STARTED = "from initial_state instead of None"


@law("parts, each from the last one's state, give what the whole gives", TOKENS, 300, needs=_stateful)
def _resumes(probe: Probe, t: int) -> Fault | None:
    with torch.set_grad_enabled(t <= TOKENS):
        x = probe.tokens(t)
        whole = probe(x)[0]
        if t <= TOKENS and isinstance(probe.layer, Recurrent):
            try:
                started = probe(x, probe.layer.initial_state(ROWS, dtype=probe.dtype))[0]
            except Exception as error:  # a report says of what
                return Fault(f"{STARTED}: raised {type(error).__name__}: {first_line(error)[:300]}")
            if fault := probe.difference(started, whole, STARTED):
                return fault
        if probe.splits == "segments":
            return None
        several: tuple[list[int], ...] = ([1], [t - 1], [4, 5], [3, 6, 9], list(range(1, t)))
        if t > TOKENS:  # parts of 64 and 128 tokens, too: those of most layers' chunks
            several = ([c for c in (1, 127, 128, 129, 200, 257) if c < t], [c for c in (64, 192) if c < t])
        for cuts in several:
            if cuts and cuts[0] > 0 and cuts[-1] < t and (fault := cut_apart(probe, x, whole, cuts)):
                return fault
    return None


def resuming_step(probe: Probe) -> int | None:
    """The smallest k of 2 to 64, if any, for which cuts before multiples of k change nothing where others do."""
    for k in (2, 4, 8, 16, 32, 64):
        with contextlib.suppress(Exception):
            x = probe.tokens(3 * k + 1)
            if not cut_apart(probe, x, probe(x)[0], [k, 2 * k, 3 * k]):
                return k
    return None


def cut_apart(probe: Probe, x: Tensor, whole: Tensor, cuts: Sequence[int]) -> Fault | None:
    """How the outputs of x, read in parts between these cuts, differ from those of the whole."""
    state, parts = None, []
    for a, b in itertools.pairwise([0, *cuts, x.shape[1]]):
        y, state = probe(x[:, a:b], state)
        parts.append(y)
    every = list(cuts) == list(range(1, x.shape[1]))
    shown = "every token by itself" if every and len(cuts) > 1 else f"cut before {' and '.join(map(str, cuts))}"
    return probe.difference(torch.cat(parts, 1), whole, shown)


# The same values: each second one of a larger tensor, and the last axis first in memory.
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as every second number of a tensor": lambda x: (
        torch.stack([x, torch.zeros_like(x)], -1)[..., 0] if x.dim() else x.clone()
    ),
    "in another order in memory": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() > 1 else x.clone(),
}


@law("x, mask and state may lie in memory in any way", 1, TOKENS)
def _layout(probe: Probe, t: int) -> Fault | None:
    """x, mask and state are what they hold: not how they lie in memory, nor which tensors they are."""
    for run in (probe, probe.copy(torch.float32)):
        with torch.set_grad_enabled(run is probe):
            x, then = run.tokens(t), run.calls(1, 3, 1)
            mask = patterns(t)[1:4]
            masks = (None, mask) if run.takes_mask else (None,)
            for m, called in zip(masks, ("", ", with a mask"), strict=False):
                plain = run.run([Call(x, m)])
                for what, change in _LAYOUTS.items():
                    other = None if m is None else change(m)
                    if fault := run.compare(run.run([Call(change(x), other)]), plain, f"x {what}{called}"):
                        return fault
                if run.state_kind == "none" or m is not None or t < TOKENS:
                    continue
                with torch.no_grad():
                    _, state = run(x, None, m)
                expected = run.run(then, state=state)
                for what, moved in (
                    ("copied", lambda part: map_state(torch.clone, part)),
                    ("detached", lambda part: map_state(Tensor.detach, part)),
                    ("selected by rows", lambda part: select(part, torch.arange(ROWS))),
                    *((what, lambda part, f=change: map_state(f, part)) for what, change in _LAYOUTS.items()),
                ):
                    if fault := run.compare(run.run(then, state=moved(state)), expected, f"the state {what}{called}"):
                        return fault
    return None


@law("x, mask and state keep their values, and a new state is no view of others", 1, TOKENS)
def _untouched(probe: Probe, t: int) -> Fault | None:
    """What is passed in keeps its values, and the state its own when x, mask, outputs or weights change afterwards."""
    for run in (probe, probe.copy(torch.float32)):
        for live in (False, True) if run is probe else (False,):
            with torch.set_grad_enabled(live):
                fault = _passed_in(run, t) or (None if live else _own(run, t))
            if fault:
                return fault
    return None


def _passed_in(probe: Probe, t: int) -> Fault | None:
    state: State = None
    stateful = probe.state_kind != "none"
    masks = [None, None, patterns(1)[:ROWS], patterns(t)[:ROWS]] if probe.takes_mask else [None, None]
    for i, (length, mask) in enumerate(zip((t, 1, 1, t), masks, strict=False)):
        x = probe.tokens(length, 2 + i)
        held = [x, *([] if mask is None else [mask]), *leaves(state)]
        before = [tensor.detach().clone() for tensor in held]
        _, after = probe(x, state, mask)
        if stateful:
            again, left = probe(probe.tokens(1, 8), state)
            probe(probe.tokens(1, 9), state)  # a sibling, which may write into room that the two share
            beside, _ = probe(probe.tokens(1, 7), left)
            probe(probe.tokens(2, 9), after)
            first, left = probe(probe.tokens(1, 8), state)
            alone, _ = probe(probe.tokens(1, 7), left)
        names = ["x", *([] if mask is None else ["the mask"])]
        for j, (was, now) in enumerate(zip(before, held, strict=True)):
            if not torch.equal(was.nan_to_num(), now.nan_to_num()):
                name = names[j] if j < len(names) else f"tensor {j - len(names)} of the state"
                apart = float((now.double() - was.double()).abs().nan_to_num().max())
                return Fault(f"{name} that was passed in has changed, by up to {apart:.2g}", None, apart)
        if stateful and (fault := probe.difference(again, first, "the same token from the same state again")):
            return fault
        if stateful and (
            fault := probe.difference(
                beside, alone, "a token read after the same state was continued by another one too"
            )
        ):
            return fault
        state = after
    return None


def _own(probe: Probe, t: int) -> Fault | None:
    if probe.state_kind == "none":
        return None
    parameters = list(probe.layer.parameters())
    for mask in (None, patterns(t)[:ROWS], patterns(t)[-1:].expand(ROWS, t)) if probe.takes_mask else (None,):
        state: State = None
        for length in (t, 1, 0):
            x, valid = probe.tokens(length), None if mask is None else mask[:, :length].clone()
            try:
                y, state = probe(x, state, valid)
            except Exception:
                if length:
                    raise
                break  # the law of lengths says it
            before = [leaf.clone() for leaf in leaves(state)]
            values = [parameter.detach().clone() for parameter in parameters]
            changed: list[tuple[str, list[Tensor]]] = [("x", [x]), ("the outputs", [y]), ("the weights", [*parameters])]
            changed += [("the mask", [valid])] if valid is not None else []
            for what, tensors in changed:
                for tensor in tensors:
                    tensor.logical_not_() if tensor.dtype == torch.bool else tensor.mul_(0.5).add_(1)
                same = all(torch.equal(a, b) for a, b in zip(before, leaves(state), strict=True))
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)
                if not same:
                    return Fault(f"the state changes when {what} is changed afterwards: it is no copy")
    return None


@law("the state's first axis is the batch: rows can be chosen and copied", needs=_stateful)
def _select(probe: Probe, t: int) -> Fault | None:
    with torch.no_grad():
        _, state = probe(probe.tokens(t))
        x, rows = probe.tokens(5, 3), torch.tensor([2, 0, 2])
        for i, leaf in enumerate(leaves(unshare(state))):
            if not leaf.dim() or len(leaf) != ROWS:
                found = f"tensor {i} of the state has the shape {list(leaf.shape)}"
                return Fault(f"{found}: its first axis is not the batch of {ROWS} rows")
        chosen = select(state, rows)
        y = probe(x, state)[0]
        return probe.difference(probe(x[rows], chosen)[0], y[rows], "rows 2, 0, 2 of the state")


@law("a row of zeros in the state is a new row", needs=_stateful, after="select")
def _reset(probe: Probe, t: int) -> Fault | None:
    with torch.no_grad():
        _, state = probe(probe.tokens(t))
        x = probe.tokens(5, 3)
        with_new_row = reset(state, torch.tensor([False, True, False]))
        y, fresh, mixed = probe(x, state)[0], probe(x)[0], probe(x, with_new_row)[0]
    return probe.difference(mixed[1:2], fresh[1:2], "a row of zeros, against a new row") or probe.difference(
        mixed[::2], y[::2], "row 1 reset, in the other rows"
    )


def _declares_size(probe: Probe) -> str:
    if any(name.startswith("state_kind") for name in probe.assumed):
        return "the layer does not declare state_kind"
    return _stateful(probe)


@law("the state has a constant size or grows, as declared", needs=_declares_size, shrinks=False)
def _size(probe: Probe, t: int) -> Fault | None:
    with torch.no_grad():
        _, state = probe(probe.tokens(300, rows=1))
        first = numbers(state)
        then = numbers(probe(probe.tokens(3, 3, rows=1), state)[1])
    if {"none": then == first == 0, "constant": then == first > 0, "growing": then > first}[probe.state_kind]:
        return None
    return Fault(f"declared {probe.state_kind}, and it has {first} numbers after 300 tokens and {then} after 303")


def numbers(state: object) -> int:
    """How many numbers a state has."""
    return sum(leaf.numel() for leaf in leaves(state))


# ---- padding: a row with a mask is the row without it, and nothing reads what the padding holds ----


@law("a row with padding is the row without it", 1, TOKENS, LONG, needs=_masked)
def _padding(probe: Probe, t: int) -> Fault | None:
    """Outputs, calls that follow and gradients of rows with padding are those of each row alone without it."""
    if not probe.rows_independent:
        probe = probe.copy(training=False)
    low, plain = probe.copy(torch.float32), probe.calls(t, 1, 2)
    valid = [Call(x, torch.ones(x.shape[:2], dtype=torch.bool)) for x, _ in plain]
    if fault := probe.compare(probe.run(valid), probe.run(plain), "a mask in which all is valid, against no mask"):
        return fault
    masked = masked_calls(probe, t)
    if t > TOKENS:
        masked = [Call(x[1:4], None if mask is None else mask[1:4]) for x, mask in masked[:2]]
    one_row = [Call(x[2:3], None if mask is None else mask[2:3]) for x, mask in masked]
    square = [Call(probe.tokens(3), patterns(3)[[1, 2, 5]]), *probe.calls(1)]
    for calls, what in (
        (masked, "rows with padding"),
        *([(one_row, "a batch of one row with padding"), (square, "as many rows as tokens")] if t <= TOKENS else []),
    ):
        expected = probe.run(calls, [slice(i, i + 1) for i in range(len(calls[0].x))])
        fault = probe.compare(probe.run(calls), expected, f"{what}, against each row without it")
        if t > TOKENS and not fault:  # of short calls the law of modes says it
            with torch.no_grad():
                found = low.run([Call(x.to(low.dtype), mask) for x, mask in calls])
            fault = low.compare(found, expected, f"float32, without gradients, {what}, against each row without it")
        if not probe.padding_free:
            return Fault("declared padding_free = False, and it is") if t > TOKENS and not fault else None
        if fault:
            return fault
    return None


@law("what padding holds, NaN too, changes nothing", 1, TOKENS, LONG, needs=_masked)
def _hidden(probe: Probe, t: int) -> Fault | None:
    """What the padding holds changes no valid output and no gradient, and gets no gradient."""
    calls = masked_calls(probe, t)[: 2 if t > TOKENS else None]
    base = probe.run(calls)
    for call, gradient in enumerate(x for name, x in base.items() if name.startswith("gradient of x")):
        mask = calls[call].mask
        if mask is not None and gradient[~mask].any():
            return Fault("padding gets a gradient", None, float(gradient[~mask].abs().max()))
    for value in (float("nan"), 100.0, -1e4, float("inf"), -float("inf"))[: None if t == TOKENS else 1]:
        filled = [Call(x if m is None else torch.where(m[..., None], x, value), m) for x, m in calls]
        if fault := probe.compare(probe.run(filled), base, f"padding of {value:g}, against numbers"):
            return fault
    with torch.no_grad():
        if not probe(calls[0].x, None, calls[0].mask)[0].isfinite().all():
            return Fault("outputs of padding are not finite")
    return None


# ---- gradients ----


@law("every parameter gets a gradient", 80, shrinks=False)
def _parameters(probe: Probe, t: int) -> Fault | None:
    layer = probe.layer
    with collect_auxiliary_losses() as auxiliary:
        y, _ = layer(probe.tokens(t))  # a gated cache is written here
    (y.square().sum() + sum(auxiliary)).backward()
    for name, parameter in layer.named_parameters():
        if not parameter.requires_grad:
            continue
        # A key's bias shifts all scores equally: its gradient is zero.
        if parameter.grad is None or ("bias" not in name and not parameter.grad.abs().max() > GRADIENT):
            return Fault(f"the parameter {name} gets no gradient")
        if not parameter.grad.isfinite().all():
            return Fault(f"the gradient of the parameter {name} is not finite")
    return None


def _inputs(probe: Probe, x: list[Tensor], state: State) -> dict[str, Tensor]:
    """What gradients are of: x, the numbers of the state, the parameters."""
    named = {"x" if len(x) == 1 else f"x of call {i + 1}": part for i, part in enumerate(x)}
    named |= {f"tensor {i} of the state": leaf for i, leaf in enumerate(leaves(state)) if leaf.requires_grad}
    return named | {f"the parameter {name}": p for name, p in probe.layer.named_parameters() if p.requires_grad}


def _started(probe: Probe, live: bool) -> State:
    """The state after four tokens, with gradient if `live`."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(live and tensor.is_floating_point())

    return map_state(leaf, probe(probe.tokens(4, 3))[1])


@law(
    "gradients are the derivatives",
    *(1, 7),
    needs=lambda probe: "" if probe.dtype == torch.float64 else "needs float64",
    shrinks=False,
)
def _derivatives(probe: Probe, t: int) -> Fault | None:
    """Along a random direction of each input, gradients against differences of the outputs."""
    g = torch.Generator().manual_seed(5)
    live = probe.state_gradient
    state = _started(probe, live)
    x = [probe.tokens(n, n).requires_grad_() for n in ((t, 1, 2) if live and probe.state_kind != "none" else (t,))]

    def loss() -> Tensor:
        after, total, weights = state, torch.zeros((), dtype=probe.dtype), torch.Generator().manual_seed(6)
        for part in x:
            y, after = probe(part, after)
            total = total + (y * torch.randn(y.shape, generator=weights, dtype=y.dtype)).sum()
        return total

    named = _inputs(probe, x, state)
    gradients = torch.autograd.grad(loss(), list(named.values()), allow_unused=True)
    for (name, tensor), gradient in zip(named.items(), gradients, strict=True):
        step = 1e-6 * torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
        with torch.no_grad():
            value = tensor.clone()
            ends = []
            for sign in (1, -1):
                tensor.copy_(value + sign * step)
                ends.append(float(loss()))
            tensor.copy_(value)
            slope = 0.0 if gradient is None else float((gradient * step).sum()) / 1e-6
        expected = (ends[0] - ends[1]) / 2e-6
        if not abs(slope - expected) <= 1e-5 * (1 + abs(expected)):
            text = (
                f"the gradient of {name} says {slope:.4g} along a direction, differences of the outputs {expected:.4g}"
            )
            return Fault(text, None, abs(slope - expected))
    return None


def _cut_anywhere(probe: Probe) -> str:
    if probe.splits != "anywhere":
        return _stateful(probe) or "it is declared for layers that may be cut anywhere"
    return "" if probe.state_gradient else "declared: state_gradient = False"


@law("the gradient passes through the state", needs=_cut_anywhere, after="resumes")
def _gradient(probe: Probe, t: int) -> Fault | None:
    for started in (False, True):
        whole: dict[str, Tensor] = {}
        for cuts in ([], [c for c in (2, 7) if c < t] or [1], list(range(1, t))):
            x, state = probe.tokens(t).requires_grad_(), _started(probe, True) if started else None
            named, loss = _inputs(probe, [x], state), x.new_zeros(())
            for a, b in itertools.pairwise([0, *(c for c in cuts if c < t), t]):
                y, state = probe(x[:, a:b], state)
                loss = loss + y.square().sum()
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            gradients = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
            whole = whole or gradients
            for name, gradient in whole.items():
                if name not in gradients:
                    return Fault(f"the gradient of {name} does not pass the state")
                what = f"the gradient of {name}, cut, against the whole"
                if fault := probe.difference(gradients[name], gradient, what, "gradient"):
                    return fault
    return None


@law("zeros, large numbers and long sequences give finite numbers", 1, TOKENS, LONG)
def _finite(probe: Probe, t: int) -> Fault | None:
    """Zeros, equal tokens and large numbers, in float32, and long sequences."""
    low = probe.copy(torch.float32)
    changes: list[tuple[str, bool, Callable[[Tensor], Tensor]]] = [
        ("x of size 1e4", False, lambda x: 1e4 * x),
        ("x of size 1e3", True, lambda x: 1e3 * x),
        ("zeros", True, torch.zeros_like),
        ("equal tokens", True, torch.ones_like),
    ]
    for what, live, change in changes[: 2 if t > TOKENS else None]:
        with torch.set_grad_enabled(live):
            found = low.run([Call(change(x)) for x, _ in low.calls(t, 1)])
        for name, tensor in found.items():
            if not tensor.isfinite().all():
                return Fault(f"{what}: the {name} is not finite")
    if t < LONG:
        return None
    with torch.no_grad():
        x = low.tokens(1000, rows=1)
        y, state = low(x)
        if not y.isfinite().all():
            return Fault("1,000 tokens in float32: the outputs are not finite")
        if low.splits != "anywhere":
            return None
        first, state = low(x[:, :517])
        return low.difference(torch.cat([first, low(x[:, 517:], state)[0]], 1), y, "1,000 tokens, cut before 517")


# ---- weights: changed ones are read, saved and copied ones are the same, casts and compilation agree ----

law("weights that have changed are read", shrinks=False)(weights)
law("state_dict holds all that the outputs depend on; copies are equal")(saving)
law("bfloat16 by autocast stays within 5 %", shrinks=False)(autocast)
law("torch.compile gives the same outputs and gradients", shrinks=False)(compiles)
