"""Draw the next token from a model's outputs."""

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from mnemos.ops.checks import check_finite
from mnemos.types import InputError


def draw(
    outputs: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    likelihood: Any = None,
    min_p: float = 0.0,
) -> Tensor:
    """Tokens [B] int64 drawn from outputs [B, V]: logits, or the parameters of `likelihood`, if the model has one.

    temperature 0: the most probable token. top_k > 0: only the k most probable ones; top_p < 1: only the most probable
    ones, as many as have this probability together; min_p > 0: only those that have at least this share of the greatest
    probability; 0, 1 and 0: all. The settings are those of `checked_settings`. Raises InputError on a CPU for outputs
    of NaN, and for a likelihood that cannot be drawn from, or not so.
    """
    if likelihood is not None and not hasattr(likelihood, "log_prob"):
        if not hasattr(likelihood, "draw"):
            raise InputError(
                f"expected a likelihood to draw from, found {type(likelihood).__name__} without `draw` or `log_prob`; "
                "define one"
            )
        if min_p:
            raise InputError(
                f"expected min_p 0, because {type(likelihood).__name__} has no logits, found {min_p}; use temperature"
            )
        tokens: Tensor = likelihood.draw(outputs, temperature, top_k, top_p, generator)
        return tokens
    scores = outputs if likelihood is None else likelihood.log_prob(outputs)
    if temperature == 0:
        greatest, tokens = scores.max(-1)
        check_finite(greatest)
        return tokens
    chances = probabilities(scores, temperature, top_k, top_p, min_p)
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1)


def probabilities(scores: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The distribution [.., V], in float32, from which `draw` draws a token of logits [.., V] at a temperature above 0.

    The order is that of transformers: temperature, top_k, top_p, min_p (Nguyen et al. 2024, "Turning Up the Heat").
    Cost: O(V), with top_p below 1 O(V log V), per distribution. Raises InputError for NaN, on a CPU.
    """
    logits = scores.float()
    greatest = logits.amax(-1, keepdim=True)
    check_finite(greatest)
    # At most 0: cannot overflow. A temperature that float32 does not have would make 0/0 of the greatest.
    logits = (logits - greatest) / max(temperature, torch.finfo(torch.float32).tiny)
    if 0 < top_k < logits.shape[-1]:
        values, indices = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, indices, values)
    if top_p < 1:
        ordered, indices = logits.sort(-1, descending=True)
        share = ordered.softmax(-1)
        # Keep a token if the more probable ones have less than top_p together; so the first is always kept.
        ordered = ordered.masked_fill(share.cumsum(-1) - share >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, indices, ordered)
    if min_p > 0:  # the greatest logit is 0, and is always kept
        logits = logits.masked_fill(logits < math.log(min_p), -torch.inf)
    return logits.softmax(-1)


def checked_settings(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None = 0.0
) -> tuple[int, float, float]:
    """top_k, top_p and min_p as numbers, None being 0, 1 and 0. Raises InputError for settings out of range."""
    top_k, top_p = 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
    min_p = 0.0 if min_p is None else min_p
    for name, value, expected, right in (
        ("temperature", temperature, "a finite number of at least 0", lambda x: 0 <= x < torch.inf),
        ("top_k", top_k, "a whole number of at least 0", lambda x: is_whole(x) and x >= 0),
        ("top_p", top_p, "a number above 0 and at most 1", lambda x: 0 < x <= 1),
        ("min_p", min_p, "a number of 0 to 1", lambda x: 0 <= x <= 1),
    ):
        if not (isinstance(value, Real) and right(value)):
            raise InputError(f"{name}: expected {expected}, found {value!r}; change it")
    return top_k, top_p, min_p


def is_whole(x: object) -> bool:
    """Whether a number of tokens is a whole one, of Python or of NumPy."""
    return isinstance(x, Integral)
