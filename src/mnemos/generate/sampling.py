"""Draw the next token from a model's outputs."""

from numbers import Integral, Real

import torch
from torch import Tensor

from mnemos.types import DrawingLikelihood, InputError, Likelihood, LogProbLikelihood


def draw(
    outputs: Tensor,
    temperature: float = 1.0,
    top_k: int | None = 0,
    top_p: float | None = 1.0,
    generator: torch.Generator | None = None,
    likelihood: Likelihood | None = None,
) -> Tensor:
    """Tokens [B] int64 drawn from outputs [B, V]: logits, or the parameters of `likelihood`, if the model has one.

    temperature 0: the most probable token. top_k > 0: only the k most probable ones; top_p < 1: only the most probable
    ones, as many as have this probability together; 0 and 1, or None: all. Raises InputError for settings out of range.
    """
    top_k, top_p = checked_settings(temperature, top_k, top_p)
    if likelihood is not None and not isinstance(likelihood, LogProbLikelihood):
        if not isinstance(likelihood, DrawingLikelihood):
            raise InputError(
                f"expected a likelihood to draw from, found {type(likelihood).__name__} without `draw` or `log_prob`; "
                "define one"
            )
        return likelihood.draw(outputs, temperature, top_k, top_p, generator)
    outputs = scores_of(outputs, likelihood)
    if temperature == 0:
        return outputs.argmax(-1)
    return torch.multinomial(probabilities(outputs, temperature, top_k, top_p), 1, generator=generator).squeeze(-1)


def scores_of(outputs: Tensor, likelihood: LogProbLikelihood | None) -> Tensor:
    """Logits [.., V] of a model's outputs: the outputs themselves, or log-probabilities of its likelihood."""
    return outputs if likelihood is None else likelihood.log_prob(outputs)


def probabilities(scores: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The distribution [.., V], in float32, from which `draw` draws a token of logits [.., V] at a temperature above 0.

    Cost: O(V), with top_p below 1 O(V log V), per distribution.
    """
    logits = scores.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: cannot overflow at any temperature
    if 0 < top_k < logits.shape[-1]:
        values, places = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, places, values)
    if top_p < 1:
        ordered, places = logits.sort(-1, descending=True)
        share = ordered.softmax(-1)
        # Keep a token if the more probable ones have less than top_p together; so the first is always kept.
        ordered = ordered.masked_fill(share.cumsum(-1) - share >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, places, ordered)
    return logits.softmax(-1)


def checked_settings(temperature: float, top_k: int | None, top_p: float | None) -> tuple[int, float]:
    """top_k and top_p as numbers, None being 0 and 1. Raises InputError for settings out of range."""
    top_k, top_p = 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
    if not (isinstance(temperature, Real) and isinstance(top_p, Real) and isinstance(top_k, Integral)):
        raise InputError(
            "expected a number as temperature and top_p and an integer as top_k, "
            f"found {temperature!r}, {top_p!r} and {top_k!r}"
        )
    if not 0 <= temperature < torch.inf or top_k < 0 or not 0 < top_p <= 1:
        raise InputError(
            "expected a finite temperature of at least 0, top_k of at least 0 and top_p in (0, 1], "
            f"found {temperature}, {top_k} and {top_p}"
        )
    return top_k, top_p


def is_whole(x: object) -> bool:
    """Whether a number of tokens is a whole one, of Python or of NumPy."""
    return isinstance(x, Integral)
