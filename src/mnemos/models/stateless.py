"""The declarations of models that read each input as a whole and keep no state between calls."""

import torch

from mnemos.types import Device, Splits, StateKind


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
