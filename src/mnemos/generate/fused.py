"""The fused decoding step: one token through all layers of a model in one call of a C++ kernel.

Decoding a token by `model(x, state)` spends most of its time on starting operations: at dim 256 and 8 layers several
times as long as reading the weights, which is the lower bound. The kernel (mnemos/native/decode.cpp) computes all
layers in one call. The state is the model's own.
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import native
from mnemos._compat import (
    dispatch_mode_active,
    function_mode_active,
    parameters_of,
    transformed,
    write_count,
)
from mnemos.attention.linear import PlacedSums
from mnemos.models.encoder_decoder import EncoderDecoderState
from mnemos.models.transformer import TransformerState
from mnemos.native import codes, library
from mnemos.ops.linear import LinearState
from mnemos.types import InputError, Output, State

from .fused_memory import (
    KIND,
    NO_KEYS,
    NO_SUMS,
    NOTHING,
    Prepared,
    is_literal,
    prepared_keys,
    prepared_source,
    prepared_sums,
)
from .fused_plan import plan_of, why_not_fused

ROWS = 160  # for more rows PyTorch's matrix products are faster, with weights in float32


def fused_step(model: nn.Module, weights: str = "float32") -> "FusedStep":
    """A faster `model(x, state)` for single tokens, without gradient: `logits, state = fused_step(model)(x, state)`.

    x [B, 1] int64; state: of the model or of an earlier step (None: new sequences), never changed. Logits and state
    equal the model's to rounding, so a stream may change between the two at any token.

    A fused kernel exists for a `mnemos.Transformer`, and for the decoder of a `mnemos.EncoderDecoder`, with linear
    attention (feature maps "elu" and "relu") or softmax attention in float32 on the CPU: then `step.fused` is True. It
    uses `torch.get_num_threads()` threads. Cost per token: reading the weights and the state once; with linear
    attention the state has the same size however many tokens came before. For other models `step.why` says why there
    is no kernel, and the step calls the model. It also calls the model for several tokens, for the first token of
    softmax attention, more than `ROWS` rows with weights in float32, under autocast, and in training with dropout.

    weights: "float32"; "bfloat16" or "int8" for a copy of the matrices in 16 bits, or in 8 bits with one scale per row
    (its largest absolute value / 127). Few rows are bound by reading the weights, so they take a half and a quarter of
    the bytes; sums, activations, norms, biases, embeddings and the state stay float32. Logits then differ from the
    model's: see docs/streams.md for how much. Calls that the kernel does not compute use the model's own weights.

    Weights may change in place, or move, between steps. A copy is made again after a change that PyTorch counts, so not
    after one through `.data` or by an optimiser with `fused=True`, which recipes use: make a new step after training.
    Modules and hooks are checked when the step is made: make a new one after changing them.
    Raises InputError for inputs that the model refuses, and for other `weights`.
    """
    return FusedStep(model, weights)


class FusedStep:
    """See `fused_step`. fused: whether the kernel computes the step; why: if not, the reason in one line."""

    def __init__(self, model: nn.Module, weights: str = "float32") -> None:
        if weights not in codes.WEIGHTS:
            raise InputError(f"expected weights of {', '.join(codes.WEIGHTS)}, found {weights!r}")
        self.model, self.weights = model, weights
        self.why = why_not_fused(model)
        self.most_rows = ROWS if weights == "float32" else sys.maxsize  # that the kernel computes
        self._pointers: list[Any] | None = None
        if not self.why:
            self._plan(model)
            self._locate()

    def __getstate__(self) -> dict[str, Any]:
        """The model: addresses of its weights are of use only here, so a copy finds its own."""
        return {"model": self.model, "weights": self.weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the step of the copied model."""
        self.__init__(**state)  # type: ignore[misc]

    @property
    def fused(self) -> bool:
        """Whether the kernel computes the step."""
        return not self.why

    @torch.no_grad()
    def __call__(self, x: Tensor, state: State = None) -> Output:
        """x [B, 1] -> logits [B, 1, V] (a classifier: [B, classes]) and the state after it."""
        if self._pointers is not None and x.dim() == 2 and x.shape[1] == 1 and 0 < x.shape[0] <= self.most_rows:
            self._locate()
            if not self.why and _takes(x) and not (self._drops and self.model.training):
                found = self._step(x, state)
                if found is not None:
                    return found
        return self.model(x, state)

    def _plan(self, model: Any) -> None:
        """Find the parameters: the tables, then weight and bias of each linear layer and norm."""
        self._drops = model.config.dropout > 0
        self.plan = plan = plan_of(model)
        tables = [table for table in (plan.embedding, plan.positions) if table is not None]
        affine = [part for part in plan.affine if part is not None]
        parts = [(table, "weight") for table in tables]
        parts += [(module, name) for module in affine for name in ("weight", "bias")]
        self._where = [(parameters_of(module), name) for module, name in parts]
        self._matrices = [isinstance(module, nn.Linear) and name == "weight" for module, name in parts]
        self._shapes = [None if (p := found.get(name)) is None else p.shape for found, name in self._where]
        self._numbers = (ctypes.c_double * 3)(*plan.numbers)

    def _locate(self) -> None:
        """Read the addresses of the weights; check and store them again if one has changed."""
        # A weight that was transposed in place keeps its address: -1 makes the comparison below fail.
        pointers: list[Any] = [
            0 if (p := found.get(name)) is None else p.data_ptr() if p.is_contiguous() else -1
            for found, name in self._where
        ]
        if self.weights != "float32":  # copies of weights are old after a write
            pointers += [
                _writes(found.get(name))
                for (found, name), is_matrix in zip(self._where, self._matrices, strict=True)
                if is_matrix
            ]
        if pointers == self._pointers and None not in pointers:
            return
        # References keep the memory from reuse: another tensor at an old address would pass for the weight.
        self._held = [None if (p := found.get(name)) is None else p.detach() for found, name in self._where]
        self._pointers = pointers
        self.why = next((w for p, e in zip(self._held, self._shapes, strict=True) if (w := _unfit(p, e))), "")
        if self.why:
            return
        self._copies = [
            _converted(p, self.weights) if is_matrix else (p, None)
            for p, is_matrix in zip(self._held, self._matrices, strict=True)
        ]
        rest = iter(self._copies)
        plan = self.plan
        embedding, positions = (_address(next(rest)[0]) if table else 0 for table in (plan.embedding, plan.positions))
        affine: list[list[int]] = []
        for part in plan.affine:
            (weight, scale), (bias, _) = ((None, None), (None, None)) if part is None else (next(rest), next(rest))
            affine.append([_address(weight), _address(bias), _address(scale)])
        numbers = [*plan.sizes, codes.WEIGHTS[self.weights], plan.attention, int(plan.reads)]
        numbers += [embedding, positions, plan.frequencies.data_ptr()]
        self._stack = _words([*numbers, *(word for words in affine[:3] for word in words)])
        self._layers = _words([word for words in affine[3:] for word in words])

    def _step(self, x: Tensor, state: State) -> Output | None:
        """The kernel's logits and state, or None for inputs that the model must handle or refuse."""
        plan, rows = self.plan, len(x)
        source: Prepared | None = None
        if state is None and not plan.attention and not plan.reads:
            sums = LinearState(*(torch.zeros(rows, *shape, **KIND) for shape in self._sums()))
            seen = torch.zeros(rows, dtype=torch.int64, device="cpu") if plan.turned_sums else None
            given: tuple[Any, ...] = (sums if seen is None else PlacedSums(sums, seen),) * plan.layers
        elif not isinstance(state, EncoderDecoderState if plan.reads else TransformerState):
            return None
        else:
            given, seen = state.layers, state.seen
            if len(given) != plan.layers or seen is None or not _counts(seen, rows):
                return None
        if isinstance(state, EncoderDecoderState):
            source = prepared_source(state.source, (rows, *plan.heads), plan.layers)
            if source is None:
                return None
        if plan.attention == codes.ATTENTIONS["softmax"] and seen is not None:
            own = prepared_keys(given, (rows, *plan.heads), plan.window, seen)
        else:
            own = prepared_sums(given, (rows, *self._sums()[0]), seen if plan.turned_sums else None)
        if own is None:
            return None
        logits = torch.empty(rows, *plan.outputs, **KIND)
        place = 0 if seen is None else seen.data_ptr()
        step = [rows, torch.get_num_threads(), x.data_ptr(), x.stride(0), place, logits.data_ptr()]
        step += [*own.visible, *(source.visible if source else NOTHING)]
        words: list[int] = []
        for i in range(plan.layers):
            words += [*NO_SUMS, *own.words[i]] if plan.attention else [*own.words[i], *NO_KEYS]
            words += source.words[i] if source else NO_KEYS
        loaded: Any = library()
        given_words = self._stack, self._layers, _words(step), _words(words), self._numbers
        if loaded.mnemos_decode(native.variant(loaded), *given_words):
            return None
        seen = torch.ones(rows, dtype=torch.int64, device="cpu") if seen is None else seen + 1
        if isinstance(state, EncoderDecoderState):
            return logits, state._replace(seen=seen, layers=own.layers)
        return logits, TransformerState(seen, own.layers)

    def _sums(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a row's running sums s and z."""
        heads, width = self.plan.heads
        return (heads, width, width), (heads, width)


def _words(numbers: list[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _address(p: Tensor | None) -> int:
    return 0 if p is None else p.data_ptr()


def _counts(seen: Tensor, rows: int) -> bool:
    return seen.shape == (rows,) and seen.dtype == torch.int64 and seen.is_contiguous() and is_literal(seen)


def _writes(p: Tensor | None) -> int | None:
    """The number of writes to a weight; None if it is unknown, and a copy must be made again."""
    return -1 if p is None else None if p.is_inference() else write_count(p)


def _converted(p: Tensor | None, weights: str) -> tuple[Tensor | None, Tensor | None]:
    """A matrix [out, in] in the kernel's numbers, and its scale per row [out] or None."""
    if p is None or weights == "float32":
        return p, None
    if weights == "bfloat16":
        return _paired(p.to(torch.bfloat16)), None
    scale = p.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (p / scale[:, None]).round().to(torch.int8), scale


def _paired(p: Tensor) -> Tensor:
    """A matrix [out, in] in the order that the kernel reads (native/matrix.h): in every 32 columns 0, 16, 1, 17, ..."""
    padded = nn.functional.pad(p, (0, -p.shape[1] % codes.PAIRS))
    return padded.unflatten(1, (-1, 2, codes.PAIRS // 2)).mT.contiguous()


def _takes(x: Tensor) -> bool:
    """Whether x is a plain tensor of tokens on the CPU, without autocast, function transforms or modes."""
    return (
        type(x) is Tensor
        and x.dtype == torch.int64
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not transformed()
        and not dispatch_mode_active()
        and not function_mode_active()
    )


def _unfit(p: Tensor | None, shape: torch.Size | None) -> str:
    if p is None or shape is None:
        return "" if p is shape else "a bias was added or removed"
    if p.dtype != torch.float32 or p.device.type != "cpu":
        return f"the kernel needs torch.float32 on cpu, found weights of {p.dtype} on {p.device.type}"
    if p.shape != shape or not p.is_contiguous():
        return f"expected a contiguous weight of shape {tuple(shape)}, found {tuple(p.shape)}, strides {p.stride()}"
    return ""
