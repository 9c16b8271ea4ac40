"""The adaptive softmax (Grave et al. 2017), a head of language models with many tokens."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mnemos.ops.dense_layer import Linear, dense
from mnemos.ops.precision import full_precision
from mnemos.types import InputError


def adaptive_softmax(
    embedding: nn.Embedding, tied: bool, cutoffs: Sequence[int], div_value: float
) -> "AdaptiveSoftmax":
    """The head over the embedding's tokens, from hidden states [.., D]. Raises InputError for impossible cut-offs."""
    size, dim = embedding.num_embeddings, embedding.embedding_dim
    bounds = [0, *cutoffs, size]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise InputError(
            f"cutoffs: expected increasing numbers above 0 and below the vocabulary's {size:,} tokens, found "
            f"{' '.join(map(str, cutoffs))}; give others, or none (--model.head.cutoffs, of Memformer and LSTM "
            "--model.cutoffs)"
        )
    if not div_value >= 1 or dim // div_value ** len(cutoffs) < 1 or (tied and div_value != 1):
        wanted = "1 in a tied head" if tied else f"at least 1, and so small that width {dim} divided by its powers is 1"
        raise InputError(f"div_value: expected {wanted}, found {div_value}; change it")
    if tied:
        return TiedAdaptiveSoftmax(embedding, cutoffs)
    return UntiedAdaptiveSoftmax(dim, size, cutoffs, div_value)


class AdaptiveSoftmax(nn.Module, ABC):
    """Base of softmaxes in clusters (Grave et al. 2017): a head that scores hidden states instead of making V logits.

    The tokens, the most frequent first, are divided at the cut-offs c_1 < … < c_K. The shortlist (tokens below c_1) and
    K clusters share one softmax; a token of cluster k has  log p(token) = log p(cluster k) + log p(token | cluster k).
    Cost per target: O(D·(c_1 + K)), and for targets in cluster k O(D·(c_(k+1) − c_k)) more, against O(D·V).

    `head(hidden)` returns the hidden states [.., D] unchanged: they are the model's outputs, and `loss`, `right` and
    `log_prob` are its likelihood (see `mnemos.types.Likelihood`). Under autocast log-probabilities are
    computed in float32, as the loss of a linear head is.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    @abstractmethod
    def scores(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """log p(target) [N] of hidden states [N, D]. Only clusters with a target are computed."""

    @abstractmethod
    def log_prob(self, outputs: Tensor) -> Tensor:
        """The log-probabilities [.., V] of all tokens, of outputs [.., D]. Cost: O(D·V)."""

    @abstractmethod
    def likeliest(self, hidden: Tensor) -> Tensor:
        """The most probable token [N] of hidden states [N, D]. Clusters are read where one of them is the likeliest."""

    def loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum of −log p(target) over targets [..] of outputs [.., D]. Targets below 0 do not count."""
        counted = targets >= 0
        return -self.scores(outputs[counted], targets[counted]).sum()

    @torch.no_grad()
    def right(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(targets that are the most probable token, targets counted). Targets below 0 do not count."""
        counted = targets >= 0
        return (self.likeliest(outputs[counted]) == targets[counted]).sum(), counted.sum()


class UntiedAdaptiveSoftmax(AdaptiveSoftmax):
    """`torch.nn.AdaptiveLogSoftmaxWithLoss`: cluster k is read through a projection to D/div_value^k channels."""

    def __init__(self, dim: int, vocab_size: int, cutoffs: Sequence[int], div_value: float = 1.0) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(dim, vocab_size, list(cutoffs), div_value, head_bias=True)

    def scores(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with full_precision(hidden.device.type):  # under autocast the module mixes dtypes, which it cannot add
            return self.softmax(hidden.to(self._dtype), targets).output

    def log_prob(self, outputs: Tensor) -> Tensor:
        with full_precision(outputs.device.type):
            found = self.softmax.log_prob(outputs.to(self._dtype).flatten(0, -2))
        return found.unflatten(0, outputs.shape[:-1])

    def likeliest(self, hidden: Tensor) -> Tensor:
        if not len(hidden):
            return hidden.new_zeros(0, dtype=torch.int64)
        with full_precision(hidden.device.type):
            return self.softmax.predict(hidden.to(self._dtype))

    @property
    def _dtype(self) -> torch.dtype:  # under autocast the hidden states may have another
        return self.softmax.head.weight.dtype


class TiedAdaptiveSoftmax(AdaptiveSoftmax):
    """As Transformer-XL ties it with div_value 1: a token's weights are its row of the embedding, and it has a bias.

    Only the clusters have weights of their own: `clusters`, [K, D] and a bias.
    """

    def __init__(self, embedding: nn.Embedding, cutoffs: Sequence[int]) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))
        self.clusters = Linear(embedding.embedding_dim, len(cutoffs))
        self.bounds = (*cutoffs, embedding.num_embeddings)

    def _head(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [N, c_1 + K] of the shortlist and the clusters."""
        first = self.bounds[0]
        weight = torch.cat([self.weight[:first], self.clusters.weight])
        return _log_softmax(dense(hidden, weight, torch.cat([self.bias[:first], self.clusters.bias])))

    def _cluster(self, hidden: Tensor, k: int) -> Tensor:
        """Log-probabilities of the tokens of cluster k, given the cluster."""
        span = slice(self.bounds[k], self.bounds[k + 1])
        return _log_softmax(dense(hidden, self.weight[span], self.bias[span]))

    def scores(self, hidden: Tensor, targets: Tensor) -> Tensor:
        first = self.bounds[0]
        cluster = torch.bucketize(targets, torch.tensor(self.bounds, device=targets.device), right=True)  # 0: none
        place = torch.where(cluster == 0, targets, first - 1 + cluster)
        found = self._head(hidden).gather(1, place[:, None])[:, 0]
        for k in range(len(self.bounds) - 1):
            rows = (cluster == k + 1).nonzero()[:, 0]
            if len(rows):
                inside = self._cluster(hidden[rows], k).gather(1, targets[rows, None] - self.bounds[k])
                found = found.index_add(0, rows, inside[:, 0].to(found.dtype))
        return found

    def log_prob(self, outputs: Tensor) -> Tensor:
        head, first = self._head(outputs), self.bounds[0]
        tails = [head[..., first + k, None] + self._cluster(outputs, k) for k in range(len(self.bounds) - 1)]
        return torch.cat([head[..., :first], *tails], -1)

    def likeliest(self, hidden: Tensor) -> Tensor:
        # No token of a cluster is more probable than its cluster.
        found = self._head(hidden).argmax(-1)
        rows = (found >= self.bounds[0]).nonzero()[:, 0]
        return found.index_copy(0, rows, self.log_prob(hidden[rows]).argmax(-1)) if len(rows) else found


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 at least: autocast of a CPU would compute it, and the sum of a loss, in bfloat16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
