"""Log-mel filterbanks: the features of a waveform that a speech recogniser reads."""

import functools

import torch
from torch import Tensor

WINDOW, HOP = 0.025, 0.010  # seconds
FLOOR = 1e-10  # minimum power of a band for samples in [-1, 1]: far below one quantisation step


def frames(samples: int, rate: int) -> int:
    """The number of whole windows in `samples` samples at `rate` samples per second."""
    window, hop = _sizes(rate)
    return max(0, 1 + (samples - window) // hop)


def filterbanks(wave: Tensor, rate: int, bands: int = 40) -> Tensor:
    """log Σ_f w_b(f)·|X_t(f)|² of samples [n] in [-1, 1], as [T, bands]: windows of 25 ms, one every 10 ms.

    X_t is the spectrum of window t, weighted by a Hann window and zero-padded to a power of two. w_b is a triangle of
    height 1; the corners of all triangles are equally spaced from 0 to rate/2 on the mel scale 2595·log₁₀(1 + f/700).
    There are no delta features. Only whole windows count: T = 1 + ⌊(n − 25 ms)/10 ms⌋.
    Cost: O(T·N·log N) for windows of N samples.
    """
    window, hop = _sizes(rate)
    shape, triangles = _window(rate).to(wave), _triangles(rate, bands).to(wave)
    size = 2 * (triangles.shape[0] - 1)
    spectrum = torch.fft.rfft(wave.unfold(0, window, hop) * shape, size)
    return ((spectrum.real.square() + spectrum.imag.square()) @ triangles).clamp(min=FLOOR).log()


def normalised(rows: Tensor) -> Tensor:
    """Normalise rows [T, bands] of one utterance to mean 0 and variance 1 per band. A constant band becomes 0."""
    centred = rows - rows.mean(0)
    return centred / centred.square().mean(0).sqrt().clamp(min=1e-5)


def _sizes(rate: int) -> tuple[int, int]:
    return round(WINDOW * rate), round(HOP * rate)


@functools.cache
def _window(rate: int) -> Tensor:
    return torch.hann_window(_sizes(rate)[0], periodic=True, dtype=torch.float64)


@functools.cache
def _triangles(rate: int, bands: int) -> Tensor:
    """The weights w_b [F, bands] at F frequencies from 0 to rate/2."""
    size = 1 << (_sizes(rate)[0] - 1).bit_length()
    frequency = torch.linspace(0, rate / 2, size // 2 + 1, dtype=torch.float64)[:, None]
    top = torch.tensor(rate / 2, dtype=torch.float64)
    mel = torch.linspace(0, 1, bands + 2, dtype=torch.float64) * 2595 * torch.log10(1 + top / 700)
    corner = 700 * (10 ** (mel / 2595) - 1)
    low, middle, high = corner[:-2], corner[1:-1], corner[2:]
    return torch.minimum((frequency - low) / (middle - low), (high - frequency) / (high - middle)).clamp(min=0)
