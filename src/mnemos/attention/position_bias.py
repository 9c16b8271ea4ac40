"""Relative positions as a bias of the scores (T5, Raffel et al. 2020), learned for buckets of distances and heads."""

import math
from bisect import bisect_left

import torch
from torch import Tensor, nn

from mnemos.types import InputError


class PositionBias(nn.Module):
    """bias(distance): integer distances key − query, [.., T, N] -> biases [.., H, T, N].

    For keys at or before the query (key − query ≤ 0), the first half of a direction's buckets hold one distance each,
    the others share the distances up to `max_distance` evenly in the logarithm, and the last also holds all larger
    ones. With `both` directions, keys after the query have as many buckets of their own; without, they share the bucket
    of distance 0, and the caller must mask them.
    `bias` [buckets, H] is added to scores that are scaled by 1/√d. It starts at −a·ln(1 + distance), with a = 4 for the
    first head, half as much for each next head, and 0 for the last: the first heads attend to near keys, the last to
    all. Cost: O(H·T·N).
    Raises InputError for fewer than 2 buckets per direction, or a max_distance that the single buckets already reach.
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, both: bool = False) -> None:
        super().__init__()
        each = buckets // 2 if both else buckets
        if each < 2 or (both and buckets % 2) or max_distance <= each // 2:
            least = "at least 4 buckets, an even number," if both else "at least 2 buckets"
            raise InputError(
                f"relative positions: expected {least} and a max_distance above {max(1, each // 2)}, found {buckets} "
                f"buckets and max_distance {max_distance}; change one of them"
            )
        self.both = both
        self.bias = nn.Parameter(torch.empty((1 + both) * each, heads))
        # The nearest distance of each bucket, computed once in Python's precision.
        distances = range(max_distance + 1)
        nearest = torch.tensor(
            [bisect_left(distances, b, key=lambda d: bucket(d, each, max_distance)) for b in range(each)]
        )
        table = torch.searchsorted(nearest, torch.arange(max_distance + 1), right=True) - 1
        # Saved, though it follows from the settings: a model built on the meta device gets it with the weights.
        self.register_buffer("table", torch.cat([table, table + each]) if both else table)
        self.table: Tensor
        # Adam moves a bias by at most the learning rate per update: from noise, a head took hundreds of updates to
        # prefer near keys.
        slope = torch.tensor([-4.0 / 2**h for h in range(heads - 1)] + [0.0])
        with torch.no_grad():
            self.bias.copy_((nearest.log1p()[:, None] * slope).repeat(1 + both, 1))

    def forward(self, distance: Tensor) -> Tensor:
        """See the class."""
        most = len(self.table) // (1 + self.both) - 1
        if self.both:  # keys after the query: the second half of the table
            place = distance.abs().clamp(max=most) + (distance > 0) * (most + 1)
        else:
            place = (-distance).clamp(0, most)
        return self.bias[self.table[place]].movedim(-1, -3)


def bucket(distance: int, buckets: int, max_distance: int) -> int:
    """The bucket of a distance of 0 or more, from `buckets` for one direction."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))
