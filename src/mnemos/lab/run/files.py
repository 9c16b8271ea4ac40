"""The JSON files of a run's folder, each with one class that writes it and reads it; recipe.json is `recipe_files`'."""

import json
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from mnemos.atomic import parse, read_text, write_json
from mnemos.lab.evaluate import records
from mnemos.lab.evaluate.records import from_json
from mnemos.lab.tasks.metrics import described_in
from mnemos.types import InputError, JSONObject

Scores = dict[str, float]  # the loss and each of the task's metrics
PLACES = ("path", "folder")  # fields of data that say where they are
Types = Mapping[str, type | tuple[type, ...]]
_REMEDY = "start a new run in another folder"


class _File:
    """A JSON object in a run's folder, with a field for each entry; null is the field's default.

    _OTHERS: the field with the entries that have no field of their own. _ALWAYS: written also where they are the
    default.
    """

    FILE: ClassVar[str]
    _OTHERS: ClassVar[str]
    _ALWAYS: ClassVar[set[str]]

    @classmethod
    def exists(cls, folder: Path) -> bool:
        return (folder / cls.FILE).is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / cls.FILE
        return cls.from_json(read_object(path), path)

    @classmethod
    def from_json(cls, content: JSONObject, path: Path) -> Self:
        hints = typing.get_type_hints(cls)
        names = {one.name for one in fields(cls)} - {cls._OTHERS}  # type: ignore[arg-type]
        # A count that is written as 3.1e6 is one too.
        hints |= {name: int | float for name, hint in hints.items() if hint in (int, int | None)}
        own = {
            name: from_json(hints[name], value, path, _REMEDY, name)
            for name, value in content.items()
            if name in names and value is not None
        }
        return cls(**own, **{cls._OTHERS: {name: value for name, value in content.items() if name not in names}})

    def to_json(self) -> JSONObject:
        content: JSONObject = {}
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if one.name != self._OTHERS and (one.name in self._ALWAYS or value != default):
                content[one.name] = value
        return content | getattr(self, self._OTHERS)

    def write(self, folder: Path) -> None:
        write_json(folder / self.FILE, self.to_json())


@dataclass(frozen=True)
class Result(_File):
    """result.json, which is written last: a run that has it is finished. A score that is null is NaN."""

    recipe: str = ""
    seed: int | None = None
    steps: int | None = None  # updates done
    valid: Scores = field(default_factory=dict)  # of the validation split
    test: Scores | None = None  # None for a task without a test split
    scored_rows: dict[str, int] = field(default_factory=dict)  # by split
    # The counted targets in them, over which scores are means; {}: the first metric is of whole rows
    scored_targets: dict[str, int] = field(default_factory=dict)
    metric: str = ""  # the task's first, by which runs are compared
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)  # {name: {"higher_is_better", "about", "bounds"}}
    reference: Scores = field(default_factory=dict)  # {name: score in the metric without learning}
    majority: float | None = None  # the share of the most frequent class; None without classes
    parameters: int | None = None  # of the model
    seconds: float | None = None  # spent in updates
    peak_bytes: int | None = None  # of the GPU; on the CPU, the growth of the process since before the model was built
    tokens: int | None = None  # that updates read, without padding; those that two updates read count twice
    unit: str = "tokens or rows"  # what `tokens` counts (`Task.unit`)
    update_flops: float | None = None  # `count_update_flops`; None for several processes
    epoch_seconds: float | None = None  # of updates; None if the size of an epoch is unknown
    rollout_segments: int = 1  # per update
    best_step: int = 0  # whose weights were scored, with `train.keep_best`; 0: those of the last step
    averaged_steps: list[int] = field(default_factory=list)  # whose averaged weights were scored, with `train.average`
    stopped_early: bool = False  # by `train.patience`, before all its steps
    before: Scores = field(default_factory=dict)  # `valid` of the weights of `train.init_from`
    flops: int | None = None  # of a training forward of one sample of the greatest length; None: not assessed yet
    state_bytes: int | None = None  # of one stream after that sample
    controls: dict[str, Scores] = field(default_factory=dict)  # of models with gated caches (`evaluate.controls`)
    # Entries that the task adds (`Task.artifacts`), beside the others in the file
    artifacts: JSONObject = field(default_factory=dict)

    FILE = "result.json"
    _OTHERS = "artifacts"
    _ALWAYS = {"valid", "scored_rows", "metrics", "reference", "majority", "epoch_seconds"}

    @property
    def split(self) -> Literal["valid", "test"]:
        return "valid" if self.test is None else "test"

    @property
    def scores(self) -> Scores:
        return self.valid if self.test is None else self.test

    @property
    def train_flops(self) -> float | None:
        """FLOPs of all updates; None for several processes."""
        return None if self.update_flops is None or self.steps is None else self.update_flops * self.steps

    @property
    def assessed(self) -> bool:
        return self.flops is not None

    def score(self, metric: str, control: str | None = None) -> float:
        """A score of `split`, as trained or under a control ("emptied", …); NaN if there is none."""
        return (self.scores if control is None else self.controls.get(control, {})).get(metric, math.nan)

    def description(self, metric: str, folder: Path) -> JSONObject:
        """{"higher_is_better", "about", "bounds"} of a metric. folder: the run's, for the InputError if it has none."""
        if (entry := described_in(self.metrics, metric)) is None:
            raise InputError(
                f'{folder / self.FILE}: expected "higher_is_better" of the metric {metric!r} in "metrics", found none; '
                "train the run again"
            )
        return entry


