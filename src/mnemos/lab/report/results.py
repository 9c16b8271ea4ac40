"""What was recorded of a trained model, as frozen dataclasses of numbers."""

from dataclasses import dataclass, field

import numpy as np

from mnemos.types import JSONObject

NO_PICTURES = "the task has no pictures"  # why explain.json has none (lab/evaluate/explain.py)


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
