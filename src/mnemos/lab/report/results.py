"""The data of a report: runs and a comparison, as frozen dataclasses of numbers."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mnemos.lab.run.run_files import final_scores
from mnemos.types import JSONObject

NO_PICTURES = "the task has no pictures"  # why explain.json has none (lab/evaluate/explain.py)
Columns = dict[str, np.ndarray]  # "step" [S] and one float64 array [S] per quantity; NaN where a record lacks it


@dataclass(frozen=True)
class GateCurves:
    """The gates over training: `mix` is σ(λ) [S, L, H]; `values` has [S, L] per quantity, as "update.mean"."""

    step: np.ndarray
    layers: tuple[str, ...]
    mix: np.ndarray
    values: Columns


@dataclass(frozen=True)
class Cached:
    """One cached layer from explain.json (see lab/evaluate/explain.py): σ(λ) per head, sizes, cost and measurements.

    maps, slots: {"left": reason} if there is nothing to show, None if nothing was measured. self_map, memory_map
    [N, h, w]: mean of o_self and o_mem over head and channel; patches [slots, K, side, side, C] uint8.
    """

    name: str
    share: tuple[float, ...]
    cost: dict[str, float] | None
    maps: JSONObject | None
    slots: JSONObject | None
    inference: str | None = None  # "transient": evaluation reads the slots after its own tokens updated them
    self_map: np.ndarray | None = None
    memory_map: np.ndarray | None = None
    patches: np.ndarray | None = None


@dataclass(frozen=True)
class ControlledMemory:
    """One memory of a state, by control: scores, the metric of each segment [S], or the reason why there is neither."""

    name: str
    scores: dict[str, dict[str, float]]
    by_segment: dict[str, np.ndarray]
    left: dict[str, str]


@dataclass(frozen=True)
class StateControls:
    """Segments read with a changed state (see lab/evaluate/state_controls.py); left: the reason if there are none.

    about: "rows", "targets" and "cut"; segments [S]: their numbers; carried, course [S]: the scores of the unchanged
    state, in all and the metric of each segment.
    """

    left: str | None
    metric: str = "loss"
    about: dict[str, float] = field(default_factory=dict)
    segments: np.ndarray = field(default_factory=lambda: np.zeros(0))
    carried: dict[str, float] = field(default_factory=dict)
    course: np.ndarray = field(default_factory=lambda: np.zeros(0))
    memories: tuple[ControlledMemory, ...] = ()


@dataclass(frozen=True)
class Explained:
    """The analysis of a finished model's memory: the controls of its state (None: not recorded), its cached layers, and
    the pictures [N, H, W, C] it was run on.

    about: "label", "guess" and "names" of the pictures; left: the reason if there are none; middle: index of the layer
    that Figure 4 shows.
    """

    layers: tuple[Cached, ...]
    pictures: np.ndarray | None
    about: JSONObject
    left: str | None
    middle: int | None
    sizes: dict[str, float]
    memory: StateControls | None = None


@dataclass(frozen=True)
class Written:
    """Pictures that a model generated: samples [N, H, W, C]; originals [K, H, W, C] and completions [K, ways, H, W, C].

    The upper about["given"] rows of a completion are those of the original.
    """

    samples: np.ndarray | None
    originals: np.ndarray | None
    completions: np.ndarray | None
    about: JSONObject


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
    """What the slots of a model attend to when they are written (see lab/evaluate/write_attention.py).

    shares: kind -> [S] by segment; examples: single slots; words: the text as (text, number of tokens), None if the
    task has no text; first: number of tokens of the examples' segment; about: the other fields of
    write_attention.json.
    """

    shares: dict[str, np.ndarray]
    examples: tuple[SlotExample, ...]
    words: tuple[tuple[str, int], ...] | None
    first: int
    about: JSONObject


@dataclass(frozen=True)
class RunRecord:
    """One run folder. `label` is its name in the report: a path relative to the folder that was given.

    detected: (name, bytes) of the JPEGs with annotations and detections that a detector's run has drawn.
    """

    folder: Path
    label: str
    recipe: JSONObject
    provenance: JSONObject | None
    train: Columns
    valid: Columns
    gates: GateCurves | None
    result: JSONObject | None
    caches: dict[str, np.ndarray] | None
    explained: Explained | None = None
    written: Written | None = None
    write_attention: WriteAttention | None = None
    detected: tuple[tuple[str, bytes], ...] = ()

    @property
    def seed(self) -> object:
        """The seed from the result, the recipe or the provenance, in this order; "?" if none has it."""
        training = self.recipe.get("train")
        for place in (self.result, training if isinstance(training, dict) else None, self.provenance):
            if place and place.get("seed") is not None:
                return place["seed"]
        return "?"

    def tested(self, metric: str, control: str | None = None) -> float:
        """The test metric, or the same under a control ("emptied", …); NaN if it was not measured.

        Of data without a test split, the validation metric.
        """
        part: object = self.result or {}
        for key in (final_scores(self.result or {})[0],) if control is None else ("controls", control):
            part = part.get(key) if isinstance(part, dict) else None
        value = part.get(metric) if isinstance(part, dict) else None
        return float(value) if isinstance(value, (int, float)) else math.nan


@dataclass(frozen=True)
class Row:
    """One variant of a comparison: mean and sample standard deviation of the metric over `seeds` runs, and the cost.

    baseline_of: the variants whose never-written baseline it is; None where this is not known.
    """

    name: str
    mean: float
    std: float
    seeds: int
    parameters: float = math.nan
    flops: float = math.nan
    state_bytes: float = math.nan
    seconds: float = math.nan
    peak_bytes: float = math.nan
    baseline_of: tuple[str, ...] | None = ()


@dataclass(frozen=True)
class Control:
    """A variant evaluated under a control: "emptied", "exchanged" or "closed"."""

    name: str
    control: str
    mean: float
    std: float
    seeds: int


@dataclass(frozen=True)
class Comparison:
    """Variants side by side, in the order of `rows`, with the runs of each. `source` names the file they come from."""

    metric: str
    higher_is_better: bool
    majority: float | None
    rows: tuple[Row, ...]
    controls: tuple[Control, ...]
    runs: dict[str, tuple[RunRecord, ...]]
    source: str
    provenance: JSONObject = field(default_factory=dict)
    about: str = ""  # one sentence: what the metric measures
    against: str = ""  # the row that the others are tested against; "": the first
    equal: str = ""  # what was made equal, in words; "": the comparison does not say
    reference: dict[str, float] = field(default_factory=dict)  # scores without learning, but for `majority`
    budget: tuple[str, ...] = ()  # the options of `mnemos compare` that make it equal, if it is not the updates alone

    @property
    def variants(self) -> list[str]:
        """The names of the variants, in the order that determines their colours."""
        return [row.name for row in self.rows]

    @property
    def scored(self) -> str:
        """The split that the scores are of: "validation" for data without a test split, else "test"."""
        of = {final_scores(run.result)[0] for run in self.all_runs() if run.result}
        return "validation" if of == {"valid"} else "test"

    def all_runs(self) -> list[RunRecord]:
        """All runs, ordered by variant."""
        return [run for name in self.variants for run in self.runs.get(name, ())]

    def with_memory(self) -> list[str]:
        """The variants with a cache: those with a control or with recorded gates."""
        controlled = {control.name for control in self.controls}
        return [n for n in self.variants if n in controlled or any(r.gates for r in self.runs.get(n, ()))]


def spread(values: list[float]) -> tuple[float, float, int]:
    """Mean, sample standard deviation (n − 1; NaN for one) and count of the finite values."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return math.nan, math.nan, 0
    return float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan, len(finite)
