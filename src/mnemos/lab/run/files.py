"""The JSON files of a run's folder, each with one class that writes it and reads it.

RUN/run.json        `Provenance`: what the run's numbers depend on, and each time that it was continued
    metrics.jsonl   `Measurement`, one a line
    result.json     `Result`

recipe.json holds a `Recipe`, which `recipe_files` reads. A damaged or hand-made file is one line of error.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from mnemos.atomic import parse, read_text, write_json
from mnemos.lab.tasks.metrics import description
from mnemos.types import JSON, InputError, JSONObject

Scores = dict[str, float]  # the loss and each of the task's metrics
PLACES = ("path", "folder")  # fields of data that say where they are
Types = Mapping[str, type | tuple[type, ...]]


class _File:
    """A JSON object in a run's folder, as a dataclass with a field for each entry.

    FILE: its name. _OTHERS: the field with the entries that have no field of their own. _ALWAYS: entries that are
    written also where they have the default. _TYPES: of entries, beside those that a class checks itself.
    """

    FILE: ClassVar[str]
    _OTHERS: ClassVar[str]
    _ALWAYS: ClassVar[set[str]]
    _TYPES: ClassVar[Types]

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether a folder has the file."""
        return (folder / cls.FILE).is_file()

    @classmethod
    def _of(cls, found: JSONObject, path: Path) -> Self:
        """The dataclass with the entries in the content of the file; null is the default."""
        names = {one.name for one in fields(cls)} - {cls._OTHERS}  # type: ignore[arg-type]
        known = {name: value for name, value in found.items() if name in names and value is not None}
        for name, kind in cls._TYPES.items():
            if name in known and not isinstance(known[name], kind):
                raise damaged(path, f"{known[name]!r:.40} as its {name!r}")
        return cls(**known, **{cls._OTHERS: {name: value for name, value in found.items() if name not in names}})

    def to_json(self) -> JSONObject:
        """The content of the file."""
        found: JSONObject = {}
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if one.name != self._OTHERS and (one.name in self._ALWAYS or value != default):
                found[one.name] = value
        return found | getattr(self, self._OTHERS)

    def write(self, folder: Path) -> None:
        """Write the file."""
        write_json(folder / self.FILE, self.to_json())


