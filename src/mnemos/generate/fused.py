"""The fused decoding step: one token through all layers of a model in one call of a C++ kernel.

Decoding a token by `model(x, state)` spends most of its time on starting operations: at dim 256 and 8 layers several
times as long as reading the weights, which is the lower bound. The kernel (native/decoder/decode.cpp) computes all
layers in one call. The state is the model's own.

From top to bottom: `FusedStep`, which hands the kernel the addresses of weights (`_lay_out`) and of a state (`_step`);
what each attention says of itself, by three classes: running sums, layers that forget, keys and values; and for which
models there is a kernel.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import native
from mnemos._compat import (
    dispatch_mode_active,
    function_mode_active,
    hooks_of,
    is_plain,
    is_plain_tensor,
    parameters_of,
    pre_hooks_of,
    transformed,
    write_count,
)
from mnemos.attention.linear import LinearAttention, PlacedSums
from mnemos.attention.recurrent import (
    RANK,
    DeltaAttention,
    GatedLinearAttention,
    Mamba2Attention,
    RecurrentSums,
    Retention,
)
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.config import ModelConfig
from mnemos.errors import near_arguments
from mnemos.memory.key_values import BranchedKeyValues, Encoded, KeyValues
from mnemos.models.encoder_decoder import EncoderDecoder, EncoderDecoderState
from mnemos.models.store import skeleton
from mnemos.models.transformer import Transformer, TransformerState
from mnemos.native import codes, library, why_not
from mnemos.ops.dense_layer import Linear
from mnemos.ops.linear import LinearState
from mnemos.ops.linear.feature_maps import FEATURE_MAPS
from mnemos.ops.positions import frequencies
from mnemos.types import InputError, Output, State, likelihood_of

ROWS = 160  # for more rows PyTorch's matrix products are faster, with weights in float32
MAPS = [name for name in codes.FEATURE_MAPS if name in FEATURE_MAPS]  # those that the kernel has
FLOAT32_CPU: Any = {"dtype": torch.float32, "device": "cpu"}  # explicit: the defaults may differ
STACK = native.layout(
    "Stack",
    "layers width heads mlp vocabulary hidden outputs post rms activation gated map position limit weights attention "
    "reads key_heads key_width value_width decay doubled rank embedding positions frequencies turns "
    "final_norm:3 before_head:3 head:3",
)
LAYER = native.layout(
    "Layer",
    "attention_norm:3 qkv:3 output:3 read_norm:3 query:3 read_output:3 mlp_norm:3 gate:3 expand:3 contract:3 "
    "to_decay:3 to_gate:3 recurrent:6",
)
STEP = native.layout("Step", "rows threads tokens stride seen logits own:4 source:4")
MEMORY = native.layout("Memory", "sums:4 own:5 source:5 window:2")
NO_SUMS, NO_KEYS, NO_WINDOW = [0] * 4, [0] * 5, [0] * 2  # `Sums`, `Keys` and `Window` of native/decoder/decode.h
NOTHING = [0, 0, 1, 0]  # a `Visible` without entries

DecodeStep = Callable[[Tensor, State], Output]  # tokens [R, 1] and a state -> outputs [R, 1, V] and the new state


@near_arguments
def fused_step(model: nn.Module, weights: str = "float32") -> "FusedStep":
    """A faster `model(x, state)` for single tokens, without gradient: `logits, state = fused_step(model)(x, state)`.

    x [B, 1] int64; state: of the model or of an earlier step (None: new sequences), never changed. Logits and state
    equal the model's to rounding, so a stream may change between the two at any token.

    A fused kernel exists for a `mnemos.Transformer`, and for the decoder of a `mnemos.EncoderDecoder`, with linear
    attention (feature maps "elu" and "relu"), softmax attention or a layer that forgets (the delta rule and its family,
    GLA, retention, Mamba-2) in float32 on the CPU: then `step.fused` is True. It uses `torch.get_num_threads()`
    threads. Cost per token: reading the weights and the state once; the state has the same size however many tokens
    came before, except with softmax attention. For other models `step.why` says why there is no kernel, and the step
    calls the model. It also calls the model for several tokens, for the first token of softmax attention, more than
    `ROWS` rows with weights in float32, under autocast, and in training with dropout.

    weights: "float32"; "bfloat16" or "int8" for a copy of the matrices in 16 bits, or in 8 bits with one scale per row
    (its largest absolute value / 127). Few rows are bound by reading the weights, so they take a half and a quarter of
    the bytes; sums, activations, norms, biases, embeddings and the state stay float32. Distributions then differ from
    the model's, in a small random model by less than 1e-4 and 1e-3 bits a token. Calls that the kernel does not compute
    use the model's own weights.

    Weights may change in place, or move, between steps. A copy is made again after a change that PyTorch counts, so not
    after one through `.data` or by an optimiser with `fused=True`, which recipes use: make a new step after training.
    Hooks that are there when it is called make the model compute. Modules are checked when the step is made: make a new
    one after changing them.
    Raises InputError for inputs that the model refuses, and for other `weights`.
    """
    return FusedStep(model, weights)


class Laid(NamedTuple):
    """The weights as the kernel reads them. It is replaced as a whole: another thread may still read the one before."""

    pointers: list[Any]  # what it was made of
    why: str  # why the kernel cannot read them; "": it can
    alive: Sequence[Tensor | None] = ()  # what the addresses belong to
    stack: bytes = b""
    layers: bytes = b""
    numbers: Any = None


class FusedStep:
    """See `fused_step`. fused: whether the kernel computes the step; why: if not, the reason in one line."""

    def __init__(self, model: nn.Module, weights: str = "float32") -> None:
        if weights not in codes.WEIGHTS:
            raise InputError(f"expected weights of {', '.join(codes.WEIGHTS)}, found {weights!r}")
        self.model, self.weights = model, weights
        self.why = why_not_fused(model)
        self.most_rows = ROWS if weights == "float32" else sys.maxsize  # that the kernel computes
        self._laid: Laid | None = None
        if not self.why:
            blocks: Any = model.decoder if isinstance(model, EncoderDecoder) else model.blocks
            self.layer = layer_of(blocks[0].attention)
            parts = [part for name, part in model.named_modules() if not _encodes(name)]
            self._hooks = [hooks(part) for part in parts for hooks in (hooks_of, pre_hooks_of)]  # live mappings
            config: Any = model.config
            self._drops = parts if config.dropout else []  # that may be in training mode, each by itself
            self._where = [(parameters, name) for parameters in map(parameters_of, parts) for name in parameters]
            self._shapes = [None if (p := parameters[name]) is None else p.shape for parameters, name in self._where]
            self._locate()

    def __getstate__(self) -> dict[str, Any]:
        """The model: addresses of its weights are of use only here, so a copy finds its own."""
        return {"model": self.model, "weights": self.weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def fused(self) -> bool:
        """Whether the kernel computes the step."""
        return not self.why

    @torch.no_grad()
    def __call__(self, x: Tensor, state: State = None) -> Output:
        """x [B, 1] -> logits [B, 1, V] (a classifier: [B, classes]) and the state after it."""
        if self._laid is not None and x.dim() == 2 and x.shape[1] == 1 and 0 < x.shape[0] <= self.most_rows:
            laid = self._locate()
            # The kernel takes plain tokens on the CPU, without autocast, function transforms or modes.
            plain = type(x) is Tensor and x.dtype == torch.int64 and x.device.type == "cpu"
            plain = plain and not torch.is_autocast_enabled("cpu") and not transformed()
            plain = plain and not dispatch_mode_active() and not function_mode_active()
            plain = plain and not any(self._hooks)
            if not laid.why and plain and not any([part.training for part in self._drops]):
                output = self._step(x, state, laid)
                if output is not None:
                    return output
        return self.model(x, state)

    def _locate(self) -> Laid:
        """Read the addresses of the weights; check and lay them out again if one has changed."""
        # A weight that was transposed in place keeps its address: -1 makes the comparison below fail.
        pointers: list[Any] = [
            0 if (p := parameters.get(name)) is None else p.data_ptr() if p.is_contiguous() else -1
            for parameters, name in self._where
        ]
        if self.weights != "float32":  # copies of weights are old after a write
            pointers += [_writes(parameters.get(name)) for parameters, name in self._where]
        laid = self._laid
        if laid is None or pointers != laid.pointers or None in pointers:
            # References keep the memory from reuse: another tensor at an old address would pass for the weight.
            alive = [None if (p := parameters.get(n)) is None else p.detach() for parameters, n in self._where]
            why = next((w for p, e in zip(alive, self._shapes, strict=True) if (w := _why_not_weight(p, e))), "")
            laid = Laid(pointers, why, alive) if why else Laid(pointers, "", *self._lay_out(self.model, alive))
            self._laid, self.why = laid, why
        return laid

    def _lay_out(self, model: Any, alive: list[Tensor | None]) -> tuple[list[Tensor | None], bytes, bytes, Any]:
        """Sizes and addresses, in the order of the structs of native/decoder/decode.h."""
        c, self._reads, layer = model.config, isinstance(model, EncoderDecoder), self.layer
        blocks = model.decoder if self._reads else model.blocks
        self._count = len(blocks)
        self._heads = c.num_heads, c.dim // c.num_heads

        def affine(*modules: nn.Module | None) -> list[int]:
            """An `Affine` of each linear layer or norm: weight, bias, scale of the weight; zeros if it is not there."""
            words: list[int] = []
            for one in modules:
                weight, scale = getattr(one, "weight", None), None
                if isinstance(one, nn.Linear) and self.weights != "float32":
                    weight, scale = _convert(one.weight.detach(), self.weights)
                    alive.extend((weight, scale))
                words += [_address(weight), _address(getattr(one, "bias", None)), _address(scale)]
            return words

        # --- `Stack` and `Numbers`: sizes, what the model computes, and weights outside the layers ---
        head = [part for part in model.head.modules() if isinstance(part, nn.Linear)]
        outputs, hidden = head[-1].out_features, head[0].out_features if head[1:] else 0
        self._outputs = (1, outputs) if self._reads or not c.head.classes else (outputs,)
        gated = c.activation == "swiglu"
        activation = codes.ACTIVATIONS["silu" if gated else c.activation]
        position = c.position if self._reads else c.resolved_position
        sizes = [len(blocks), c.dim, c.num_heads, c.mlp, c.vocab_size, hidden, outputs]
        sizes += [int(c.norm == "post"), int(c.norm == "rms"), activation, int(gated), layer.map]
        sizes += [codes.POSITIONS[position], c.max_length, codes.WEIGHTS[self.weights], layer.code]
        sizes += [int(self._reads), *layer.recurrent]
        scale = (c.dim**0.5 if c.scale_embedding else 1.0) if self._reads else c.embedding_scale
        numbers = (ctypes.c_double * 3)(blocks[0].mlp_norm.eps, layer.eps, scale)
        rotary = c.rotary.frequencies(self._heads[1], "cpu") if position == "rotary" else None
        alive.append(turns := frequencies(c.dim, "cpu") if rotary is None else rotary)
        norm = model.decoder_norm if self._reads else model.final_norm
        positions = model.positions.weight if position == "learned" else None
        tables = [model.embedding.weight, positions, turns, layer.turns]
        ends = affine(None if c.norm == "post" else norm, head[0] if head[1:] else None, head[-1])
        stack = STACK.pack(*sizes, *map(_address, tables), *ends)
        # --- a `Layer` of each block ---
        layers = b""
        for block in blocks:
            attention, mlp = block.attention, block.mlp
            parts = [block.attention_norm, getattr(attention, "input", None) or attention.qkv, attention.output]
            read = block.reads[0] if self._reads else None
            parts += [None] * 3 if read is None else [block.read_norms[0], read.query, read.output]
            parts += [block.mlp_norm, getattr(mlp, "gate", None), mlp.expand, mlp.contract]
            parts += [getattr(attention, "to_decay", None), getattr(attention, "to_gate", None)]
            layers += LAYER.pack(*affine(*parts), *map(_address, layer_of(attention).vectors()))
        return alive, stack, layers, numbers

    def _step(self, x: Tensor, state: State, laid: Laid) -> Output | None:
        """The kernel's logits and state, or None for inputs that the model must handle or refuse."""
        rows, layer, source = len(x), self.layer, None
        # --- the states of the layers, and how many tokens they have read ---
        layers: tuple[Any, ...]
        if state is None and layer.sums and not self._reads:
            first = layer.attention.initial_state(rows, "cpu", torch.float32)
            layers, seen = (first,) * self._count, getattr(first, "seen", None)
        elif not isinstance(state, EncoderDecoderState if self._reads else TransformerState):
            return None
        else:
            layers, seen = state.layers, state.seen
            if len(layers) != self._count or seen is None or seen.shape != (rows,):
                return None
            if seen.dtype != torch.int64 or not seen.is_contiguous() or not is_literal(seen):
                return None
        # --- their addresses, and those of the states after them ---
        own = layer.read(layers, rows, seen)
        if own is None:
            return None
        if isinstance(state, EncoderDecoderState):
            source = read_source(state.source, (rows, *self._heads), self._count)
            if source is None:
                return None
        # --- the words of `Step` and of every `Memory` ---
        logits = torch.empty(rows, *self._outputs, **FLOAT32_CPU)
        step = [rows, torch.get_num_threads(), x.data_ptr(), x.stride(0), _address(seen), logits.data_ptr()]
        call = STEP.pack(*step, *own.visible, *(source.visible if source else NOTHING))
        memory = b"".join(
            MEMORY.pack(*sums, *keys, *(source.words[i][1] if source else NO_KEYS), *window)
            for i, (sums, keys, window) in enumerate(own.words)
        )
        loaded, instructions = native.load_kernels()
        if loaded.mnemos_decode(instructions, laid.stack, laid.layers, call, memory, laid.numbers):
            return None
        seen = torch.ones(rows, dtype=torch.int64, device="cpu") if seen is None else seen + 1
        if isinstance(state, EncoderDecoderState):
            return logits, state._replace(seen=seen, layers=own.after)
        return logits, TransformerState(seen, own.after)


