"""The parts that the models share: attention and MLP blocks, positions, initialisation, declarations."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from mnemos.modes import reads_without_waiting
from mnemos.ops.dropout import Dropout
from mnemos.ops.padding import positions
from mnemos.ops.sinusoids import sinusoids as of_positions
from mnemos.types import Attention, Device, InputError, Output, Splits, State, StateKind, select

Norm = Literal["rms", "pre", "post"]
Ungated = Literal["gelu", "relu", "silu"]
Activation = Literal["swiglu"] | Ungated
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "swiglu": nn.SiLU}

TABLE = 4096  # positions that a table of sinusoids may have; those of longer streams are computed

_IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.GELU: torch.ops.aten.gelu_,
    nn.ReLU: torch.relu_,
    nn.SiLU: torch.ops.aten.silu_,
}


class MLP(nn.Module):
    """W₂·φ(W₁·x) for each token, [.., D] -> [.., D]."""

    def __init__(self, dim: int, hidden: int, activation: Ungated = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.activation: nn.Module = ACTIVATIONS[activation]()
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        hidden = self.expand(x)
        hidden = self.activation(hidden) if torch.is_grad_enabled() else self.activate(hidden)
        return self.contract(self.dropout(hidden))

    if TYPE_CHECKING:
        __call__ = forward

    def activate(self, hidden: Tensor) -> Tensor:
        """φ in place, without gradient: allocating every intermediate costs more than the arithmetic."""
        return _IN_PLACE.get(type(self.activation), self.activation)(hidden)


class GatedMLP(nn.Module):
    """W₃·(SiLU(W₁·x) ⊙ W₂·x) for each token, [.., D] -> [.., D], without biases (SwiGLU, Shazeer 2020).

    Cost: 6·D·hidden FLOPs for a token, where an `MLP` of this width has 4·D·hidden.
    """

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.expand = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.contract = nn.Linear(hidden, dim, bias=False)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if torch.is_grad_enabled():
            hidden = nn.functional.silu(self.gate(x)) * self.expand(x)
        else:
            hidden = nn.functional.silu(self.gate(x)).mul_(self.expand(x))
        return self.contract(self.dropout(hidden))

    if TYPE_CHECKING:
        __call__ = forward


def mlp_of(dim: int, hidden: int, activation: Activation, dropout: float) -> "MLP | GatedMLP":
    """The MLP of a block."""
    return GatedMLP(dim, hidden, dropout) if activation == "swiglu" else MLP(dim, hidden, activation, dropout)


def norm_of(norm: Norm, dim: int) -> nn.RMSNorm | nn.LayerNorm:
    """The norm of a block: RMSNorm ("rms", eps 1e-6) or LayerNorm."""
    return nn.RMSNorm(dim, eps=1e-6) if norm == "rms" else nn.LayerNorm(dim)


def final_norm_of(norm: Norm, dim: int) -> nn.Module:
    """The norm after the last block; none where each block ends with one ("post")."""
    return nn.Identity() if norm == "post" else norm_of(norm, dim)


class Block(nn.Module):
    """Attention and MLP, each with a residual and a norm: before it ("rms", "pre") or after the sum ("post").

    x [B, T, D], state of the attention, mask [B, T] -> y [B, T, D], state. mlp None: attention alone.
    """

    attention: Attention

    def __init__(
        self, attention: Attention, mlp: MLP | GatedMLP | None, dim: int, norm: Norm = "pre", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norm_of(norm, dim), norm_of(norm, dim) if mlp else nn.Identity()
        self.norm, self.dropout = norm, Dropout(dropout)

    def forward(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output:
        """See the class."""
        if self.norm != "post":
            y, state = self.attention(self.attention_norm(x), state, mask)
            x = add_into(x, self.dropout(y))
            return x if self.mlp is None else add_into(x, self.dropout(self.mlp(self.mlp_norm(x)))), state
        y, state = self.attention(x, state, mask)
        x = self.attention_norm(add_into(x, self.dropout(y)))
        return x if self.mlp is None else self.mlp_norm(add_into(x, self.dropout(self.mlp(x)))), state

    if TYPE_CHECKING:
        __call__ = forward


M = TypeVar("M", bound=nn.Module)


def module_list(modules: Iterable[M]) -> Sequence[M]:
    """An `nn.ModuleList`, typed by what it holds: torch's own type forgets it."""
    return cast(Sequence[M], nn.ModuleList(modules))


