"""The step of xLSTM's layers, whose own code writes the state in place and ignores padding."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional_cache import FunctionalCache
from .layer_parts import memory_dtype, only_valid
from .recurrences import stabilised


class MatrixState(NamedTuple):
    """memory [B, H, D, M + 1]: the cell, and the normaliser as its last column, times e^{−top}. top [B, H]. float32."""

    memory: Tensor
    top: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "mLSTM"


def matrix_lstm(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, FunctionalCache]:
    """The mLSTM (Beck et al. 2024, eqs. 19 to 27), x [B, T, D] -> y [B, T, D].

    h_t = C_tᵀq_t / max(|n_tᵀq_t|, 1): with a column of ones in the values, the normaliser n is a column of C.
    """
    given, config = cache.take(), layer.config
    q, k, v, gate, write, keep = _projected(layer, x)
    wide, heads = memory_dtype(x), config.num_heads
    q, k, v = (z.to(wide).unflatten(-1, (heads, -1)) for z in (q, k, v))
    v = F.pad(v, (0, 1), value=1.0)
    cap = config.gate_soft_cap
    write, keep = (z.to(wide) if cap is None else cap * torch.tanh(z.to(wide) / cap) for z in (write, keep))
    if given is None:
        memory, top = v.new_zeros(len(x), heads, k.shape[-1], v.shape[-1]), v.new_zeros(len(x), heads)
    else:
        memory, top = given.memory.to(wide), given.top.to(wide)
    keep, write = only_valid(F.logsigmoid(keep), cache), only_valid(write, cache, -torch.inf)
    y, m, memory, top = stabilised(q * q.shape[-1] ** -0.5, k, v, keep, write, memory, top)
    cache.new.append(MatrixState(memory, top))
    y = y[..., :-1] / (torch.maximum(y[..., -1].abs(), (-m).exp()) + config.eps)[..., None]
    y = layer.multihead_norm(y.to(x.dtype)).flatten(2)
    return layer.out_proj(layer.ogate_act_fn(gate) * y.to(x.dtype)), cache


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """q, k, v, the output gate, and the logits of the input and forget gates, of either layout of weights."""
    if layer.config.weight_mode == "single":
        return tuple(
            p(x) for p in (layer.q, layer.k, layer.v, layer.ogate_preact, layer.igate_preact, layer.fgate_preact)
        )
    sizes = [layer.qk_dim, layer.qk_dim, layer.v_dim, layer.v_dim]
    return *layer.qkv_opreact(x).split(sizes, -1), *layer.ifgate_preact(x).chunk(2, -1)
