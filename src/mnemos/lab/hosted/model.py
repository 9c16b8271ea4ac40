"""What models around layers of other libraries share: checks, having no state, and tables that are not saved."""

from typing import Any

import torch

from mnemos.models.store import skeleton
from mnemos.types import Device, InputError, Splits, StateKind

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}


def check_segments(config: Any, length: str, positions: Any, row: str) -> None:
    """Raise InputError for a cache that is not a row's own, and for segments of more tokens than a host's positions.

    length: the field with the tokens of a segment. positions: of the host; no number if it has no limit.
    """
    if config.cache is not None and config.cache.scope not in config.cache_scopes:
        raise InputError(
            f"{config.name}: cache.scope: expected stream, a cache per {row}, found {config.cache.scope}; use "
            "--model.cache.scope stream"
        )
    if isinstance(positions, int) and 0 < positions < getattr(config, length):
        raise InputError(
            f"{config.name}: {length}: expected at most the {positions} positions of the host, found "
            f"{getattr(config, length)}; lower data.segment"
        )


class Stateless:
    """Base of models without a state, next to `nn.Module`: what `mnemos.types.RecurrentModel` asks for."""

    splits: Splits = "never"
    state_kind: StateKind = "none"
    state_gradient = False
    autoregressive = False

    @property
    def rows_independent(self) -> bool:
        return True

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        return None


def keep_tables(model: Any) -> None:
    """Let a model with layers of other libraries, built on meta, compute what they do not save, such as positions.

    Otherwise these buffers would have no values after load_state_dict; they are computed from the configuration again.
    """
    if any(x.is_meta for x in model.buffers()):
        model.register_load_state_dict_post_hook(_compute_tables)


def _compute_tables(model: Any, _: object) -> None:  # no closure: models are copied and pickled with their hooks
    with torch.device("cpu"):
        fresh = skeleton(model.config)
    own, saved = dict(model.named_buffers()), model.state_dict().keys()
    for name, x in fresh.named_buffers():
        if name in own and name not in saved:
            part, _, last = name.rpartition(".")
            setattr(model.get_submodule(part), last, x.to(next(model.parameters()).device, own[name].dtype))