@dataclass(frozen=True)
class Result(_File):
    """result.json, which is written last: a run that has it is finished.

    An entry that is missing or null has the default; a score that is null is NaN.

    Attributes:
        recipe: the recipe's name.
        seed: the run's seed.
        steps: updates done.
        valid: the scores of the validation split.
        test: those of the test split; None for a task without one.
        scored_rows: how many rows of each split were scored.
        metric: the name of the task's first metric, by which runs are compared.
        metrics: {name: {"higher_is_better", "about", "bounds"}}.
        reference: {name: score in the metric without learning}.
        majority: the share of the most frequent class; None without classes.
        parameters: of the model.
        seconds: spent in updates.
        peak_bytes: of the GPU; on the CPU, the growth of the process since before the model was built.
        tokens: that updates read, without padding; those that two updates read count twice.
        unit: the name of what `tokens` counts (`Task.unit`).
        update_flops: `count_update_flops`; None for several processes.
        epoch_seconds: seconds of updates per epoch; None if the size of an epoch is unknown.
        rollout_segments: segments per update.
        best_step: the step whose weights were scored, with `train.keep_best`; 0: those of the last step.
        averaged_steps: the steps whose averaged weights were scored, with `train.average`.
        stopped_early: whether the run did not train all its steps (`train.patience`).
        before: `valid` of the weights of `train.init_from`.
        flops: of a training forward of one sample of the greatest length; None before the model is assessed.
        state_bytes: of the state of one stream after that sample.
        controls: {name: scores} of models with gated caches (`evaluate.controls`).
        artifacts: the entries that the task adds (`Task.artifacts`), beside the others in the file.
    """

    recipe: str = ""
    seed: int | None = None
    steps: int | None = None
    valid: Scores = field(default_factory=dict)
    test: Scores | None = None
    scored_rows: dict[str, int] = field(default_factory=dict)
    metric: str = ""
    metrics: dict[str, JSONObject] = field(default_factory=dict)
    reference: Scores = field(default_factory=dict)
    majority: float | None = None
    parameters: int | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    tokens: int | None = None
    unit: str = "tokens or rows"
    update_flops: float | None = None
    epoch_seconds: float | None = None
    rollout_segments: int = 1
    best_step: int = 0
    averaged_steps: list[int] = field(default_factory=list)
    stopped_early: bool = False
    before: Scores = field(default_factory=dict)
    flops: int | None = None
    state_bytes: int | None = None
    controls: dict[str, Scores] = field(default_factory=dict)
    artifacts: JSONObject = field(default_factory=dict)

    FILE = "result.json"
    _OTHERS = "artifacts"
    _ALWAYS = {"valid", "scored_rows", "metrics", "reference", "majority", "epoch_seconds"}
    _TYPES = {
        **dict.fromkeys(("recipe", "metric", "unit"), str),
        **dict.fromkeys(("metrics", "controls"), dict),
        "averaged_steps": list,
        "stopped_early": bool,
    }
    _NUMBERS: ClassVar[tuple[str, ...]] = (
        *("seed", "steps", "majority", "parameters", "seconds", "peak_bytes", "tokens", "update_flops"),
        *("epoch_seconds", "rollout_segments", "best_step", "flops", "state_bytes"),
    )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The result of a run. Raises InputError if it is missing or damaged."""
        path = folder / cls.FILE
        return cls.from_json(read_object(path), path)

    @classmethod
    def from_json(cls, found: JSONObject, path: Path) -> Self:
        """The result in the content of the file at `path`. Raises InputError for entries of other types."""
        result = cls._of(found, path)
        costs = {name: getattr(result, name) for name in cls._NUMBERS}
        parts = {"costs": costs, **result.controls}
        parts |= {name: getattr(result, name) for name in ("valid", "test", "scored_rows", "reference", "before")}
        for name, numbers in parts.items():
            missing = numbers is None and name == "test"
            if not missing and not (isinstance(numbers, dict) and all(map(_is_number, numbers.values()))):
                raise damaged(path, f"{numbers!r:.60} as its {name!r}")
        for scores in (result.valid, result.test or {}, result.reference, result.before, *result.controls.values()):
            scores |= {name: math.nan for name, value in scores.items() if value is None}
        if "loss" not in result.scores:
            raise damaged(path, f"no 'loss' in its {result.split!r}")
        along: Any = result.artifacts.get("along", {"values": []})
        points: Any = along.get("values") if isinstance(along, dict) else None
        rows: Any = (along.get("rows") or []) if isinstance(along, dict) else []
        pairs = isinstance(points, list) and all(
            isinstance(pair, list) and len(pair) == 2 and None not in pair and all(map(_is_number, pair))
            for pair in points
        )
        counts = isinstance(rows, list) and all(type(count) is int and count >= 0 for count in rows)
        if not pairs or not counts or (any(rows) and not all(0 <= share <= 1 for _, share in points)):
            raise damaged(path, f"{along!r:.60} as its 'along'")
        if not all(isinstance(one, dict) for one in result.metrics.values()):
            raise damaged(path, f"{result.metrics!r:.60} as its 'metrics'")
        return result

    @property
    def split(self) -> Literal["valid", "test"]:
        """The split that the run is judged by: "test", or "valid" of data without a test split."""
        return "valid" if self.test is None else "test"

    @property
    def scores(self) -> Scores:
        """The scores of `split`."""
        return self.valid if self.test is None else self.test

    @property
    def train_flops(self) -> float | None:
        """FLOPs of all updates; None for several processes."""
        return None if self.update_flops is None or self.steps is None else self.update_flops * self.steps

    @property
    def assessed(self) -> bool:
        """Whether the run's model was measured after training."""
        return self.flops is not None

    def score(self, metric: str, control: str | None = None) -> float:
        """A score of `split`, as trained or under a control ("emptied", …); NaN if there is none."""
        return (self.scores if control is None else self.controls.get(control, {})).get(metric, math.nan)

    def description(self, metric: str, folder: Path) -> JSONObject:
        """{"higher_is_better", "about", "bounds"} of a metric. folder: the run's, for the InputError if it has none."""
        return description(self.metrics, metric, str(folder / self.FILE))