def add_into(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in the memory of y where no gradient needs y; no other code may hold y."""
    return x + y if torch.is_grad_enabled() or y.dtype != x.dtype else y.add_(x)


def sinusoids(t: int, dim: int, start: Tensor | None = None, device: Device = None) -> Tensor:
    """Fixed positions (Vaswani et al. 2017): sines in even channels, cosines in odd, of T positions from `start` [B].

    [1 or B, T, D], float32. Positions have no limit, because there is no table.
    """
    return of_positions(positions(t, start, None, device), dim)


class LearnedPositions(nn.Embedding):
    """y [B, T, D] plus learned positions from `seen` [B] on (None: 0). Raises InputError beyond the last position.

    mask [B, T] bool: positions count valid tokens.

    In a compiled graph and on other devices than a CPU, where reading `seen` would cost a wait, the look-up raises its
    own error.
    """

    def forward(self, y: Tensor, seen: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        limit, place = self.num_embeddings, positions(y.shape[1], seen, mask, y.device)
        if place.numel() and reads_without_waiting(place) and (last := int(place.max())) >= limit:
            raise InputError(
                f"learned positions: expected at most {limit} tokens, found {last + 1}; raise max_length or use "
                'position="sinusoidal"'
            )
        return y + super().forward(place)

    if TYPE_CHECKING:
        __call__ = forward


class SinusoidalPositions(nn.Module):
    """y [B, T, D] plus sinusoids of the positions from `seen` [B] on (None: 0). Positions have no limit.

    mask [B, T] bool: positions count valid tokens.

    The first `TABLE` positions come from a table, which is kept between calls and grows as it is needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table: Tensor | None = None

    def forward(self, y: Tensor, seen: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        t, dim, stops = y.shape[1], y.shape[2], y.shape[1]
        if seen is not None and seen.numel() and reads_without_waiting(seen):
            stops += int(seen.max())
        elif seen is not None:
            stops = TABLE + 1  # unknown without waiting for the device
        if torch.compiler.is_compiling() or (stops > TABLE and seen is not None):
            return y + of_positions(positions(t, seen, mask, y.device), dim).to(y.dtype)
        table = self._table
        if table is None or len(table) < stops or table.device != y.device or table.dtype != y.dtype:
            longest = stops if seen is None else min(TABLE, 2 * stops)
            table = self._table = sinusoids(longest, dim, None, y.device)[0].to(y.dtype)
        return y + (table[:t] if seen is None and mask is None else table[positions(t, seen, mask, y.device)])

    if TYPE_CHECKING:
        __call__ = forward


def init_weights(model: nn.Module) -> None:
    """Initialise a model: Xavier-uniform matrices, zero biases, embeddings N(0, 1/D); and what a layer draws itself."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    for module in model.modules():
        draw: Any = getattr(module, "draw_weights", None)  # a published start of its own
        if draw is not None:
            draw()


def shrink_residuals(blocks: Iterable[nn.Module]) -> None:
    """Divide by √(2L) what the L blocks' `output` and `contract` add to the residual at the start (as GPT-2 does)."""
    blocks = list(blocks)
    with torch.no_grad():
        for name, module in nn.ModuleList(blocks).named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in ("output", "contract"):
                module.weight.div_((2 * len(blocks)) ** 0.5)


def branch_layers(
    attentions: Sequence[Attention], layers: Sequence[State], rows: int, copies: int
) -> tuple[State, ...]:
    """The states of attentions for `copies` rows per row, next to each other; what they can share is not copied."""
    index = torch.arange(rows).repeat_interleave(copies)

    def branch(attention: Attention, state: State) -> State:
        return attention.branch(state, copies) if hasattr(attention, "branch") else select(state, index)

    return tuple(branch(attention, state) for attention, state in zip(attentions, layers, strict=True))


class Stateless:
    """Base of models without a state, next to `nn.Module`: what `mnemos.types.RecurrentModel` asks for."""

    splits: Splits = "never"
    state_kind: StateKind = "none"
    state_gradient = False
    autoregressive = False

    @property
    def rows_independent(self) -> bool:
        """Whether a row's output in training depends on that row alone."""
        return True

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        """None: there is no state."""
        return None
