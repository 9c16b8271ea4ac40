"""What the models of this room share: checks of settings and states, first values, the head over tokens, base classes.

`AttentionModel` is the base of models whose state is that of their attentions; `LanguageModel` that of the others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mnemos.attention.multi_head import padded_state
from mnemos.config import ModelConfig, check_fields, with_fields
from mnemos.memory.gated_cache import caches
from mnemos.ops.checks import check_dropout
from mnemos.ops.dense_layer import Linear
from mnemos.registry import load_baseline
from mnemos.types import (
    Attention,
    InputError,
    Likelihood,
    Splits,
    State,
    StateKind,
    check_heads,
    combined_splits,
    combined_state_kind,
    leaves,
    select,
)

C = TypeVar("C", bound=ModelConfig)

# --- Checks ---


def check_sizes(config: object, **least: float) -> None:
    """Raise InputError for a field of the configuration that is below its least value, or is NaN."""
    for name, value in least.items():
        if not getattr(config, name) >= value:
            raise InputError(f"{name}: expected at least {value}, found {getattr(config, name)}; raise it")


def checked_config(model: nn.Module, config: C, fields: dict[str, Any], **least: int) -> C:
    """A model's configuration with other values of some `fields`, after the checks that all models have in common.

    least: fields with their least values. Raises InputError for unknown fields, wrong types and impossible sizes.
    """
    c: Any = with_fields(config, fields, type(model).__name__)
    check_fields(c, "model")
    if hasattr(c, "num_heads"):
        check_heads(c.dim, c.num_heads)
    check_sizes(c, **least)
    check_dropout(c.dropout)
    checked: C = c
    return checked


def check_state(
    state: Any,
    cls: type,
    layers: int,
    rows: int,
    fits: Callable[[Any], bool] = lambda state: True,
    start: str = "state=None",
) -> None:
    """Raise InputError unless a state is of the model's class, has its layers, fits it, and has as many rows as tokens.

    start: what the error says to start with.
    """
    other = None
    if not isinstance(state, cls):
        other = type(state).__name__
    elif len(state.layers) != layers:  # type: ignore[attr-defined]
        other = f"one of {len(state.layers)} layers"  # type: ignore[attr-defined]
    elif not fits(state):
        other = "one of a model of another configuration"
    if other:
        raise InputError(f"expected the state that this model of {layers} layers returned, found {other}; use {start}")
    first = leaves(state)[0] if state.seen is None else state.seen
    if (count := first.shape[0]) != rows:
        raise InputError(f"expected a state of {rows} rows, as the tokens have, found {count}; use select or reset")


# --- First values, and the head ---


def init_weights(model: nn.Module, stacks: Iterable[Sequence[nn.Module]] = (), tied: bool = False) -> None:
    """Xavier for linear weights, zeros for their biases, normal with variance 1/D for embeddings.

    A layer with a published start of its own then draws it: `draw_weights`. In every stack of L blocks, what their
    `output` and `contract` add to the residual is divided by √(2L), as in GPT-2. tied: a linear head then shares the
    embedding's weights (an adaptive softmax has shared them from the start).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    for module in model.modules():
        draw: Any = getattr(module, "draw_weights", None)
        if draw is not None:
            draw()
    with torch.no_grad():
        for blocks in stacks:
            for name, module in nn.ModuleList(blocks).named_modules():
                if isinstance(module, nn.Linear) and name.rpartition(".")[2] in ("output", "contract"):
                    module.weight.div_((2 * len(blocks)) ** 0.5)
    if tied and isinstance(model.head, nn.Linear):
        model.head.weight = model.embedding.weight  # type: ignore[union-attr, assignment]


def language_head(embedding: nn.Embedding, tied: bool = False, cutoffs: Sequence[int] = ()) -> nn.Module:
    """The head over the embedding's tokens, from hidden states [.., D].

    Without cut-offs, a linear map to logits [.., V], without a bias where it is tied (`init_weights` ties it). With
    cut-offs, an adaptive softmax. Raises InputError for impossible cut-offs.
    """
    if cutoffs:
        if not tied:
            raise InputError("cutoffs: expected a tied head (tied=True), found an untied one; tie it, or give none")
        head: nn.Module = load_baseline("adaptive softmax")(embedding, cutoffs)
        return head
    return Linear(embedding.embedding_dim, embedding.num_embeddings, bias=not tied)


# --- Base classes ---


class LanguageModel(nn.Module):
    """Base of the language models of tokens whose state has a constant size, and which may be cut anywhere."""

    splits: Splits = "anywhere"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    autoregressive = True
    picks_positions = True  # `forward` takes `only`
    head: nn.Module

    @property
    def likelihood(self) -> Likelihood | None:
        """Scores the hidden states [B, T, D], the outputs of an adaptive softmax; None if outputs are logits."""
        head: Any = self.head
        return head if hasattr(head, "log_prob") else None


class AttentionModel(nn.Module):
    """Base of the models whose state has `layers`, those of their attentions, and which are what these declare."""

    @property
    def attentions(self) -> list[Attention]:
        """Those whose states are the model's, in order."""
        raise NotImplementedError

    @property
    def splits(self) -> Splits:
        return combined_splits(attention.splits for attention in self.attentions)

    @property
    def state_kind(self) -> StateKind:
        return combined_state_kind(attention.state_kind for attention in self.attentions)

    @property
    def rows_independent(self) -> bool:
        return all(attention.rows_independent for attention in self.attentions)

    @property
    def state_gradient(self) -> bool:
        return all(attention.state_gradient for attention in self.attentions)

    def own_caches(self) -> None:
        """Make this model begin and end a forward for its gated caches, and not each; see memory/gated_cache.py."""
        self._caches = caches(self)
        for cache in self._caches:
            cache.owned = True

    def layers_of_new_rows(self, rows: int, device: Any, dtype: torch.dtype | None) -> tuple[State, ...]:
        """The states of the attentions for new rows."""
        return tuple(attention.initial_state(rows, device, dtype) for attention in self.attentions)

    def pad_to_capacity(self, state: Any) -> Any:
        """The same state with those of its layers at their capacity."""
        layers = zip(self.attentions, state.layers, strict=True)
        return state._replace(layers=tuple(padded_state(attention, layer) for attention, layer in layers))

    def branch(self, state: Any, copies: int) -> Any:
        """The state of `copies` rows for every row, next to each other: they share what their attentions can share."""
        if state is None:
            return None
        index = torch.arange(leaves(state)[0].shape[0]).repeat_interleave(copies)
        layers = tuple(
            attention.branch(layer, copies) if hasattr(attention, "branch") else select(layer, index)
            for attention, layer in zip(self.attentions, state.layers, strict=True)
        )
        seen: Tensor | None = None if state.seen is None else state.seen.repeat_interleave(copies)
        return state._replace(seen=seen, layers=layers)