@dataclass(frozen=True)
class Provenance(_File):
    """run.json: everything that a run's numbers may depend on, and each time that it was continued.

    Attributes:
        commit: of the running source; None outside a git checkout.
        dirty: whether the source differs from the commit (`provenance.source`).
        source_sha256: of the package's files (`provenance.source_hash`).
        versions: {library: version}.
        device: that trained.
        cpu: the processor's name.
        threads: within operations on the CPU.
        dense: which library computes dense layers (`Choice.to_json` of mnemos.ops.dense_layer); {} in old files.
        seed: the run's.
        data: the exact source of the data (`provenance.data_read`).
        command: the words of the command that started the run.
        started: the time of the start, in ISO format.
        weights: of the run that it starts from, `Start.source`.
        warnings: what the task warned of in its data, such as files that two splits share.
        finished: the time of the end; None until then.
        resumed: {"step", "at", "commit", "dirty", "command"} of each continuation, and what else changed before it.
        others: further entries of the file.
    """

    commit: str | None = None
    dirty: bool | None = None
    source_sha256: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    device: str | None = None
    cpu: str | None = None
    threads: int | None = None
    dense: JSONObject = field(default_factory=dict)
    seed: int | None = None
    data: JSONObject = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    started: str | None = None
    weights: JSONObject = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    finished: str | None = None
    resumed: list[JSONObject] = field(default_factory=list)
    others: JSONObject = field(default_factory=dict)

    FILE = "run.json"
    _OTHERS = "others"
    _ALWAYS = {"commit", "dirty", "finished", "resumed"}
    _TYPES = {
        "resumed": list,
        "command": list,
        "warnings": list,
        "threads": int,
        **dict.fromkeys(("started", "finished"), str),
    }

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The provenance of a run. Raises InputError if the file is missing or damaged."""
        path = folder / cls.FILE
        return cls.from_json(read_object(path), path)

    @classmethod
    def from_json(cls, found: JSONObject, path: Path) -> Self:
        """The provenance in the content of the file at `path`. Raises InputError for entries of other types."""
        about = cls._of(found, path)
        if not all(isinstance(entry, dict) for entry in about.resumed):
            raise damaged(path, f"{about.resumed!r:.40} as its 'resumed'")
        for part in (found, *about.resumed):
            for name in ("data", "weights", "versions", "dense"):
                if not isinstance(part.get(name) or {}, dict):
                    raise damaged(path, f"{part[name]!r:.40} as its {name!r}")
            data: JSONObject = part.get("data") or {}
            files, count = data.get("files") or [], data.get("count") or 0
            if not (isinstance(files, list) and all(isinstance(one, dict) for one in files) and isinstance(count, int)):
                raise damaged(path, f"{data!r:.60} as its 'data'")
        return about

    def latest(self, name: str) -> Any:
        """An entry, such as "data", as the last process that continued the run with another one wrote it; or None."""
        own = getattr(self, name)
        return next((one[name] for one in reversed(self.resumed) if one.get(name)), None) or own or None


@dataclass(frozen=True)
class Measurement:
    """A line of metrics.jsonl: {"kind", "step", and the values}.

    kind: "train" (over the updates since the last such line), "valid" (an evaluation) or "gates" (`Gates`).
    step: updates done. where: file and line that it was read from, for errors.
    """

    kind: str
    step: int
    values: JSONObject
    where: str = ""

    FILE: ClassVar[str] = "metrics.jsonl"

    @classmethod
    def read_all(cls, folder: Path) -> Iterator[Self]:
        """The lines of a run's file, in order.

        A run that is continued repeats the steps since its last checkpoint: of two lines with one kind and step the
        later counts. An incomplete last line is left out, because the run may be writing or may have been killed.
        Raises InputError, with file and line, if there is no file or a line is no measurement.
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
                found = parse(line)
            except ValueError as error:
                if 1 < number == len(lines):
                    continue
                raise InputError(
                    f"{where}: expected one JSON object, found {error}; repair or delete the line"
                ) from None
            if not isinstance(found, dict):
                raise InputError(f"{where}: expected one JSON object, found {line[:40]!r}; repair or delete the line")
            yield cls.from_json(found, where)

    @classmethod
    def from_json(cls, found: JSONObject, where: str = "") -> Self:
        """The measurement in a line. Raises InputError if it has no kind or no step."""
        kind, step = found.get("kind"), found.get("step")
        if not isinstance(kind, str):
            raise InputError(f'{where}: expected "kind" to be a name, found {kind!r}; repair or delete the line')
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
            raise InputError(
                f'{where}: expected "step" to be a count of updates, found {step!r}; repair or delete the line'
            )
        return cls(kind, step, {k: v for k, v in found.items() if k not in ("kind", "step")}, where)

    def to_line(self) -> str:
        """The line, with its end."""
        return json.dumps({"kind": self.kind, "step": self.step, **self.values}) + "\n"


def read_object(path: Path, types: Types | None = None) -> JSONObject:
    """A JSON object with entries of these types. Raises InputError if the file is missing or holds something else."""
    try:
        found = parse(read_text(path))
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected this file of a run, found none; start a new run in another folder"
        ) from None
    except ValueError as error:
        raise damaged(path, f"a damaged file ({error})") from None
    if not isinstance(found, dict):
        raise damaged(path, f"{found!r:.40}")
    for name, kind in (types or {}).items():
        if not isinstance(found.get(name), kind):
            raise damaged(path, f"{found[name]!r:.40} as its {name!r}" if name in found else f"no {name!r} in it")
    return found


def damaged(path: Path, found: str) -> InputError:
    """The error of a file that a run did not write as it is."""
    return InputError(f"{path}: expected JSON as a run writes it, found {found}; start a new run in another folder")


def _is_number(value: JSON) -> bool:
    """Whether a value of JSON is null or a number; an integer of 64 bits, as charts and arrays have them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return value is None or isinstance(value, float)
