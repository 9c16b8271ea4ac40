"""The cache that `functional` calls a model with: it hands out the given state and collects the new one.

A call with padding has it in front of the valid tokens of every row, and every layer moves it in front of the tokens
before them (`padding_first`). So keys, values and the inputs of convolutions of a row have no gap, and no state has
padding.

Recurrent layers run the forward of their class, but for the functions that it calls for its recurrence: these take the
state from the cache, leave padding out, and write into nothing (`add_forwards`).
"""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mnemos import libraries
from mnemos.memory.gated_cache import GRC
from mnemos.memory.key_values import KeyValues
from mnemos.memory.row_blocks import CacheState
from mnemos.ops.padding import padding_first, take
from mnemos.ops.positions import positions
from mnemos.types import InputError, State

from .fast_functions import mamba_selective_scan, state_space, torch_chunk_gated_delta_rule
from .fast_model import find_replacements, has_class_forward

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
    `LinearisedState` (`mnemos.linearise`; behind it `KeyValues` of key heads that are left whole), named tuples of
    recurrent layers, and after an attention with a gated cache (`mnemos.cache`) the cache of each row.
    """

    seen: Tensor
    parts: tuple[State, ...]


class RecurrentState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution.

    memory, float32: [B, C, N] in Mamba, [B, H, N, D] in Mamba-2, [B, H, D, M] in gated delta rules.
    """

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "recurrent state"


# --- the cache ---


class CacheLayout:
    """What a model's configuration says of its cache: per layer, its type, whether it attends, and its window.

    Raises InputError for layers that are unknown here; `advice` says what to do then.
    """

    def __init__(self, model: Any, advice: str) -> None:
        config, self.architecture, self.advice = model.config, type(model).__name__, advice
        known: tuple[Any, ...] = DynamicLayer, DynamicSlidingWindowLayer, DummyLayer
        known += LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
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
        # Of the parts of a state that are keys and values, by number: their windows. A first call fills it.
        self.part_windows: dict[int, int | None] = {}
        self.sliding, self.linear, self.dummy = cache.is_sliding, cache.is_linear, cache.is_dummy
        self.attends = [not (linear or dummy) for linear, dummy in zip(self.linear, self.dummy, strict=True)]

    def named(self, layer: int | None) -> str:
        """A layer for an error: its type, as the configuration calls it, its number and the model's class."""
        if layer is None or not 0 <= layer < len(self.types):
            return f"another kind in {self.architecture}"
        return f"{self.types[layer]!r} in layer {layer} of {self.architecture}"

    def window(self, layer: int) -> int | None:
        """The window of a layer, or of the first layer that attends if this one does not."""
        if layer >= len(self.attends):
            raise InputError(
                f"functional: expected {len(self.attends)} layers, as in the configuration, found a layer {layer}"
            )
        if not self.attends[layer] and True in self.attends:
            layer = self.attends.index(True)
        window: int | None = self.windows[layer]
        return window


class _Running(threading.local):
    cache: "FunctionalCache | None" = None


_running = _Running()  # where the functions of a layer's forward find the cache of the call that runs in their thread


