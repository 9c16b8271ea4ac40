"""Softmax attention (eq. 1 of all three papers), with a key-value state, on our kernels or on PyTorch's fused one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import transformed
from mnemos.config import AttentionConfig
from mnemos.memory.key_values import BranchedKeyValues, KeyValues, check_key_values
from mnemos.modes import in_graph, reads_without_waiting
from mnemos.ops.dense_layer import Linear
from mnemos.ops.dropout import dropout as drop
from mnemos.ops.positions import Rotary, rotary_of
from mnemos.ops.softmax_attention import can_attend, softmax_attention
from mnemos.registry import register
from mnemos.types import Device, InputError

from .multi_head import MultiHeadAttention

# Queries, keys, and multiplications in all from which on our kernels are no slower than PyTorch's.
FEWEST_QUERIES, FEWEST_KEYS, LEAST = 16, 48, 1 << 24


@register
@dataclass(frozen=True)
class SoftmaxConfig(AttentionConfig):
    """Softmax attention, with a window or without: softmax(q·kᵀ/√(D/H))·v.

    Attributes:
        window: the number of tokens that a query attends to, itself included; the attention is then causal. None: all.
        kv_heads: the number of heads of keys and values, each of which num_heads / kv_heads successive query heads
            share (grouped heads, Ainslie et al. 2023); the state shrinks by that factor. None: num_heads.
        query_key_norm: an RMSNorm of each head's queries and keys before rotary positions, which bounds the scores
            (Henry et al. 2020; Qwen 3).
    """

    name: ClassVar[str] = "softmax"
    rotates: ClassVar[bool] = True
    at_evaluation: ClassVar[tuple[str, ...]] = ("window",)
    window: int | None = None
    kv_heads: int | None = None
    query_key_norm: bool = False

    @property
    def causal_modes(self) -> frozenset[bool]:
        # A window counts the tokens before a query.
        return frozenset({False, True} if self.window is None else {True})

    def build(
        self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0, rotary: Rotary | bool = False
    ) -> "SoftmaxAttention":
        """The layer, [B, T, dim] -> [B, T, dim]. rotary: rotate queries and keys by their positions."""
        settings = self.window, self.kv_heads, self.query_key_norm
        return SoftmaxAttention(dim, num_heads, causal, dropout, rotary, *settings)


class Past(NamedTuple):
    """What T causal queries, the last of N tokens, attend to in our kernels: which is no [T, N] of marks.

    valid [B, N] bool: the keys that any may attend to; None: all. window: as many up to the query's own; None: all.
    """

    valid: Tensor | None
    window: int | None

    def marks(self, k: Tensor, t: int) -> Tensor | None:
        """The `visible` argument of `attend` that says the same of the keys k [B, N, ..]."""
        valid = k.new_ones(1, k.shape[1], dtype=torch.bool) if self.valid is None else self.valid
        return _visible(valid, t, self.window, False)


Keys = KeyValues | BranchedKeyValues  # the latter: of rows that branch from common tokens, as the beams of a search


class SoftmaxAttention(MultiHeadAttention[Keys]):
    """Multi-head softmax self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. Causal: the state is a `KeyValues` of the N tokens so
    far, or of the last `window` − 1 tokens. A call costs O(T·(N+T)·D) time and the state O(N·D) memory per row, which
    is constant with a window; grouped heads divide it by H / kv_heads. Not causal: there is no state (None). The output
    of a padded query is finite and has no meaning. kv_heads, query_key_norm: see `SoftmaxConfig`.
    Raises InputError if D is not divisible by H (by 2H with rotary positions), H not by kv_heads, or if the window is
    below 1.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        rotary: Rotary | bool | None = False,
        window: int | None = None,
        kv_heads: int | None = None,
        query_key_norm: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, causal, dropout, state_kind="growing" if window is None else "constant")
        width = dim // num_heads
        self.rotary = rotary_of(rotary, width)
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or num_heads % self.kv_heads:
            raise InputError(
                f"kv_heads: expected a number that divides the {num_heads} heads, found {kv_heads}; change it"
            )
        if window is not None and (window < 1 or not causal):
            raise InputError(
                f"window: expected at least 1 and causal=True, found window {window}, {causal=}; use window=None"
            )
        self.window = window
        self.qkv = Linear(dim, dim + 2 * self.kv_heads * width)
        self.output = Linear(dim, dim)
        self.query_norm = nn.RMSNorm(width, eps=1e-6) if query_key_norm else None
        self.key_norm = nn.RMSNorm(width, eps=1e-6) if query_key_norm else None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: "Tensor | Past | None", causal: bool, dropout: float = 0.0
    ) -> Tensor:
        """The function `attend`; programs have another form of it."""
        return attend(q, k, v, visible, causal, dropout)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> KeyValues:
        return KeyValues.empty(batch_size, self.kv_heads, self.dim // self.num_heads, device, dtype)

    def check_state(self, state: Keys, batch_size: int) -> None:
        heads, width = self.kv_heads, self.dim // self.num_heads
        if isinstance(state, BranchedKeyValues) and state.fits(batch_size, heads, width):
            return
        check_key_values(state, batch_size, heads, width)

    def pad_to_capacity(self, state: Keys) -> Keys:
        if self.window is None or isinstance(state, BranchedKeyValues):
            return state
        return self._within_window(state).pad_to(self.window - 1)

    def branch(self, state: Keys, copies: int) -> Keys:
        """The state of `copies` rows for every row, next to each other, for a search. They share their tokens' keys.

        Rows that have branched before first get keys of their own, which is a copy.
        """
        state = state if isinstance(state, KeyValues) else state.unshare()
        return BranchedKeyValues.of(self._within_window(state), copies)

    def _within_window(self, state: KeyValues) -> KeyValues:
        """A state of the same weights with a longer window, or none, without the tokens before this one's.

        Without padding behind valid tokens, which would take places of the window: only a layer without one leaves it.
        """
        if self.window is None or (state.k.shape[1] < self.window and state.is_packed()):
            return state
        return state.packed().last(self.window - 1)

    def compute_heads(
        self, x: Tensor, state: Keys | None, mask: Tensor | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Keys | None]:
        # --- queries [B, T, H, D/H], keys and values [B, T, kv_heads, D/H] ---
        (b, t, _), p, few = x.shape, self.active_dropout, self.kv_heads
        qk, v = self.qkv(x).unflatten(2, (-1, self.dim // self.num_heads)).split([self.num_heads + few, few], 2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = qk.split([self.num_heads, few], 2)
            qk = torch.cat([self.query_norm(q), self.key_norm(k)], 2)
        if self.rotary is not None:
            qk = self.rotary.rotate(qk, None if state is None else state.seen, mask)
        q, k = qk.split([self.num_heads, few], 2)

        # --- not causal: all valid keys of the call ---
        if not self.causal:
            valid = None if mask is None else open_empty_rows(mask)[:, None, None]
            return self.attend(q, k, v, add_bias(valid, bias), False, p), None

        # --- a search: the rows of a group attend to the group's entries, each to its own past ---
        if isinstance(state, BranchedKeyValues):
            if t == 1 and bias is None and mask is None:
                entries = state.append(k, v)
                if self.window is not None:
                    entries = entries.last(self.window)
                visible, q = entries.visible.unflatten(0, (-1, entries.copies)), q.unflatten(0, (-1, entries.copies))
                y = self.attend(q.flatten(1, 2), entries.k, entries.v, visible[:, None], False, p)
                return y.flatten(0, 1)[:, None], entries if self.window is None else entries.last(self.window - 1)
            state = state.unshare()

        # --- causal: the tokens so far, or those of the window ---
        state = self.empty(b, x.device, k.dtype) if state is None else self._within_window(state)
        keep = new = state.append(k, v, mask)
        if self.window is not None:
            # Padding takes no place of the window: its valid tokens are the last ones of the state.
            keep = (new if mask is None else new.packed()).last(self.window - 1)
        keep = keep.kept()
        n = new.k.shape[1]
        if mask is None and bias is None and n == t and (self.window is None or t <= self.window):
            return self.attend(q, k, v, None, True, p), keep
        unbroken = mask is None or self.window is None
        if bias is None and not p and fits_kernels(q, new.k, new.v) and (unbroken or new.is_unbroken()):
            valid = None if mask is None and n == t else new.valid
            return self.attend(q, new.k, new.v, Past(valid, self.window), True), keep
        visible = _visible(new.valid[:1] if mask is None and n == t else new.valid, t, self.window, mask is not None)
        return self.attend(q, new.k, new.v, add_bias(visible, bias), False, p), keep

    def forward(
        self, x: Tensor, state: Keys | None = None, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Keys | None]:
        """As the class says; bias [1 or B, H, T, N + T] is added to the scaled scores of the T queries."""
        heads, state = self.heads(x, state, mask, bias=bias)
        return self.project(heads), state

    if TYPE_CHECKING:
        __call__ = forward


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | Past | None, causal: bool, dropout: float = 0.0
) -> Tensor:
    """softmax(q·kᵀ/√d)·v for q [B, T, H, d], k [B, N, H, d], v [B, N, H, M].

    visible [B or 1, H or 1, T or 1, N]: which keys a query attends to (bool), or a term added to its scores (float).
    k and v may have fewer heads, each of which H / heads successive heads of q share.
    """
    # --- our kernels ---
    if isinstance(visible, Past):
        return softmax_attention(q, k, v, True, visible.window, visible.valid)
    of_keys = visible is not None and visible.dtype == torch.bool and visible.shape[1:3] == (1, 1)
    if not dropout and (visible is None or of_keys) and fits_kernels(q, k, v):
        valid = None if visible is None else visible[:, 0, 0].expand(len(q), -1)
        return softmax_attention(q, k, v, causal, None, valid)

    # --- PyTorch's ---
    if (groups := q.shape[2] // k.shape[2]) > 1:
        if q.shape[1] == 1 and (visible is None or visible.shape[1] == 1):
            # The heads that share a key head become queries at one place: keys of a long state are not copied.
            shared = q.unflatten(2, (-1, groups))[:, 0].transpose(1, 2)
            return attend(shared, k, v, visible, False, dropout).transpose(1, 2).flatten(1, 2)[:, None]
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    if visible is not None and visible.is_floating_point():
        visible = visible.to(q.dtype)  # autocast may have made q narrower
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    width, more = q.shape[-1], v.shape[-1] - q.shape[-1]
    on_cpu = q.device.type == "cpu"
    t, n = q.shape[2], k.shape[2]
    short = isinstance(t, int) and 16 <= t <= 64 and n <= 64  # a program of any length has no number
    if on_cpu and (dropout or (short and not torch.is_grad_enabled())):
        # There is no fused kernel for dropout on the CPU. For short rows, without gradient, the plain products are up
        # to twice as fast as the fused kernel.
        return _plain(q, k, v, visible, causal, dropout).transpose(1, 2)
    if more > 0 and on_cpu:
        # The fused CPU kernel needs equal widths. Zeros change no score, and the kernel is 2 to 3 times faster.
        q, k = F.pad(q, (0, more)), F.pad(k, (0, more))
    y = F.scaled_dot_product_attention(q, k, v, visible, dropout, causal, scale=width**-0.5)
    return y.transpose(1, 2)


def fits_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether our kernels compute a call, and are no slower than PyTorch's."""
    if in_graph() or q.shape[1] < FEWEST_QUERIES or k.shape[1] < FEWEST_KEYS or len(q) != len(k):
        return False
    (b, t, h, d), (n, m) = q.shape, v.shape[1::2]
    # `torch.nn.attention.sdpa_kernel` may ask for another kernel, for example to differentiate twice.
    fused = torch.backends.cuda.flash_sdp_enabled()
    return fused and b * t * h * n * (d + m) >= LEAST and can_attend(q, k, v)


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """`attend` in separate products: q, k [B, H, T or N, D], v [B, H, N, M]."""
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, *x.shape[2:]) for x in (q, k, v))
    scores = torch.bmm(q, k.mT).mul_(d**-0.5).unflatten(0, (b, h))
    blind = None  # the queries that see no key, [B or 1, H or 1, T or 1, 1]; None if it is known that there are none
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    elif visible is not None:
        seeing = visible if visible.dtype == torch.bool else ~visible.detach().isneginf()
        blind = ~seeing.any(-1, keepdim=True)
        if not (in_graph() or transformed(blind) or bool(blind.any())):
            blind = None
    if visible is not None and blind is not None:
        # As in the fused kernels, a query that sees nothing reads zeros; its softmax would be 0/0.
        visible = visible | blind if visible.dtype == torch.bool else visible.masked_fill(blind, 0.0)
    if visible is not None:
        scores = scores.masked_fill_(~visible, -torch.inf) if visible.dtype == torch.bool else scores.add_(visible)
    weights = drop(torch.softmax(scores, -1), dropout)
    y = torch.bmm(weights.flatten(0, 1), v).view(b, h, t, v.shape[-1])
    return y if blind is None else y.masked_fill_(blind, 0.0)


def open_empty_rows(mask: Tensor) -> Tensor:
    """The mask, with all True in rows without a valid token: their softmax would otherwise be 0/0."""
    return mask | ~mask.any(-1, keepdim=True)


def add_bias(visible: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The `visible` argument of `attend`, from visible keys (bool) and a bias of the scores (float)."""
    if bias is None or visible is None:
        return visible if bias is None else bias
    return torch.where(visible, bias, -torch.inf)


def _visible(valid: Tensor, t: int, window: int | None, padded: bool) -> Tensor | None:
    """The keys that each of the last T queries attends to, [B, 1, T, N]: valid keys not after it, and itself.

    With a window, only keys fewer than `window` tokens before it (for T = 1 the state keeps no others). padded: whether
    there may be padding between valid keys.
    """
    n = valid.shape[1]
    if t == 1:
        # One query attends to every valid key. If all keys are valid, the kernel needs no mask; on the CPU, checking
        # that does not wait for a device.
        if reads_without_waiting(valid) and bool(valid.all()):
            return None
        itself = torch.arange(n, device=valid.device) == n - 1
        return (valid | itself)[:, None, None]
    query = torch.arange(n - t, n, device=valid.device)[:, None]
    key = torch.arange(n, device=valid.device)
    near = key <= query
    if window is not None:
        number = valid.cumsum(1) if padded else key[None]  # valid tokens alone take places of the window
        near = near & (number[:, None] > number[:, n - t :, None] - window)
    return ((near & valid[:, None]) | (key == query))[:, None]
