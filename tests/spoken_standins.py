"""Small folders of recordings: two words, one low and one high, said by two speakers."""

import io
import wave
from pathlib import Path

import numpy as np

REAL = Path(__file__).parents[1] / "../shared/data/fsdd"


def wav(samples: np.ndarray, rate: int = 8000, channels: int = 1, width: int = 2) -> bytes:
    """A wav file's bytes."""
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.astype({1: "u1", 2: "<i2", 4: "<i4"}[width]).tobytes())
    return held.getvalue()


def tone(label: int, speaker: int, take: int, rate: int = 8000) -> np.ndarray:
    """A tone of 0.1 to 0.2 seconds, its pitch by the label, a little by the rest."""
    random = np.random.default_rng((label, speaker, take))
    time = np.arange(round(rate * random.uniform(0.1, 0.2))) / rate
    pitch = (400, 1500)[label] * (1 + 0.05 * speaker) * random.uniform(0.95, 1.05)
    return np.rint(6000 * np.sin(2 * np.pi * pitch * time) + random.normal(0, 20, len(time)))


def write_recordings(folder: Path, takes: int = 4, rate: int = 8000) -> Path:
    """FOLDER/{low|high}_{ann|bob}_{take}.wav."""
    folder.mkdir(parents=True, exist_ok=True)
    for label, word in enumerate(("low", "high")):
        for speaker, name in enumerate(("ann", "bob")):
            for take in range(takes):
                (folder / f"{word}_{name}_{take}.wav").write_bytes(wav(tone(label, speaker, take, rate), rate))
    return folder
