"""The fused decoding step: one token through all layers of a model in one call of a C++ kernel.

Decoding a token by `model(x, state)` spends most of its time on starting operations: at dim 256 and 8 layers several
times as long as reading the weights, which is the lower bound. The kernel (mnemos/native/decode.cpp) computes all
layers in one call. The state is the model's own. `Plan` says where the kernel finds a model's sizes and weights,
`Prepared` how it reads and writes the memory: running sums, with or without a convolution's window, or keys and values.
"""

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos import native
from mnemos._compat import (
    dispatch_mode_active,
    function_mode_active,
    is_plain,
    is_plain_tensor,
    parameters_of,
    transformed,
    write_count,
)
from mnemos.attention.linear import LinearAttention, PlacedSums
from mnemos.attention.recurrent import (
    RANK,
    DeltaAttention,
    GatedLinearAttention,
    Mamba2Attention,
    RecurrentAttention,
    RecurrentSums,
    Retention,
    Shapes,
)
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.config import ModelConfig
from mnemos.memory.key_values import BranchedKeyValues, Encoded, KeyValues
from mnemos.models.encoder_decoder import EncoderDecoder, EncoderDecoderState
from mnemos.models.skeleton import skeleton
from mnemos.models.transformer import Transformer, TransformerState
from mnemos.native import codes, library, why_not
from mnemos.ops.linear import LinearState
from mnemos.ops.linear.feature_maps import FEATURE_MAPS
from mnemos.ops.sinusoids import frequencies
from mnemos.types import InputError, Output, State, likelihood_of

ROWS = 160  # for more rows PyTorch's matrix products are faster, with weights in float32
MAPS = [name for name in codes.FEATURE_MAPS if name in FEATURE_MAPS]  # those that the kernel has
KINDS: dict[type[nn.Module], str] = {
    LinearAttention: "linear",
    SoftmaxAttention: "softmax",
    DeltaAttention: "delta",
    GatedLinearAttention: "gla",
    Retention: "retention",
    Mamba2Attention: "mamba2",
}
DECAYS = {GatedLinearAttention: "channel", Retention: "head", Mamba2Attention: "head"}
FLOAT32_CPU: Any = {"dtype": torch.float32, "device": "cpu"}  # explicit: the defaults may differ
NO_SUMS, NO_KEYS, NO_WINDOW = [0] * 4, [0] * 5, [0] * 2  # `Sums`, `Keys` and `Window` of native/decode.h
NOTHING = [0, 0, 1, 0]  # a `Visible` without entries


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
        parts += [one for one in plan.vectors if one is not None]
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
        self.why = next((w for p, e in zip(self._held, self._shapes, strict=True) if (w := _why_not_weight(p, e))), "")
        if self.why:
            return
        self._copies = [
            _convert(p, self.weights) if is_matrix else (p, None)
            for p, is_matrix in zip(self._held, self._matrices, strict=True)
        ]
        rest = iter(self._copies)
        plan = self.plan
        embedding, positions = (_address(next(rest)[0]) if table else 0 for table in (plan.embedding, plan.positions))
        affine: list[list[int]] = []
        for part in plan.affine:
            (weight, scale), (bias, _) = ((None, None), (None, None)) if part is None else (next(rest), next(rest))
            affine.append([_address(weight), _address(bias), _address(scale)])
        vectors = [0 if one is None else _address(next(rest)[0]) for one in plan.vectors]
        each = len(vectors) // plan.layers
        numbers = [*plan.sizes, codes.WEIGHTS[self.weights], plan.attention, int(plan.reads), *plan.recurrent]
        numbers += [embedding, positions, plan.frequencies.data_ptr(), _address(plan.turns)]
        self._stack = _words([*numbers, *(word for words in affine[:3] for word in words)])
        count = len(affine[3:]) // plan.layers
        self._layers = _words(
            [
                word
                for i in range(plan.layers)
                for words in (*affine[3 + count * i : 3 + count * (i + 1)], vectors[each * i : each * (i + 1)])
                for word in words
            ]
        )

    def _step(self, x: Tensor, state: State) -> Output | None:
        """The kernel's logits and state, or None for inputs that the model must handle or refuse."""
        plan, rows = self.plan, len(x)
        source: Prepared | None = None
        given: tuple[Any, ...]
        if state is None and plan.forgets and not plan.reads:
            given = (plan.block.attention.initial_state(rows, "cpu", torch.float32),) * plan.layers
            seen = given[0].seen
        elif state is None and not plan.attention and not plan.reads:
            sums = LinearState(*(torch.zeros(rows, *shape, **FLOAT32_CPU) for shape in self._sums()))
            seen = torch.zeros(rows, dtype=torch.int64, device="cpu") if plan.turned_sums else None
            given = (sums if seen is None else PlacedSums(sums, seen),) * plan.layers
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
        elif plan.forgets:
            own = prepared_windows(given, plan.block.attention.state_shapes(rows), seen)
        else:
            own = prepared_sums(given, (rows, *self._sums()[0]), seen if plan.turned_sums else None)
        if own is None:
            return None
        logits = torch.empty(rows, *plan.outputs, **FLOAT32_CPU)
        place = 0 if seen is None else seen.data_ptr()
        step = [rows, torch.get_num_threads(), x.data_ptr(), x.stride(0), place, logits.data_ptr()]
        step += [*own.visible, *(source.visible if source else NOTHING)]
        words: list[int] = []
        for i in range(plan.layers):
            softmax = plan.attention == codes.ATTENTIONS["softmax"]
            words += [*NO_SUMS, *own.words[i]] if softmax else [*own.words[i][: len(NO_SUMS)], *NO_KEYS]
            words += source.words[i] if source else NO_KEYS
            words += own.words[i][len(NO_SUMS) :] if plan.forgets else NO_WINDOW
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


