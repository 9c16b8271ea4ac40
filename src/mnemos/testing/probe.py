"""A layer to look at: how it is run, how its numbers are compared, and how a counterexample becomes the smallest."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import gradient_hooks_of
from mnemos.memory.gated_cache import hold_caches
from mnemos.types import Output, Splits, State, StateKind

ROWS, TOKENS, LONG = 3, 11, 131  # LONG: longer than the chunks of most layers, and no multiple of them


def copied(layer: nn.Module) -> nn.Module:
    """A deep copy, with the hooks on gradients of parameters, which copy.deepcopy leaves out."""
    new = copy.deepcopy(layer)
    for own, parameter in zip(layer.parameters(), new.parameters(), strict=True):
        for hook in gradient_hooks_of(own):
            parameter.register_hook(hook)
    return new


class Fault(NamedTuple):
    """A counterexample: what is wrong, the first output or cut at which it is, and by how much."""

    text: str
    position: int | None = None
    difference: float | None = None


class Call(NamedTuple):
    """What a layer reads in one call."""

    x: Tensor
    mask: Tensor | None = None


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
    eval_as_trained: bool = True
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    assumed: tuple[str, ...] = ()  # what the layer does not declare

    @property
    def takes_mask(self) -> bool:
        """Whether its forward has an argument `mask`."""
        return "mask" in signature(self.layer.forward).parameters

    def __call__(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output:
        """`layer(x, state)`, with a mask if there is one. A gated cache is read and not written."""
        with hold_caches(self.layer):
            output: Output = self.layer(x, state) if mask is None else self.layer(x, state, mask=mask)
        return output

    def copy(self, dtype: torch.dtype | None = None, training: bool | None = None) -> "Probe":
        """The same of a copy of the layer, which may have another precision or mode."""
        layer = copied(self.layer)
        layer.train(layer.training if training is None else training)
        if dtype in (None, self.dtype):
            return dataclasses.replace(self, layer=layer)
        return dataclasses.replace(self, layer=layer.to(dtype), dtype=dtype, tolerance=max(self.tolerance, 2e-4))

    def same_modes(self) -> bool:
        """Whether training and eval mode are to give the same: there is no dropout, and nothing else is declared."""
        if not (self.rows_independent and self.eval_as_trained):
            return False
        trained = self.copy(training=True)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            first = trained.run(trained.calls(LONG))
            torch.manual_seed(2)
            return trained.compare(trained.run(trained.calls(LONG)), first, "") is None

    def tokens(self, t: int, seed: int = 2, rows: int = ROWS) -> Tensor:
        """x [rows, t, width], normally distributed."""
        drawn = torch.randn(rows, t, self.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(self.dtype)

    def calls(self, *lengths: int, rows: int = ROWS) -> list[Call]:
        """Calls of so many tokens each, without a mask."""
        return [Call(self.tokens(t, 2 + i, rows)) for i, t in enumerate(lengths)]

    def run(
        self, calls: Sequence[Call], apart: Sequence[slice] = (), state: State = None, of_x: bool = True
    ) -> dict[str, Tensor]:
        """The outputs of calls, each from the state of the last, and the gradients of a weighted sum of them.

        Outputs of padding are zeros here. apart: the rows are read in these groups, each without the tokens that are
        padding in all of its rows. of_x: whether the tokens need a gradient.
        """
        live = torch.is_grad_enabled() and of_x
        xs = [call.x.detach().requires_grad_(live) for call in calls]
        outputs = [self._rows(xs, calls, state, rows) for rows in apart or (slice(None),)]
        found = {
            f"output of call {i + 1} of {len(calls)}" if len(calls) > 1 else "output": torch.cat(parts)
            for i, parts in enumerate(zip(*outputs, strict=True))
        }
        weights = torch.Generator().manual_seed(9)
        loss = sum(
            (y * torch.randn(y.shape, generator=weights, dtype=torch.float64).to(y.dtype)).sum() for y in found.values()
        )
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return found
        named = {f"x of call {i + 1} of {len(calls)}" if len(calls) > 1 else "x": x for i, x in enumerate(xs)}
        named = {name: x for name, x in named.items() if x.requires_grad}
        named |= {f"the parameter {name}": p for name, p in self.layer.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for (name, tensor), gradient in zip(named.items(), gradients, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(tensor) if gradient is None else gradient
        return {name: tensor.detach() for name, tensor in found.items()}

    def _rows(self, xs: Sequence[Tensor], calls: Sequence[Call], state: State, rows: slice) -> list[Tensor]:
        outputs = []
        for x, (_, mask) in zip(xs, calls, strict=True):
            if mask is None:
                y, state = self(x[rows], state)
            elif rows == slice(None):
                y, state = self(x, state, mask)
                y = torch.where(mask[..., None], y, 0)
            else:
                kept = mask[rows].any(0)
                y = torch.zeros_like(x[rows])
                if kept.any():
                    valid, state = self(x[rows][:, kept], state)
                    y = y.index_put((torch.arange(len(y))[:, None], kept.nonzero()[:, 0]), valid)
            outputs.append(y)
        return outputs

    def difference(self, found: Tensor, expected: Tensor, what: str, one: str = "output") -> Fault | None:
        """Where tensors [B, T, …] differ by more than the rounding that is allowed. what: says of which outputs."""
        if found.shape != expected.shape:
            return Fault(f"{what}: expected the shape {list(expected.shape)}, found {list(found.shape)}")
        expected = expected.to(torch.float64)
        apart = (found.double() - expected).abs()
        apart = torch.where((found == expected) | (found.isnan() & expected.isnan()), 0, apart)
        size = expected.abs().nan_to_num(0, 0, 0).amax() if expected.numel() else 0.0
        wrong = ~(apart <= self.tolerance * (1 + size))
        if not wrong.any():
            return None
        position = int(wrong.nonzero()[:, 1].min()) if one == "output" and found.dim() > 1 else None
        worst = float(apart.detach().max())
        where = "it" if position is None else f"{one} {position}"
        return Fault(f"{what}: {where} differs, by up to {worst:.2g}", position, worst)

    def compare(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> Fault | None:
        """The first difference between the outputs and gradients of two runs, of those that both have."""
        for name, tensor in expected.items():
            if name not in found:
                continue
            one = "gradient" if name.startswith("gradient") else "output"
            of = "" if name == "output" else f", {name.removeprefix('output of ')}"
            if fault := self.difference(found[name], tensor, what + of, one):
                return fault
        return None


Check = Callable[[Probe, int], Fault | None]


@dataclass(frozen=True)
class Law:
    """A law: what it says, how a counterexample of T tokens is looked for, and which layers it is for."""

    name: str
    about: str
    check: Check
    lengths: tuple[int, ...]
    needs: Callable[[Probe], str]  # why it does not apply; "": it does
    shrinks: bool = True  # whether a counterexample of fewer tokens is looked for
    after: str = ""  # a law beside which it says nothing more where that one fails

    def counterexample(self, probe: Probe) -> tuple[int, Fault] | None:
        """The smallest T at which the law does not hold, and what is wrong there."""
        holds_at = 0
        for t in self.lengths:
            fault = self._at(probe, t)
            if fault is None:
                holds_at = t
                continue
            return self._smallest(probe, t, fault, holds_at) if self.shrinks else (t, fault)
        return None

    def _smallest(self, probe: Probe, t: int, fault: Fault, holds_at: int) -> tuple[int, Fault]:
        def same(shorter: int) -> Fault | None:
            # An error at shorter lengths is another fault than wrong numbers.
            smaller = self._at(probe, shorter)
            return smaller if smaller and (smaller.difference is None) == (fault.difference is None) else None

        for shorter in range(1, min(t, TOKENS + 1)):
            if smaller := same(shorter):
                return shorter, smaller
        holds_at = max(holds_at, TOKENS)
        while t - holds_at > 1:  # of a long sequence: some T at which it fails, and at T − 1 does not
            middle = (t + holds_at) // 2
            if smaller := same(middle):
                t, fault = middle, smaller
            else:
                holds_at = middle
        return t, fault

    def _at(self, probe: Probe, t: int) -> Fault | None:
        try:
            return self.check(probe.copy(), t)
        except Exception as error:  # whatever a layer of others raises is what the report says
            return Fault(f"raised {type(error).__name__}: {first_line(error)[:300]}")


def first_line(error: Exception) -> str:
    """Of an error's text; "" where there is none."""
    return next(iter(str(error).strip().splitlines()), "")


LAWS: dict[str, Law] = {}  # by name, in the order in which `check_memory` tries them


def law(
    about: str,
    *lengths: int,
    needs: Callable[[Probe], str] = lambda probe: "",
    shrinks: bool = True,
    after: str = "",
) -> Callable[[Check], Check]:
    """Decorator of the function that looks for a counterexample: the law with its name, tried at these numbers of
    tokens."""

    def register(check: Check) -> Check:
        name = check.__name__.removeprefix("_")
        LAWS[name] = Law(name, about, check, lengths or (TOKENS,), needs, shrinks, after)
        return check

    return register
