"""What a report is made from: runs and a comparison, as plain frozen dataclasses of numbers."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]  # "step" [S] and one [S] of float64 per quantity; NaN where a line lacked it


@dataclass(frozen=True)
class GateCurves:
    """What the gates did over training: `mix` σ(λ) [S, L, H]; `values["update.mean"]` and its kin [S, L]."""

    step: np.ndarray
    layers: tuple[str, ...]
    mix: np.ndarray
    values: Columns


@dataclass(frozen=True)
class Cached:
    """One cached layer as explain.json tells of it (see evaluate/explain.py): σ(λ) a head, sizes and cost, and numbers.

    maps, slots: {"left": why} where there is nothing to show, None where nothing was looked at. self_map, memory_map
    [N, h, w]: mean of o_self and o_mem over head and channel; patches [slots, K, side, side, C] uint8.
    """

    name: str
    share: tuple[float, ...]
    cost: dict[str, float] | None
    maps: dict[str, Any] | None
    slots: dict[str, Any] | None
    inference: str | None = None  # "transient": evaluation reads the slots as its own tokens rewrite them
    self_map: np.ndarray | None = None
    memory_map: np.ndarray | None = None
    patches: np.ndarray | None = None


@dataclass(frozen=True)
class Explained:
    """What a finished model's caches were seen to do: its layers and the pictures [N, H, W, C] they were shown.

    about: "label", "guess", "names" of the pictures; left: why there are none; middle: the layer of Figure 4.
    """

    layers: tuple[Cached, ...]
    pictures: np.ndarray | None
    about: dict[str, Any]
    left: str | None
    middle: int | None
    sizes: dict[str, float]


@dataclass(frozen=True)
class Written:
    """Pictures that a model wrote: samples [N, H, W, C]; originals [K, H, W, C] and their completions [K, ways, ...].

    about["given"] upper rows of a completion are the original's.
    """

    samples: np.ndarray | None
    originals: np.ndarray | None
    completions: np.ndarray | None
    about: dict[str, Any]


@dataclass(frozen=True)
class SlotExample:
    """One slot in a segment: its kind, weight on itself, ‖v_bias‖, and weights on tokens of it and the next [N]."""

    slot: int
    kind: str
    itself: float
    bias: float
    weights: np.ndarray


@dataclass(frozen=True)
class WriteAttention:
    """What a model's slots listened to (see evaluate/write_attention.py).

    shares: kind -> [S] by segment; examples, and the text as (text, how many tokens), None where it is no text; first:
    how many tokens are of the segment that examples are of; about: what else write_attention.json says.
    """

    shares: dict[str, np.ndarray]
    examples: tuple[SlotExample, ...]
    words: tuple[tuple[str, int], ...] | None
    first: int
    about: dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run folder. `label` is how the report names the folder: a path relative to what was asked for."""

    folder: Path
    label: str
    recipe: dict[str, Any]
    provenance: dict[str, Any] | None
    train: Columns
    valid: Columns
    gates: GateCurves | None
    result: dict[str, Any] | None
    caches: dict[str, np.ndarray] | None
    explained: Explained | None = None
    written: Written | None = None
    listened: WriteAttention | None = None

    @property
    def seed(self) -> Any:
        """The seed, from the result, else the recipe, else the provenance; "?" where none says."""
        training = self.recipe.get("train")
        for place in (self.result, training if isinstance(training, dict) else None, self.provenance):
            if place and place.get("seed") is not None:
                return place["seed"]
        return "?"

    def tested(self, metric: str, control: str | None = None) -> float:
        """The test metric, or the same under a control ("emptied", …); NaN where it was not measured."""
        part: Any = self.result or {}
        for key in ("test",) if control is None else ("controls", control):
            part = part.get(key) if isinstance(part, dict) else None
        value = part.get(metric) if isinstance(part, dict) else None
        return float(value) if isinstance(value, (int, float)) else math.nan


@dataclass(frozen=True)
class Row:
    """One arm of a comparison: mean and sample standard deviation of the metric over `seeds` runs, and its cost."""

    name: str
    mean: float
    std: float
    seeds: int
    parameters: float = math.nan
    flops: float = math.nan
    seconds: float = math.nan
    peak_bytes: float = math.nan


@dataclass(frozen=True)
class Control:
    """An arm of which the memory was taken away at evaluation: "emptied", "closed" or "shuffled"."""

    name: str
    control: str
    mean: float
    std: float
    seeds: int


@dataclass(frozen=True)
class Comparison:
    """Arms side by side, in the order of `rows`, with the runs that each stands on. `source` is what wrote it."""

    metric: str
    higher_is_better: bool
    majority: float | None
    rows: tuple[Row, ...]
    controls: tuple[Control, ...]
    runs: dict[str, tuple[RunRecord, ...]]
    source: str
    provenance: dict[str, Any] = field(default_factory=dict)
    about: str = ""  # what the metric counts, a sentence

    @property
    def arms(self) -> list[str]:
        """The names of the arms, in the one order that decides every colour."""
        return [row.name for row in self.rows]

    def all_runs(self) -> list[RunRecord]:
        """Every run, arm by arm."""
        return [run for name in self.arms for run in self.runs.get(name, ())]

    def with_memory(self) -> list[str]:
        """The arms that have a cache: those under a control or whose runs report gates."""
        controlled = {control.name for control in self.controls}
        return [n for n in self.arms if n in controlled or any(r.gates for r in self.runs.get(n, ()))]


def spread(values: list[float]) -> tuple[float, float, int]:
    """Mean, sample standard deviation (n − 1; NaN for one) and count of the finite values."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return math.nan, math.nan, 0
    return float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan, len(finite)
