"""What the models of this room share: checks of settings, first values, the head over tokens, a base class."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mnemos.config import AttentionConfig
from mnemos.registry import load_baseline
from mnemos.types import Attention, InputError, Likelihood, Splits, State, StateKind, select


def check_sizes(config: object, **least: int) -> None:
    """Raise InputError for a field of the configuration that is below its least value, or is NaN."""
    for name, value in least.items():
        if not getattr(config, name) >= value:
            raise InputError(f"{name}: expected at least {value}, found {getattr(config, name)}; raise it")


def check_mode(attention: AttentionConfig, causal: bool) -> None:
    """Raise InputError unless the attention can be built with this value of `causal`."""
    if causal not in attention.causal_modes:
        raise InputError(
            f"attention {attention.name!r}: expected causal={not causal}, its only mode, found causal={causal}; use "
            f"another attention, or a model with causal={not causal}"
        )


def init_weights(model: nn.Module) -> None:
    """Xavier for linear weights, zeros for their biases, normal with variance 1/D for embeddings.

    A layer with a published start of its own then draws it: `draw_weights`.
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
    return tuple(
        attention.branch(state, copies) if hasattr(attention, "branch") else select(state, index)
        for attention, state in zip(attentions, layers, strict=True)
    )


def language_head(
    embedding: nn.Embedding, tied: bool = False, cutoffs: Sequence[int] = (), div_value: float = 1.0
) -> nn.Module:
    """The head over the embedding's tokens, from hidden states [.., D]. A tied one shares the embedding's weights.

    Without cut-offs, a linear map to logits [.., V], without a bias where it is tied; the caller sets its tied weight
    after initialisation. With cut-offs, an adaptive softmax. Raises InputError for impossible cut-offs.
    """
    if cutoffs:
        head: nn.Module = load_baseline("adaptive softmax")(embedding, tied, cutoffs, div_value)
        return head
    if div_value != 1:
        raise InputError(f"div_value: expected 1 in a head without cutoffs, found {div_value}; set cutoffs, or use 1")
    return nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=not tied)


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
