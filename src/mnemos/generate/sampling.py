"""The next token, drawn from what a model says of it."""

from typing import Any

import torch
from torch import Tensor

from mnemos.types import InputError


def draw(
    outputs: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    likelihood: Any = None,
) -> Tensor:
    """Tokens [B] int64 drawn from outputs [B, V]: logits, or what `likelihood` (a model's own) understands.

    temperature 0: the likeliest. top_k > 0: among the k likeliest; top_p < 1: among the likeliest that together have
    at least that share. Raises InputError for settings out of range.
    """
    if not 0 <= temperature < torch.inf or top_k < 0 or not 0 < top_p <= 1:
        raise InputError(
            f"expected temperature and top_k at least 0, finite, and top_p in (0, 1], found {temperature}, {top_k}, "
            f"{top_p}"
        )
    if likelihood is not None:
        return likelihood.draw(outputs, temperature, top_k, top_p, generator)
    if temperature == 0:
        return outputs.argmax(-1)
    logits = outputs.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # cannot overflow, however cold
    if 0 < top_k < logits.shape[-1]:
        values, places = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, places, values)
    if top_p < 1:
        ordered, places = logits.sort(-1, descending=True)
        share = ordered.softmax(-1)
        # A token stays where those before it do not yet have the share: so the first always does.
        ordered = ordered.masked_fill(share.cumsum(-1) - share >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, places, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
