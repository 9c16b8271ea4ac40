"""Linear attention (Katharopoulos et al. 2020) as a layer: its state is a sum of constant size."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable
from mnemos.config import AttentionConfig
from mnemos.errors import near_name
from mnemos.ops.dense_layer import Linear
from mnemos.ops.linear import BACKENDS, LinearState, linear_attention
from mnemos.ops.linear.feature_maps import FeatureMap, favor, find, random_projection
from mnemos.ops.positions import Rotary, count_seen, rotary_of
from mnemos.registry import register
from mnemos.types import Device, InputError

from .multi_head import MultiHeadAttention


@exportable
class PlacedSums(NamedTuple):
    """Sums, and the position of the next token: the state with rotary positions.

    sums: a `LinearState`, s [B, H, D', M] and z [B, H, D']. seen [B] int64: valid tokens since the row began.
    """

    sums: LinearState
    seen: Tensor


Sums = LinearState | PlacedSums


@register
@dataclass(frozen=True)
class LinearConfig(AttentionConfig):
    """Linear attention: φ(q)·Σφ(k)vᵀ / (φ(q)·Σφ(k) + eps).

    Attributes:
        feature_map: φ. "elu": elu(x) + 1; "relu": relu(x); "polynomial": the products of two entries, the
            kernel (q·k)²; "favor": positive random features, whose expectation is the kernel exp(q·k/√D).
        features: the number of random features per head, for "favor".
        eps: added to the denominator, which keeps it above 0.
        backend: what computes the attention. "auto": "native" or "chunked"; "native": C++ on a CPU; "chunked":
            PyTorch, anywhere.
    """

    name: ClassVar[str] = "linear"
    rotates: ClassVar[bool] = True
    feature_map: Literal["elu", "relu", "polynomial", "favor"] = "elu"
    features: int = 128
    eps: float = 1e-6
    backend: Literal["auto", "native", "chunked"] = "auto"

    def build(
        self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0, rotary: Rotary | bool = False
    ) -> "LinearAttention":
        # There are no attention weights that could be dropped.
        return LinearAttention(dim, num_heads, causal, self.feature_map, self.features, self.eps, self.backend, rotary)


class LinearAttention(MultiHeadAttention[Sums]):
    """Multi-head linear self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. Causal: the state is a `LinearState`, s [B, H, D', M] and
    z [B, H, D'] in float32 (float64 for float64 inputs), with D' features of φ; D' = M = D/H for the default map. A
    call costs O(T·D·D') time, whatever the length so far, and O(T·D) memory for the backward pass. Not causal: there is
    no state (None).

    feature_map: a name (see `LinearConfig`), or any function [.., D/H] -> [.., D'].
    backend: see `LinearConfig`. It may be set between calls; the state is the same for all.
    rotary: queries and keys are rotated by their positions before φ, so that φ stays positive; the state is then a
    `PlacedSums`. Because φ is not linear, the result depends on the positions themselves and not on distances alone.
    (RoFormer rotates after φ, in the numerator alone.)
    Raises InputError if D is not divisible by H, or for an unknown feature map or backend; a call raises it for a
    backend that cannot run here or does not take the tensors.
    """

    projection: Tensor | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        feature_map: str | FeatureMap = "elu",
        features: int = 128,
        eps: float = 1e-6,
        backend: str = "auto",
        rotary: Rotary | bool | None = False,
    ) -> None:
        super().__init__(dim, num_heads, causal, state_kind="constant")
        self.rotary = rotary_of(rotary, dim // num_heads)
        names = ("auto", *BACKENDS.by_name)
        if backend not in names:
            raise InputError(f"expected a backend of linear attention, found {backend!r}; {near_name(backend, names)}")
        self.feature_map, self.eps, self.backend = feature_map, eps, backend
        self.qkv = Linear(dim, 3 * dim)
        self.output = Linear(dim, dim)
        # Drawn once and saved: sums of one projection's features cannot be read with another projection.
        self.register_buffer(
            "projection", random_projection(features, dim // num_heads) if feature_map == "favor" else None
        )
        self.phi()  # raises for an unknown name

    def phi(self) -> FeatureMap:
        """The feature map φ."""
        return (
            find(self.feature_map) if self.projection is None else functools.partial(favor, projection=self.projection)
        )

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> Sums:
        # The sums of a call without tokens: only the feature map, which may be any function, determines D'.
        no_tokens = torch.zeros(batch_size, 0, self.num_heads, self.dim // self.num_heads, device=device, dtype=dtype)
        sums = linear_attention(no_tokens, no_tokens, no_tokens, feature_map=self.phi())[1]
        seen = torch.zeros(batch_size, device=no_tokens.device, dtype=torch.int64)
        return sums if self.rotary is None else PlacedSums(sums, seen)

    def check_state(self, state: Sums, batch_size: int) -> None:
        # `linear_attention` checks the sums.
        if isinstance(state, PlacedSums) != (self.rotary is not None):
            expectation = "a PlacedSums" if self.rotary is not None else "sums without positions"
            raise InputError(f"expected {expectation}, found {type(state).__name__}; use the layer's own initial_state")

    def compute_heads(self, x: Tensor, state: Sums | None, mask: Tensor | None) -> tuple[Tensor, Sums | None]:
        seen = None
        if isinstance(state, PlacedSums):
            state, seen = state
        qkv = self.qkv(x).unflatten(-1, (3 * self.num_heads, -1))
        qk, v = qkv.split([2 * self.num_heads, self.num_heads], 2)  # one rotation for both
        if self.rotary is not None:
            qk = self.rotary.rotate(qk, seen, mask)
        q, k = qk.chunk(2, 2)
        y, sums = self.attend(q, k, v, state, mask)
        if not self.causal:
            return y, None
        return y, sums if self.rotary is None else PlacedSums(sums, count_seen(x, seen, mask))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """`linear_attention` with the layer's settings. A method of its own: `mnemos look` wraps it to see q, k, v."""
        phi = self.feature_map if self.projection is None else self.phi()
        return linear_attention(q, k, v, self.causal, phi, state, mask, self.eps, self.backend)