class FunctionalCache(Cache):  # type: ignore[misc, unused-ignore]
    """The state of one call. Layers take their parts of it in the order in which the model calls them.

    seen [B]: as in the given state. parts: the given ones; None for a first call, which finds out their shapes.
    valid [B, T] bool: the tokens of the call that are no padding, which is in front; None: all.
    """

    def __init__(
        self, layout: CacheLayout, seen: Tensor, parts: tuple[State, ...] | None, length: int, valid: Tensor | None
    ) -> None:
        super().__init__(layers=[])
        self.layout, self.seen, self.given, self.valid = layout, seen, parts, valid
        self.new: list[State] = []
        # Of the recurrent layer that runs: its part (None: a first call), and what the new one is made of.
        self.past: RecurrentState | None = None
        self.window: Tensor | None = None
        self.memory: Tensor | None = None
        self.seen_after = seen + (length if valid is None else valid.sum(1))
        self.positions = positions(length, seen, valid, seen.device)
        keys = [part for part in parts or () if isinstance(part, KeyValues)]
        self._longest = max(keys, key=lambda part: part.k.shape[1], default=None)
        windows = layout.part_windows if parts is not None else {}
        self._stored = {window: parts[i].k.shape[1] for i, window in windows.items()}  # type: ignore[index]

    def take(self, expected: type) -> Any:
        """The given part of the next layer, of the expected class; None in a first call."""
        if self.given is None:
            return None
        part = self.given[len(self.new)] if len(self.new) < len(self.given) else None
        if not isinstance(part, expected):
            raise self.misfit(
                f"one with {'no part' if part is None else type(part).__name__} for layer {len(self.new)}"
            )
        return part

    def after(self) -> FunctionalState:
        """The state after the call."""
        if self.given is not None and len(self.new) != len(self.given):
            raise self.misfit(f"one of {len(self.given)} layers, of which {len(self.new)} were called")
        return FunctionalState(self.seen_after, tuple(self.new))

    def misfit(self, found: str) -> InputError:
        return InputError(
            f"functional: expected a state of {self.layout.architecture} as it is now, found {found}; begin with "
            "state=None after changing the model, and turn gradient checkpointing of Transformers off, which calls "
            "layers twice"
        )

    def join(self, past: Tensor, new: Tensor) -> Tensor:
        """past [B, N, ..] and new [B, T, ..] as one sequence, with the padding of both in front."""
        joined = torch.cat([past, new], 1)
        return joined if self.valid is None else take(joined, padding_first(past.shape[1], self.valid.to(past.device)))

    def mask(self) -> Tensor | None:
        """[B, N + T] bool: the tokens that may be attended to, N of them of the state; None: all, or no attention."""
        if self._longest is None:
            return None
        past = self._longest.valid
        if self.valid is None and bool(past.all()):
            return None
        new = past.new_ones(self.positions.shape) if self.valid is None else self.valid.to(past.device)
        return self.join(past, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, N + T, D] of an attention, from those of T tokens."""
        k, v, past = key_states.transpose(1, 2), value_states.transpose(1, 2), self.take(KeyValues)
        if past is None:
            past = KeyValues.empty(len(k), k.shape[2], k.shape[3], k.device, k.dtype)
        if (past.k.dtype, past.v.dtype) != (k.dtype, v.dtype):  # from before `model.half()`, say
            past = KeyValues(past.k.to(k.dtype), past.v.to(v.dtype), past.valid, past.seen)
        if self.valid is None:
            now = past.append(k, v)
        else:
            valid = self.valid.to(k.device)
            seen = self.seen_after.to(k.device)
            now = KeyValues(self.join(past.k, k), self.join(past.v, v), self.join(past.valid, valid), seen)
        window = self.layout.window(layer_idx)
        if self.given is None:
            self.layout.part_windows[len(self.new)] = window
        kept = now if window is None else now.last(window - 1)
        if self.valid is not None:
            kept = kept.last(int(self.seen_after.max()))
        self.new.append(kept.kept())
        return now.k.transpose(1, 2), now.v.transpose(1, 2)

    # --- gated caches, whose branch calls the following (`mnemos.hosts.hooks`) ---

    def gated(self, grc: GRC) -> "FunctionalCache":
        """What has the state of the rows (`RowState`): this cache."""
        if grc.scope != "stream":
            raise InputError(
                f'functional: expected gated caches of scope="stream", a cache per row, found scope={grc.scope!r}; '
                'call mnemos.cache with GRC(scope="stream")'
            )
        return self

    def current(self) -> Any:
        """The given `CacheState` of the next gated cache; None in a first call. A row of zeros is a new row."""
        return self.take(CacheState)

    def extend(self, t: int, state: CacheState) -> None:
        """Note the state after a call of t tokens."""
        self.new.append(state)

    def project(self, cache: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(cache): nothing is kept from call to call."""
        return compute(cache)

    # --- what recurrent layers call: no state is handed out, so that none is written into ---

    @contextlib.contextmanager
    def recurrent_layer(self) -> Iterator[None]:
        """Inside, the next layer runs, which is recurrent."""
        self.past, self.window, self.memory, _running.cache = self.take(RecurrentState), None, None, self
        try:
            yield
        finally:
            _running.cache = None
        assert self.window is not None
        assert self.memory is not None
        self.new.append(RecurrentState(self.window, self.memory))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *_: Any, conv_kernel_size: int | None = None, **__: Any
    ) -> Tensor:
        """The inputs [B, C, K − 1 + T] of a convolution of K taps, from those of T tokens."""
        if _running.cache is not self or conv_kernel_size is None:
            return self._unknown(layer_idx=layer_idx)
        x, size = conv_states.mT, conv_kernel_size - 1
        past = x.new_zeros(len(x), size, x.shape[2]) if self.past is None else self.past.window.to(x.dtype)
        inputs = self.join(past, x)
        self.window = inputs[:, inputs.shape[1] - size :].clone()  # not a view, which would keep all inputs
        return inputs.mT

    def get_conv_state(self, layer_idx: int, *_: Any, **__: Any) -> None:
        if _running.cache is not self:
            self._unknown(layer_idx=layer_idx)

    get_recurrent_state = get_conv_state

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int = 0, *_: Any, **__: Any) -> Tensor:
        """The state after the call, which `_recur` has noted."""
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
            f"functional: expected recurrent layers whose step is known, found {self.layout.named(layer)}; "
            f"{self.layout.advice}"
        )

    has_previous_state = update_indexer = _unknown


