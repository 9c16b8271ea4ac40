"""The finished hypotheses of a beam search, and when a sentence is done, as fairseq and transformers define it."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Stopping = Literal["fairseq", "early", "heuristic", "never"]


class Finished(NamedTuple):
    """The best K finished hypotheses of B sentences, the best first. A score of −inf: none.

    scores, log_probs [B, K]: with and without the length penalty; lengths [B, K]: tokens after the prefix; ended
    [B, K]: whether the last token is the end token; tokens [B, K, T]: prefix and tokens.
    """

    scores: Tensor
    log_probs: Tensor
    lengths: Tensor
    ended: Tensor
    tokens: Tensor

    @staticmethod
    def none(like: Tensor, tokens: Tensor) -> "Finished":
        """No hypothesis, for scores like [B, K] and tokens [B, K, T]."""
        empty = torch.full_like(like, -torch.inf)
        return Finished(empty, empty, tokens.new_zeros(like.shape), empty > 0, tokens)

    def merged(self, new: "Finished") -> "Finished":
        """The best K of these and others [B, N]."""
        longer = new.tokens.shape[-1] - self.tokens.shape[-1]
        before = self._replace(tokens=F.pad(self.tokens, (0, longer)))
        both = [torch.cat(pair, 1) for pair in zip(before, new, strict=True)]
        _, places = both[0].topk(self.scores.shape[1])
        rows = torch.arange(len(places), device=places.device)[:, None]
        return Finished(*(x[rows, places] for x in both))

    def select(self, sentences: Tensor) -> "Finished":
        """Those of the given sentences."""
        return Finished(*(x.index_select(0, sentences) for x in self))


def accepted(pool: Tensor, hits: Tensor, done: Tensor, stopping: Stopping) -> Tensor:
    """Which hits [B, N], candidates that end in this step, become finished hypotheses beside those of pool [B, K].

    fairseq: the first ones until there are K, and none is replaced. transformers: all, and the best K stay.
    """
    hits = hits & ~done
    if stopping != "fairseq":
        return hits
    count = (pool > -torch.inf).sum(1, keepdim=True)
    return hits & (count + hits.cumsum(1) <= pool.shape[1])


def is_done(pool: Tensor, best: Tensor, lengths: Tensor, stopping: Stopping, penalty: float) -> Tensor:
    """Whether sentences are done, [B, 1], with finished scores pool [B, K] and the best running hypothesis.

    best [B, 1]: its log-probability; lengths [B, 2]: its length, and the greatest length.
    "fairseq", "early": there are K finished ones. "heuristic": also none of them is worse than the best running one
    would be if it ended now. "never": the same, but with a penalty above 0 as if it ended at the greatest length
    without losing probability, so no better hypothesis is missed.
    """
    full = (pool > -torch.inf).all(1, keepdim=True)
    if stopping in ("fairseq", "early"):
        return full | (best == -torch.inf)
    length = lengths[:, 1:] if stopping == "never" and penalty > 0 else lengths[:, :1]
    reachable = best / length.to(best.dtype) ** penalty
    return full & (reachable <= pool.amin(1, keepdim=True)) | (best == -torch.inf)
