"""`fast(model)`: dense layers of any model by `mnemos.ops.dense`, recurrent ones of Transformers by our kernels.

A recurrent layer gets a forward of its own: a copy of its class's forward, in which the functions of `fast_functions`
replace those of the same names. For a single token one call of a kernel can replace the whole forward (`fast_token`).
The forwards of dense layers are in `fast_dense`, those of softmax attention in `fast_attention`.
"""

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.libraries import with_globals
from mnemos.native import library
from mnemos.ops.dense_layer import choice
from mnemos.types import InputError

from .fast_attention import attention_forward
from .fast_dense import dense_forward
from .fast_functions import DELTA, FUNCTIONS, Function, replacement_for, unknown_parameters
from .fast_token import LAYERS, LayerNames, compute_token, is_untouched, norm_offset, normalise

_CACHES = ("cache", "cache_params")  # what layers call their cache, the newest name first
_MARK = "_mnemos_fast"  # an attribute of the forwards that `fast` makes
_MIXING = {*DELTA, "mamba_selective_scan"}  # they mix packed rows unless they are given the ends of the sequences
_PACKED = "seq_idx", "cu_seq_lens_q"  # the options of a forward that tell where packed sequences end
# Recurrent layers of Transformers without a kernel, which a report names as left.
_NO_KERNEL = {"RwkvSelfAttention", "RwkvFeedForward", "RecurrentGemmaRecurrentBlock", "xLSTMLayer"}


