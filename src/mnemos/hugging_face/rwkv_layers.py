"""The steps of RWKV's two kinds of layers (version 4), whose own code writes its state in place and ignores padding."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .functional_cache import FunctionalCache, following
from .layer_parts import memory_dtype


class TimeMixState(NamedTuple):
    """last [B, 1, D]: the last input. weighted, weights, top [B, C]: sums Σ e^{k−m}·v and Σ e^{k−m}, and m; float32."""

    last: Tensor
    weighted: Tensor
    weights: Tensor
    top: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "RWKV"


class ChannelMixState(NamedTuple):
    """last [B, 1, D]: the last input."""

    last: Tensor


def _mixed(x: Tensor, last: Tensor | None, cache: FunctionalCache, *shares: Tensor) -> tuple[list[Tensor], Tensor]:
    """μ·x_t + (1 − μ)·x_{t−1} for every μ of `shares`, and the last input."""
    last = x.new_zeros(len(x), 1, x.shape[-1]) if last is None else last.to(x.dtype)
    joined = following(last, x, cache.padding)
    return [x * share + joined[:, :-1] * (1 - share) for share in shares], joined[:, -1:].clone()


def time_mix(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, FunctionalCache]:
    """The WKV recurrence (Peng et al. 2023, eqs. 16 to 22): x [B, T, D] -> y [B, T, D], in a loop over tokens."""
    given = cache.take()
    shares = layer.time_mix_key, layer.time_mix_value, layer.time_mix_receptance
    (key, value, receptance), last = _mixed(x, given and given.last, cache, *shares)
    wide = memory_dtype(x)
    k, v = layer.key(key).to(wide), layer.value(value).to(wide)
    first, decay = layer.time_first.to(wide), -layer.time_decay.to(wide).exp()
    a, b, top = [k.new_zeros(len(x), k.shape[-1])] * 3 if given is None else [z.to(wide) for z in given[1:]]
    top = top.masked_fill((cache.seen == 0).to(top.device)[:, None], -1e38)  # new rows have no largest key
    valid = None if cache.valid is None else cache.valid.to(x.device)[..., None]
    outputs = []
    for t in range(x.shape[1]):
        m = torch.maximum(top, first + k[:, t])
        old, now = (top - m).exp(), (first + k[:, t] - m).exp()
        outputs.append((old * a + now * v[:, t]) / (old * b + now))
        m = torch.maximum(top + decay, k[:, t])
        old, now = (top + decay - m).exp(), (k[:, t] - m).exp()
        new = old * a + now * v[:, t], old * b + now, m
        if valid is not None:
            a, b, top = (torch.where(valid[:, t], z, before) for z, before in zip(new, (a, b, top), strict=True))
        else:
            a, b, top = new
    cache.new.append(TimeMixState(last, a, b, top))
    y = torch.stack(outputs, 1).to(x.dtype)
    return layer.output(torch.sigmoid(layer.receptance(receptance)) * y), cache


def channel_mix(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, FunctionalCache]:
    """σ(r)·W_v max(k, 0)² of inputs that are mixed with the one before: x [B, T, D] -> y [B, T, D]."""
    given = cache.take()
    shares = layer.time_mix_key, layer.time_mix_receptance
    (key, receptance), last = _mixed(x, given and given.last, cache, *shares)
    cache.new.append(ChannelMixState(last))
    return torch.sigmoid(layer.receptance(receptance)) * layer.value(layer.key(key).relu().square()), cache
