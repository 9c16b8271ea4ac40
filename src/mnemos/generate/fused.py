"""The fused decoding step: one token through all layers of a linear transformer in one call of a C++ kernel.

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
    has_forward_hooks,
    has_global_forward_hooks,
    literal,
    parameters_of,
    transformed,
    write_count,
)
from mnemos.attention.linear import LinearAttention
from mnemos.models.skeleton import skeleton
from mnemos.models.transformer import Transformer, TransformerState
from mnemos.native import codes, library, why_not
from mnemos.ops.linear import LinearState
from mnemos.ops.linear.feature_maps import FEATURE_MAPS
from mnemos.ops.sinusoids import frequencies
from mnemos.types import InputError, Output, likelihood_of

MAPS = [name for name in codes.FEATURE_MAPS if name in FEATURE_MAPS]  # those that the kernel has
_KIND: Any = {"dtype": torch.float32, "device": "cpu"}  # explicit: the defaults may differ
ROWS = 160  # for more rows PyTorch's matrix products are faster, with weights in float32


def fused_step(model: nn.Module, weights: str = "float32") -> "FusedStep":
    """A faster `model(x, state)` for single tokens, without gradient: `logits, state = fused_step(model)(x, state)`.

    x [B, 1] int64; state: of the model or of an earlier step (None: new sequences), never changed. Logits and state
    equal the model's to rounding, so a stream may change between the two at any token.

    A fused kernel exists for a `mnemos.Transformer` with linear attention (feature maps "elu" and "relu") in float32 on
    the CPU: then `step.fused` is True. It uses `torch.get_num_threads()` threads. Cost per token: reading the weights
    and the state once, however many tokens came before. For other models `step.why` says why there is no kernel, and
    the step calls the model. It also calls the model for several tokens, more than `ROWS` rows with weights in float32,
    under autocast, and in training with dropout.

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
        self.why = _why_not(model)
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
    def __call__(self, x: Tensor, state: TransformerState | None = None) -> Output:
        """x [B, 1] -> logits [B, 1, V] (a classifier: [B, classes]) and the state after it."""
        if self._pointers is not None and x.dim() == 2 and x.shape[1] == 1 and 0 < x.shape[0] <= self._most:
            self._locate()
            if not self.why and _takes(x) and not (self._drops and self.model.training):
                found = self._step(x, state)
                if found is not None:
                    return found
        return self.model(x, state)

    def _plan(self, model: Any) -> None:
        """Find the parameters and the sizes, in the order of `Stack` and `Layer` of native/decode.h."""
        c, attention = model.config, model.blocks[0].attention
        self._drops = c.dropout > 0
        self._shape = (c.num_heads, c.dim // c.num_heads, c.dim // c.num_heads)
        self._eps = model.blocks[0].mlp_norm.eps, attention.eps
        head = [part for part in model.head.modules() if isinstance(part, nn.Linear)]
        parts = [(model.embedding, "weight"), *([(model.positions, "weight")] if c.position == "learned" else [])]
        affine = [model.final_norm] if c.norm == "pre" else []
        affine += head
        for block in model.blocks:
            affine += [block.attention_norm, block.attention.qkv, block.attention.output]
            affine += [block.mlp_norm, block.mlp.expand, block.mlp.contract]
        parts += [(module, name) for module in affine for name in ("weight", "bias")]
        self._where = [(parameters_of(module), name) for module, name in parts]
        self._matrices = [isinstance(module, nn.Linear) and name == "weight" for module, name in parts]
        self._most = ROWS if self.weights == "float32" else sys.maxsize
        self._shapes = [None if (p := found[name]) is None else p.shape for found, name in self._where]
        self._frequencies = frequencies(c.dim, "cpu")
        outputs = head[-1].out_features
        self._outputs = (outputs,) if c.head.classes else (1, outputs)
        kinds = (c.norm == "post", c.activation == "gelu", _map(attention), codes.POSITIONS[c.position])
        sizes = (c.layers, c.dim, c.num_heads, c.mlp, c.vocab_size, head[0].out_features if head[1:] else 0, outputs)
        self._sizes = (*sizes, *map(int, kinds), c.max_length, codes.WEIGHTS[self.weights])

    def _locate(self) -> None:
        """Read the addresses of the weights; check and store them again if one has changed."""
        # A weight that was transposed in place keeps its address: -1 makes the comparison below fail.
        pointers: list[Any] = [
            0 if (p := found[name]) is None else p.data_ptr() if p.is_contiguous() else -1
            for found, name in self._where
        ]
        if self.weights != "float32":  # copies of weights are old after a write
            pointers += [
                _writes(found[name])
                for (found, name), is_matrix in zip(self._where, self._matrices, strict=True)
                if is_matrix
            ]
        if pointers == self._pointers and None not in pointers:
            return
        # References keep the memory from reuse: another tensor at an old address would pass for the weight.
        self._held = [None if (p := found[name]) is None else p.detach() for found, name in self._where]
        self._pointers = pointers
        self.why = next((w for p, e in zip(self._held, self._shapes, strict=True) if (w := _unfit(p, e))), "")
        if self.why:
            return
        copies = [
            _converted(p, self.weights) if is_matrix else (p, None)
            for p, is_matrix in zip(self._held, self._matrices, strict=True)
        ]
        self._copies = copies
        learned, pre, deep = self._sizes[10] == codes.POSITIONS["learned"], not self._sizes[7], self._sizes[5] > 0
        single, rest = copies[: 1 + learned], iter(copies[1 + learned :])
        tables = [0 if p is None else p.data_ptr() for p, _ in single]
        affine = [
            [0 if p is None else p.data_ptr() for p in (weight, bias, scale)]
            for (weight, scale), (bias, _) in zip(rest, rest, strict=True)
        ]
        parts = iter(affine)
        numbers = [*self._sizes, tables[0], tables[1] if learned else 0, self._frequencies.data_ptr()]
        for there in (pre, deep, True):  # final norm, the head's hidden layer, the head
            numbers += next(parts) if there else [0, 0, 0]
        self._stack = (ctypes.c_int64 * len(numbers))(*numbers)
        layers = [word for words in parts for word in words]
        self._layers = (ctypes.c_int64 * len(layers))(*layers)

    def _step(self, x: Tensor, state: TransformerState | None) -> Output | None:
        """The kernel's logits and state, or None for inputs that the model must handle or refuse."""
        b, layers = x.shape[0], self._sizes[0]
        h, d, m = self._shape
        if state is None:
            nothing = LinearState(torch.zeros(b, h, d, m, **_KIND), torch.zeros(b, h, d, **_KIND))
            given, seen = (nothing,) * layers, None
        else:
            if not isinstance(state, TransformerState):
                return None
            given, seen = state.layers, state.seen
            if not _fits(state, layers, (b, h, d, m)):
                return None
        s, z = torch.empty(layers, b, h, d, m, **_KIND), torch.empty(layers, b, h, d, **_KIND)
        new = tuple(map(LinearState, s.unbind(), z.unbind()))
        sums = [x.data_ptr() for pair in zip(given, new, strict=True) for layer in pair for x in layer]
        logits = torch.empty(b, *self._outputs, **_KIND)
        threads = torch.get_num_threads()
        place = 0 if seen is None else seen.data_ptr()
        step = (ctypes.c_int64 * 6)(b, threads, x.data_ptr(), x.stride(0), place, logits.data_ptr())
        loaded: Any = library()
        words = (ctypes.c_int64 * len(sums))(*sums)
        if loaded.mnemos_decode(native.variant(loaded), self._stack, self._layers, step, words, *self._eps):
            return None
        one = torch.ones(b, dtype=torch.int64, device="cpu")
        return logits, TransformerState(one if seen is None else seen + one, new)


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


def _fits(state: TransformerState, layers: int, shape: tuple[int, ...]) -> bool:
    """Whether the state's tensors have the shapes, types and layout that the kernel reads."""
    seen = state.seen
    if seen is None or seen.shape != shape[:1] or seen.dtype != torch.int64 or not _plain(seen):
        return False
    if len(state.layers) != layers or any(type(layer) is not LinearState for layer in state.layers):
        return False
    return all(
        s.shape == shape and z.shape == shape[:3] and s.dtype == z.dtype == torch.float32 and _plain(s) and _plain(z)
        for s, z in state.layers
    )


def _plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.is_cpu and literal(x)


def _unfit(p: Tensor | None, shape: torch.Size | None) -> str:
    if p is None or shape is None:
        return "" if p is shape else "a bias was added or removed"
    if p.dtype != torch.float32 or p.device.type != "cpu":
        return f"the kernel needs torch.float32 on cpu, found weights of {p.dtype} on {p.device.type}"
    if p.shape != shape or not p.is_contiguous():
        return f"expected a contiguous weight of shape {tuple(shape)}, found {tuple(p.shape)}, strides {p.stride()}"
    return ""


def _why_not(model: nn.Module) -> str:
    """Why the kernel cannot compute this model, in one line; empty if it can."""
    if library() is None:
        return why_not()
    if type(model) is not Transformer:
        return f"the kernel needs a mnemos.Transformer, found {type(model).__name__}"
    if has_global_forward_hooks():
        return "there are hooks on the forward of all modules, which the kernel would skip"
    for name, part in model.named_modules():
        if has_forward_hooks(part):
            return f"there is a hook on {name or 'the model'}, which the kernel would skip"
    if model.config.activation not in ("gelu", "relu"):
        return f"the kernel has the activations gelu and relu, found {model.config.activation}"
    if not model.config.mlp:
        return "its blocks have no MLP, for which there is no kernel"
    if likelihood_of(model) is not None and not isinstance(model.head, nn.Linear):
        return f"its head is {type(model.head).__name__}, and the kernel has linear heads"
    return next((why for block in model.blocks if (why := _attends(block, model.blocks[0]))), "") or _differs(model)


def _attends(block: nn.Module, first: Any) -> str:
    attention: Any = block.attention
    if type(attention) is not LinearAttention:
        return f"the kernel needs LinearAttention, found {type(attention).__name__}"
    if not attention.causal:
        return "its attention is not causal, so it has no state"
    if _map(attention) is None:
        return f"the kernel has the feature maps {' and '.join(MAPS)}, found {attention.feature_map!r}"
    if attention.compensated:
        return "its state is compensated, for which there is no kernel"
    if attention.backend not in ("auto", "native"):
        return f"its attention is computed by the backend {attention.backend!r}, and the kernel belongs to 'native'"
    settings = [(a.num_heads, a.eps, _map(a)) for a in (attention, first.attention)]
    return "" if settings[0] == settings[1] else "its layers' attention differs in heads, eps or feature map"


def _map(attention: LinearAttention) -> int | None:
    """The kernel's code of a feature map, None if it has none."""
    found = attention.feature_map
    return next((codes.FEATURE_MAPS[name] for name in MAPS if found in (name, FEATURE_MAPS[name])), None)


def _differs(model: Any) -> str:
    """The first part that is not as the configuration builds it; the head may have another number of outputs."""
    expected = skeleton(model.config).named_modules()
    found = dict(model.named_modules())
    for name, part in expected:
        other = found.pop(name, None)
        if type(part) is not type(other) or (part.extra_repr() != other.extra_repr() and not name.startswith("head")):
            return f"{name}: its configuration says {part}, found {other}"
    return f"{next(iter(found))}: a module that its configuration does not have" if found else ""
