"""The adaptive softmax (Grave et al. 2017), a head of language models with many tokens."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mnemos.ops.dense_layer import Linear, dense
from mnemos.types import InputError


class AdaptiveSoftmax(nn.Module):
    """A softmax in clusters (Grave et al. 2017): a head that scores hidden states instead of making V logits.

    The tokens, the most frequent first, are divided at the cut-offs c_1 < … < c_K. The shortlist (tokens below c_1) and
    K clusters share one softmax; a token of cluster k has  log p(token) = log p(cluster k) + log p(token | cluster k).
    As Transformer-XL ties it with div_value 1: a token's weights are its row of the embedding, and it has a bias. Only
    the clusters have weights of their own: `clusters`, [K, D] and a bias.
    Cost per target: O(D·(c_1 + K)), and for targets in cluster k O(D·(c_(k+1) − c_k)) more, against O(D·V).

    `head(hidden)` returns the hidden states [.., D] unchanged: they are the model's outputs, and `loss`, `right` and
    `log_prob` are its likelihood (see `mnemos.types.Likelihood`). Under autocast log-probabilities are
    computed in float32, as the loss of a linear head is.
    Raises InputError for impossible cut-offs.
    """

    def __init__(self, embedding: nn.Embedding, cutoffs: Sequence[int]) -> None:
        super().__init__()
        size, dim = embedding.num_embeddings, embedding.embedding_dim
        if any(a >= b for a, b in itertools.pairwise([0, *cutoffs, size])):
            raise InputError(
                f"cutoffs: expected increasing numbers above 0 and below the vocabulary's {size:,} tokens, found "
                f"{' '.join(map(str, cutoffs))}; give others, or none, "
                "by the option --model.head.cutoffs (Memformer and LSTM: --model.cutoffs) without numbers"
            )
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(size))
        self.clusters = Linear(dim, len(cutoffs))
        self.bounds = (*cutoffs, size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    def loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum of −log p(target) over targets [..] of outputs [.., D]. Targets below 0 do not count.

        Only clusters with a target are computed.
        """
        counted = targets >= 0
        hidden, targets = outputs[counted], targets[counted]
        first = self.bounds[0]
        cluster = torch.bucketize(targets, torch.tensor(self.bounds, device=targets.device), right=True)  # 0: none
        entry = torch.where(cluster == 0, targets, first - 1 + cluster)
        scores = self._head(hidden).gather(1, entry[:, None])[:, 0]
        for k in range(len(self.bounds) - 1):
            rows = (cluster == k + 1).nonzero()[:, 0]
            if len(rows):
                inside = self._cluster(hidden[rows], k).gather(1, targets[rows, None] - self.bounds[k])
                scores = scores.index_add(0, rows, inside[:, 0].to(scores.dtype))
        return -scores.sum()

    @torch.no_grad()
    def right(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(targets that are the most probable token, targets counted). Targets below 0 do not count."""
        counted = targets >= 0
        hidden = outputs[counted]
        # No token of a cluster is more probable than its cluster: others are read where a cluster is the likeliest.
        likeliest = self._head(hidden).argmax(-1)
        rows = (likeliest >= self.bounds[0]).nonzero()[:, 0]
        if len(rows):
            likeliest = likeliest.index_copy(0, rows, self.log_prob(hidden[rows]).argmax(-1))
        return (likeliest == targets[counted]).sum(), counted.sum()

    def log_prob(self, outputs: Tensor) -> Tensor:
        """The log-probabilities [.., V] of all tokens, of outputs [.., D]. Cost: O(D·V)."""
        head, first = self._head(outputs), self.bounds[0]
        tails = [head[..., first + k, None] + self._cluster(outputs, k) for k in range(len(self.bounds) - 1)]
        return torch.cat([head[..., :first], *tails], -1)

    def _head(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [.., c_1 + K] of the shortlist and the clusters."""
        first = self.bounds[0]
        weight = torch.cat([self.weight[:first], self.clusters.weight])
        return _log_softmax(dense(hidden, weight, torch.cat([self.bias[:first], self.clusters.bias])))

    def _cluster(self, hidden: Tensor, k: int) -> Tensor:
        """Log-probabilities of the tokens of cluster k if the token is one of them."""
        span = slice(self.bounds[k], self.bounds[k + 1])
        return _log_softmax(dense(hidden, self.weight[span], self.bias[span]))


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 at least: autocast of a CPU would compute it, and the sum of a loss, in bfloat16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
