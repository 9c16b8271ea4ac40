"""The laws of a memory `y, state = layer(x, state)`: each is a function that looks for a counterexample."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos.memory.gated_cache import hold_caches
from mnemos.types import (
    Output,
    Recurrent,
    Splits,
    State,
    StateKind,
    collect_auxiliary_losses,
    leaves,
    map_state,
    reset,
    select,
    unshare,
)

ROWS, TOKENS, LONG = 3, 11, 80  # LONG: longer than the chunks of most layers
GRADIENT = 1e-9  # a greater derivative counts as one


class Fault(NamedTuple):
    """A counterexample: what is wrong, the first output or cut at which it is, and by how much."""

    text: str
    position: int | None = None
    difference: float | None = None


@dataclass(frozen=True)
class Probe:
    """A layer to look at, what it declares or is taken to declare, and how exactly its numbers must agree."""

    layer: nn.Module
    width: int
    splits: Splits
    state_kind: StateKind
    causal: bool = True
    rows_independent: bool = True
    state_gradient: bool = True
    future_free: bool = True
    padding_free: bool = True
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    assumed: tuple[str, ...] = ()  # what the layer does not declare

    @property
    def takes_mask(self) -> bool:
        """Whether its forward has an argument `mask`."""
        return "mask" in signature(self.layer.forward).parameters

    def __call__(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output:
        """`layer(x, state)`, with a mask if there is one."""
        found: Output = self.layer(x, state) if mask is None else self.layer(x, state, mask=mask)
        return found

    def tokens(self, t: int, seed: int = 2, rows: int = ROWS) -> Tensor:
        """x [rows, t, width], normally distributed."""
        drawn = torch.randn(rows, t, self.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(self.dtype)

    def difference(self, found: Tensor, expected: Tensor, what: str) -> Fault | None:
        """Where tensors [B, T, …] differ by more than the rounding that is allowed. what: says of which outputs."""
        if found.shape != expected.shape:
            return Fault(f"{what}: expected the shape {list(expected.shape)}, found {list(found.shape)}")
        apart = (found.double() - expected.double()).abs()
        apart = torch.where((found == expected) | (found.isnan() & expected.isnan()), 0, apart)
        wrong = ~(apart <= self.tolerance * (1 + expected.double().abs()))
        if not wrong.any():
            return None
        at = wrong.nonzero()
        position = int(at[:, 1].min()) if found.dim() > 1 else 0
        worst = float(apart.detach().max())
        return Fault(f"{what}: output {position} differs, by up to {worst:.2g}", position, worst)


Check = Callable[[Probe, int], Fault | None]


@dataclass(frozen=True)
class Law:
    """A law: what it says, how a counterexample of T tokens is looked for, and which layers it is for."""

    name: str
    about: str
    check: Check
    lengths: tuple[int, ...] = (TOKENS,)
    needs: Callable[[Probe], str] = field(default=lambda probe: "")  # why it does not apply; "": it does
    shrinks: bool = True

    def counterexample(self, probe: Probe) -> tuple[int, Fault] | None:
        """The smallest T at which the law does not hold, and what is wrong there."""
        for t in self.lengths:
            fault = self._at(probe, t)
            if fault is None:
                continue
            for shorter in range(1, t) if self.shrinks else ():
                smaller = self._at(probe, shorter)
                # An error at shorter lengths is another fault than wrong numbers.
                if smaller is not None and (smaller.difference is None) == (fault.difference is None):
                    return shorter, smaller
            return t, fault
        return None

    def _at(self, probe: Probe, t: int) -> Fault | None:
        try:
            with contextlib.nullcontext() if self.name in _WRITES else hold_caches(probe.layer):
                return self.check(probe, t)
        except Exception as error:  # whatever a layer of others raises is what the report says
            line = next(iter(str(error).strip().splitlines()), "")
            return Fault(f"raised {type(error).__name__}: {line[:300]}")


def _repeats(probe: Probe, t: int) -> Fault | None:
    x = probe.tokens(t)
    first = probe(x)[0]
    probe(probe.tokens(t, 3))
    return probe.difference(probe(x)[0], first, "the same call again, after another one")


def _float64(probe: Probe, t: int) -> Fault | None:
    """Changes of x by 1e-8 and 2e-8: those of the outputs are one to two only if nothing rounds more coarsely."""
    x, direction = probe.tokens(t).double(), probe.tokens(t, 3).double()
    with torch.no_grad():
        y, once, twice = (probe(x + step * direction)[0] for step in (0, 1e-8, 2e-8))
    if y.dtype != torch.float64:
        return Fault(f"the outputs of float64 are {y.dtype}".replace("torch.", ""))
    bent, whole = (twice - 2 * once + y).abs().max(), (twice - y).abs().max()
    if bent <= 1e-3 * whole and whole > 0:
        return None
    return Fault("outputs do not follow changes of 1e-8: a part is computed in a lower precision", None, float(bent))


def _resumes(probe: Probe, t: int) -> Fault | None:
    x = probe.tokens(t)
    whole = probe(x)[0]
    if t <= TOKENS and isinstance(probe.layer, Recurrent):
        started = probe(x, probe.layer.initial_state(ROWS, dtype=probe.dtype))[0]
        if fault := probe.difference(started, whole, "from initial_state instead of None"):
            return fault
    if probe.splits == "segments":
        if not 5 <= t <= TOKENS:
            return None
        _, state = probe(x[:, :4])
        kept = map_state(torch.clone, state)
        live = probe(x[:, 4:], state)[0]
        return probe.difference(probe(x[:, 4:], kept)[0], live, "from a copy of the state instead of the state")
    several: tuple[list[int], ...] = (
        ([1], [t - 1], [4, 5], [3, 6, 9], list(range(1, t))) if t <= TOKENS else ([t * 5 // 8],)
    )
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
    shown = "every token by itself" if len(cuts) > 3 else f"cut before {' and '.join(map(str, cuts))}"
    return probe.difference(torch.cat(parts, 1), whole, shown)


def _changed(probe: Probe, t: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(j, the outputs, the outputs with token j changed): every j of a short sequence, one of a long one."""
    x = probe.tokens(t)
    with torch.no_grad():
        before = probe(x)[0]
        for j in range(t) if t <= TOKENS else (t * 5 // 8,):
            other = x.clone()
            other[:, j] += 1
            yield j, before, probe(other)[0]


def _causal(probe: Probe, t: int) -> Fault | None:
    declared = probe.future_free
    if not declared and t <= TOKENS:
        return None
    for j, before, after in _changed(probe, t):
        fault = probe.difference(after[:, :j], before[:, :j], f"token {j} changed")
        if declared and fault:
            return fault
        if not declared and not fault:
            return Fault("declared future_free = False, and no later token changes an output")
    return None


def _reads(probe: Probe, t: int) -> Fault | None:
    for j, before, after in _changed(probe, t):
        if torch.equal(before[:, j:], after[:, j:]):
            return Fault(f"token {j} changed, and no output from {j} on", j, 0.0)
    return None


def _rows(probe: Probe, t: int) -> Fault | None:
    x = probe.tokens(t)
    other = x.clone()
    other[1] += 1
    with torch.no_grad():
        y, alone = probe(x)[0], probe(x[:1])[0]
        fault = probe.difference(probe(other)[0][:1], y[:1], "row 1 changed, in row 0")
    if not probe.rows_independent:
        return None if fault else Fault("declared rows_independent = False, and no row changes another")
    return fault or probe.difference(alone, y[:1], "row 0 alone and in a batch")


def _untouched(probe: Probe, t: int) -> Fault | None:
    with torch.no_grad():
        _, state = probe(probe.tokens(t))
        before = [leaf.clone() for leaf in leaves(state)]
        first, _ = probe(probe.tokens(1, 3), state)
        _, after = probe(probe.tokens(1, 4), state)
        again, _ = probe(probe.tokens(1, 3), state)
        probe(probe.tokens(2, 5), after)
    for i, (was, now) in enumerate(zip(before, leaves(state), strict=True)):
        if not torch.equal(was.nan_to_num(), now.nan_to_num()):
            apart = float((now.double() - was.double()).abs().nan_to_num().max())
            return Fault(f"tensor {i} of the state that was passed in has changed, by up to {apart:.2g}", None, apart)
    return probe.difference(again, first, "the same token from the same state again")


def _select(probe: Probe, t: int) -> Fault | None:
    with torch.no_grad():
        _, state = probe(probe.tokens(t))
        x, rows = probe.tokens(5, 3), torch.tensor([2, 0, 2])
        for i, leaf in enumerate(leaves(unshare(state))):
            if not leaf.dim() or len(leaf) != ROWS:
                found = f"tensor {i} of the state has the shape {list(leaf.shape)}"
                return Fault(f"{found}: its first axis is not the batch of {ROWS} rows")
        taken = select(state, rows)
        y = probe(x, state)[0]
        return probe.difference(probe(x[rows], taken)[0], y[rows], "rows 2, 0, 2 of the state")


def _reset(probe: Probe, t: int) -> Fault | None:
    with torch.no_grad():
        _, state = probe(probe.tokens(t))
        x = probe.tokens(5, 3)
        begun = reset(state, torch.tensor([False, True, False]))
        y, fresh, mixed = probe(x, state)[0], probe(x)[0], probe(x, begun)[0]
    return probe.difference(mixed[1:2], fresh[1:2], "a row of zeros, against a new row") or probe.difference(
        mixed[::2], y[::2], "row 1 reset, in the other rows"
    )


def _parameters(probe: Probe, t: int) -> Fault | None:
    probe.layer.zero_grad()
    with collect_auxiliary_losses() as auxiliary:
        y, _ = probe(probe.tokens(t))
    (y.square().sum() + sum(auxiliary)).backward()
    for name, parameter in probe.layer.named_parameters():
        if not parameter.requires_grad:
            continue
        # A key's bias shifts all scores equally: its gradient is zero.
        if parameter.grad is None or ("bias" not in name and not parameter.grad.abs().max() > GRADIENT):
            return Fault(f"the parameter {name} gets no gradient")
        if not parameter.grad.isfinite().all():
            return Fault(f"the gradient of the parameter {name} is not finite")
    return None


def _derivatives(probe: Probe, t: int) -> Fault | None:
    x = probe.tokens(t, rows=2).requires_grad_()
    state = map_state(Tensor.detach, probe(probe.tokens(4, 3, rows=2))[1])
    torch.autograd.gradcheck(lambda x: probe(x, state)[0], x, fast_mode=True)
    return None


def _state_gradient(probe: Probe, t: int) -> Fault | None:
    gradients: list[dict[str, Tensor]] = []
    for cuts in ([], [c for c in (2, 7) if c < t] or [1]):
        x = probe.tokens(t).requires_grad_()
        probe.layer.zero_grad()
        state, loss = None, x.new_zeros(())
        for a, b in itertools.pairwise([0, *(c for c in cuts if c < t), t]):
            y, state = probe(x[:, a:b], state)
            loss = loss + y.square().sum()
        loss.backward()
        named = {name: p.grad.clone() for name, p in probe.layer.named_parameters() if p.grad is not None}
        assert x.grad is not None
        gradients.append({"x": x.grad} | named)
    whole, split = gradients
    for name in whole:
        if name not in split:
            return Fault(f"the gradient of {name} does not pass the state")
        what = "x" if name == "x" else f"the parameter {name}"
        if fault := probe.difference(split[name], whole[name], f"the gradient of {what}, cut, against the whole"):
            return fault._replace(text=fault.text.replace(f"output {fault.position} differs", "it differs"))
    return None


def _padding(probe: Probe, t: int) -> Fault | None:
    """Valid tokens give the same outputs whatever the padding holds, and as if it were not there."""
    x, cut = probe.tokens(t), max(1, t * 7 // 11)
    mask = torch.ones(ROWS, t, dtype=torch.bool)
    mask[1, cut:] = False
    with torch.no_grad():
        y = probe(x, None, mask)[0]
        other = probe(torch.where(mask[..., None], x, 100.0), None, mask)[0]
        if fault := probe.difference(other[1:2, :cut], y[1:2, :cut], "padding of other values"):
            return fault
        alone = probe(x[1:2, :cut])[0]
        fault = probe.difference(y[1:2, :cut], alone, "a row with padding, against the row without it")
        if not probe.padding_free:
            return Fault("declared padding_free = False, and it is") if t == LONG and not fault else None
        if fault:
            return fault
        mask[2] = False
        if not probe(x, None, mask)[0].isfinite().all():
            return Fault("a row of padding alone gives outputs that are not finite")
    return None


def _saving(probe: Probe, t: int) -> Fault | None:
    fresh = copy.deepcopy(probe.layer)  # before the forward, which may change what is not saved
    for tensor in fresh.state_dict(keep_vars=True).values():
        torch.nn.init.zeros_(tensor)
    probe(probe.tokens(t))
    fresh.load_state_dict(probe.layer.state_dict(), strict=True)
    x, layer = probe.tokens(t, 5), copy.deepcopy(probe.layer)
    return probe.difference(fresh.eval()(x)[0], layer.eval()(x)[0], "a layer that was read from the state_dict")


def _compiles(probe: Probe, t: int) -> Fault | None:
    torch.compiler.reset()
    layer = copy.deepcopy(probe.layer)
    inner = copy.deepcopy(layer)
    compiled = torch.compile(inner, backend="aot_eager")
    for seed in (3, 4):  # the second forward meets what the first one wrote
        x, z = probe.tokens(t, seed).requires_grad_(), probe.tokens(t, seed).requires_grad_()
        y, found = layer(x)[0], compiled(z)[0]
        y.square().sum().backward()
        found.square().sum().backward()
        assert x.grad is not None
        assert z.grad is not None
        fault = probe.difference(found, y, "compiled") or probe.difference(z.grad, x.grad, "the compiled gradient of x")
        if fault:
            return fault
    for (name, a), b in zip(layer.state_dict().items(), inner.state_dict().values(), strict=True):
        if not torch.allclose(a.double(), b.double(), rtol=1e-7, atol=probe.tolerance):
            return Fault(f"compiled: {name} differs after two calls")
    return None


def _autocast(probe: Probe, t: int) -> Fault | None:
    layer, x = copy.deepcopy(probe.layer).float(), probe.tokens(t).float()
    with hold_caches(layer):
        y = layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(x)[0]
    if not low.isfinite().all():
        return Fault("outputs under autocast are not finite")
    apart, most = float((low.float() - y).abs().max()), float(y.abs().max())
    if apart < 0.05 * most:
        return None
    return Fault(f"outputs differ by up to {apart:.2g}, of at most {most:.2g}", None, apart)


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


def _declared_size(probe: Probe) -> str:
    if any(name.startswith("state_kind") for name in probe.assumed):
        return "the layer does not declare state_kind"
    return _stateful(probe)


def _stateful(probe: Probe) -> str:
    return "there is no state" if probe.state_kind == "none" else ""


def _cut_anywhere(probe: Probe) -> str:
    if probe.splits != "anywhere":
        return _stateful(probe) or "it is declared for layers that may be cut anywhere"
    return "" if probe.state_gradient else "declared: state_gradient = False"


def _no_float64(probe: Probe) -> str:
    return "" if probe.dtype == torch.float64 else "needs float64"


_WRITES = {"parameters", "saving", "compiles"}  # laws under which a gated cache is written, as in training

# The laws of a memory by name, in the order in which `check_memory` tries them.
LAWS = {
    law.name: law
    for law in (
        Law("repeats", "two equal calls give equal outputs: nothing is kept outside the state", _repeats),
        Law("float64", "float64 in, float64 out and in between", _float64, shrinks=False),
        Law("reads", "every token changes its own output or a later one", _reads),
        Law(
            "causal",
            "no token changes an earlier output",
            _causal,
            (TOKENS, LONG),
            lambda probe: "" if probe.causal else "declared: causal = False",
        ),
        Law("rows", "no row of a batch changes another", _rows),
        Law(
            "resumes",
            "parts, each from the last one's state, give what the whole gives",
            _resumes,
            (TOKENS, LONG),
            _stateful,
        ),
        Law("untouched", "a state that is passed in keeps its values", _untouched, needs=_stateful),
        Law(
            "select",
            "the state's first axis is the batch: rows can be taken and copied",
            _select,
            needs=_stateful,
        ),
        Law("reset", "a row of zeros in the state is a new row", _reset, needs=_stateful),
        Law("size", "the state has a constant size or grows, as declared", _size, needs=_declared_size, shrinks=False),
        Law(
            "padding",
            "padding changes nothing that is valid",
            _padding,
            (TOKENS, LONG),
            lambda probe: "" if probe.takes_mask else "forward has no argument mask",
        ),
        Law("parameters", "every parameter gets a gradient", _parameters, (LONG,), shrinks=False),
        Law("derivatives", "gradients are the derivatives", _derivatives, (7,), _no_float64, shrinks=False),
        Law("gradient", "the gradient passes through the state", _state_gradient, needs=_cut_anywhere),
        Law("saving", "state_dict holds all that the outputs depend on", _saving),
        Law("autocast", "bfloat16 by autocast stays within 5 %", _autocast, shrinks=False),
        Law("compiles", "torch.compile gives the same outputs and gradients", _compiles, shrinks=False),
    )
}


# A law that says nothing more where another one fails.
AFTER = {"gradient": "resumes", "reset": "select"}
