"""Sinusoids of positions (Vaswani et al. 2017, §3.5): sines in even channels, cosines in odd ones."""

import torch
from torch import Tensor

from mnemos.types import Device


def frequencies(dim: int, device: Device = None) -> Tensor:
    """10000^(−2i/D) for the ⌈D/2⌉ pairs of channels: radians per position, in the widest float the device has."""
    dtype = torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
    return 10000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)


def angles(positions: Tensor, dim: int) -> Tensor:
    """Position times frequency, [..] -> [.., ⌈D/2⌉]. float64 where the device has it: float32 is wrong beyond 2²⁴."""
    frequency = frequencies(dim, positions.device)
    return positions[..., None].to(frequency.dtype) * frequency


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Sines and cosines of positions [..] (integers or floats, any size): [.., D] float32."""
    angle = angles(positions, dim)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :dim].float()
