"""`verify()`: every operation with kernels on this machine, each of its backends, against its float64 oracle."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mnemos import native, ops
from mnemos.errors import InputError
from mnemos.ops.convolution.reference import reference_short_convolution
from mnemos.ops.delta.reference import reference_delta_rule
from mnemos.ops.gated_cache import write
from mnemos.ops.gated_cache.reference import reference_update
from mnemos.ops.linear import LinearState
from mnemos.ops.linear.reference import reference_bidirectional, reference_causal, reference_linear_attention
from mnemos.ops.selective.reference import reference_selective_scan

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}  # differences that are allowed, of the largest number of a tensor
B, T, H, D, M = 2, 67, 2, 6, 5  # longer than a chunk, and no number of it is a multiple of a vector's
Outputs = tuple[Tensor, ...]
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Verified:
    """An operation by one backend.

    Attributes:
        operation, backend, dtype: what was computed; "native avx2": the C++ kernels with this instruction set.
        values, gradients: the largest difference from the oracle, relative to the largest number of the same tensor;
            gradients None where there are none.
        bound: what is allowed.
    """

    operation: str
    backend: str
    dtype: str
    values: float
    gradients: float | None
    bound: float

    @property
    def passed(self) -> bool:
        """Whether no difference is above the bound; one that is not a number is."""
        return self.values <= self.bound and (self.gradients is None or self.gradients <= self.bound)

    def __str__(self) -> str:
        gradients = "      -" if self.gradients is None else f"{self.gradients:7.1e}"
        word = "passed" if self.passed else "FAILED"
        name = f"{self.operation:38} {self.backend:18} {self.dtype:8}"
        return f"{name} {self.values:7.1e}    {gradients}  {self.bound:.0e}  {word}"


HEAD = f"{'operation':38} {'backend':18} {'dtype':8} values   gradients  bound  "


class Case(NamedTuple):
    """An operation: its inputs in float64, the oracle, and the call of a backend."""

    operation: str
    given: Leaves
    oracle: Callable[[Leaves], Outputs]
    call: Callable[..., Outputs]  # (inputs, backend=)
    backends: Callable[[], list[str]]


def verify(operations: list[str] | None = None) -> Iterator[Verified]:
    """Compare values and gradients of every operation that has several backends with its float64 oracle.

    The operations are linear attention, the delta rule, decayed attention, the short convolution, the selective scan
    and the write of a gated cache, each from non-zero states, with padding, at odd sizes; by every backend that runs on
    this machine, the C++ kernels with every instruction set that the processor has. operations: the first words of
    those that are wanted; by default all. Cost: some seconds. Raises InputError for an unknown operation.
    """
    known = {case.operation: case for case in cases()}
    wanted = [name for name in known if operations is None or any(map(name.startswith, operations))]
    if not wanted:
        raise InputError(f"verify: expected operations of {', '.join(known)}, found {operations}")
    for name in wanted:
        case = known[name]
        truth = _with_gradients(case.given, case.oracle, torch.float64)
        for backend in case.backends():
            for label, context in _settings(backend):
                for dtype, bound in BOUNDS.items():
                    with context():
                        try:
                            found = _with_gradients(case.given, partial(case.call, backend=backend), dtype)
                        except InputError:  # the backend does not take this type
                            continue
                    values, gradients = (_apart(a, b) for a, b in zip(found, truth, strict=True))
                    yield Verified(name, label, str(dtype).removeprefix("torch."), values, gradients, bound)


def _settings(backend: str) -> Iterator[tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]]:
    """The native kernels with each instruction set; another backend as it is."""
    if backend != "native":
        yield backend, contextlib.nullcontext
        return
    for name in native.instruction_sets():
        if name != "avx512bf16":  # the same kernels as avx512 but for products of bfloat16
            yield f"native {name}", partial(native.instruction_set, name)


def _with_gradients(given: Leaves, call: Callable[[Leaves], Outputs], dtype: torch.dtype) -> tuple[Outputs, Outputs]:
    """Outputs, and the gradients of their weighted sum, of all that is given."""
    leaves = {name: x if x.dtype == torch.bool else x.to(dtype).detach().requires_grad_() for name, x in given.items()}
    outputs = call(leaves)
    drawn = torch.Generator().manual_seed(7)
    weights = [torch.randn(y.shape, generator=drawn, dtype=torch.float64).to(y.dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, [x for x in leaves.values() if x.requires_grad], weights)
    return tuple(y.detach() for y in outputs), gradients


def _apart(found: Outputs, expected: Outputs) -> float:
    """The largest difference of all tensors, each relative to its largest number; NaN where one is not a number."""
    worst = torch.zeros((), dtype=torch.float64)
    for a, b in zip(found, expected, strict=True):
        apart = (a.double() - b.double()).abs().max() / max(1.0, float(b.abs().max()))
        worst = torch.maximum(worst, apart)  # NaN stays
    return float(worst)


def cases() -> list[Case]:
    """The operations."""
    g = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    mask = uniform(B, T) > 0.2
    mask[1, :9] = False
    qkv = {"q": normal(B, T, H, D), "k": normal(B, T, H, D) / D**0.5, "v": normal(B, T, H, M)}
    sums = {"s": uniform(B, H, D, M), "z": uniform(B, H, D)}
    beta, state = {"beta": uniform(B, T, H)}, {"state": normal(B, H, D, M)}
    decay, channels = {"decay": -3 * uniform(B, T, H) ** 3}, {"decay": -3 * uniform(B, T, H, D) ** 3}
    found = []
    for name, causal, schedule in (
        ("linear_attention", True, reference_causal),
        ("linear_attention (both directions)", False, reference_bidirectional),
    ):
        found.append(_linear(name, qkv | sums, mask, causal, schedule))
    for name, given in (
        ("delta_rule", qkv | beta | state),
        ("delta_rule (decay)", qkv | beta | decay | state),
        ("delta_rule (decay per channel)", qkv | beta | channels | state),
        ("decayed_attention", qkv | decay | state),
        ("decayed_attention (per channel)", qkv | channels | state),
    ):
        found.append(_delta(name, given, mask))
    taps = {"x": normal(B, T, 9), "weight": normal(9, 4), "bias": normal(9), "state": normal(B, 3, 9)}
    found.append(
        Case(
            "short_convolution",
            taps,
            lambda x: reference_short_convolution(**x, mask=mask, activation="silu"),
            lambda x, backend: ops.short_convolution(**x, mask=mask, activation="silu", backend=backend),
            lambda: ops.backends("short_convolution"),
        )
    )
    rates, skips = {"A": -3 * uniform(9, D)}, {"D": normal(9), "state": normal(B, 9, D)}
    steps = {"x": normal(B, T, 9), "dt": uniform(B, T, 9), "B": normal(B, T, D), "C": normal(B, T, D)}
    found.append(
        Case(
            "selective_scan",
            steps | rates | skips,
            lambda x: reference_selective_scan(**x, mask=mask),
            lambda x, backend: ops.selective_scan(**x, mask=mask, backend=backend),
            lambda: ops.backends("selective_scan"),
        )
    )
    width = 7
    gates = {"source": normal(B, 5, width), "cache": normal(B, 5, width)}
    gates |= {f"{kind}_{gate}": normal(width, *[2 * width] * (kind == "W")) / 3 for gate in "urc" for kind in "Wb"}
    kernels = ["native"] if native.library() else []
    found.append(Case("gated cache", gates, _gates, _write, lambda: [*kernels, "pytorch"]))
    return found


def _linear(name: str, given: Leaves, mask: Tensor, causal: bool, schedule: Callable[..., Outputs]) -> Case:
    reference: Callable[..., Outputs] = reference_linear_attention

    def oracle(x: Leaves) -> Outputs:
        state = x["s"], x["z"]
        return reference(x["q"], x["k"], x["v"], schedule, state=state, mask=mask)

    def call(x: Leaves, backend: str) -> Outputs:
        state = LinearState(x["s"], x["z"])
        y, end = ops.linear_attention(x["q"], x["k"], x["v"], causal=causal, state=state, mask=mask, backend=backend)
        return y, *end

    return Case(name, given, oracle, call, lambda: ops.backends("linear_attention"))


def _delta(name: str, given: Leaves, mask: Tensor) -> Case:
    operator: Callable[..., Outputs] = ops.delta_rule if "beta" in given else ops.decayed_attention
    reference: Callable[..., Outputs] = reference_delta_rule

    def oracle(x: Leaves) -> Outputs:
        return reference(**{"beta": None, **x}, mask=mask)

    def call(x: Leaves, backend: str) -> Outputs:
        return operator(**x, mask=mask, backend=backend)

    return Case(name, given, oracle, call, lambda: ops.backends("delta_rule"))


def _gates(x: Leaves) -> Outputs:
    weights = {name: value for name, value in x.items() if name[1] == "_"}
    rows = [reference_update(s, c, weights) for s, c in zip(x["source"], x["cache"], strict=True)]
    return (torch.stack(rows),)


def _write(x: Leaves, backend: str) -> Outputs:
    """`write`: with the gates observed it computes in PyTorch's operations."""
    if backend == "native" and x["source"].dtype != torch.float32:
        raise InputError("the kernel is for float32")
    names = ("W_u", "b_u", "W_r", "b_r", "W_c", "b_c")
    weights = (*(x[name] for name in names), None, None)
    observe = None if backend == "native" else lambda gates: None
    return (write(x["source"], x["cache"], weights, observe=observe).new,)
