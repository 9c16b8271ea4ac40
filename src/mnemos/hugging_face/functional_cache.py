"""The cache that a model of Transformers is called with: it hands out the given state and collects the new one.

A call with padding moves the valid tokens of every row to the right end (`Padding`), where keys, values and
convolution windows of a row stay next to each other. So padding takes no place in any state.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos import libraries
from mnemos.hosts.linearised import LinearisedState
from mnemos.hosts.row_states import BlockState
from mnemos.memory.gated_cache import GRC
from mnemos.memory.key_values import KeyValues
from mnemos.types import InputError, State

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


class FunctionalState(NamedTuple):
    """The state of a model of Transformers. seen [B] int64: the valid tokens that each row has read.

    parts: the states of its layers, in the order in which the model calls them: `KeyValues` of attentions, or
    `LinearisedState` (`mnemos.linearise`), named tuples of recurrent layers, and after an attention with a gated cache
    (`mnemos.cache`) the cache of each row.
    """

    seen: Tensor
    parts: tuple[State, ...]


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
    place, count = torch.arange(joined.shape[1], device=joined.device), padding.count.to(joined.device)[:, None]
    return _gather(joined, torch.where(place >= past.shape[1] + count, place, (place - count).clamp(min=0)))


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


class CacheLayout:
    """What a model's configuration says of its cache: per layer, its kind, whether it attends, and its window.

    Raises InputError for layers that are unknown here; `advice` says what to do then.
    """

    def __init__(self, model: Any, advice: str) -> None:
        config, self.architecture, self.advice = model.config, type(model).__name__, advice
        kinds = (
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionLayer,
            DummyLayer,
        )
        named = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
        cache = DynamicCache(config=_take_decoder(config))
        self.kinds = [named[i] if i < len(named) else type(layer).__name__ for i, layer in enumerate(cache.layers)]
        for i, (layer, name) in enumerate(zip(cache.layers, self.kinds, strict=True)):
            if type(layer) not in kinds or name == "chunked_attention":
                raise InputError(
                    "functional: expected layers of full or sliding attention or linear recurrences, found "
                    f"{self.named(i)}; {self.advice}"
                )
        self.windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        self.sliding, self.linear, self.dummy = cache.is_sliding, cache.is_linear, cache.is_dummy
        self.attends = [not (linear or dummy) for linear, dummy in zip(self.linear, self.dummy, strict=True)]

    def named(self, layer: int | None) -> str:
        """A layer for an error: its kind, as the configuration calls it, its number and the model's class."""
        if layer is None or not 0 <= layer < len(self.kinds):
            return f"another kind in {self.architecture}"
        return f"{self.kinds[layer]!r} in layer {layer} of {self.architecture}"

    def attending(self, parts: tuple[State, ...]) -> list[tuple[State, int | None]]:
        """The states of the layers that attend, with their windows in the configuration."""
        windows = [window for window, attends in zip(self.windows, self.attends, strict=True) if attends]
        found = [part for part in parts if isinstance(part, KeyValues | LinearisedState)]
        return list(zip(found, windows, strict=False))

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


def _take_decoder(config: Any) -> Any:
    """The configuration with the decoder's layers, where `num_hidden_layers` is another name of the encoder's."""
    layers = getattr(config, "decoder_layers", None)
    if layers is None or layers == config.num_hidden_layers:
        return config
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    return config


class GatedPart:
    """The state of one gated cache in one call (`RowsState`): the given one, and the list that gets the next one."""

    def __init__(self, state: Any, new: list[State]) -> None:
        self._state, self._new = state, new

    def current(self, repeat: object) -> Any:
        """The given state, a `BlockState`; None in a first call. A row of zeros is a new row."""
        return self._state

    def extend(self, source: Tensor, valid: Tensor | None, blocks: Any, gradient: bool) -> None:
        """Note the state after a call's tokens."""
        self._new.append(blocks.after())

    def project(self, cache: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(cache): nothing is kept from call to call."""
        return compute(cache)


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

    def gated(self, grc: GRC) -> "GatedPart":
        """What the next gated cache reads and writes; its branch asks for it (`mnemos.hosts.hooks`)."""
        if grc.scope != "stream":
            raise InputError(
                f'functional: expected gated caches of scope="stream", found scope={grc.scope!r}, whose cache belongs '
                'to the model and not to a row; call mnemos.cache with GRC(scope="stream")'
            )
        return GatedPart(self.take(BlockState), self.new)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always: the state is a value, into which no layer may write (`fast_token` asks)."""
        return True

    # What the masks of Transformers read. Every layer begins at the same token, that of the longest past.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """N, the tokens of the longest past."""
        return 0 if self._longest is None else int(self._longest.k.shape[1])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The keys of a layer, and where among the N + T tokens they begin."""
        stored = self._stored.get(self.layout.window(layer_idx), 0)
        return stored + query_length, self.get_seq_length() - stored

    @property
    def is_sliding(self) -> list[bool]:
        """Per layer."""
        return self.layout.sliding

    @property
    def is_linear(self) -> list[bool]:
        """Per layer."""
        return self.layout.linear

    @property
    def is_dummy(self) -> list[bool]:
        """Per layer."""
        return self.layout.dummy

    @property
    def is_compileable(self) -> bool:
        """No: the state grows."""
        return False

    def _unknown(self, *given: Any, layer_idx: int | None = None, **_: Any) -> Any:
        layer = next((x for x in given if isinstance(x, int)), None) if layer_idx is None else layer_idx
        raise InputError(
            "functional: expected recurrent layers whose step is known (docs/hugging-face.md has the list), found "
            f"{self.layout.named(layer)}; {self.layout.advice}"
        )

    get_conv_state = get_recurrent_state = update_conv_state = update_recurrent_state = _unknown
    has_previous_state = update_indexer = _unknown
