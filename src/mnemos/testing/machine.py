"""`verify()`: every operation with kernels on this machine, each of its backends, against its float64 oracle.

`cases` are the operations, with their inputs; `verify` runs each by its oracle and by its backends, and compares.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos import native, ops
from mnemos.errors import InputError
from mnemos.ops import dense_layer
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
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Verified:
    """An operation by one backend ("native avx2": the C++ kernels with this instruction set).

    values, gradients: the largest difference from the oracle, relative to the largest number of the same tensor, or
    None where there are no gradients. bound: what is allowed.
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
    """An operation: its inputs in float64, and its oracle and its front as functions of them."""

    operation: str
    inputs: Inputs
    oracle: Callable[..., Outputs]
    call: Callable[..., Outputs]  # with backend= beside them
    backends: list[str]


def verify(operations: list[str] | None = None) -> Iterator[Verified]:
    """Compare values and gradients of every operation that has several backends with its float64 oracle.

    The operations are linear attention, the delta rule, decayed attention, the short convolution, the selective scan,
    dense layers and the write of a gated cache, each from non-zero states, with padding, at odd sizes; by every backend
    that runs on this machine, the C++ kernels with every instruction set that the processor has. operations: the first
    words of those that are wanted; by default all. Cost: some seconds. Raises InputError for an unknown operation.
    """
    known = {case.operation: case for case in cases()}
    wanted = [name for name in known if operations is None or any(map(name.startswith, operations))]
    if not wanted:
        raise InputError(f"verify: expected operations of {', '.join(known)}, found {operations}")
    # avx512bf16 has the kernels of avx512 but for products of bfloat16
    variants = [name for name in native.instruction_sets() if name != "avx512bf16"]
    for case in map(known.__getitem__, wanted):
        expected = _with_gradients(case.inputs, case.oracle, torch.float64)
        for backend in case.backends:
            for variant, (dtype, bound) in product(variants if backend == "native" else [""], BOUNDS.items()):
                with native.instruction_set(variant) if variant else contextlib.nullcontext():
                    try:
                        found = _with_gradients(case.inputs, partial(case.call, backend=backend), dtype)
                    except InputError:  # the backend does not take this type
                        continue
                values, gradients = (_distance(a, b) for a, b in zip(found, expected, strict=True))
                name = str(dtype).removeprefix("torch.")
                yield Verified(case.operation, f"{backend} {variant}".strip(), name, values, gradients, bound)


def _with_gradients(inputs: Inputs, call: Callable[..., Outputs], dtype: torch.dtype) -> tuple[Outputs, Outputs]:
    """Outputs, and the gradients of their weighted sum, of all inputs."""
    leaves = {name: x.to(dtype).detach().requires_grad_() for name, x in inputs.items()}
    outputs = call(**leaves)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
    return tuple(y.detach() for y in outputs), gradients


