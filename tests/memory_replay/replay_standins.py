"""Recurrent models to replay, and the plain loop that every replay is judged by."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Cell(nn.Module):
    """A recurrent model with dropout on its critical path and, after it, beside it; a count that is an integer."""

    def __init__(self, width: int = 5, dropout: float = 0.3, learned: bool = False) -> None:
        super().__init__()
        self.read, self.keep, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.start = nn.Parameter(torch.randn(width)) if learned else None
        self.drop = nn.Dropout(dropout)
        self.width = width

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x [B, T, D], state {"h": [B, D], "seen": ([B], name)} -> (loss, state)."""
        h, state = self.walk(x, state)
        return self.head(self.drop(torch.stack(h, 1))).square().mean(), state

    def walk(self, x: Tensor, state: Any) -> tuple[list[Tensor], Any]:
        if state is None:
            start = x.new_zeros(self.width) if self.start is None else self.start
            state = {"h": start.expand(len(x), -1), "seen": (torch.zeros(len(x), dtype=torch.int64), "rows")}
        h, outputs = state["h"], []
        for token in self.drop(x).unbind(1):
            h = torch.tanh(self.read(token) + self.keep(h))
            outputs.append(h)
        return outputs, {"h": h, "seen": (state["seen"][0] + x.shape[1], "rows")}

    def advance(self, x: Tensor, state: Any) -> Any:
        return self.walk(x, state)[1]


def cell(dtype: torch.dtype = torch.float64, **options: Any) -> Cell:
    torch.manual_seed(0)
    return Cell(**options).to(dtype)


def segments(count: int = 7, dtype: torch.dtype = torch.float64, rows: int = 3, tokens: int = 2) -> list[Tensor]:
    """Not contiguous, of which the last is longer."""
    drawn = torch.Generator().manual_seed(1)
    lengths = [tokens] * (count - 1) + [tokens + 1]
    return [torch.randn(rows, 5, n, generator=drawn, dtype=dtype).transpose(1, 2) for n in lengths]


def begin(dtype: torch.dtype = torch.float64, rows: int = 3) -> Any:
    drawn = torch.Generator().manual_seed(2)
    h = torch.randn(5, rows, generator=drawn, dtype=dtype).T
    return {"h": h, "seen": (torch.arange(rows), "rows")}


def fresh(state: Any, mask: Tensor | None) -> Any:
    """Rows of a state made zeros; by multiplication, and not as the library does it."""
    if mask is None or state is None:
        return state

    def leaf(x: Any) -> Any:
        return x * (~mask).to(x.dtype).view(-1, *[1] * (x.dim() - 1)) if isinstance(x, Tensor) else x

    return pytree.tree_map(leaf, state)


def plain(
    step: Callable[[Any, Any], tuple[Tensor, Any]],
    pieces: Any,
    state: Any = None,
    weights: Any = None,
    resets: Any = None,
    every: int = 10**9,
    before: Callable[[int], None] = lambda t: None,
) -> tuple[Tensor, list[Tensor], Any]:
    """Back-propagation through time: one graph over all steps."""
    total: Any = 0
    losses = []
    for t, piece in enumerate(pieces):
        if t and t % every == 0:
            state = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, state)
        before(t)
        loss, state = step(piece, fresh(state, None if resets is None else resets[t]))
        total = total + loss * (1 / len(pieces) if weights is None else weights[t])
        losses.append(loss.detach())
    total.backward()
    return total.detach(), losses, state


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def agree(found: Any, expected: Any, tolerance: float) -> None:
    """Every tensor of two pytrees, to `tolerance` of its norm; of 1e-4 where it is zero but for rounding."""
    left, right = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert left[1] == right[1]
    for a, b in zip(left[0], right[0], strict=True):
        if not isinstance(b, Tensor):
            assert a == b
        else:
            assert a.dtype == b.dtype
            a, b = a.detach().double(), b.detach().double()
            assert (a - b).norm() <= tolerance * max(b.norm(), 1e-4), (
                f"{((a - b).norm() / b.norm()).item():.3g} of its norm"
            )