def fast(model: nn.Module) -> "FastReport":
    """Let a model run faster on a CPU: its recurrent layers on the kernels of this library, its dense ones by `dense`.

        report = mnemos.fast(model)          # for good; report.undo() takes it back
        with mnemos.fast(model) as report:   # or for a while
            model.generate(ids)

    Training, prefill and decoding give equal outputs, caches and gradients, up to rounding. docs/fast.md has the layers
    that are served, `print(report)` those of this model, and what is left.

    Each such layer gets a `forward` of its own: a copy of its class's, in which some names mean other functions.
    Nothing is changed in the class, in its module or in other models. Weights, hooks, `generate`, copies, threads,
    `torch.compile` and gradient checkpointing work as before. A copy of the model is fast too, and a second call serves
    the same layers again, so that `fast(copy).undo()` undoes it there; a pickled model is loaded as it was before.
    Tensors on other devices or in float64, and programs that are exported, run the functions of Transformers and of
    PyTorch. A layer of another class stays as it is: a quantised or parametrised one, and one whose forward another
    library has set.

    Padding decays the state as it does in Transformers; `mnemos.functional` leaves the state alone. Packed sequences
    are kept apart where the model hands their ends to its layers: those of gated delta rules need `seq_idx` and
    `cu_seq_lens_q`, the scan of Mamba-2 `seq_idx`, attention layers `position_ids`. A layer of a gated delta rule
    raises InputError if it gets only one of its two, or cannot hand them to its functions; one of Mamba-1 for either.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"fast: expected a model, found {type(model).__name__}; pass the module")
    choice()  # a wrong MNEMOS_DENSE is said here, and not in a forward
    changed: list[FastLayer] = []
    left: list[LeftLayer] = []
    norms: list[str] = []
    dense: list[str] = []
    attentions: list[str] = []
    layers: dict[str, nn.Module] = {}
    modules = dict(model.named_modules())
    already_fast = {name for name, layer in modules.items() if is_fast(layer)}
    for name, layer in modules.items():
        cls = type(layer)

        # --- the functions of this layer that are replaced, and why it, or one of its functions, stays as it is ---
        functions, reasons = find_replacements(cls)
        if functions and _is_taken(layer):
            functions, reasons = {}, ["has a forward of its own, which another library set"]
        elif not functions and not reasons:
            if cls.__name__ in _NO_KERNEL and cls.__module__.startswith("transformers."):
                reasons = ["no kernel computes it"]
            elif base := next((base for base in cls.__mro__[1:-1] if find_replacements(base)[0]), None):
                reasons = [f"its forward is another than that of {base.__name__}, whose functions have kernels"]
        left += [LeftLayer(name, cls.__name__, reason) for reason in reasons]

        # --- its new forward ---
        if functions:
            changed.append(FastLayer(name, cls.__name__, tuple(functions)))
        elif _is_taken(layer):
            continue
        elif norm_offset(cls) is not None:
            norms.append(name)
        elif dense_forward(cls) is not None and not _belongs_to_mnemos(name, modules):
            dense.append(name)
        elif attention_forward(cls) is not None:
            attentions.append(name)
        else:
            continue
        layers[name] = layer
        _set_forward(layer, functions)
    why = "" if layers else _why_unchanged(model)
    parts = tuple(changed), tuple(left), tuple(norms), tuple(dense), tuple(attentions)
    return FastReport(*parts, layers, already_fast, why)


@dataclass(frozen=True)
class FastLayer:
    """A layer that runs the kernels: its name in the model, its class, and the functions that were replaced in it."""

    name: str
    kind: str
    functions: tuple[str, ...]


@dataclass(frozen=True)
class LeftLayer:
    """A layer, or functions of one, that stayed as before, and why."""

    name: str
    kind: str
    reason: str


@dataclass(eq=False, repr=False)
class FastReport:
    """What `fast` changed and what it left. `undo()` takes it back.

    Leaving a `with` block takes back what the call changed; layers that were fast before it stay so.

    changed, left: recurrent layers and short convolutions. norms: names of RMS norms, which a kernel computes where no
    gradients are wanted. dense, attentions: names of dense layers, and of layers of softmax attention.
    """

    changed: tuple[FastLayer, ...]
    left: tuple[LeftLayer, ...]
    norms: tuple[str, ...]
    dense: tuple[str, ...]
    attentions: tuple[str, ...]
    _layers: dict[str, nn.Module]  # with a forward of `fast`
    _before: set[str]  # the names of those that had one before this call
    _why_unchanged: str
    _undone: bool = False

    def undo(self) -> None:
        """Give the layers the forward of their class again. A second call does nothing.

        Raises InputError, and changes nothing, where another library has replaced the forward since.
        """
        if others := [name for name, layer in self._layers.items() if _is_taken(layer)]:
            raise InputError(
                f"undo: expected the forward that fast() set, found another in {', '.join(others)}; remove that first"
            )
        for layer in self._layers.values():
            vars(layer).pop("forward", None)
        self._layers, self._undone = {}, True

    def __enter__(self) -> "FastReport":
        if self._undone:
            raise InputError("expected a report of layers that are fast, found one after undo; call fast(model) again")
        return self

    def __exit__(self, *_: object) -> None:
        self._layers = {name: layer for name, layer in self._layers.items() if name not in self._before}
        self.undo()

    def __str__(self) -> str:
        counts = f"{len(self.changed)} recurrent layers, {len(self.attentions)} attentions and {len(self.norms)} norms"
        lines = [f"{len(self.dense)} dense layers run the faster of PyTorch's libraries; {counts} our kernels"]
        if self._why_unchanged:
            lines = [f"nothing was changed: {self._why_unchanged}"]
        elif self._undone:
            lines[0] += ", until undo() was called"
        lines += [f"  {x.name} ({x.kind}): {', '.join(x.functions)}" for x in self.changed]
        lines += [f"  {x.name} ({x.kind}), left: {x.reason}" for x in self.left]
        return "\n".join(lines)

    __repr__ = __str__


def _belongs_to_mnemos(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a layer is part of a module of mnemos, in which kernels may read the weights themselves."""
    while name:
        name = name.rpartition(".")[0]
        package = type(modules[name]).__module__.partition(".")[0]
        if package != "torch":  # a container of PyTorch (Sequential) says nothing: what is around it does
            return package == "mnemos"
    return False


def _why_unchanged(model: nn.Module) -> str:
    """Why `fast` changed nothing in this model, and what to do."""
    name = type(model).__name__
    if any(type(layer).__module__.startswith("mnemos.") for layer in model.modules()):
        return f"{name} is a model of mnemos, whose layers call its kernels themselves; use it as it is"
    return f"{name} has no layer that mnemos.fast serves (docs/fast.md has the list); use it as it is"


# --- the forward of a layer ---


def is_fast(layer: nn.Module) -> bool:
    """Whether `fast` gave this layer its forward."""
    return hasattr(vars(layer).get("forward"), _MARK)


def _is_taken(layer: nn.Module) -> bool:
    """Whether another library set its forward."""
    return "forward" in vars(layer) and not is_fast(layer) and not has_class_forward(layer)


def has_class_forward(layer: nn.Module) -> bool:
    """Whether the forward of its own is its class's, or was before `functional`: of a fast layer that was pickled."""
    forward = type(layer).forward
    own = getattr(vars(layer).get("forward"), "__func__", None)
    return own is not None and own in (forward, getattr(forward, "__wrapped__", None))