def _distance(found: Outputs, expected: Outputs) -> float:
    """The largest difference of all tensors, each relative to its largest number; NaN where one is not a number."""
    worst = torch.zeros((), dtype=torch.float64)
    for a, b in zip(found, expected, strict=True):
        difference = (a.double() - b.double()).abs().max() / max(1.0, float(b.abs().max()))
        worst = torch.maximum(worst, difference)  # NaN stays
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
    every: list[Case] = []

    def add(name: str, inputs: Inputs, oracle: Callable[..., Any], operator: Callable[..., Any], **more: Any) -> None:
        call = partial(operator, mask=mask, **more)
        every.append(Case(name, inputs, partial(oracle, mask=mask, **more), call, ops.backends(operator.__name__)))

    # --- linear attention: its state is a pair ---
    qkv = {"q": normal(B, T, H, D), "k": normal(B, T, H, D) / D**0.5, "v": normal(B, T, H, M)}
    sums = {"s": uniform(B, H, D, M), "z": uniform(B, H, D)}

    def linear(name: str, causal: bool, schedule: Callable[..., Any]) -> None:
        def oracle(s: Tensor, z: Tensor, **x: Any) -> Outputs:
            result: Outputs = reference_linear_attention(**x, schedule=schedule, state=(s, z), mask=mask)
            return result

        def call(s: Tensor, z: Tensor, backend: str, **x: Any) -> Outputs:
            state = LinearState(s, z)
            y, end = ops.linear_attention(**x, causal=causal, state=state, mask=mask, backend=backend)
            return y, *end

        every.append(Case(name, qkv | sums, oracle, call, ops.backends("linear_attention")))

    linear("linear_attention", True, reference_causal)
    linear("linear_attention (both directions)", False, reference_bidirectional)

    # --- the family that forgets and corrects ---
    beta, state = {"beta": uniform(B, T, H)}, {"state": normal(B, H, D, M)}
    decay, channels = {"decay": -3 * uniform(B, T, H) ** 3}, {"decay": -3 * uniform(B, T, H, D) ** 3}
    decayed = partial(reference_delta_rule, beta=None)
    add("delta_rule", qkv | beta | state, reference_delta_rule, ops.delta_rule)
    add("delta_rule (decay)", qkv | beta | decay | state, reference_delta_rule, ops.delta_rule)
    add("delta_rule (decay per channel)", qkv | beta | channels | state, reference_delta_rule, ops.delta_rule)
    add("decayed_attention", qkv | decay | state, decayed, ops.decayed_attention)
    add("decayed_attention (per channel)", qkv | channels | state, decayed, ops.decayed_attention)

    # --- Mamba's two ---
    taps = {"x": normal(B, T, 9), "weight": normal(9, 4), "bias": normal(9), "state": normal(B, 3, 9)}
    add("short_convolution", taps, reference_short_convolution, ops.short_convolution, activation="silu")
    rates, skips = {"A": -3 * uniform(9, D)}, {"D": normal(9), "state": normal(B, 9, D)}
    steps = {"x": normal(B, T, 9), "dt": uniform(B, T, 9), "B": normal(B, T, D), "C": normal(B, T, D)}
    add("selective_scan", steps | rates | skips, reference_selective_scan, ops.selective_scan)

    # --- dense layers ---
    layer = {"x": normal(B, T, 9), "weight": normal(7, 9), "bias": normal(7)}
    every.append(Case("dense", layer, _sums, _dense, ops.backends("dense")))

    # --- the write of a gated cache ---
    width = 7
    gates = {"source": normal(B, 5, width), "cache": normal(B, 5, width)}
    gates |= {f"{part}_{gate}": normal(width, *[2 * width] * (part == "W")) / 3 for gate in "urc" for part in "Wb"}
    every.append(Case("gated cache", gates, _gates, _write, [*(["native"] if native.library() else []), "pytorch"]))
    return every


def _sums(x: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    return ((x[..., None, :] * weight).sum(-1) + bias,)


def _dense(x: Tensor, weight: Tensor, bias: Tensor, backend: str) -> Outputs:
    """The backend itself: `dense` leaves products as small as this one to PyTorch."""
    if backend == "onednn" and x.dtype != torch.float32:
        raise InputError("oneDNN computes float32")
    return (dense_layer.BACKENDS.by_name[backend].run(x, weight, bias),)


def _gates(source: Tensor, cache: Tensor, **weights: Tensor) -> Outputs:
    return (torch.stack([reference_update(s, c, weights) for s, c in zip(source, cache, strict=True)]),)


def _write(source: Tensor, cache: Tensor, backend: str, **weights: Tensor) -> Outputs:
    """`write`: with the gates observed it computes in PyTorch's operations."""
    if backend == "native" and source.dtype != torch.float32:
        raise InputError("the kernel is for float32")
    ordered = [weights[name] for name in ("W_u", "b_u", "W_r", "b_r", "W_c", "b_c")]
    observe = None if backend == "native" else lambda gates: None
    return (write(source, cache, (*ordered, None, None), observe=observe).new,)
