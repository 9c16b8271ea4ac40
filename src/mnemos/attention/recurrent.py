"""What the layers that forget and correct share: their state, a short convolution, decays, a gated norm."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.config import AttentionConfig
from mnemos.ops.checks import check_mask
from mnemos.ops.convolution import short_convolution
from mnemos.ops.delta import decayed_attention, delta_rule
from mnemos.ops.padding import zero_invalid
from mnemos.types import Device, InputError, Splits, StateKind, check_heads, check_input

WIDTH = 4  # tokens that a short convolution reads
Shapes = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]  # of a `RecurrentSums`
EPS = 1e-5  # of the norms, but that of retention, as in the authors' code


@exportable
class RecurrentSums(NamedTuple):
    """The state of a layer that forgets.

    sums [B, H, D, M], float32 (float64 for float64). window [B, W − 1, C]: the last inputs of the short convolution;
    None without one. seen [B] int64: valid tokens since the row began, where positions are rotary; else None.
    """

    sums: Tensor
    window: Tensor | None = None
    seen: Tensor | None = None


@dataclass(frozen=True)
class RecurrentConfig(AttentionConfig):
    """Base of the configurations of layers that forget: causal, and without positions in their inputs."""

    knows_distances: ClassVar[bool] = True

    @property
    def causal_modes(self) -> frozenset[bool]:
        """A sum over the tokens so far is causal."""
        return frozenset({True})

    @property
    def remembers(self) -> bool:
        """Its sums are a memory of all tokens."""
        return True


class Widths(NamedTuple):
    """The heads of queries and keys, their width D, the heads of values, which these serve in turn, and their width M.

    Value head h has the query and key head h // (value_heads / key_heads).
    """

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int

    @property
    def keys(self) -> int:
        """The width of all keys of a token."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """The width of all values of a token."""
        return self.value_heads * self.value_width


class ShortConvolution(nn.Module):
    """SiLU of a causal convolution over `WIDTH` tokens, one a channel: x [B, T, C], window, mask -> y, new window.

    Weights (and biases, if any) start uniform in ±1/√WIDTH, as those of `torch.nn.Conv1d` do.
    """

    def __init__(self, channels: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, WIDTH))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(WIDTH**-0.5), WIDTH**-0.5)

    def forward(self, x: Tensor, window: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """See the class."""
        window = None if window is None else window.to(x.dtype)
        return short_convolution(x, self.weight, self.bias, window, mask, activation="silu")

    if TYPE_CHECKING:
        __call__ = forward


class GatedNorm(nn.RMSNorm):
    """An RMS norm over the last axis, times an activation of a gate of the same shape, if there is one.

    `eps` may be set later, for the weights of a model that has another.
    """

    def __init__(
        self, width: int, gate: Literal["silu", "sigmoid"] | None, learned: bool = True, eps: float = EPS
    ) -> None:
        super().__init__(width, eps, learned)
        self.gate = gate

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """See the class."""
        scale = None if self.weight is None else self.weight.to(x.dtype)
        y = F.rms_norm(x, self.normalized_shape, scale, self.eps)
        if gate is None:
            return y
        return y * (F.silu(gate) if self.gate == "silu" else torch.sigmoid(gate))

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        """The settings in one line."""
        return f"{super().extra_repr()}, gate={self.gate}"


class RecurrentAttention(nn.Module):
    """Base of layers whose memory is one sum a head: `y, state = layer(x, state=None, mask=None)`.

    x, y [B, T, dim]; mask [B, T] bool, True = valid: an invalid token, wherever it stands, leaves the state alone, and
    its y has no meaning. The state is a `RecurrentSums`. A subclass defines `input`, the projection of x, and
    `compute`, which gets checked inputs, and an empty state where none is given. convolved: the channels of its short
    convolution; 0: it has none.
    """

    causal = True
    splits: Splits = "anywhere"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    input: nn.Linear
    placed = False  # whether the state counts tokens

    def __init__(self, dim: int, num_heads: int, widths: Widths, convolved: int = 0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        if min(widths) < 1 or widths.value_heads % widths.key_heads:
            raise InputError(
                f"expected widths and heads of at least 1, and heads of keys that divide the {num_heads} heads, found "
                f"{', '.join(f'{name} {size}' for name, size in widths._asdict().items())}; change them"
            )
        self.dim, self.num_heads, self.widths = dim, num_heads, widths
        self.convolved = convolved

    def compute(self, x: Tensor, state: "RecurrentSums | Nothing", mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        """y and the new state."""
        raise NotImplementedError

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        decay: Tensor | None,
        sums: Tensor | None,
        mask: Tensor | None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The function `delta_rule`, or `decayed_attention` without β; programs have another form of it."""
        if beta is not None:
            return delta_rule(q, k, v, beta, decay, sums, mask, scale)
        assert decay is not None
        return decayed_attention(q, k, v, decay, sums, mask, scale)

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> RecurrentSums:
        """The state of `batch_size` new rows, by default like the weights; None in `forward` means the same."""
        like = self.input.weight
        device, dtype = like.device if device is None else device, dtype or like.dtype
        sums, window, seen = self.state_shapes(batch_size)
        wide = torch.promote_types(dtype, torch.float32)
        return RecurrentSums(
            torch.zeros(sums, dtype=wide, device=device),
            None if window is None else torch.zeros(window, dtype=dtype, device=device),
            None if seen is None else torch.zeros(seen, dtype=torch.int64, device=device),
        )

    def forward(
        self, x: Tensor, state: RecurrentSums | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, RecurrentSums]:
        """See the class."""
        check_input(x, self.dim)
        check_mask(mask, x.shape[:2])
        x = zero_invalid(x, mask)
        if state is None:
            return self.compute(x, NOTHING, mask)
        self._check_state(state, x.shape[0])
        return self.compute(x, state, mask)

    if TYPE_CHECKING:
        __call__ = forward

    def state_shapes(self, rows: int) -> Shapes:
        """The shapes of a state's sums, window and seen; None for a part that it does not have."""
        w = self.widths
        sums = (rows, w.value_heads, w.key_width, w.value_width)
        return sums, (rows, WIDTH - 1, self.convolved) if self.convolved else None, (rows,) if self.placed else None

    def _check_state(self, state: object, rows: int) -> None:
        wanted = self.state_shapes(rows)
        found = (
            tuple(None if part is None else tuple(part.shape) for part in state)
            if isinstance(state, RecurrentSums)
            else type(state).__name__
        )
        if found != wanted:
            raise InputError(
                f"expected a state of the shapes {wanted} (sums, window, seen), found {found}; pass None to begin"
            )


