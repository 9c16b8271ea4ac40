"""Memory tokens that a row carries from segment to segment: the last layer's outputs become the next ones (RMT)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.config import check_fields
from mnemos.types import Device, InputError


@dataclass(frozen=True)
class TokensConfig:
    """The settings of a memory of tokens.

    tokens: m, their number, at least 1; 0 with write=False: no memory, as in a baseline. causal: within the read
    tokens, and within the write tokens, each attends to itself and earlier ones only, as in a decoder with a plain
    causal mask; otherwise each attends to all of its group. write=False: the tokens keep their start values, which are
    equal for all rows, and no write tokens are read.
    """

    tokens: int = 16
    causal: bool = False
    write: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "memory")
        check_count(self.tokens, self.write)


def check_count(tokens: int, write: bool) -> None:
    """Raise InputError for a number of memory tokens below 1; 0 is allowed with write=False, which says it is meant."""
    if tokens < (1 if write else 0):
        raise InputError(
            f"memory.tokens: expected at least 1, found {tokens}; raise it, or use tokens=0 with write=False for a "
            "model without a memory"
        )


@exportable
class TokenState(NamedTuple):
    """tokens [B, m, D] and writes [B] int64, their number; where it is 0, the row's tokens are the learned start."""

    tokens: Tensor
    writes: Tensor

    @property
    def memory_name(self) -> str:
        return "memory tokens"


class TokenMemory(nn.Module):
    """m memory tokens of width D per row. `start` [m, D] are those of a new row: learned, at first random.

    They start different from one another: equal tokens at equal positions would stay equal. `written` replaces them.
    """

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(tokens, dim) * dim**-0.5)

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> TokenState:
        """The state of `batch_size` new rows, like the weights by default."""
        device = self.start.device if device is None else device
        tokens = torch.zeros(batch_size, *self.start.shape, device=device, dtype=dtype or self.start.dtype)
        return TokenState(tokens, torch.zeros(batch_size, device=device, dtype=torch.int64))

    def contents(self, state: TokenState) -> Tensor:
        """The memory tokens [B, m, D]; the start in new rows."""
        return torch.where((state.writes == 0)[:, None, None], self.start, state.tokens)

    @staticmethod
    def written(state: TokenState, tokens: Tensor, active: Tensor | None) -> TokenState:
        """The state with new tokens [B, m, D] in the rows that are `active` [B] bool (None: all)."""
        tokens = tokens.to(state.tokens.dtype)
        if active is None:
            return TokenState(tokens, state.writes + 1)
        return TokenState(torch.where(active[:, None, None], tokens, state.tokens), state.writes + active)
