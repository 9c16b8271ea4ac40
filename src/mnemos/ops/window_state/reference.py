"""Attention with a window, sinks and a state by its equations: loops over rows, heads and tokens, in float64.

Tests compare the fast paths with it, so it shares no code with them and uses only elementary functions. Gradients are
autograd's. near(i) are the last w tokens and the first s; far(i) the other tokens up to i. With a(i, j) = q_i·k_j·scale
(softcap·tanh(a / softcap) with a softcap), b(i, j) the same with the query that meets the sinks, and m_i the largest
score of near(i):

    y_i = [Σ_near e^{score − m_i} v_j + γ Σ_far φ_q(q_i)·φ_k(k_j) v_j] / [the same sums without v]
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Map = Callable[[Tensor, int], Tensor]  # the features of a vector of a head, by the head's number


def _score(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    score = (query * key).sum() * scale
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def reference_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: tuple[int, int],
    scale: float,
    softcap: float | None = None,
    far: tuple[Map, Map, Tensor] | None = None,
    sink_q: Tensor | None = None,
    decay: float = 0.0,
) -> Tensor:
    """The equation above for one row of n tokens, as double sums: q [n, H, D], k [n, Hk, D], v [n, Hk, M] -> [n, H, M].

    sizes: (w, s). far: (φ_q, φ_k, γ [H]). The weight of a far token is e^decay to the power of the tokens that have
    left the window since.
    """
    q, k, v = q.double(), k.double(), v.double()
    meeting = q if sink_q is None else sink_q.double()
    (window, sinks), n, heads, group = sizes, len(q), q.shape[1], q.shape[1] // k.shape[1]
    rows = []
    for i in range(n):
        outputs = []
        for h in range(heads):
            c = h // group
            near = [j for j in range(i + 1) if j > i - window or j < sinks]
            scores = torch.stack(
                [_score((q if j > i - window else meeting)[i, h], k[j, c], scale, softcap) for j in near]
            )
            weights = torch.exp(scores - scores.amax())
            top, bottom = weights @ v[near, c], weights.sum()
            for j in range(i + 1):
                if far is not None and j not in near:
                    weight = far[2][h].double() * (far[0](q[i, h], h) * far[1](k[j, c], c)).sum()
                    weight = weight * math.exp(decay * (i - window - j))
                    top, bottom = top + weight * v[j, c], bottom + weight
            outputs.append(top / bottom)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


class ReferenceRow:
    """One row, token by token: what the state holds, and what it becomes.

    window, sinks: lists of (number of the token, key [Hk, D], value [Hk, M], what its features are computed of
    [Hk, D]). s [Hk, F, M], z [Hk, F]. beta [Hk]: the state follows the delta rule on [v, 1] with keys of length 1.
    decay: S and z are multiplied by e^decay before a token enters them.
    """

    def __init__(self, sizes: tuple[int, int], s: Tensor, z: Tensor, seen: int = 0) -> None:
        self.sizes, self.s, self.z, self.seen = sizes, s.double(), z.double(), seen
        self.window: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.sinks: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def read(
        self,
        tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        scale: float,
        softcap: float | None,
        far: tuple[Map, Map, Tensor] | None,
        beta: Tensor | None = None,
        decay: float = 0.0,
    ) -> Tensor:
        """y [H, M] of one token: q [H, D], k [Hk, D], v [Hk, M], the query that meets the sinks, raw q and raw k."""
        q, k, v, meeting, raw_q, raw_k = (x.double() for x in tokens)
        token = self.seen, k, v, raw_k
        self.seen += 1
        self.window.append(token)
        if token[0] < self.sizes[1]:
            self.sinks.append(token)
        if len(self.window) > self.sizes[0]:
            self._leave(*self.window.pop(0), far, beta, decay)
        first = self.window[0][0]
        group, outputs = q.shape[0] // k.shape[0], []
        for h in range(q.shape[0]):
            c = h // group
            near = [(_score(q[h], key[c], scale, softcap), value[c]) for _, key, value, _ in self.window]
            near += [
                (_score(meeting[h], key[c], scale, softcap), value[c])
                for number, key, value, _ in self.sinks
                if number < first
            ]
            largest = torch.stack([score for score, _ in near]).amax()
            weights = torch.exp(torch.stack([score for score, _ in near]) - largest)
            top, bottom = weights @ torch.stack([value for _, value in near]), weights.sum()
            if far is not None:
                features = far[0](raw_q[h], h)
                norm = features @ self.z[c]
                if beta is not None:  # may be negative where a key is corrected
                    norm = torch.where(norm > 0, norm, torch.zeros_like(norm))
                top = top + far[2][h].double() * (features @ self.s[c])
                bottom = bottom + far[2][h].double() * norm
            outputs.append(top / bottom)
        return torch.stack(outputs)

    def _leave(
        self,
        number: int,
        k: Tensor,
        v: Tensor,
        raw: Tensor,
        far: tuple[Map, Map, Tensor] | None,
        beta: Tensor | None,
        decay: float,
    ) -> None:
        """A token leaves the window: a sink stays beside the window, another enters the sums."""
        if far is None or number < self.sizes[1]:
            return
        states, norms = [], []
        for c in range(len(k)):
            features, value, one = far[1](raw[c], c), v[c], torch.ones((), dtype=torch.float64)
            s, z = math.exp(decay) * self.s[c], math.exp(decay) * self.z[c]
            if beta is not None:
                features = features / torch.sqrt((features * features).sum() + 1e-6)
                value = beta[c].double() * (value - features @ s)
                one = beta[c].double() * (one - features @ z)
            states.append(s + torch.outer(features, value))
            norms.append(z + features * one)
        self.s, self.z = torch.stack(states), torch.stack(norms)
