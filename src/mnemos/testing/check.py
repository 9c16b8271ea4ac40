"""`check_memory(layer)`: which laws of a memory a layer of anyone keeps, and a counterexample where it does not."""

import contextlib
import copy
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mnemos.errors import InputError
from mnemos.modes import plain_module
from mnemos.types import leaves

from .laws import STARTED, numbers, resuming_step
from .probe import LAWS, Law, Probe, copied, first_line


@dataclass(frozen=True)
class Result:
    """What was found of one law; `holds` is None where it does not apply.

    detail: the counterexample in words, or why the law does not apply. tokens: the smallest T at which it does not
    hold. position, difference: the first output that is wrong, and the largest difference there.
    """

    law: str
    about: str
    holds: bool | None
    detail: str = ""
    tokens: int | None = None
    position: int | None = None
    difference: float | None = None

    def __str__(self) -> str:
        word = {True: "holds", False: "FAILS", None: "-"}[self.holds]
        at = f"T = {self.tokens}: " if self.tokens else ""
        return f"{self.law:12} {word:6} {f'{at}{self.detail}' if self.detail else self.about}"


@dataclass(frozen=True)
class Report:
    """What `check_memory` found; printed, it is a table.

    checked: the layer and how it was run. assumed: what the layer does not declare, and what was taken instead.
    """

    results: tuple[Result, ...]
    checked: str
    assumed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no law fails. Those that do not apply count as held."""
        return all(result.holds is not False for result in self.results)

    def __str__(self) -> str:
        lines = [self.checked, *([f"assumed: {', '.join(self.assumed)}"] if self.assumed else [])]
        return "\n".join([*lines, *map(str, self.results)])


def examine(law: Law, probe: Probe) -> Result:
    """What is found of one law."""
    if reason := law.needs(probe):
        return Result(law.name, law.about, None, reason)
    counterexample = law.counterexample(probe)
    if counterexample is None:
        return Result(law.name, law.about, True)
    t, fault = counterexample
    text = fault.text
    about_cuts = law.name == "resumes" and probe.splits == "anywhere" and not text.startswith(STARTED)
    if about_cuts and (step := resuming_step(probe)):
        text += f"; with cuts before multiples of {step} it holds"
    return Result(law.name, law.about, False, text, t, fault.position, fault.difference)


def check_memory(layer: nn.Module, width: int | None = None, laws: str | Iterable[str] | None = None) -> Report:
    """Check the laws of a memory on any module `y, state = layer(x, state)`, x and y [B, T, width].

        report = mnemos.testing.check_memory(layer)
        print(report)                                 # a table
        assert report.passed

    state is None at the beginning of a sequence; its tensors are found in tuples, lists and dicts, and in classes that
    are registered as pytrees. A forward with an argument `mask` [B, T] bool, True = valid, is also given padding.

    What the layer declares as an attribute is respected, and checked: splits ("anywhere", "segments" or "never"),
    state_kind ("none", "constant" or "growing"), causal, rows_independent, state_gradient, future_free, padding_free
    (`mnemos.types`), eval_as_trained. What it does not declare is assumed to hold, and `report.assumed` says so.

    A copy of the layer is run, with its weights and in its mode: call layer.eval() first if it has dropout. Numbers are
    compared in float64 where the whole layer computes in it, to 1e-9, and else in float32, to 1e-4. width: by default
    layer.dim. laws: the name or names of those that are checked, by default all (`mnemos.testing.LAWS`). Raises
    InputError if the width is unknown, or the layer cannot be called in this way.
    """
    named = [laws] if isinstance(laws, str) else LAWS if laws is None else list(laws)
    if unknown := [name for name in named if name not in LAWS]:
        raise InputError(f"check_memory: expected names of laws, found {unknown[0]!r}; known: {', '.join(LAWS)}")
    if isinstance(layer, nn.Module):
        layer = plain_module(layer, "check_memory")
    results: dict[str, Result] = {}

    # --- what is checked is a copy ---
    if unlike := _copying(layer):
        why = "the layer cannot be copied, and a copy is what is checked"
        results = {name: Result(name, LAWS[name].about, None, why) for name in named if name != "saving"}
        return Report(
            (*results.values(), Result("saving", LAWS["saving"].about, False, unlike)), type(layer).__name__, ()
        )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of layers of others, in every call

        # --- in float64, unless it rounds more coarsely ---
        probe = _probe(layer, width)
        exact = examine(LAWS["float64"], probe)
        if not exact.holds:
            own = next((x.dtype for x in layer.parameters() if x.is_floating_point()), torch.float32)
            probe = _probe(layer, width, own, 1e-4 if own in (torch.float32, torch.float64) else 5e-2)

        # --- each law, unless it says nothing more ---
        for name in named:
            law = LAWS[name]
            failed = [other for other in ("repeats", law.after) if other in results and results[other].holds is False]
            if failed:
                results[name] = Result(name, law.about, None, f"says nothing more, because {failed[0]} fails")
            elif name == "float64":
                results[name] = exact
            else:
                results[name] = examine(law, probe)

        # --- how large the state is ---
        size = ""
        with torch.no_grad(), contextlib.suppress(Exception):  # a layer that raises has its law
            first, last = (numbers(probe.copy()(probe.tokens(t, rows=1))[1]) for t in (1, 80))
            size = f"; state: {first:,} numbers a row" + (f" after 1 token, {last:,} after 80" if last != first else "")
            size = size if last else ""
    mode = "training" if layer.training else "eval"
    dtype = str(probe.dtype).removeprefix("torch.")
    rounded = f"differences above {probe.tolerance:.0e} count"
    checked = f"{type(layer).__name__} of width {probe.width} in {mode} mode, {dtype}, {rounded}{size}"
    return Report(tuple(results.values()), checked, probe.assumed)


def _copying(layer: Any) -> str:
    """What is wrong with copy.deepcopy(layer); "": nothing."""
    try:
        new = copy.deepcopy(layer)
    except Exception as error:
        return f"raised {type(error).__name__} in copy.deepcopy(layer): {first_line(error)}"
    if isinstance(layer, nn.Module):
        own = {parameter.data_ptr() for parameter in layer.parameters() if parameter.numel()}
        if any(parameter.data_ptr() in own for parameter in new.parameters()):
            return "copy.deepcopy(layer) shares weights with the layer"
    return ""


def _probe(layer: nn.Module, width: int | None, dtype: torch.dtype = torch.float64, tolerance: float = 1e-9) -> Probe:
    """The layer in a precision, with what it declares; what it does not is tried or assumed."""
    width = getattr(layer, "dim", None) if width is None else width
    if not isinstance(layer, nn.Module) or not isinstance(width, int):
        raise InputError(
            f"check_memory: expected a module and the width of its inputs, found {type(layer).__name__} and {width!r}; "
            "give check_memory(layer, width=…)"
        )
    untried = copied(layer).to(dtype)
    tried = copied(untried)
    x = torch.randn(3, 80, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    try:
        output = tried(x[:, :4].clone(), None)
    except Exception as error:
        if dtype == torch.float64:  # it may run in its own precision
            return _probe(layer, width, torch.float32, 1e-4)
        raise InputError(
            f"check_memory: expected a layer that takes layer(x, None) with x [3, 4, {width}], found that it raises "
            f"{type(error).__name__}: {first_line(error)}; give its width, or put a module around it"
        ) from error
    if not isinstance(output, tuple) or len(output) != 2 or getattr(output[0], "shape", None) != x[:, :4].shape:
        shown = f"{type(output).__name__} of {len(output)}" if isinstance(output, tuple) else type(output).__name__
        raise InputError(
            f"check_memory: expected y, state = layer(x, state) with y {list(x[:, :4].shape)} as x, found {shown} with "
            f"{getattr(output[0], 'shape', 'no tensor')}; put a module around it that returns both"
        )
    state = output[1]
    tensors = len(leaves(state))
    if state is not None and not tensors:
        raise InputError(
            f"check_memory: expected a state of tensors, found {type(state).__name__}, in which none are found; return "
            "tensors in tuples, lists or dicts"
        )
    measured: dict[str, Any] = {"splits": "anywhere" if tensors else "never", "state_kind": "none"}
    if tensors:
        measured["state_kind"] = "constant"
        with torch.no_grad(), contextlib.suppress(Exception):  # a layer that raises has its law
            first, last = (numbers(tried(x[:, :t].clone(), None)[1]) for t in (40, 80))
            measured["state_kind"] = "growing" if last > first else "constant"
    flags = ("causal", "rows_independent", "state_gradient", "future_free", "padding_free", "eval_as_trained")
    declared = {name: getattr(layer, name) for name in (*measured, *flags) if hasattr(layer, name)}
    defaults = measured | dict.fromkeys(flags, True)
    assumed = tuple(f"{name} = {defaults[name]!r}" for name in (*measured, *flags[:3]) if name not in declared)
    return Probe(untried, width, **defaults | declared, dtype=dtype, tolerance=tolerance, assumed=assumed)
