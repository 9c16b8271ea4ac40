"""Heads of language models: logits, or one of the heads that the papers' comparisons need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from mnemos.registry import load_baseline
from mnemos.types import InputError, Likelihood


@dataclass(frozen=True)
class HeadConfig:
    """What the model predicts: the next token (classes = 0), or one of `classes` for the whole sequence."""

    classes: int = 0
    hidden: int = 0  # width of a hidden layer before the classes; 0: none
    pool: Literal["cls", "mean", "last"] = "cls"  # a learned token in front, the mean or the last of the valid tokens
    tied: bool = False  # language: share the embedding's weights
    cutoffs: tuple[int, ...] = ()  # language: adaptive softmax with clusters from these tokens on; (): one softmax
    div_value: float = 1.0  # adaptive softmax, untied: cluster k is read through D/div_value^k channels
    mixture: int = 0  # for brightnesses: the number of discretised logistics instead of logits; 0: logits


def check_head(head: HeadConfig, vocab_size: int) -> None:
    """Raise InputError for settings that exclude each other."""
    if head.classes < 0 or head.hidden < 0:
        raise InputError(
            f"expected head.classes and head.hidden of at least 0, found {head.classes} and {head.hidden}; use 0 "
            "for none"
        )
    if head.mixture < 0 or (head.mixture and (head.classes or head.tied or vocab_size < 2)):
        raise InputError(
            f"head.mixture: expected a language model of two or more brightnesses with an untied head, found mixture "
            f"{head.mixture}, classes {head.classes}, tied {head.tied}, vocab_size {vocab_size}; change one"
        )
    if (head.classes or head.mixture) and (head.cutoffs or head.div_value != 1):
        raise InputError(
            f"head.cutoffs: expected none but in a language model of tokens, found {head.cutoffs} with classes "
            f"{head.classes}, mixture {head.mixture}; leave cutoffs and div_value out"
        )


def language_head(
    embedding: nn.Embedding, tied: bool = False, cutoffs: Sequence[int] = (), div_value: float = 1.0
) -> nn.Module:
    """The head over the embedding's tokens, from hidden states [.., D]. A tied one shares the embedding's weights.

    Without cut-offs, a linear map to logits [.., V], without a bias where it is tied; the caller sets its tied weight
    after initialisation (`tie`). With cut-offs, an adaptive softmax. Raises InputError for impossible cut-offs.
    """
    if cutoffs:
        head: nn.Module = load_baseline("adaptive softmax")(embedding, tied, cutoffs, div_value)
        return head
    if div_value != 1:
        raise InputError(f"div_value: expected 1 in a head without cutoffs, found {div_value}; set cutoffs, or use 1")
    return nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=not tied)


def tie(head: nn.Module, embedding: nn.Embedding) -> None:
    """Let a linear head share the embedding's weights; a tied adaptive softmax shares them from the start."""
    if isinstance(head, nn.Linear):
        head.weight = embedding.weight


def likelihood_of_head(head: nn.Module) -> Likelihood | None:
    """The head as a model's `likelihood`, as an adaptive softmax is one; None if its outputs are logits."""
    return head if hasattr(head, "log_prob") else None
