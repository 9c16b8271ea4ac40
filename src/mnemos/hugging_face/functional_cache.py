"""The cache that `functional` calls a model with: it hands out the given state and collects the new one.

A call with padding moves the valid tokens of every row to the right end (`Padding`), where keys, values and the inputs
of convolutions of a row stay next to each other. So padding is in no state.

Recurrent layers run the forward of their class, but for the functions that it calls for its recurrence: these take the
state from the cache, leave padding out, and write into nothing (`add_forwards`).
"""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mnemos import libraries
from mnemos.hosts.linearised import LinearisedState
from mnemos.hosts.row_caches import BlockState
from mnemos.memory.gated_cache import GRC
from mnemos.memory.key_values import KeyValues
from mnemos.types import InputError, State

from .fast_functions import mamba_selective_scan, state_space, torch_chunk_gated_delta_rule
from .fast_model import find_replacements

_library: Any = libraries.transformers()
try:
    from transformers.cache_utils import (
        Cache,
        DummyLayer,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )
except ImportError as error:
    raise libraries.other_version(
        "functional: expected the caches of", f"{_library.__version__} without {error.name or 'them'} ({error})"
    ) from None


# --- states ---


class FunctionalState(NamedTuple):
    """The state of a model of Transformers. seen [B] int64: the valid tokens that each row has read.

    parts: the states of its layers, in the order in which the model calls them: `KeyValues` of attentions, or
    `LinearisedState` (`mnemos.linearise`), named tuples of recurrent layers, and after an attention with a gated cache
    (`mnemos.cache`) the cache of each row.
    """

    seen: Tensor
    parts: tuple[State, ...]


class MambaState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, C, N]; in Mamba-2 [B, H, N, D]. float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "state space"


class DeltaState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, H, D, M], float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "gated delta"


# --- padding ---


class Padding:
    """Where the padding of a call is. mask [B, T] bool: True = valid.

    `order` [B, T] puts the padding of a row before its valid tokens. count [B]: padding per row. valid [B, T]: the mask
    in that order.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask, self.count = mask, (~mask).sum(1)
        self.order = mask.to(torch.uint8).argsort(dim=1, stable=True)
        self.valid = mask.gather(1, self.order)

    def sort(self, x: Tensor) -> Tensor:
        """x [B, T, ..] with the padding of a row first."""
        return _gather(x, self.order)

    def restore(self, y: Tensor) -> Tensor:
        """y [B, T, ..] in the order of the call, with zeros where the padding is."""
        y = _gather(y, self.order.argsort(1))
        return y.masked_fill(~_widen(self.mask, y), 0)


def join_tokens(past: Tensor, new: Tensor, padding: Padding | None) -> Tensor:
    """past [B, N, ..] and new [B, T, ..] as one sequence [B, N + T, ..]; the padding of `new` comes first.

    The valid tokens of a row then follow those of its past without a gap. What comes before both repeats the first
    token; `join_masks` says where it ends.
    """
    joined = torch.cat([past, new], 1)
    if padding is None:
        return joined
    position, count = torch.arange(joined.shape[1], device=joined.device), padding.count.to(joined.device)[:, None]
    return _gather(joined, torch.where(position >= past.shape[1] + count, position, (position - count).clamp(min=0)))


def join_masks(past: Tensor, new: Tensor, padding: Padding | None) -> Tensor:
    """Which tokens of `join_tokens` are valid, from the masks [B, N] and [B, T] of its parts."""
    joined = join_tokens(past, new, padding)
    if padding is None:
        return joined
    return joined & (torch.arange(joined.shape[1], device=joined.device) >= padding.count.to(joined.device)[:, None])


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, _widen(index.to(x.device), x).expand(-1, -1, *x.shape[2:]))


def _widen(x: Tensor, like: Tensor) -> Tensor:
    """x [B, T] with the dimensions of `like`."""
    return x.to(like.device).view(*x.shape, *[1] * (like.dim() - 2))


# --- the cache ---


class CacheLayout:
    """What a model's configuration says of its cache: per layer, its type, whether it attends, and its window.

    Raises InputError for layers that are unknown here; `advice` says what to do then.
    """

    def __init__(self, model: Any, advice: str) -> None:
        config, self.architecture, self.advice = model.config, type(model).__name__, advice
        known = (
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionLayer,
            DummyLayer,
        )
        named = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
        layers = getattr(config, "decoder_layers", None)
        if layers is not None and layers != config.num_hidden_layers:  # which is another name of the encoder's
            config = copy.deepcopy(config)
            config.num_hidden_layers = layers
        cache = DynamicCache(config=config)
        self.types = [named[i] if i < len(named) else type(layer).__name__ for i, layer in enumerate(cache.layers)]
        for i, (layer, name) in enumerate(zip(cache.layers, self.types, strict=True)):
            if type(layer) not in known or name == "chunked_attention":
                raise InputError(
                    "functional: expected layers of full or sliding attention or linear recurrences, found "
                    f"{self.named(i)}; {self.advice}"
                )
        self.windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        self.sliding, self.linear, self.dummy = cache.is_sliding, cache.is_linear, cache.is_dummy
        self.attends = [not (linear or dummy) for linear, dummy in zip(self.linear, self.dummy, strict=True)]

    def named(self, layer: int | None) -> str:
        """A layer for an error: its type, as the configuration calls it, its number and the model's class."""
        if layer is None or not 0 <= layer < len(self.types):
            return f"another kind in {self.architecture}"
        return f"{self.types[layer]!r} in layer {layer} of {self.architecture}"

    def attending(self, parts: tuple[State, ...]) -> list[tuple[State, int | None]]:
        """The states of the layers that attend, with their windows in the configuration."""
        windows = [window for window, attends in zip(self.windows, self.attends, strict=True) if attends]
        return list(
            zip((part for part in parts if isinstance(part, KeyValues | LinearisedState)), windows, strict=False)
        )

    def window(self, layer: int) -> int | None:
        """The window of a layer, or of the first layer that attends if this one does not."""
        if layer >= len(self.attends):
            raise InputError(
                f"functional: expected {len(self.attends)} layers, as the configuration says, found a layer {layer}; "
                "use another model"
            )
        if not self.attends[layer] and True in self.attends:
            layer = self.attends.index(True)
        window: int | None = self.windows[layer]
        return window


