"""The candidates of a step of beam search: log-probabilities under constraints, and the best or drawn tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from mnemos.types import InputError, Likelihood, LogProbLikelihood

from .sampling import draw

BLOCK = 64  # columns whose maximum stands for them in `top_tokens`
WIDE = 1024  # columns from which on that is faster than `torch.topk` on a CPU


class Candidates(NamedTuple):
    """Continuations of the K hypotheses of B sentences, the best first: each [B, N].

    scores: the summed log-probability with the token (−inf: none). parents: which hypothesis it continues. tokens.
    """

    scores: Tensor
    parents: Tensor
    tokens: Tensor

    def padded(self, n: int) -> "Candidates":
        """N = n at least, with candidates of score −inf at the end."""
        missing = n - self.scores.shape[1]
        if missing <= 0:
            return self
        none = torch.full_like(self.scores[:, :1], -torch.inf).expand(-1, missing)
        zero = torch.zeros_like(self.tokens[:, :1]).expand(-1, missing)
        pairs = ((self.scores, none), (self.parents, zero), (self.tokens, zero))
        return Candidates(*(torch.cat(pair, 1) for pair in pairs))

    def take(self, places: Tensor) -> "Candidates":
        """The candidates at places [B, M]."""
        return Candidates(*(x.gather(1, places) for x in self))


def log_probs(outputs: Tensor, likelihood: Likelihood | None) -> Tensor:
    """Log-probabilities [R, V] of a model's outputs [R, ·], in float32 at least: sums in less would not be comparable.

    Raises InputError for a likelihood without log-probabilities.
    """
    if likelihood is None:
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32)).log_softmax(-1)
    if not isinstance(likelihood, LogProbLikelihood):
        raise InputError(
            f"beam_search: expected logits or a likelihood with `log_prob`, found {type(likelihood).__name__}; use "
            "Stream.generate, which draws"
        )
    found = likelihood.log_prob(outputs)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def check_finite(values: Tensor) -> None:
    """Raise InputError for NaN among the best values, on a CPU: a device is not synchronised."""
    if values.device.type == "cpu" and bool(values.isnan().any()):
        raise InputError("expected finite outputs, found NaN: the weights have diverged; use an earlier checkpoint")


def forbid_repeats(logp: Tensor, tokens: Tensor, n: int) -> None:
    """Set the log-probabilities [R, V] of tokens that would repeat n of tokens [R, T] to −inf, in place."""
    if tokens.shape[1] < n:
        return
    windows = tokens.unfold(1, n, 1)  # [R, T − n + 1, n]
    last = tokens[:, tokens.shape[1] - n + 1 :]
    row, place = (windows[..., :-1] == last[:, None]).all(-1).nonzero(as_tuple=True)
    logp[row, windows[row, place, -1]] = -torch.inf


def best(logp: Tensor, scores: Tensor, count: int) -> Candidates:
    """The `count` best continuations of hypotheses with scores [B, K], of log-probabilities [B·K, V]."""
    beams = scores.shape[1]
    found, tokens = top_tokens(logp, min(count, logp.shape[1]))
    check_finite(found)
    total = (found + scores.reshape(-1, 1)).unflatten(0, (-1, beams)).flatten(1)
    values, places = total.topk(min(count, total.shape[1]))
    tokens = tokens.unflatten(0, (-1, beams)).flatten(1).gather(1, places)
    return Candidates(values, places // found.shape[1], tokens).padded(count)


def drawn(
    logp: Tensor, scores: Tensor, settings: tuple[float, int, float], generator: torch.Generator | None
) -> Candidates:
    """One drawn continuation of each hypothesis; its score is of the model's own distribution.

    Where no token may come next, the score is −inf: the hypothesis goes on with any token and never counts.
    """
    check_finite(logp)
    ends = (logp == -torch.inf).all(1, keepdim=True)
    tokens = draw(logp.masked_fill(ends, 0), *settings, generator)[:, None]
    found = logp.gather(1, tokens).view(scores.shape) + scores
    parents = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return Candidates(found, parents, tokens.view(scores.shape))


def top_tokens(logp: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`logp.topk(k)` of [R, V], faster on a CPU: only blocks that hold one of the k largest values are sorted.

    The k largest values are in the k blocks with the largest maxima.
    """
    width = logp.shape[1]
    blocks = width // BLOCK
    if width < WIDE or blocks <= k or logp.device.type != "cpu":
        return logp.topk(k)
    whole = blocks * BLOCK
    grid = logp[:, :whole].unflatten(1, (blocks, BLOCK))
    chosen = grid.amax(-1).topk(k, sorted=False).indices
    values = grid.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1)
    found, places = torch.cat([values, logp[:, whole:]], 1).topk(k)
    inside = chosen.gather(1, (places // BLOCK).clamp(max=k - 1)) * BLOCK + places % BLOCK
    return found, torch.where(places < k * BLOCK, inside, places - k * BLOCK + whole)