def _convert(p: Tensor | None, weights: str) -> tuple[Tensor | None, Tensor | None]:
    """A matrix [out, in] in the kernel's numbers, and its scale per row [out] or None."""
    if p is None or weights == "float32":
        return p, None
    if weights == "bfloat16":
        return _pair(p.to(torch.bfloat16)), None
    scale = p.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (p / scale[:, None]).round().to(torch.int8), scale


def _pair(p: Tensor) -> Tensor:
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


def _why_not_weight(p: Tensor | None, shape: torch.Size | None) -> str:
    if p is None or shape is None:
        return "" if p is shape else "a bias was added or removed"
    if p.dtype != torch.float32 or p.device.type != "cpu":
        return f"the kernel needs torch.float32 on cpu, found weights of {p.dtype} on {p.device.type}"
    if p.shape != shape or not p.is_contiguous():
        return f"expected a contiguous weight of shape {tuple(shape)}, found {tuple(p.shape)}, strides {p.stride()}"
    return ""


class Plan(NamedTuple):
    """The sizes and parts of a model. `Stack`, `Layer` and `Numbers` are those of native/decode.h.

    sizes: the numbers of `Stack` up to `limit`, in its order. attention, reads: those that follow its `weights`.
    embedding, positions: the tables; positions is None if they are not learned. affine: the linear layers and norms of
    `Stack`, then those of every `Layer`, with None for one that the model does not have. numbers: those of `Numbers`.
    outputs: the shape of the logits of a row. window: the attention's. turned_sums: whether the state of a layer is a
    `PlacedSums`, as in linear attention with rotary positions. vectors: those of every `Recurrent`, as the module and
    the name, None for one that is not there. recurrent: what `Stack` says of a layer that forgets. turns: the
    frequencies of its own positions, None where it has none. block: the model's first.
    """

    sizes: tuple[int, ...]
    attention: int
    reads: bool
    embedding: nn.Module
    positions: nn.Module | None
    frequencies: Tensor
    affine: list[nn.Module | None]
    numbers: tuple[float, float, float]
    outputs: tuple[int, ...]
    window: int | None
    turned_sums: bool
    vectors: list[tuple[nn.Module, str] | None]
    recurrent: list[int]
    turns: Tensor | None
    block: Any

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.sizes[0]

    @property
    def forgets(self) -> bool:
        """Whether the layers are of the delta rule or others that forget."""
        return self.attention >= codes.ATTENTIONS["delta"]

    @property
    def heads(self) -> tuple[int, int]:
        """The number of heads and their width."""
        return self.sizes[2], self.sizes[1] // self.sizes[2]