# --- recurrent layers ---

RECURRENT = {
    "MambaMixer", "FalconMambaMixer", "JambaMambaMixer",
    "Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer",
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet",
}  # fmt: skip


def add_forwards(model: nn.Module) -> None:
    """Let the layers of the classes in `RECURRENT` go from a given state to a new one, with a `FunctionalCache`.

    With any other cache, and with none, a layer runs its own forward. The forward of the class is wrapped, once per
    process: instances stay as they are, so copies, hooks and threads need no care; of a pickled fast layer the forward
    of its own goes, which is its class's. What Transformers calls there cannot serve: it changes states in place,
    padding changes the states, and in part the given state is ignored.
    """
    for cls in {cls for layer in model.modules() for cls in type(layer).__mro__}:
        if cls.__name__ in RECURRENT and cls.__module__.startswith("transformers.") and "_functional" not in vars(cls):
            functions = {name: _RECURRENCES.get(name, function) for name, function in find_replacements(cls)[0].items()}
            if not set(functions).isdisjoint(_RECURRENCES):  # else it is of another version, whose calls are refused
                _wrap(cls, functions)
    for layer in model.modules():
        if hasattr(type(layer), "_functional") and has_class_forward(layer):  # which hides the wrapped one
            del layer.forward


def _wrap(cls: Any, functions: dict[str, Any]) -> None:
    theirs, ours = cls.forward, libraries.with_globals(cls.forward, functions)

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        cache = next((x for x in (*args, *options.values()) if isinstance(x, FunctionalCache)), None)
        if cache is None:
            return theirs(self, *args, **options)
        x = args[0] if args else options["hidden_states"]
        with cache.recurrent_layer(), _KeepDouble() if x.dtype is torch.float64 else contextlib.nullcontext():
            return ours(self, x, cache)

    cls.forward, cls._functional = forward, True


def _recur(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function of `fast_functions` from the given memory, over the valid tokens."""
    cache = _running.cache
    assert cache is not None
    memory, valid = None, cache.valid
    if cache.past is not None:
        memory = cache.past.memory.to(torch.promote_types(cache.past.memory.dtype, torch.float32))
    if valid is not None:
        valid = valid.to(args[0].device)
    y, cache.memory = function(*args, **{**options, "initial_state": memory, "valid": valid})
    return y, cache.memory


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