class Nothing(NamedTuple):
    """The parts of a state that is not there."""

    sums: None = None
    window: None = None
    seen: None = None


NOTHING = Nothing()


def head_width(dim: int, num_heads: int) -> int:
    """dim/num_heads. Raises InputError if it is not a whole number of at least 1."""
    check_heads(dim, num_heads)
    return dim // num_heads


def either(size: int | None, default: int) -> int:
    """The given size, or the default for None."""
    return default if size is None else size


def unit(x: Tensor) -> Tensor:
    """x·rsqrt(Σx² + 1e-6) over the last axis, in float32 at least: queries and keys of length 1."""
    x = widened(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def widened(x: Tensor) -> Tensor:
    """x in float32 at least: decays and lengths are computed in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def steps(x: Tensor, bias: Tensor) -> Tensor:
    """softplus(x + bias), in float32 at least: Δ of Mamba, which a decay is −e^A times."""
    return F.softplus(widened(x) + widened(bias))


def drawn_rates(heads: int, least: float) -> nn.Parameter:
    """A = log of uniform numbers from `least` to 16, one a head."""
    return nn.Parameter(torch.empty(heads).uniform_(least, 16).log())


def drawn_biases(number: int) -> nn.Parameter:
    """The biases of `steps` whose softplus is log-uniform from .001 to .1 (Mamba)."""
    step = torch.empty(number).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(step + torch.log(-torch.expm1(-step)))
