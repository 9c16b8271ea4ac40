"""Inputs of linear attention, and its equations."""

import torch
from kernel_cases import strange

import mnemos
from mnemos.ops.linear import BACKENDS, LinearState, linear_attention
from mnemos.ops.linear.reference import (
    reference_bidirectional,
    reference_causal,
    reference_elu,
    reference_linear_attention,
    reference_polynomial,
    reference_relu,
)

B, H, D, M = 2, 3, 5, 4
# Those that run float32 and shorter on this processor: "auto" is the first of them alone.
HERE = [
    name
    for name in mnemos.ops.backends("linear_attention")
    if BACKENDS.by_name[name].takes(*torch.zeros(3, 1, 1, 1, 1))
]
MAPS = {"elu": reference_elu, "relu": reference_relu, "polynomial": reference_polynomial}


def inputs(t, n=None, dtype=torch.float64, b=B, h=H, d=D, m=M):
    """q, k, v, s, z: leaves, none of q, k, v, s contiguous; the sums are float32 or wider."""
    g = torch.Generator().manual_seed(0)
    n, wide = t if n is None else n, torch.promote_types(dtype, torch.float32)
    given = {"q": strange((b, t, h, d), g, dtype), "k": strange((b, n, h, d), g, dtype)}
    given["v"] = strange((b, n, h, m), g, dtype)
    given["s"] = torch.rand(b, h, m, d, generator=g, dtype=wide).mT.requires_grad_()
    given["z"] = torch.rand(b, h, d, generator=g, dtype=wide).requires_grad_()
    return given


def run(q, k, v, s=None, z=None, **options):
    return linear_attention(q, k, v, state=None if s is None else LinearState(s, z), **options)


def equations(q, k, v, s=None, z=None, causal=True, feature_map="elu", schedule=None, **options):
    schedule = schedule or (reference_causal if causal else reference_bidirectional)
    state = None if s is None else (s, z)
    return reference_linear_attention(q, k, v, schedule, MAPS.get(feature_map, feature_map), state, **options)
