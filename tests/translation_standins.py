"""A small parallel text: numbers in words, from one made-up language to another that writes them backwards."""

import gzip
from pathlib import Path

import numpy as np

ONES = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
OTHER = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def sentences(rows: int, seed: int) -> list[tuple[str, str]]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        digits = random.integers(0, 10, random.integers(2, 9)).tolist()
        found.append((" ".join(OTHER[d] for d in digits) + ".", " ".join(ONES[d] for d in digits) + "!"))
    return found


def write_pairs(folder: Path, rows: int = 300) -> Path:
    """train, val and test in English and German; the training files are gzipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate((("train", rows), ("val", 24), ("test", 16))):
        for side, language in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in sentences(count, seed)).encode()
            name = f"{split}.{language}" + ".gz" * (split == "train")
            (folder / name).write_bytes(gzip.compress(text) if split == "train" else text)
    return folder
