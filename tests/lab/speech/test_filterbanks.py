"""Filterbanks against sums written out from the definition, and against another library's filters."""

import math

import numpy as np
import pytest
import torch

from mnemos.lab.speech.audio import _triangles, filterbanks, frames, normalise


def oracle(wave: torch.Tensor, rate: int, bands: int) -> torch.Tensor:
    """Frame by frame and band by band: a Fourier sum of each windowed frame, and a triangle's share of each power."""
    window, hop = rate // 40, rate // 100
    size = 1
    while size < window:
        size *= 2
    top = 2595 * math.log10(1 + rate / 2 / 700)
    corner = [700 * (10 ** (top * i / (bands + 1) / 2595) - 1) for i in range(bands + 2)]
    rows = []
    for start in range(0, len(wave) - window + 1, hop):
        n = torch.arange(window, dtype=torch.float64)
        frame = wave[start : start + window].double() * (0.5 - 0.5 * torch.cos(2 * math.pi * n / window))
        power = []
        for k in range(size // 2 + 1):
            angle = 2 * math.pi * k * n / size
            power.append((frame * angle.cos()).sum() ** 2 + (frame * angle.sin()).sum() ** 2)
        row = []
        for b in range(bands):
            total = 0.0
            for k, p in enumerate(power):
                f = k * rate / size
                if corner[b] < f <= corner[b + 1]:
                    total += float(p) * (f - corner[b]) / (corner[b + 1] - corner[b])
                elif corner[b + 1] < f < corner[b + 2]:
                    total += float(p) * (corner[b + 2] - f) / (corner[b + 2] - corner[b + 1])
            row.append(math.log(max(total, 1e-10)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("rate", "bands", "samples"), [(8000, 40, 531), (16000, 40, 1003), (8000, 7, 200)])
def test_every_band_of_every_frame(rate, bands, samples):
    wave = torch.randn(samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    expected = oracle(wave, rate, bands)
    found = filterbanks(wave, rate, bands)
    assert found.shape == (frames(samples, rate), bands) == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    every_other = torch.stack([wave, wave], 1).reshape(-1)[::2]
    torch.testing.assert_close(filterbanks(every_other, rate, bands), found)
    torch.testing.assert_close(filterbanks(wave.float(), rate, bands).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rate", [8000, 16000])
def test_the_filters_are_those_of_transformers(rate):
    audio = pytest.importorskip("transformers.audio_utils")
    ours = _triangles(rate, 40)
    theirs = audio.mel_filter_bank(ours.shape[0], 40, 0.0, rate / 2, rate, norm=None, mel_scale="htk")
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-12)
    assert (ours.sum(0) > 0).all(), "a band without a frequency hears nothing"


def test_a_tone_is_in_the_band_around_it():
    time = torch.arange(4000, dtype=torch.float64) / 8000
    found = filterbanks(torch.sin(2 * math.pi * 1000 * time), 8000, 40)
    mel = 2595 * math.log10(1 + 1000 / 700) / (2595 * math.log10(1 + 4000 / 700)) * 41 - 1
    assert set(found.argmax(1).tolist()) <= {math.floor(mel), math.ceil(mel)}


def test_silence_is_finite_and_normalised_to_zero():
    found = filterbanks(torch.zeros(400), 8000)
    assert found.isfinite().all()
    assert not normalise(found).any()


def test_normalised_within_the_utterance():
    rows = normalise(torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5)
    torch.testing.assert_close(rows.mean(0), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(rows.var(0, correction=0), torch.ones(6, dtype=torch.float64))


def test_whole_windows_alone():
    assert [frames(n, 8000) for n in (0, 199, 200, 279, 280)] == [0, 0, 1, 1, 2]