def find_replacements(cls: type[nn.Module]) -> tuple[dict[str, Function], list[str]]:
    """The functions to put in place of those that the forward of this class calls, by name, and why some are left."""
    functions: dict[str, Function] = {}
    reasons: list[str] = []
    forward = inspect.unwrap(getattr(cls, "forward", None))  # type: ignore[arg-type]
    if not isinstance(forward, FunctionType):
        return functions, reasons
    for name in sorted({name for code in _codes(forward.__code__) for name in code.co_names if name in FUNCTIONS}):
        theirs = forward.__globals__.get(name)
        if not callable(theirs) or not str(theirs.__module__).startswith("transformers."):
            continue
        if other := unknown_parameters(name, theirs):
            reasons.append(f"{name}: parameters of another version of Transformers ({', '.join(sorted(other))})")
        else:
            functions[name] = replacement_for(name, theirs)
    return functions, reasons


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def renew(model: nn.Module) -> None:
    """Make the forwards of `fast` again, from those of the classes, which have changed."""
    for layer in model.modules():
        if is_fast(layer):
            _set_forward(layer, find_replacements(type(layer))[0])


def _set_forward(layer: nn.Module, functions: dict[str, Function]) -> None:
    """Give a layer its forward of `fast`. functions: those that it calls and that are replaced."""
    cls, forward = type(layer), type(layer).forward
    forward = dense_forward(cls) or attention_forward(cls) or forward
    if (offset := norm_offset(cls)) is not None:
        forward = _with_norm_kernel(forward, offset)
    if functions:
        # A forward that hands the ends on reads them from its keyword arguments, by a name among its constants.
        passes_ends = any("cu_seq_lens_q" in code.co_consts for code in _codes(inspect.unwrap(forward).__code__))
        forward = with_globals(forward, functions)
        if not _MIXING.isdisjoint(functions):
            forward = _with_packed_rows(forward, passes_ends)
        # `is_untouched`: a class of this name from elsewhere (a model with its own code) may compute something else.
        if cls.__name__ in LAYERS and is_untouched(cls):
            forward = _with_token_kernel(forward, LAYERS[cls.__name__])
    setattr(forward, _MARK, True)
    layer.forward = MethodType(forward, layer)


def _with_token_kernel(forward: Any, names: LayerNames) -> Any:
    """A forward that computes a single token by the kernel if this takes it, and all else as `forward` does."""

    @functools.wraps(forward)
    def with_token_kernel(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        if hidden_states.shape[1] == 1 and not torch.compiler.is_compiling() and library() is not None:
            # Layers declare hidden_states, the cache under one of its names, attention_mask, in this order.
            cache = next((options[name] for name in _CACHES if name in options), args[0] if args else None)
            mask = options.get("attention_mask", args[1] if args[1:] else None)
            y = compute_token(names, self, hidden_states, cache, mask)
            if y is not None:
                return y
        return forward(self, hidden_states, *args, **options)

    return with_token_kernel


def _with_norm_kernel(forward: Any, offset: float) -> Any:
    """A forward that computes a norm by the kernel where no gradient is wanted, and else as `forward` does."""

    @functools.wraps(forward)
    def with_norm_kernel(self: Any, x: Tensor) -> Any:
        theirs = type(self).forward  # not `forward`, if other code has set another since
        can_use_kernel = theirs is forward and not torch.compiler.is_compiling() and library() is not None
        y = normalise(self, x, offset) if can_use_kernel else None
        return theirs(self, x) if y is None else y

    return with_norm_kernel


def _with_packed_rows(forward: Any, passes_ends: bool) -> Any:
    """A forward that refuses packed rows that `forward` would mix. passes_ends: it hands cu_seq_lens_q on."""

    @functools.wraps(forward)
    def with_packed_rows(self: Any, *args: Any, **options: Any) -> Any:
        ends = [name for name in _PACKED if options.get(name) is not None]
        if ends and not passes_ends:
            raise InputError(
                f"packed rows: {type(self).__name__} of this version of Transformers does not hand the ends of "
                f"sequences to its recurrence, found {' and '.join(ends)}; give each a row of its own, with padding"
            )
        if len(ends) == 1:
            raise InputError(
                f"packed rows: expected {' and '.join(_PACKED)} (for the convolution and the delta rule), found "
                f"{ends[0]} alone; give both, and position_ids for the attention layers"
            )
        return forward(self, *args, **options)

    return with_packed_rows
