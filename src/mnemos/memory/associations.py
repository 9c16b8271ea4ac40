"""An associative memory per row: a matrix from keys to values, written from memory tokens by a delta rule (ARMT)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.config import check_fields
from mnemos.ops.associative import associative_read, associative_write, dpfp
from mnemos.ops.dense_layer import Linear
from mnemos.types import Device, InputError

from .tokens import check_count


@dataclass(frozen=True)
class AssociationsConfig:
    """The settings of a memory of associations.

    tokens: m, the number of memory tokens that write it after each segment, at least 1 (0: only with write=False).
    key_dim: d, the width of keys and queries. nu: ν of the feature map DPFP-ν, which makes 2·ν·d features of them.
    causal: a memory token attends to itself and earlier ones of its segment only; otherwise to all. bounded:
    denominators of at least 1, so that a write multiplies what is held by at most 1; False: the published ones, for
    weights that were trained with them. write=False: nothing is written and nothing read, as in a baseline.
    """

    tokens: int = 16
    key_dim: int = 32
    nu: int = 3
    causal: bool = False
    bounded: bool = True
    write: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "memory")
        check_count(self.tokens, self.write)
        for name in ("key_dim", "nu"):
            if getattr(self, name) < 1:
                raise InputError(f"memory.{name}: expected at least 1, found {getattr(self, name)}; raise it")


@exportable
class AssociationState(NamedTuple):
    """A layer's matrix A [B, F, D] and normaliser z [B, F], at least float32; zeros are the empty memory."""

    matrix: Tensor
    normaliser: Tensor

    @property
    def memory_name(self) -> str:
        return "associations"


class AssociativeMemory(nn.Module):
    """A layer's associations (Rodkin et al. 2024): each token reads them, and memory tokens write them.

        read    x + Aᵀφ(W_Q·x)/max(zᵀφ(W_Q·x), 1)
        write   keys φ(W_K·m_i), values W_V·m_i, strengths β_i = σ(w·m_i + b) of the memory tokens m_i

    See `mnemos.ops.associative`. φ: DPFP-ν, F = 2·ν·d features. W_V starts at 0, so that a new model reads nothing and
    learns to. Cost: O(T·D·(d + F)) to read T tokens, O(m·D·(D + F)) to write m.
    """

    def __init__(self, dim: int, config: AssociationsConfig) -> None:
        super().__init__()
        self.nu, self.features = config.nu, 2 * config.nu * config.key_dim
        self.bounded = config.bounded
        self.query, self.key = (Linear(dim, config.key_dim, bias=False) for _ in range(2))
        self.value, self.strength = Linear(dim, dim, bias=False), Linear(dim, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W_V = 0."""
        nn.init.zeros_(self.value.weight)

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> AssociationState:
        """The state of `batch_size` new rows: empty."""
        weight = self.value.weight
        device = weight.device if device is None else device
        wide = torch.promote_types(dtype or weight.dtype, torch.float32)
        matrix = torch.zeros(batch_size, self.features, weight.shape[0], device=device, dtype=wide)
        return AssociationState(matrix, matrix.new_zeros(batch_size, self.features))

    def read(self, state: AssociationState, x: Tensor) -> Tensor:
        """x [B, T, D] with what the memory holds for each token added."""
        return x + associative_read(*state, dpfp(self.query(x), self.nu), self.bounded).to(x.dtype)

    def write(self, state: AssociationState, tokens: Tensor, active: Tensor | None) -> AssociationState:
        """The state after a write from memory tokens [B, m, D] in the rows that are `active` [B] bool (None: all)."""
        beta = torch.sigmoid(self.strength(tokens)).squeeze(-1)
        keys, values = dpfp(self.key(tokens), self.nu), self.value(tokens)
        new = AssociationState(*associative_write(*state, keys, values, beta, self.bounded))
        if active is None:
            return new
        return AssociationState(
            torch.where(active[:, None, None], new.matrix, state.matrix),
            torch.where(active[:, None], new.normaliser, state.normaliser),
        )