def _address(p: Tensor | None) -> int:
    return 0 if p is None else p.data_ptr()


def _writes(p: Tensor | None) -> int | None:
    """The number of writes to a weight; None if it is unknown, and a copy must be made again."""
    return -1 if p is None else None if p.is_inference() else write_count(p)


def _convert(p: Tensor, weights: str) -> tuple[Tensor, Tensor | None]:
    """A matrix [out, in] in the kernel's numbers of fewer bits, and its scale per row [out] or None."""
    if weights == "bfloat16":  # as native/decoder/matrix.h reads: of every 32 columns 0, 16, 1, 17…
        padded = F.pad(p.to(torch.bfloat16), (0, -p.shape[1] % codes.PAIRS))
        return padded.unflatten(1, (-1, 2, codes.PAIRS // 2)).mT.contiguous(), None
    scale = p.abs().amax(1) / 127
    scale = torch.where(scale == 0, 1.0, scale)  # NaN stays, so that a row of a broken model is NaN
    return (p / scale[:, None]).round().to(torch.int8), scale


# --- What an attention says of itself, and how the kernel reads its state ---


class StateAddresses(NamedTuple):
    """What a step hands to the kernel of its memory, and the states that the kernel then completes.

    words: a `Sums`, a `Keys` and a `Window` per layer; visible: a `Visible`, of native/decoder/decode.h. after: the
    states after the token. alive: tensors made for this call to which addresses belong.
    """

    words: list[tuple[list[int], list[int], list[int]]]
    visible: list[int]
    after: tuple[State, ...]
    alive: tuple[Tensor, ...]


class FusedLayer:
    """What an attention says of itself to the kernel, and how the kernel reads its state."""

    code: int  # of native/decoder/decode.h
    sums = True  # whether a new row has a state
    map, eps = 0, 0.0
    recurrent = [0] * 6  # the numbers of `Stack` about a layer that forgets, in its order
    turns: Tensor | None = None  # frequencies of its own positions

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def why_not(self) -> str:
        """Why the kernel cannot compute this one; empty if it can."""
        return ""

    def settings(self) -> tuple[Any, ...]:
        """What all layers must have in common."""
        raise NotImplementedError

    def vectors(self) -> list[Tensor | None]:
        """The vectors of `Recurrent`, in its order; None for one that is not there."""
        return [None] * 6

    def read(self, layers: Sequence[Any], rows: int, seen: Tensor | None) -> StateAddresses | None:
        """The addresses; None where the kernel cannot read a state. seen [B]: of the model's state."""
        raise NotImplementedError


class RunningSums(FusedLayer):
    """Linear attention: s [B, H, D, D] and z [B, H, D]; with rotary positions each state counts its tokens too."""

    code = codes.ATTENTIONS["linear"]

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        phi = attention.feature_map
        self.eps = attention.eps
        self.map = next((codes.FEATURE_MAPS[name] for name in MAPS if phi in (name, FEATURE_MAPS[name])), -1)

    def why_not(self) -> str:
        backend = self.attention.backend
        if self.map < 0:
            return f"the kernel has the feature maps {' and '.join(MAPS)}, found {self.attention.feature_map!r}"
        if backend not in ("auto", "native"):
            return f"its attention is computed by the backend {backend!r}, and the kernel belongs to 'native'"
        return ""

    def settings(self) -> tuple[Any, ...]:
        return self.attention.num_heads, self.eps, self.attention.rotary, self.map

    def read(self, layers: Sequence[Any], rows: int, seen: Tensor | None) -> StateAddresses | None:
        heads, turned = self.attention.num_heads, self.attention.rotary is not None
        shape = rows, heads, self.attention.dim // heads, self.attention.dim // heads
        if turned:
            if not all(type(layer) is PlacedSums for layer in layers) or not _all_equal(seen, layers):
                return None
            layers = [layer.sums for layer in layers]
        for layer in layers:
            if type(layer) is not LinearState or layer.s.shape != shape or layer.z.shape != shape[:3]:
                return None
            if not _is_readable(layer.s) or not _is_readable(layer.z):
                return None
        n = len(layers)
        s, z = torch.empty(n, *shape, **FLOAT32_CPU), torch.empty(n, *shape[:3], **FLOAT32_CPU)
        after: tuple[Any, ...] = tuple(map(LinearState, s.unbind(), z.unbind()))
        words = [
            ([old.s.data_ptr(), old.z.data_ptr(), new.s.data_ptr(), new.z.data_ptr()], NO_KEYS, NO_WINDOW)
            for old, new in zip(layers, after, strict=True)
        ]
        if turned and seen is not None:
            later = seen + 1
            after = tuple(PlacedSums(sums, later) for sums in after)
        return StateAddresses(words, NOTHING, after, ())


class ForgettingSums(FusedLayer):
    """Layers that forget: s [B, H, D, M], with or without a convolution's window and a count of tokens."""

    classes: ClassVar[dict[type[nn.Module], tuple[int, str]]] = {
        DeltaAttention: (codes.ATTENTIONS["delta"], "none"),  # the layer says which decay
        GatedLinearAttention: (codes.ATTENTIONS["gla"], "channel"),
        Retention: (codes.ATTENTIONS["retention"], "head"),
        Mamba2Attention: (codes.ATTENTIONS["mamba2"], "head"),
    }

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.code, decay = self.classes[type(attention)]
        self.eps, w, delta = attention.norm.eps, attention.widths, isinstance(attention, DeltaAttention)
        rank = RANK if isinstance(attention, GatedLinearAttention) else 0
        self.recurrent = [w.key_heads, w.key_width, w.value_width, codes.DECAYS[attention.decay if delta else decay]]
        self.recurrent += [int(delta and attention.doubled_beta), rank]
        if type(attention) is Retention:
            self.turns = attention.rotary.frequencies(w.key_width, "cpu")

    def settings(self) -> tuple[Any, ...]:
        return self.attention.num_heads, self.eps, getattr(self.attention, "rotary", None), *self.recurrent

    def vectors(self) -> list[Tensor | None]:
        attention = self.attention
        convolution = getattr(attention, "convolution", None)
        vectors = [getattr(convolution, name, None) for name in ("weight", "bias")]
        vectors += [getattr(attention, name, None) for name in ("A_log", "dt_bias", "skip")]
        return [*vectors, attention.norm_weight if hasattr(attention, "norm_weight") else attention.norm.weight]

    def read(self, layers: Sequence[Any], rows: int, seen: Tensor | None) -> StateAddresses | None:
        shapes = self.attention.state_shapes(rows)
        for layer in layers:
            if type(layer) is not RecurrentSums or tuple(None if x is None else x.shape for x in layer) != shapes:
                return None
            if not _is_readable(layer.sums) or not (layer.window is None or _is_readable(layer.window)):
                return None
        of_sums, of_window, of_seen = shapes
        if of_seen is not None and not _all_equal(seen, layers):
            return None
        n = len(layers)
        sums = torch.empty(n, *of_sums, **FLOAT32_CPU).unbind()
        windows = [None] * n if of_window is None else torch.empty(n, *of_window, **FLOAT32_CPU).unbind()
        later = None if of_seen is None or seen is None else seen + 1
        after = tuple(RecurrentSums(s, w, later) for s, w in zip(sums, windows, strict=True))
        words = [
            ([old.sums.data_ptr(), 0, new.sums.data_ptr(), 0], NO_KEYS, [_address(old.window), _address(new.window)])
            for old, new in zip(layers, after, strict=True)
        ]
        return StateAddresses(words, NOTHING, after, ())


class Keys(FusedLayer):
    """Softmax attention, all of it or a window: keys and values, of every row or branched.

    The kernel has one number of entries and one set of marks for all layers.
    """

    code, sums = codes.ATTENTIONS["softmax"], False

    def why_not(self) -> str:
        if self.attention.kv_heads != self.attention.num_heads:
            return "its heads share keys and values, for which there is no kernel"
        if self.attention.query_norm is not None:
            return "its queries and keys are normalised, for which there is no kernel"
        return ""

    def settings(self) -> tuple[Any, ...]:
        return self.attention.num_heads, self.attention.rotary, self.attention.window

    def read(self, layers: Sequence[Any], rows: int, seen: Tensor | None) -> StateAddresses | None:
        heads, window, first = self.attention.num_heads, self.attention.window, layers[0]
        if type(first) not in (KeyValues, BranchedKeyValues) or len(first.seen) != rows:
            return None
        branched = type(first) is BranchedKeyValues
        marks = "visible" if branched else "valid"  # which entries a row attends to
        for layer in layers:
            if type(layer) is not type(first) or not layer.k.dtype == layer.v.dtype == torch.float32:
                return None
            shape = layer.k.shape
            if not shape[1] or shape[2:] != (heads, self.attention.dim // heads) or shape != layer.v.shape:
                return None
            if shape != first.k.shape or not is_literal(layer.k) or not is_literal(layer.v):
                return None
            if getattr(layer, marks).dtype != torch.bool or layer.seen.dtype != torch.int64:
                return None
            if layer is not first and not torch.equal(getattr(layer, marks), getattr(first, marks)):
                return None
        within = window is None or branched or first.is_packed()
        if not _all_equal(seen, layers) or not within:  # padding between tokens would count in the window
            return None
        visible = first.visible_after() if branched else None
        words, after, attended = [], [], None
        for layer in layers:
            new: Any = layer.with_room(visible, first.seen + 1) if branched else layer.with_room()
            read = new if window is None else new.last(window)
            after.append(new if window is None else new.last(window - 1))
            words.append((NO_SUMS, _keys(read.k, read.v), NO_WINDOW))
            attended = attended or read
        attends = getattr(attended, marks).contiguous()
        copies = first.copies if branched else 1
        return StateAddresses(words, [attends.data_ptr(), attends.shape[1], copies, 0], tuple(after), (attends,))


LAYERS: dict[type[nn.Module], type[FusedLayer]] = {
    LinearAttention: RunningSums,
    SoftmaxAttention: Keys,
    **dict.fromkeys(ForgettingSums.classes, ForgettingSums),
}


def layer_of(attention: Any) -> FusedLayer:
    """What an attention of one of these classes says of itself."""
    return LAYERS[type(attention)](attention)


def read_source(source: Encoded, shape: tuple[int, int, int], layers: int) -> StateAddresses | None:
    """For the attention to a source, of `shape`: rows, heads and their width; None where the kernel cannot read it."""
    rows, *heads = shape
    if len(source.layers) != layers or source.rows != rows or source.valid.dtype != torch.bool:
        return None
    words = []
    for k, v in source.layers:
        if [*k.shape[2:]] != heads or k.shape[:2] != source.valid.shape or not k.dtype == v.dtype == torch.float32:
            return None
        # One layout for both, whose last axis lies together.
        if k.shape != v.shape or k.stride() != v.stride() or not (k.stride(3) == 1 or k.shape[3] == 1):
            return None
        if not is_literal(k) or not is_literal(v):
            return None
        words.append((NO_SUMS, _keys(k, v), NO_WINDOW))
    marks = source.valid.contiguous()
    return StateAddresses(words, [marks.data_ptr(), marks.shape[1], source.copies, 1], (), (marks,))


def _keys(k: Tensor, v: Tensor) -> list[int]:
    return [k.data_ptr(), v.data_ptr(), *k.stride()[:3]]


def _all_equal(seen: Tensor | None, layers: Sequence[Any]) -> bool:
    """Whether every layer has read as many tokens as the model; a tensor that layers share is compared once."""
    counted = seen
    for layer in layers:
        if layer.seen is not counted and (counted is None or not torch.equal(layer.seen, counted)):
            return False
        counted = layer.seen
    return True


def _is_readable(x: Tensor) -> bool:
    """Whether the kernel can read it: float32 numbers that lie together on the CPU."""
    return x.dtype == torch.float32 and x.is_contiguous() and is_literal(x)


def is_literal(x: Tensor) -> bool:
    """Whether the tensor's memory on the CPU holds its numbers as they are."""
    return x.is_cpu and is_plain_tensor(x)


# --- For which models there is a kernel ---


def why_not_fused(model: nn.Module) -> str:
    """Why the kernel cannot compute this model, in one line; empty if it can."""
    if library() is None:
        return why_not()
    if type(model) not in (Transformer, EncoderDecoder):
        return f"the kernel needs a mnemos.Transformer or EncoderDecoder, found {type(model).__name__}"
    for name, part in model.named_modules():
        if not is_plain(part) and not _encodes(name):
            return f"there is a hook on {name or 'the model'}, or a forward of its own, which the kernel would skip"
    config: Any = model.config
    if getattr(config, "features", 0):
        return "it reads vectors, and the kernel reads tokens"
    if not config.mlp:
        return "its blocks have no MLP, for which there is no kernel"
    if likelihood_of(model) is not None and not isinstance(model.head, nn.Linear):
        return f"its head is {type(model.head).__name__}, and the kernel has linear heads"
    # --- attentions that the kernel has, with the same settings in every layer ---
    blocks: Any = model.decoder if isinstance(model, EncoderDecoder) else model.blocks
    first: Any = None
    for block in blocks:
        attention = block.attention
        if type(attention) not in LAYERS:
            names = [cls.__name__ for cls in LAYERS]
            return f"the kernel has {', '.join(names[:-1])} and {names[-1]}, found {type(attention).__name__}"
        if not attention.causal:
            return "its attention is not causal, so it has no state"
        layer = layer_of(attention)
        if why := layer.why_not():
            return why
        first = first or layer
        if type(attention) is not type(first.attention) or layer.settings() != first.settings():
            return "its layers' attention differs in kind, heads, eps, feature map, rotary positions or window"
    # --- modules as the configuration builds them; the head may have another number of outputs ---
    parts = {name: part for name, part in model.named_modules() if name and not _encodes(name)}
    for name, (cls, settings, words) in _expected(config).items():
        other = parts.pop(name, None)
        if cls is not _class(other) or (other.extra_repr() != settings and not name.startswith("head")):
            return f"{name}: its configuration says {words}, found {other}"
    return f"{next(iter(parts))}: a module that its configuration does not have" if parts else ""


def _why_not_weight(p: Tensor | None, shape: torch.Size | None) -> str:
    if p is None or shape is None:
        return "" if p is shape else "a bias was added or removed"
    if p.dtype != torch.float32 or p.device.type != "cpu":
        return f"the kernel needs torch.float32 on cpu, found weights of {p.dtype} on {p.device.type}"
    if p.shape != shape or not p.is_contiguous():
        return f"expected a contiguous weight of shape {tuple(shape)}, found {tuple(p.shape)}, strides {p.stride()}"
    return ""


def _encodes(name: str) -> bool:
    """Whether a module is of the encoder, which a step does not run."""
    return name.startswith(("encoder", "source_"))


@functools.lru_cache(maxsize=16)
def _expected(config: ModelConfig) -> dict[str, tuple[type, str, str]]:
    """The modules that a configuration builds, by their names: type, settings, and how they print."""
    modules = skeleton(config).named_modules()
    return {name: (_class(part), part.extra_repr(), str(part)) for name, part in modules if name and not _encodes(name)}


def _class(part: nn.Module | None) -> type:
    """A module's class; a linear layer of torch.nn is as good as one of ours."""
    return nn.Linear if type(part) is Linear else type(part)