class FunctionalCache(Cache):  # type: ignore[misc, unused-ignore]
    """The state of one call. Layers take their parts of it in the order in which the model calls them.

    seen [B]: as in the given state. parts: the given ones; None for a first call, which finds out their shapes.
    """

    def __init__(
        self, layout: CacheLayout, seen: Tensor, parts: tuple[State, ...] | None, length: int, padding: Padding | None
    ) -> None:
        super().__init__(layers=[])
        self.layout, self.seen, self.given, self.padding = layout, seen, parts, padding
        self.new: list[State] = []
        self.recurrent: Recurrent | None = None  # the recurrent layer that runs
        self.seen_after = seen + (length if padding is None else length - padding.count)
        self.positions = (seen[:, None] + torch.arange(length, device=seen.device)).clamp(min=0)
        if padding is not None:
            self.positions = (self.positions - padding.count[:, None]).clamp(min=0)
            self._most = int(self.seen_after.max())
        keys = [part for part in parts or () if isinstance(part, KeyValues)]
        self._longest = max(keys, key=lambda part: part.k.shape[1], default=None)
        attending = layout.attending(parts or ())
        self._stored = {window: part.k.shape[1] for part, window in attending if isinstance(part, KeyValues)}

    @property
    def valid(self) -> Tensor | None:
        """[B, T] bool, the valid tokens of this call in `Padding.order`; None: all."""
        return None if self.padding is None else self.padding.valid

    def take(self, expected: type) -> Any:
        """The given part of the next layer, of the expected class; None in a first call."""
        if self.given is None:
            return None
        if len(self.new) == len(self.given):
            raise InputError(
                f"functional: expected {len(self.given)} layers with a state, found more; turn gradient checkpointing "
                "of Transformers off, which calls layers twice, or begin with state=None after changing the model"
            )
        part = self.given[len(self.new)]
        if not isinstance(part, expected):
            raise InputError(
                f"functional: expected a state of {self.layout.architecture} as it is now, found one of before it was "
                f"changed ({type(part).__name__} in place of {expected.__name__}); begin with state=None"
            )
        return part

    def mask(self) -> Tensor | None:
        """[B, N + T] bool: the tokens that may be attended to, N of them of the state; None: all, or no attention."""
        if self._longest is None:
            return None
        past, length = self._longest.valid, self.positions.shape[1]
        if self.padding is None and bool(past.all()):
            return None
        new = past.new_ones(len(past), length) if self.padding is None else self.padding.valid
        return join_masks(past, new.to(past.device), self.padding)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, N + T, D] of an attention, from those of T tokens."""
        k, v, past = key_states.transpose(1, 2), value_states.transpose(1, 2), self.take(KeyValues)
        if past is not None and (past.k.dtype, past.v.dtype) != (k.dtype, v.dtype):  # from before `model.half()`, say
            past = KeyValues(past.k.to(k.dtype), past.v.to(v.dtype), past.valid, past.seen)
        seen = self.seen_after.to(k.device)
        valid = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        if self.padding is not None:
            valid = self.padding.valid.to(k.device)
        if past is None or (past.k.shape[1] == 0 and self.padding is None):
            now = KeyValues(k, v, valid, seen)
        elif self.padding is None:
            now = past.append(k, v)
        else:
            keys, values = join_tokens(past.k, k, self.padding), join_tokens(past.v, v, self.padding)
            now = KeyValues(keys, values, join_masks(past.valid, valid, self.padding), seen)
        window = self.layout.window(layer_idx)
        kept = now if window is None else now.last(window - 1)
        if self.padding is not None:
            kept = kept.last(self._most)
        self.new.append(kept)
        return now.k.transpose(1, 2), now.v.transpose(1, 2)

    # --- gated caches, whose branch calls the following (`mnemos.hosts.hooks`) ---

    def gated(self, grc: GRC) -> "FunctionalCache":
        """What has the state of the rows (`RowsState`): this cache."""
        if grc.scope != "stream":
            raise InputError(
                f'functional: expected gated caches of scope="stream", found scope={grc.scope!r}, whose cache belongs '
                'to the model and not to a row; call mnemos.cache with GRC(scope="stream")'
            )
        return self

    def current(self, repeat: object) -> Any:
        """The given `BlockState` of the next gated cache; None in a first call. A row of zeros is a new row."""
        return self.take(BlockState)

    def extend(self, source: Tensor, valid: Tensor | None, blocks: Any, gradient: bool) -> None:
        """Note the state after a call's tokens."""
        self.new.append(blocks.after())

    def project(self, cache: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(cache): nothing is kept from call to call."""
        return compute(cache)

    # --- what recurrent layers call: no state is handed out, so that none is written into ---

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *_: Any, conv_kernel_size: int | None = None, **__: Any
    ) -> Tensor:
        """The inputs [B, C, K − 1 + T] of a convolution of K taps, from those of T tokens."""
        layer = self.recurrent
        if layer is None or conv_kernel_size is None:
            return self._unknown(layer_idx=layer_idx)
        x, size = conv_states.mT, conv_kernel_size - 1
        past = x.new_zeros(len(x), size, x.shape[2]) if layer.given is None else layer.given.window.to(x.dtype)
        inputs = join_tokens(past, x, self.padding)
        layer.window = inputs[:, inputs.shape[1] - size :].clone()  # not a view, which would keep all inputs
        return inputs.mT

    def get_conv_state(self, layer_idx: int, *_: Any, **__: Any) -> None:
        if self.recurrent is None:
            self._unknown(layer_idx=layer_idx)

    get_recurrent_state = get_conv_state

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int = 0, *_: Any, **__: Any) -> Tensor:
        """The state after the call, which `Recurrent` has."""
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always: no layer may write into what it was given (`fast_token` asks, too)."""
        return True

    # --- what the masks of Transformers read: every layer begins at the same token, that of the longest past ---

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """N, the tokens of the longest past."""
        return 0 if self._longest is None else int(self._longest.k.shape[1])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The keys of a layer, and where among the N + T tokens they begin."""
        stored = self._stored.get(self.layout.window(layer_idx), 0)
        return stored + query_length, self.get_seq_length() - stored

    is_sliding = property(lambda self: self.layout.sliding)
    is_linear = property(lambda self: self.layout.linear)
    is_dummy = property(lambda self: self.layout.dummy)
    is_compileable = property(lambda self: False)  # the state grows

    def _unknown(self, *given: Any, layer_idx: int | None = None, **_: Any) -> Any:
        layer = next((x for x in given if isinstance(x, int)), None) if layer_idx is None else layer_idx
        raise InputError(
            "functional: expected recurrent layers whose step is known (docs/hugging-face.md has the list), found "
            f"{self.layout.named(layer)}; {self.layout.advice}"
        )

    has_previous_state = update_indexer = _unknown


# --- recurrent layers ---

RECURRENT: dict[str, type] = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), MambaState),
    **dict.fromkeys(("Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), MambaState),
    "Zamba2MambaMixer": MambaState,
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), DeltaState),
    "OlmoHybridGatedDeltaNet": DeltaState,
}


def add_forwards(model: nn.Module) -> None:
    """Let the layers of the classes in `RECURRENT` go from a given state to a new one, with a `FunctionalCache`.

    With any other cache, and with none, a layer runs its own forward. The forward of the class is wrapped, once per
    process: instances stay as they are, so copies, pickles, hooks and threads need no care. What Transformers calls
    there cannot serve: it changes states in place, padding changes the states, and in part the given state is ignored.
    """
    for cls in {cls for layer in model.modules() for cls in type(layer).__mro__}:
        if cls.__name__ in RECURRENT and cls.__module__.startswith("transformers.") and "_functional" not in vars(cls):
            functions = {name: _RECURRENCES.get(name, function) for name, function in find_replacements(cls)[0].items()}
            if not set(functions).isdisjoint(_RECURRENCES):  # else it is of another version, whose calls are refused
                _wrap(cls, functions)


def _wrap(cls: Any, functions: dict[str, Any]) -> None:
    theirs, ours, state = cls.forward, libraries.with_globals(cls.forward, functions), RECURRENT[cls.__name__]

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        cache = next((x for x in (*args, *options.values()) if isinstance(x, FunctionalCache)), None)
        if cache is None:
            return theirs(self, *args, **options)
        x = args[0] if args else options["hidden_states"]
        with Recurrent(cache, state), _KeepDouble() if x.dtype is torch.float64 else contextlib.nullcontext():
            return ours(self, x, cache)

    cls.forward, cls._functional = forward, True


class _Running(threading.local):
    layer: "Recurrent | None" = None


_running = _Running()  # where the functions of a layer's forward find what runs in their thread


class Recurrent:
    """A call of a recurrent layer: its given state (None: a first call), and the parts of the new one."""

    def __init__(self, cache: FunctionalCache, cls: type) -> None:
        self.cache, self.cls, self.given = cache, cls, cache.take(cls)
        self.window: Tensor | None = None
        self.memory: Tensor | None = None

    def __enter__(self) -> None:
        self.cache.recurrent = _running.layer = self

    def __exit__(self, error: type | None, *_: object) -> None:
        self.cache.recurrent = _running.layer = None
        if error is None:
            self.cache.new.append(self.cls(self.window, self.memory))


def _recur(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function of `fast_functions` from the given memory, over the valid tokens."""
    layer = _running.layer
    assert layer is not None
    memory, valid = None, layer.cache.valid
    if layer.given is not None:
        memory = layer.given.memory.to(torch.promote_types(layer.given.memory.dtype, torch.float32))
    if valid is not None:
        valid = valid.to(args[0].device)
    y, layer.memory = function(*args, **{**options, "initial_state": memory, "valid": valid})
    return y, layer.memory


_RECURRENCES = {
    "torch_chunk_gated_delta_rule": functools.partial(_recur, torch_chunk_gated_delta_rule),
    "mamba2_chunk_scan": functools.partial(_recur, state_space),
    "mamba_selective_scan": functools.partial(_recur, mamba_selective_scan),
}


class _KeepDouble(TorchFunctionMode):
    """Inside, what layers of Transformers compute in float32 (decays, norms) stays in float64."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        single = func is Tensor.float or (func is Tensor.to and args[1:2] == (torch.float32,))
        if single and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))
