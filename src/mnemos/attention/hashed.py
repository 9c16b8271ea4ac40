"""What attentions by hashing compute from their inputs."""

from torch import Tensor, nn

from mnemos.ops.precision import full_precision


def queries_and_values(
    query: nn.Linear, value: nn.Linear, x: Tensor, mask: Tensor | None, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Queries (which are the keys too) and values, [B, T, H, D/H] each, zero where mask [B, T] is False.

    Queries are computed in float32 under any autocast, because the bucket of a token must not depend on it.
    """
    v = value(x).unflatten(-1, (num_heads, -1))
    with full_precision(x.device.type):
        q = query(x.to(query.weight.dtype)).unflatten(-1, (num_heads, -1))
    if mask is not None:
        q, v = (tensor.masked_fill(~mask[..., None, None], 0) for tensor in (q, v))
    return q, v