def plan_of(model: Any) -> Plan:
    """The plan of a model for which `why_not_fused` finds no reason."""
    c, pairs = model.config, isinstance(model, EncoderDecoder)
    blocks = model.decoder if pairs else model.blocks
    attention = blocks[0].attention
    kind, forgets = KINDS[type(attention)], isinstance(attention, RecurrentAttention)
    linear = kind == "linear"
    norm = model.decoder_norm if pairs else model.final_norm
    head = [part for part in model.head.modules() if isinstance(part, nn.Linear)]
    vectors: list[tuple[nn.Module, str] | None] = []
    affine: list[nn.Module | None] = [None if c.norm == "post" else norm, head[0] if head[1:] else None, head[-1]]
    for block in blocks:
        one = block.attention
        affine += [block.attention_norm, one.input if forgets else one.qkv, one.output]
        affine += [block.read_norm, block.read.query, block.read.output] if pairs else [None] * 3
        affine += [block.mlp_norm, getattr(block.mlp, "gate", None), block.mlp.expand, block.mlp.contract]
        affine += [getattr(one, "to_decay", None), getattr(one, "to_gate", None)]
        vectors += _vectors(one)
    sizes = (len(blocks), c.dim, c.num_heads, c.mlp, c.vocab_size, head[0].out_features if head[1:] else 0)
    gated = c.activation == "swiglu"
    activation = codes.ACTIVATIONS["silu" if gated else c.activation]
    kinds = (c.norm == "post", c.norm == "rms", activation, gated, _map(attention) if linear else 0)
    outputs = head[-1].out_features
    position = c.position if pairs else c.positions
    rotary = c.rotary.frequencies(c.dim // c.num_heads, "cpu") if position == "rotary" else None
    return Plan(
        sizes=(*sizes, outputs, *map(int, kinds), codes.POSITIONS[position], c.max_length),
        attention=codes.ATTENTIONS[kind],
        reads=pairs,
        embedding=model.embedding,
        positions=model.positions if position == "learned" else None,
        frequencies=frequencies(c.dim, "cpu") if rotary is None else rotary,
        affine=affine,
        numbers=(
            blocks[0].mlp_norm.eps,
            attention.eps if linear else attention.norm.eps if forgets else 0.0,
            (c.dim**0.5 if c.scale_embedding else 1.0) if pairs else c.embedding_scale,
        ),
        outputs=(1, outputs) if pairs or not c.head.classes else (outputs,),
        window=attention.window if kind == "softmax" else None,
        turned_sums=linear and rotary is not None,
        vectors=vectors,
        recurrent=_recurrent(attention),
        turns=attention.rotary.frequencies(attention.widths.key_width, "cpu") if kind == "retention" else None,
        block=blocks[0],
    )


def _vectors(attention: Any) -> list[tuple[nn.Module, str] | None]:
    """The vectors of `Recurrent`, in its order; None for one that is not there."""
    if not isinstance(attention, RecurrentAttention):
        return [None] * 6
    convolution = getattr(attention, "convolution", None)
    places: list[tuple[Any, str]] = [(convolution, "weight"), (convolution, "bias")]
    places += [(attention, name) for name in ("A_log", "dt_bias", "skip")]
    places.append((attention, "norm_weight") if hasattr(attention, "norm_weight") else (attention.norm, "weight"))
    return [(part, name) if getattr(part, name, None) is not None else None for part, name in places]


def _recurrent(attention: Any) -> list[int]:
    """The numbers of `Stack` about a layer that forgets, in its order."""
    if not isinstance(attention, RecurrentAttention):
        return [0] * 6
    w = attention.widths
    decay = attention.decay if isinstance(attention, DeltaAttention) else DECAYS[type(attention)]
    doubled = isinstance(attention, DeltaAttention) and attention.doubled_beta
    rank = RANK if isinstance(attention, GatedLinearAttention) else 0
    return [w.key_heads, w.key_width, w.value_width, codes.DECAYS[decay], int(doubled), rank]


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
    if config.activation not in (*codes.ACTIVATIONS, "swiglu"):
        return f"the kernel has the activations {', '.join(codes.ACTIVATIONS)} and swiglu, found {config.activation}"
    if not config.mlp:
        return "its blocks have no MLP, for which there is no kernel"
    if likelihood_of(model) is not None and not isinstance(model.head, nn.Linear):
        return f"its head is {type(model.head).__name__}, and the kernel has linear heads"
    blocks: Any = model.decoder if isinstance(model, EncoderDecoder) else model.blocks
    reasons = (why for block in blocks if (why := _why_not_attention(block, blocks[0])))
    return next(reasons, "") or _why_not_configured(model)


def _encodes(name: str) -> bool:
    """Whether a module is of the encoder, which a step does not run."""
    return name.startswith(("encoder", "source_"))


def _why_not_attention(block: nn.Module, first: Any) -> str:
    attention: Any = block.attention
    if type(attention) not in KINDS:
        names = [kind.__name__ for kind in KINDS]
        return f"the kernel has {', '.join(names[:-1])} and {names[-1]}, found {type(attention).__name__}"
    if not attention.causal:
        return "its attention is not causal, so it has no state"
    if type(attention) is LinearAttention:
        if _map(attention) is None:
            return f"the kernel has the feature maps {' and '.join(MAPS)}, found {attention.feature_map!r}"
        if attention.backend not in ("auto", "native"):
            return f"its attention is computed by the backend {attention.backend!r}, and the kernel belongs to 'native'"
    if type(attention) is SoftmaxAttention and attention.kv_heads != attention.num_heads:
        return "its heads share keys and values, for which there is no kernel"
    if type(attention) is SoftmaxAttention and attention.query_norm is not None:
        return "its queries and keys are normalised, for which there is no kernel"
    same = _settings(attention) == _settings(first.attention)
    return "" if same else "its layers' attention differs in kind, heads, eps, feature map, rotary positions or window"


def _settings(attention: Any) -> tuple[Any, ...]:
    if type(attention) is LinearAttention:
        return LinearAttention, attention.num_heads, attention.eps, attention.rotary, _map(attention)
    if isinstance(attention, RecurrentAttention):
        norm: Any = attention.norm
        rotary = getattr(attention, "rotary", None)
        return type(attention), attention.num_heads, *_recurrent(attention), norm.eps, rotary
    return SoftmaxAttention, attention.num_heads, attention.rotary, attention.window


def _map(attention: LinearAttention) -> int | None:
    """The kernel's code of a feature map, None if it has none."""
    found = attention.feature_map
    return next((codes.FEATURE_MAPS[name] for name in MAPS if found in (name, FEATURE_MAPS[name])), None)


@functools.lru_cache(maxsize=16)
def _expected(config: ModelConfig) -> dict[str, tuple[type[nn.Module], str, str]]:
    """The modules that a configuration builds, by their names: type, settings, and how they print."""
    modules = skeleton(config).named_modules()
    return {name: (type(part), part.extra_repr(), str(part)) for name, part in modules if name and not _encodes(name)}


def _why_not_configured(model: Any) -> str:
    """The first part that is not as the configuration builds it; the head may have another number of outputs."""
    found = {name: part for name, part in model.named_modules() if name and not _encodes(name)}
    for name, (kind, settings, words) in _expected(model.config).items():
        other = found.pop(name, None)
        if kind is not type(other) or (other.extra_repr() != settings and not name.startswith("head")):
            return f"{name}: its configuration says {words}, found {other}"
    return f"{next(iter(found))}: a module that its configuration does not have" if found else ""


class Prepared(NamedTuple):
    """What a step hands to the kernel, and the states that the kernel then completes.

    words: a `Sums` or a `Keys` per layer; visible: a `Visible`, all of native/decode.h. held: what their addresses
    belong to.
    """

    words: list[list[int]]
    visible: list[int]
    layers: tuple[State, ...]
    held: tuple[Tensor, ...]


def prepared_sums(layers: Sequence[State], shape: tuple[int, ...], seen: Tensor | None) -> Prepared | None:
    """For linear attention with states s [B, H, D, D]; None where the kernel cannot read a state.

    seen [B]: of the model's state where positions are rotary, which that of every layer must equal; else None.
    """
    given: list[LinearState] = []
    counted = seen
    for layer in layers:
        if (type(layer) is PlacedSums) != (seen is not None):
            return None
        if isinstance(layer, PlacedSums) and seen is not None:
            if layer.seen is not counted and not torch.equal(layer.seen, seen):
                return None
            counted, layer = layer.seen, layer.sums
        if type(layer) is not LinearState or layer.s.shape != shape or layer.z.shape != shape[:3]:
            return None
        if not all(map(_plain, layer)):
            return None
        given.append(layer)
    n = len(given)
    s, z = torch.empty(n, *shape, **FLOAT32_CPU), torch.empty(n, *shape[:3], **FLOAT32_CPU)
    new: tuple[Any, ...] = tuple(map(LinearState, s.unbind(), z.unbind()))
    words = [[x.data_ptr() for pair in both for x in pair] for both in zip(given, new, strict=True)]
    if seen is not None:
        later = seen + 1
        new = tuple(PlacedSums(sums, later) for sums in new)
    return Prepared(words, NOTHING, new, ())


def prepared_windows(layers: Sequence[Any], shapes: Shapes, seen: Tensor | None) -> Prepared | None:
    """For layers that forget; None where the kernel cannot read a state.

    shapes: those of the parts of a layer's state. seen [B]: of the model's state, which that of every layer must equal
    where it has one.
    """
    counted = seen
    for layer in layers:
        if type(layer) is not RecurrentSums or tuple(None if x is None else x.shape for x in layer) != shapes:
            return None
        if not all(_plain(x) for x in (layer.sums, layer.window) if x is not None):
            return None
        if layer.seen is not None and layer.seen is not counted:
            if counted is None or not torch.equal(layer.seen, counted):
                return None
            counted = layer.seen
    n, (of_sums, of_window, of_seen) = len(layers), shapes
    sums = torch.empty(n, *of_sums, **FLOAT32_CPU).unbind()
    windows = [None] * n if of_window is None else torch.empty(n, *of_window, **FLOAT32_CPU).unbind()
    later = None if of_seen is None or counted is None else counted + 1
    new = tuple(RecurrentSums(s, w, later) for s, w in zip(sums, windows, strict=True))
    words = [
        [one.sums.data_ptr(), 0, end.sums.data_ptr(), 0, _address(one.window), _address(end.window)]
        for one, end in zip(layers, new, strict=True)
    ]
    return Prepared(words, NOTHING, new, ())


def prepared_keys(
    layers: Sequence[Any], shape: tuple[int, int, int], window: int | None, seen: Tensor
) -> Prepared | None:
    """For softmax attention of `shape`: rows, heads and their width; None where the kernel cannot read a state.

    The kernel has one number of entries and one set of marks for all layers. seen [B]: of the model's state.
    """
    rows, *heads = shape
    first: Any = layers[0]
    if type(first) not in (KeyValues, BranchedKeyValues) or len(first.seen) != rows:
        return None
    branched = isinstance(first, BranchedKeyValues)
    if not all(_readable(layer, heads) and _alike(layer, first, seen) for layer in layers):
        return None
    visible = first.visible_after() if branched else None
    words, kept, attended = [], [], []
    for layer in layers:
        new: Any = layer.with_room(visible, first.seen + 1) if branched else layer.with_room()
        attended.append(new if window is None else new.last(window))
        kept.append(new if window is None else new.last(window - 1))
        words.append(_keys(attended[-1].k, attended[-1].v))
    marks = _marks(attended[0]).contiguous()
    copies = first.copies if branched else 1
    return Prepared(words, [marks.data_ptr(), marks.shape[1], copies, 0], tuple(kept), (marks,))


def prepared_source(source: Encoded, shape: tuple[int, int, int], layers: int) -> Prepared | None:
    """For the attention to a source; None where the kernel cannot read it."""
    rows, *heads = shape
    if len(source.layers) != layers or source.rows != rows or source.valid.dtype != torch.bool:
        return None
    words = []
    for k, v in source.layers:
        if [*k.shape[2:]] != heads or k.shape[:2] != source.valid.shape or not _same_layout(k, v):
            return None
        words.append(_keys(k, v))
    marks = source.valid.contiguous()
    return Prepared(words, [marks.data_ptr(), marks.shape[1], source.copies, 1], (), (marks,))


def _keys(k: Tensor, v: Tensor) -> list[int]:
    return [k.data_ptr(), v.data_ptr(), *k.stride()[:3]]


def _readable(layer: Any, heads: list[int]) -> bool:
    """Whether the kernel can read a layer's keys and values, of which there is at least one entry."""
    if type(layer) not in (KeyValues, BranchedKeyValues) or not layer.k.dtype == layer.v.dtype == torch.float32:
        return False
    fits = layer.k.shape[1] > 0 and [*layer.k.shape[2:]] == heads and layer.k.shape == layer.v.shape
    return fits and is_literal(layer.k) and is_literal(layer.v)


def _alike(layer: Any, first: Any, seen: Tensor) -> bool:
    """Whether a layer has read the tokens that the first one has, and its rows attend to the same entries."""
    if type(layer) is not type(first) or layer.k.shape != first.k.shape or not torch.equal(layer.seen, seen):
        return False
    if isinstance(layer, BranchedKeyValues) and (layer.copies, layer.shared) != (first.copies, first.shared):
        return False
    return layer is first or torch.equal(_marks(layer), _marks(first))


def _marks(layer: Any) -> Tensor:
    """Which entries a row attends to."""
    marks: Tensor = layer.visible if isinstance(layer, BranchedKeyValues) else layer.valid
    return marks


def _same_layout(k: Tensor, v: Tensor) -> bool:
    """Whether both are float32, with one layout whose last axis lies together."""
    if not (k.dtype == v.dtype == torch.float32 and is_literal(k) and is_literal(v)):
        return False
    return k.shape == v.shape and k.stride() == v.stride() and (k.stride(3) == 1 or k.shape[3] == 1)


def _plain(x: Tensor) -> bool:
    """Whether the kernel can read it: float32 numbers that lie together on the CPU."""
    return x.dtype == torch.float32 and x.is_contiguous() and is_literal(x)


def is_literal(x: Tensor) -> bool:
    """Whether the tensor's memory on the CPU holds its numbers as they are."""
    return x.is_cpu and is_plain_tensor(x)