@dataclass(frozen=True)
class Provenance(_File):
    """run.json: everything that a run's numbers may depend on, and each time that it was continued."""

    commit: str | None = None  # of the running source; None outside a git checkout
    dirty: bool | None = None  # whether the source differs from it (`provenance.source`)
    source_sha256: str | None = None  # of the package's files (`provenance.source_hash`)
    versions: dict[str, str | None] = field(default_factory=dict)
    device: str | None = None  # that trained
    cpu: str | None = None  # the processor's name
    threads: int | None = None  # within operations on the CPU
    dense: dict[str, Any] = field(default_factory=dict)  # which library computes dense layers (`dense_layer.Choice`)
    seed: int | None = None
    data: dict[str, Any] = field(default_factory=dict)  # their exact source (`provenance.data_read`)
    command: list[str] = field(default_factory=list)  # the words that started the run
    started: str | None = None  # in ISO format, as `finished`
    weights: dict[str, Any] = field(default_factory=dict)  # of the run that it starts from, `Start.source`
    warnings: list[str] = field(default_factory=list)  # of the task about its data, such as files that two splits share
    finished: str | None = None  # None until then
    # {"step", "at", "commit", "dirty", "command"} of each continuation, and what else changed before it
    resumed: list[dict[str, Any]] = field(default_factory=list)
    others: JSONObject = field(default_factory=dict)  # further entries of the file

    FILE = "run.json"
    _OTHERS = "others"
    _ALWAYS = {"commit", "dirty", "finished", "resumed"}

    def latest(self, name: str) -> Any:
        """An entry, such as "data", as the last process that continued the run with another one wrote it; or None."""
        own = getattr(self, name)
        return next((one[name] for one in reversed(self.resumed) if one.get(name)), None) or own or None


@dataclass(frozen=True)
class Measurement:
    """A line of metrics.jsonl: {"kind", "step", and the values}."""

    kind: str  # "train" (over the updates since the last such line), "valid" or "gates" (`Gates`)
    step: int  # updates done
    values: JSONObject
    where: str = ""  # file and line that it was read from, for errors

    FILE: ClassVar[str] = "metrics.jsonl"

    @classmethod
    def read_all(cls, folder: Path) -> Iterator[Self]:
        """The lines of a run's file, in order; of two with one kind and step, as after a resume, the later counts.

        An incomplete last line is left out: the run may be writing. Raises InputError, with file and line, if there is
        no file or a line is no measurement.
        """
        path = folder / cls.FILE
        try:
            lines = read_text(path).split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: expected the metrics of a run, found {error}; is this a run folder?") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = parse(line)
            except ValueError:
                if number == len(lines):
                    continue
                content = line
            values = dict(content) if isinstance(content, dict) else {}
            kind, step = values.pop("kind", None), values.pop("step", None)
            if not isinstance(kind, str) or type(step) is not int or not 0 <= step < 2**63:
                raise InputError(f"{where}: expected a measurement, found {line[:40]!r}; repair or delete the line")
            yield cls(kind, step, values, where)

    def to_line(self) -> str:
        return json.dumps({"kind": self.kind, "step": self.step, **self.values}) + "\n"


def read_object(path: Path, types: Types | None = None) -> JSONObject:
    """A JSON object with entries of these types. Raises InputError if the file is missing or holds something else."""
    content = records.read_object(path, _REMEDY)
    for name, cls in (types or {}).items():
        if not isinstance(content.get(name), cls):
            raise damaged(path, f"{content[name]!r:.40} as its {name!r}" if name in content else f"no {name!r} in it")
    return content


def damaged(path: Path, problem: str) -> InputError:
    """The error of a file that a run did not write as it is."""
    return InputError(f"{path}: expected JSON as a run writes it, found {problem}; {_REMEDY}")
