"""What is recorded of a trained model in its run folder, explain.json and explain.safetensors: `Explanation`."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mnemos.atomic import replacing, write_json
from mnemos.types import InputError

from .records import APART, from_json, read_object, to_json

NO_PICTURES = "the task has no pictures"
_REMEDY = "delete the file to make the report without it"


@dataclass(frozen=True)
class Left:
    """The reason why something was not measured."""

    left: str


@dataclass(frozen=True)
class ScoredSegments:
    """The loss and the metrics over all scored segments, and the metric of each segment [S]."""

    scores: dict[str, float]
    by_segment: np.ndarray


@dataclass(frozen=True)
class ControlledMemory:
    """One memory of a state under each control (see `controls.state_controls`)."""

    name: str
    emptied: ScoredSegments | Left
    exchanged: ScoredSegments | Left
    frozen: ScoredSegments | Left

    def scored(self) -> dict[str, ScoredSegments]:
        return {name: one for name, one in vars(self).items() if isinstance(one, ScoredSegments)}

    def unscored(self) -> dict[str, str]:
        """The controls that were not scored, with the reason."""
        return {name: one.left for name, one in vars(self).items() if isinstance(one, Left)}


@dataclass(frozen=True)
class StateControls:
    """Segments read with a changed state."""

    rows: int  # read at once
    segments: tuple[int, ...]  # numbers of the scored ones, from 1
    targets: int  # scored
    metric: str  # the task's first, or "loss" if that is not a sum
    carried: ScoredSegments  # with the unchanged state
    memories: tuple[ControlledMemory, ...]
    cut: int | None = None  # tokens per segment, if rows were cut for this
    split: str = "test"
    left: None = None  # which says that nothing was left out


@dataclass(frozen=True)
class BranchMaps:
    """o_self and o_mem of a layer, as images (see `branches.maps`)."""

    grid: tuple[int, int]
    weight: float
    correlation: tuple[float, ...]
    self_own: float
    memory_own: float


@dataclass(frozen=True)
class CachedLayer:
    """One layer with a gated cache. None: not measured."""

    name: str
    share: tuple[float, ...]  # σ(λ) per head
    maps: BranchMaps | Left | None = None
    # [N, h, w]: the mean of o_self and of o_mem over heads and channels at every token, not scaled.
    self_map: np.ndarray | None = field(default=None, metadata=APART)
    memory_map: np.ndarray | None = field(default=None, metadata=APART)


@dataclass(frozen=True)
class Pictures:
    """The pictures of a split that were shown."""

    label: tuple[int, ...]
    guess: tuple[int, ...]
    names: tuple[str, ...]
    index: tuple[int, ...] = ()
    split: str = "test"
    pixels: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 1, 1), np.uint8), metadata=APART)  # [N, H, W, C]


@dataclass(frozen=True)
class Explanation:
    """explain.json: controls of the state, the pictures or the reason for none, and the layers with a gated cache."""

    layers: tuple[CachedLayer, ...]
    memory: StateControls | Left | None = None
    pictures: Pictures | None = None
    left: str | None = None
    middle: int | None = None  # the layer that Figure 4 of Cached Transformers shows

    def write(self, folder: Path) -> None:
        arrays = {} if self.pictures is None else {"pictures": self.pictures.pixels}
        for i, layer in enumerate(self.layers):
            drawn = {"self": layer.self_map, "memory": layer.memory_map}
            arrays |= {f"{name}.{i}": array for name, array in drawn.items() if array is not None}
        if arrays:
            from safetensors.numpy import save_file

            contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            with replacing(folder / "explain.safetensors") as temporary:
                save_file(contiguous, str(temporary))
        write_json(folder / "explain.json", to_json(self))  # last, so that the arrays exist when it does


def read_explanation(folder: Path) -> Explanation | None:
    """The explanation in a run folder; None if there is none. Raises InputError for files that do not fit."""
    path = folder / "explain.json"
    if not path.is_file():
        return None
    explanation = from_json(Explanation, read_object(path, _REMEDY), path, _REMEDY)
    if explanation.pictures is None:
        return explanation
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / "explain.safetensors"
    try:
        arrays = load_file(path)
        layers = []
        for i, layer in enumerate(explanation.layers):
            if isinstance(layer.maps, BranchMaps):
                layer = replace(layer, self_map=arrays[f"self.{i}"], memory_map=arrays[f"memory.{i}"])
            layers.append(layer)
        pictures = replace(explanation.pictures, pixels=arrays["pictures"])
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{path}: expected the arrays of explain.json, found none ({error}); {_REMEDY}") from None
    return replace(explanation, layers=tuple(layers), pictures=pictures)
