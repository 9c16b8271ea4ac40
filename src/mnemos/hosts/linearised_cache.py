"""The layer of a cache of Transformers that holds the state of a linearised attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mnemos.ops.window_state import Ring
from mnemos.types import InputError, map_state

from .linearised import Linearised, LinearisedState, Rotation, Tokens, pick_heads
from .row_caches import GIVE, list_layers

DRAFT = 64  # the last tokens of a call that `crop` can take back


class LinearisedLayer(DynamicLayer):
    """Keys and values while they fit into the window, then a `LinearisedState`, of constant size.

    Beyond the window `keys` and `values` are those of the key heads that are left whole, and None without such heads.
    Where gradients are off, single tokens change buffers in place (`Ring`). Else the state is never changed.
    """

    keys: Any
    values: Any

    def __init__(self, own: Linearised) -> None:
        super().__init__()
        self.settings, self.window, self.whole_masks, self.least = own.settings, own.settings.window, own.whole_masks, 0
        self.full_heads = own.full_heads
        self._clear()

    def _clear(self) -> None:
        self.columns = 0  # of all calls, with padding
        self.raw: Tensor | None = None  # keys before rotary positions
        self.valid: Tensor | None = None  # [B, columns]; None: all
        self.state: LinearisedState | None = None
        self.earlier: Callable[[int], LinearisedState | None] | None = None  # after the first tokens of the last call
        self.read_last = 0  # the tokens of that call
        self.ring: tuple[Ring, Tensor] | None = None  # in place of `state`: its window, and its `turn`

    def __getstate__(self) -> dict[str, Any]:
        """Without the way back, which belongs to this model's modules."""
        return {**self.__dict__, "earlier": None}

    @property
    def whole(self) -> bool:
        """Whether all tokens are kept, which fit into the window."""
        return self.state is None and self.ring is None

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the mask: all keys while there are all; then those of the call."""
        if self.whole_masks or self.columns + query_length <= self.window:
            return self.columns + query_length, 0
        return query_length, self.columns

    def update(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """What an attention calls that is not linearised: raises InputError."""
        raise InputError(
            f"expected a cache for an attention that keeps all keys, found that of a linearised one; {GIVE}"
        )

    def extend(self, k: Tensor, v: Tensor, rotation: Rotation | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """All keys and values, with those of a call that fits into the window."""
        if rotation is not None:
            self.raw = rotation.k if self.raw is None else torch.cat([self.raw, rotation.k], -2)
        if valid is not None or self.valid is not None:
            new = k.new_ones(len(k), k.shape[2], dtype=torch.bool) if valid is None else valid
            if self.valid is None:
                self.valid = new.new_ones(len(k), self.columns)
            self.valid = torch.cat([self.valid, new], 1)
        self.columns += k.shape[2]
        whole: tuple[Tensor, Tensor] = super().update(k, v)
        return whole

    def read(self, own: Linearised, tokens: Tokens) -> Tensor:
        """y [B, T, H, M] of a call beyond the window."""
        q, _, _, sizes, rotation, valid = tokens
        t = q.shape[2]
        one = t == 1 and valid is None and not torch.is_grad_enabled()
        if one and self.least >= sizes.window + sizes.sinks:
            if self.state is not None:
                self.ring, self.state = (own.start_ring(self.state, sizes, rotation), self.state.turn), None
            if self.ring is not None:
                self.columns += 1
                self.least += 1
                self.earlier = None
                return own.step(self.ring[0], tokens)
        state = self.current()
        if state is None:
            # --- the tokens that were kept whole, whose positions are before the one that `turn` is of ---
            keys, values, raw, kept_valid = self.keys, self.values, self.raw, self.valid
            self.keys = self.values = self.raw = self.valid = None
            if self.columns:
                b, n = len(q), self.columns
                zeros = q.new_zeros(b, q.shape[1] // tokens.k.shape[1] * keys.shape[1], n, q.shape[-1])
                before = None
                if rotation is not None:
                    cos, width = rotation.cos.new_zeros(b, n, rotation.cos.shape[-1]), rotation.q.shape[-1]
                    raw = keys[..., :width] if raw is None else raw
                    before = Rotation(zeros[..., :width], raw, cos, cos, rotation.apply)
                kept = Tokens(zeros, keys, values, sizes, before, kept_valid)
                state = own.read(kept.of_heads(own.far_heads) if own.full_heads else kept, None)[1]
                if own.full_heads:
                    self.keys, self.values = (pick_heads(x, x.shape[1], own.full_heads) for x in (keys, values))
        # --- the call; of a long one the last tokens apart, since drafts come with a prompt in one call ---
        self.earlier, self.read_last, outputs = None, t, []
        if not torch.is_grad_enabled():
            if t > DRAFT:
                first = tokens.some(slice(t - DRAFT))
                tokens = map_state(torch.clone, tokens.some(slice(t - DRAFT, t)))  # copies keep no long call in memory
                y, state = own.read(first, state)
                outputs.append(y)
                self.read_last = DRAFT
            self.earlier = lambda n: own.read_first(n, tokens, state)
        y, self.state = own.read(tokens, state)
        outputs.append(y)
        self.is_initialized = True
        self.columns += t
        self.least = int(self.state.window.seen.min())
        return torch.cat(outputs, 1) if len(outputs) > 1 else y

    def keep(self, k: Tensor, v: Tensor, sliding: int | None) -> tuple[Tensor, Tensor]:
        """The keys and values that a call of the key heads reads which are left whole, from those of its T tokens.

        sliding: their own sliding window; beyond it as many tokens are kept as `crop` may take back.
        """
        t = k.shape[2]
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], -2), torch.cat([self.values, v], -2)
        self.keys, self.values = k, v
        if sliding is not None:
            most = sliding - 1 + DRAFT
            if k.shape[2] > most:
                self.keys, self.values = (x[:, :, -most:].clone() for x in (k, v))
            k, v = (x[:, :, -(sliding - 1 + t) :] for x in (k, v))
        return k, v

    def current(self) -> LinearisedState | None:
        """The state, with what the ring has read."""
        if self.ring is not None:
            self.state, self.ring = LinearisedState(self.ring[0].state(), self.ring[1]), None
        return self.state

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: any while all fit into the window, then at most DRAFT of the last call.

        Raises InputError, and changes nothing, for others.
        """
        count = abs(tokens_to_remove)
        if not count:
            return
        if not self.whole:
            if tokens_to_remove > 0:
                raise InputError(f"crop: expected a negative number, of tokens to take back, found {tokens_to_remove}")
            kept = self.read_last - count
            if self.earlier is None or kept < 0 or (state := self.earlier(kept)) is None:
                raise InputError(
                    f"crop: expected to take back at most {DRAFT} tokens, of the last call alone, which had several "
                    f"and no gradients, found {count} tokens; keep a copy.deepcopy of the cache, or give generate an "
                    "assistant_model that is not linearised"
                )
            self.state, self.earlier = state, None
            self.columns -= count
            if self.keys is not None:
                super().crop(-count)
            self.least = int(state.window.seen.min())
            return
        super().crop(tokens_to_remove)
        self.columns -= count
        self.raw = None if self.raw is None else self.raw[..., : self.columns, :]
        self.valid = None if self.valid is None else self.valid[:, : self.columns]

    def reset(self) -> None:
        super().reset()
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Any) -> None:
        self._map(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values", "raw", "valid"):
            if getattr(self, name) is not None:
                setattr(self, name, fn(getattr(self, name)))
        self.earlier = None
        if self.ring is not None:
            self.ring[0].map(fn)
            self.ring = self.ring[0], fn(self.ring[1])
        if self.state is not None:
            self.state = map_state(fn, self.state)


def find_layer(past: Any, number: int, own: Linearised) -> LinearisedLayer:
    """Layer `number` of a cache; it takes the place of an empty layer of Transformers. Raises InputError for others."""
    past, layers = list_layers(past)
    grows_by: Any = getattr(past, "layer_class_to_replicate", None)
    if grows_by is DynamicLayer:
        layers.extend(DynamicLayer() for _ in range(len(layers), number + 1))
    layer: Any = layers[number] if number < len(layers) else None
    if isinstance(layer, LinearisedLayer):
        if (layer.settings, layer.full_heads) != (own.settings, own.full_heads):
            wanted, found = (
                f"{one.settings}" + (f" with the key heads {one.full_heads} whole" if one.full_heads else "")
                for one in (own, layer)
            )
            raise InputError(f"expected layer {number} of a cache of {wanted}, found one of {found}; {GIVE}")
        return layer
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.get_seq_length():
        shown = "none" if layer is None else type(layer).__name__
        shown += f" of {layer.get_seq_length()} tokens" if layer is not None else ""
        raise InputError(
            f"expected an empty layer {number} of a DynamicCache for a linearised attention, found {shown}; {GIVE}"
        )
    layers[number] = LinearisedLayer(own)
    return layers[number]
