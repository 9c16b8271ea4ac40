"""The tasks that memories are compared on, with their sizes and the longer rows beyond training."""

from dataclasses import dataclass, field, replace
from typing import Any

from mnemos.lab.tasks.generated import CopyConfig
from mnemos.lab.tasks.listops import ListOpsAnswersConfig
from mnemos.lab.tasks.mad import (
    MADCompressionConfig,
    MADCopyingConfig,
    MADFuzzyRecallConfig,
    MADMemorisationConfig,
    MADRecallConfig,
)
from mnemos.lab.tasks.recall import MQARConfig
from mnemos.lab.tasks.task import DataConfig

from .memories import Sizes


@dataclass(frozen=True)
class Benchmark:
    """A task and how memories are trained on it."""

    about: str
    chance: float  # the score of a guess
    data: DataConfig
    steps: int
    batch: int = 64
    beyond: tuple[dict[str, Any], ...] = ()  # longer tests, by the fields of the data that they change
    axis: str = "length"  # what grows in them
    sizes: Sizes = field(default_factory=Sizes)
    keyless: float = 0.0  # the score of an answer that ignores what is asked, or a part of it; 0: not known
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)  # further scores, by the fields that they change

    def at(self, settings: dict[str, Any]) -> float:
        return float({**vars(self.data), **settings}[self.axis])


_ZOOLOGY = Sizes(num_heads=1, mlp=0, tied=True)  # Transformers of attention without MLPs, one head, as Zoology has them


def _mqar(length: int, pairs: int, batch: int) -> Benchmark:
    return Benchmark(
        f"MQAR as published: {pairs} pairs in {length} tokens of 8,192; Transformers have 2 layers without MLPs",
        2 / 8192,
        MQARConfig(length, pairs, rows=1000),
        steps=6000,
        batch=batch,
        sizes=_ZOOLOGY,
        keyless=1 / pairs,
    )


def _longer(*lengths: int) -> tuple[dict[str, Any], ...]:
    return tuple({"length": n} for n in lengths)


# Rows of 64 tokens, which fit into four segments, tested at up to 512.
_SHORT: Any = {"steps": 2000, "batch": 16, "beyond": _longer(128, 256, 512), "sizes": Sizes(segment=16)}
_SHORT_MQAR = {**_SHORT, "sizes": replace(_ZOOLOGY, segment=16)}


def _mad(about: str, chance: float, data: DataConfig, sizes: Sizes | None = None) -> Benchmark:
    return Benchmark(f"MAD, {about}", chance, data, steps=1200, sizes=sizes or Sizes(128, 32, 4, 8, 256))


BENCHMARKS: dict[str, Benchmark] = {
    "mqar": Benchmark(
        "MQAR, small: 8 keys and values in 64 tokens of 64, each key asked once more",
        2 / 64,
        MQARConfig(64, 8, 64, rows=500),
        **_SHORT_MQAR,
        keyless=1 / 8,
    ),
    "mqar-rewritten": Benchmark(
        "MQAR with rewritten keys, small: 8 keys and values in 64 tokens of 64, 4 keys again with a value that counts",
        2 / 64,
        MQARConfig(64, 8, 64, rows=500, rewritten=4),
        **_SHORT_MQAR | {"steps": 4000},  # softmax attention needs more than 2,000
        keyless=1 / 8,
        beside={"rewritten keys": {"counted": "rewritten"}, "their old values": {"counted": "old"}},
    ),
    "mqar-two-tokens": Benchmark(
        "MQAR with keys of two tokens, small: 4 keys and values in 64 tokens of 64; one token of a key tells half",
        1 / 22,
        MQARConfig(64, 4, 64, rows=500, key_tokens=2),
        **_SHORT_MQAR,
        keyless=1 / 2,
    ),
    "noisy-recall": Benchmark(
        "MAD, noisy in-context recall, small: 8 keys and values among 64 tokens, a fifth of them noise",
        1 / 8,
        MADRecallConfig(64, 16, 0.2, examples=0, rows=500),
        **_SHORT,
        keyless=0.355,  # measured: log/2026-11-23-answers-without-the-key.md
    ),
    "selective-copying": Benchmark(
        "MAD, selective copying, small: 8 tokens among 64, written in order",
        1 / 6,
        MADCopyingConfig(64, 8, 8, examples=0, rows=500),
        **_SHORT,
    ),
    "copy": Benchmark(
        "copy a word of 16 to 31 symbols",
        1 / 10,
        CopyConfig(64, rows=500),
        steps=1000,
        beyond=_longer(128, 256),
        sizes=Sizes(segment=16),
    ),
    "listops-32": Benchmark(
        "Long ListOps, small: the value of an expression of 9 to 26 symbols in at most 3 levels",
        0.11,
        ListOpsAnswersConfig(8, 32, 3, 4, 0.5, examples=64_000, rows=500),
        steps=2000,
        batch=32,
        beyond=tuple(
            {"min_length": n // 2, "max_length": n, "max_depth": depth, "examples": 1}
            for n, depth in ((64, 5), (128, 6), (256, 8))
        ),
        axis="max_length",
        sizes=Sizes(segment=8, num_heads=4),
    ),
    "listops": Benchmark(
        "Long ListOps as in Long Range Arena: the value of an expression of 501 to 1,999 symbols",
        0.16,
        ListOpsAnswersConfig(rows=1000),
        steps=5000,
        batch=32,
        beyond=({"min_length": 2000, "max_length": 4000, "examples": 1},),
        axis="max_length",
        sizes=Sizes(segment=64, num_heads=4),
    ),
    "mqar-64x4": _mqar(64, 4, 128),
    "mqar-128x8": _mqar(128, 8, 128),
    "mqar-256x16": _mqar(256, 16, 64),
    "mqar-512x64": _mqar(512, 64, 32),
    "mad-recall": _mad("in-context recall", 1 / 8, MADRecallConfig()),
    "mad-noisy-recall": _mad("noisy recall", 1 / 8, MADRecallConfig(noise=0.2)),
    "mad-fuzzy-recall": _mad("fuzzy recall", 1 / 8, MADFuzzyRecallConfig()),
    "mad-copying": _mad("selective copying", 1 / 14, MADCopyingConfig()),
    "mad-compression": _mad(
        "compression, written by the model", 1 / 15, MADCompressionConfig(), Sizes(128, 31, 4, 8, 256)
    ),
    "mad-memorisation": _mad("memorisation", 1 / 127, MADMemorisationConfig()),
}
DEFAULT = ("mqar", "noisy-recall", "selective-copying", "listops-32")
QUICK = ("mqar", "selective-copying")
QUICK_STEPS = 1000
