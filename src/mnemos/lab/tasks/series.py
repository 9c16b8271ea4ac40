"""A series: a table of numbers over time, whose next step or class of each step is predicted from the steps so far."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.errors import near_name, plural
from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE, Batch
from .metrics import ACCURACY, MAJORITY, SumMetric, ratio
from .preprocessing import Predicted, Preprocessing, likely_classes
from .tables import ENDINGS, is_number, read_table
from .task import SPLITS, DataConfig, HeldOut, Split
from .token_task import SegmentedTask

REPEAT, MEAN = "repeating the last value", "the training mean"  # reference scores
NUMBERS = ("int", "uint", "halffloat", "float", "double", "decimal", "bool")  # how the names of their types begin
MOST_CLASSES = 100  # a column of whole numbers with more different ones holds no classes


def squared_errors(model: object, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(the sum over steps of the mean squared error over columns, steps). Values of NaN do not count."""
    known = ~batch.targets.isnan()
    errors = (outputs - batch.targets.nan_to_num()) * known
    return (errors.square().sum(-1) / known.sum(-1).clamp(min=1)).sum(), known.any(-1).sum()


ERROR = SumMetric(
    "error",
    False,
    "The root of the mean squared error of the next step, in standard deviations of the training split.",
    "error {value:.4f}",
    sums=squared_errors,
    value=lambda sums: math.sqrt(ratio(sums)),
    bounds=(0.0, math.inf),
)


@register
@dataclass(frozen=True)
class SeriesConfig(DataConfig):
    """A table of numbers over time, a row for each step: from the steps so far the next one is predicted.

    `path`: a file .csv, .tsv, .jsonl or .parquet, whose rows are in the order of time. The features are its columns of
    numbers but those that only grow, as the time does, or only fall, or `columns`; a missing value is read as that of
    the step before, or as the training mean, and not scored.
    Without `target` the next values of all features are predicted, with it those of this column. If it holds words, or
    at most 100 different whole numbers and is none of `columns`, the class of each step is, from the steps up to it.
    The last share `held_out` of the steps is the test split, and the share before it the validation split. Values are
    normalised by the training split. Training reads pieces of `longest` steps, each with a new state, in segments of
    `segment` steps; a held-out split is read as one. Needs the extra `data`.
    """

    name: ClassVar[str] = "series"

    path: str = "series.csv"
    columns: tuple[str, ...] = ()
    target: str | None = None
    segment: int = 64
    held_out: float = 0.15
    longest: int = 512

    def files(self) -> list[Path]:
        return [Path(self.path)]

    def build(self) -> "SeriesTask":
        self.require("0 < held_out < 0.5", "longest >= 1", "segment >= 1")
        series = read_series(Path(self.path), self.columns, self.target)
        steps, count = len(series.values), int(self.held_out * len(series.values))
        if count < 2:
            raise InputError(f"{self.path}: expected at least two steps in each split, found {steps} in all; add some")
        bounds = 0, steps - 2 * count, steps - count, steps
        ranges = {split: range(*bounds[i : i + 2]) for i, split in enumerate(SPLITS)}
        columns = dict(zip((*series.columns, *series.targets), (*series.values.T, *series.numbers.T), strict=True))
        if empty := [name for name, values in columns.items() if np.isnan(values[: ranges["train"].stop]).all()]:
            raise InputError(
                f"{self.path}: expected a value of each column in the training split, rows 1 to "
                f"{ranges['train'].stop:,}, found none in {', '.join(empty)}; name the others with --data.columns"
            )
        prepared = SeriesPreprocessing.of(series, ranges["train"], self.segment)
        task = SeriesTask(series, ranges, self.segment, self.longest, prepared)
        task.about = (*(f"{split:5}  {len(steps):,} steps" for split, steps in ranges.items()), *series.about)
        return task

    def build_to_score(self, split: HeldOut, trained: Any = None) -> "SeriesTask":
        """The task that scores another series whole, normalised as that of the run."""
        if not isinstance(trained, SeriesPreprocessing):
            return self.build()
        series = read_series(Path(self.path), trained.columns, self.target, trained)
        if series.targets != trained.targets:
            raise InputError(f"{self.path}: {trained.other_target(series.targets)}")
        whole = dict.fromkeys(SPLITS, range(len(series.values)))
        task = SeriesTask(series, whole, self.segment, len(series.values), trained)
        task.about, task.whole = (f"scored: the whole series, {len(series.values):,} steps", *series.about), True
        return task


class Series(NamedTuple):
    """What is read and what is predicted at each step: columns of numbers, or a class.

    A gap has the value before it, and NaN where there is none.
    """

    columns: tuple[str, ...]
    values: NDArray[np.float64]  # [steps, columns]
    targets: tuple[str, ...]  # the columns that are predicted; () for classes
    numbers: NDArray[np.float64]  # of these, [steps, targets]
    known: NDArray[np.bool_]  # which of these are not a gap that was filled
    classes: tuple[str, ...]
    labels: NDArray[np.int64]  # [steps]; [0] without classes
    about: tuple[str, ...]


def read_series(
    path: Path, columns: Sequence[str], target: str | None, run: "SeriesPreprocessing | None" = None
) -> Series:
    """The columns of a table, in the order of its rows. run: what is known of the run that they are read for."""
    table = read_table(path)
    types = {field.name: str(field.type) for field in table.schema}
    numbers = [name for name, own in types.items() if own.startswith(NUMBERS)]
    # --- the names of columns ---
    has = f"it has the columns {', '.join(types)}, of which {', '.join(numbers) or 'none'} are numbers"
    if target is not None and target not in types:
        raise InputError(
            f"{path}: expected the name of a column in data.target, found {target!r}; {near_name(target, types, has)}"
        )
    predicted = [target] if target is not None and run is not None and not run.names else []
    if (wrong := next((name for name in (*columns, *predicted) if name not in numbers), None)) is not None:
        whose = "data.columns" if run is None else "the run"
        found = "other values in it" if wrong in types else "no such column"
        hint = near_name(wrong, numbers, has) if run is None and wrong not in types else has
        raise InputError(f"{path}: expected numbers in the column {wrong!r} of {whose}, found {found}; {hint}")
    # --- the classes, if these are predicted ---
    labels = np.zeros(0, np.int64)
    names: tuple[str, ...] = ()
    if target is not None and target not in (*columns, *predicted):
        cells = [None if one is None else str(one) for one in table[target].to_pylist()]
        known_cells = [one for one in cells if one is not None]
        few = types[target].startswith(("int", "uint", "bool")) and len({*known_cells}) <= MOST_CLASSES
        if run is not None or few or target not in numbers:
            names = tuple(sorted({*known_cells})) if run is None else run.names
            if run is None and not len(known_cells) / 2 >= len(names) > 0:
                numbered = ", or add it to data.columns to predict its number" if target in numbers else ""
                raise InputError(
                    f"{path}: expected classes that come again as data.target, found {len(names):,} different ones in "
                    f"{len(known_cells):,} rows of {target}; name another column{numbered}"
                )
            if unknown := sorted({*known_cells} - {*names}):
                raise InputError(f"{path}: expected the classes of the run, found {unknown[0]!r}; remove these rows")
            labels = np.array([IGNORE if one is None else names.index(one) for one in cells], np.int64)
    # --- what is read: no column that only grows, as the time does, for training never sees its later values ---
    features = tuple(columns) or tuple(name for name in numbers if not (names and name == target))
    arrays = {name: np.array(table[name].to_pylist(), np.float64) for name in numbers}
    grows = {name for name in features if name not in (*columns, target) and _only_grows(arrays[name])}
    features = tuple(name for name in features if name not in grows) or features
    targets = () if names else features if target is None else (target,)
    if not features:
        raise InputError(f"{path}: expected columns of numbers, found none; {has}; name another file")
    # --- numbers, and for a gap the value before ---
    known = np.stack([np.isfinite(arrays[name]) for name in targets], 1) if targets else np.zeros((len(table), 0), bool)
    gaps = 0
    for name in {*features, *targets}:
        finite = np.isfinite(arrays[name])
        last = np.maximum.accumulate(np.where(finite, np.arange(len(table)), -1))
        arrays[name] = np.where(last >= 0, arrays[name][last], np.nan)  # nothing of later steps
        gaps += int((~finite).sum())
    # --- what is printed about them ---
    about = [f"{plural(len(features), 'column')}: {', '.join(features)}; predicted: {target or 'all'}"]
    if left_out := [name for name in types if name not in (*features, target)]:
        why = dict.fromkeys(grows, " (only grows or falls: --data.columns reads it)")
        why |= {name: _no_numbers(table[name]) for name in left_out if name not in numbers}
        about.append(f"left out: {', '.join(name + why.get(name, '') for name in left_out)}")
    times = [name for name in left_out if types[name].startswith(("timestamp", "date"))]
    about.extend(found for name in times if (found := _of_times(name, table[name])))
    if without := int((labels == IGNORE).sum()):
        about.append(f"{plural(without, 'step')} without {target} (empty, NA, null, …): read and not scored")
    if gaps:
        about.append(
            f"{plural(gaps, 'missing value')}, not scored: read as that of the step before, or as the training mean"
        )
    values, own = (
        np.stack([arrays[n] for n in some], 1) if some else np.zeros((len(table), 0)) for some in (features, targets)
    )
    return Series(features, values, targets, own, known, names, labels, tuple(about))


def _no_numbers(column: Any) -> str:
    """Why a column is no column of numbers: its first value that is none. A single one makes words of all."""
    filled = [str(one) for one in column.to_pylist() if one is not None]
    first = next((one for one in filled if not is_number(one)), None)
    if first is None:
        return " (has its numbers in quotation marks)" if filled else " (has no values)"
    return f" (has other values than numbers, first {first!r:.40})"


def _of_times(name: str, column: Any) -> str:
    """What is wrong with times: they go back, stand still, or some steps are longer than the others; "": nothing."""
    times = column.drop_null().cast("timestamp[us]", safe=False).cast("int64").to_numpy().astype("datetime64[us]")
    steps = np.diff(times) / np.timedelta64(1, "s")
    if not len(steps):
        return ""

    def seconds(row: int) -> str:
        return str(np.datetime_as_string(times[row], unit="s"))

    if (wrong := steps <= 0).any():
        at = int(wrong.argmax())
        does = "goes back" if steps[at] else "stands still"
        return (
            f"warning: {name} {does}, from {seconds(at)} to {seconds(at + 1)}: the rows must be in the order of time, "
            "one for each time, and of one series"
        )
    holes = steps > 1.5 * np.median(steps)
    if not holes.any():
        return ""
    at = int(holes.argmax())
    return (
        f"warning: {name} has {plural(int(holes.sum()), 'hole')} that the model does not see, the first from "
        f"{seconds(at)} to {seconds(at + 1)}: add these rows, with empty values"
    )


def _only_grows(values: NDArray[np.float64]) -> bool:
    """Whether each value is above the one before, or each below it, as times are where the newest row is the first."""
    known = values[np.isfinite(values)]  # times with a gap are times; but few values in a long column rise by chance
    steps = np.diff(known)
    return len(steps) > 1 and 2 * len(known) > len(values) and bool((steps > 0).all() or (steps < 0).all())


class SeriesTask(SegmentedTask):
    """A series in segments, as `SegmentedTask` reads documents: its tokens are the numbers of the steps.

    Inputs [B, T, columns]: at each step the values of the step before, or for classes of the step itself. Targets:
    float [B, T, targets], NaN where none counts, or the classes [B, T].
    """

    shuffled = False

    def __init__(
        self,
        series: Series,
        ranges: Mapping[Split, range],
        segment: int,
        longest: int,
        prepared: "SeriesPreprocessing",
    ) -> None:
        steps = {split: np.arange(one.start, one.stop) for split, one in ranges.items()}
        pieces = {split: [one] for split, one in steps.items()}
        pieces["train"] = [steps["train"][i : i + longest] for i in range(0, len(steps["train"]), longest)]
        super().__init__(pieces, len(series.values), segment)
        self.prepared = prepared
        self.values = torch.from_numpy(prepared.normalised(series.values))
        self.labels = torch.from_numpy(series.labels)
        shift, scale = np.array(prepared.target_mean), np.array(prepared.target_std)
        filled = torch.from_numpy(((series.numbers - shift) / scale).astype(np.float32)).nan_to_num()
        self.numbers = filled.masked_fill(~torch.from_numpy(series.known), torch.nan)
        # --- what it is judged by ---
        self.vocab_size = len(prepared.names) or len(series.targets)  # the number of outputs of the model
        test = steps["test"]
        if not (series.labels[test] != IGNORE if len(self.labels) else series.known[test]).any():
            of = ", ".join(series.targets) or "the classes"
            raise InputError(f"data.target: expected a value in the test split, found none of {of}; add some")
        if len(self.labels):
            known = series.labels[test][series.labels[test] != IGNORE]
            self.metrics, self.reference = (ACCURACY,), {MAJORITY: float(np.bincount(known).max() / len(known))}
        else:
            self.metrics = (ERROR,)
            scored = Batch(None, self.numbers[test])
            before = filled[np.maximum(test - 1, 0)] * torch.from_numpy(test > 0)[:, None]  # as `_read`
            naive = {REPEAT: before, MEAN: torch.zeros_like(before)}
            sums = {name: squared_errors(self, outputs, scored) for name, outputs in naive.items()}
            self.reference = {name: ERROR.value([*map(float, both)]) for name, both in sums.items()}

    @property
    def sizes(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "features": self.values.shape[1], "max_length": self.max_length}

    @property
    def unit(self) -> str:
        return "steps"

    def size(self, split: Split) -> int:
        steps = np.concatenate(self._splits[split])
        return self.count(Batch(None, (self.labels if len(self.labels) else self.numbers)[steps]))

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        return self._read(super().train_batch(index, batch_size, seed))

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        return map(self._read, super().batches(split, batch_size))

    def _read(self, steps: Batch) -> Batch:
        """The batch of `SegmentedTask`, whose targets are the numbers of steps, with the values of these steps."""
        counts, at = steps.targets != IGNORE, steps.targets.clamp(min=0)
        if len(self.labels):
            return steps._replace(inputs=self.values[at], targets=torch.where(counts, self.labels[at], IGNORE))
        before = self.values[(at - 1).clamp(min=0)] * (at > 0)[..., None]  # nothing is before the first step
        return steps._replace(inputs=before, targets=torch.where(counts[..., None], self.numbers[at], torch.nan))

    def example(self) -> Batch:
        return self._read(Batch(None, torch.arange(min(self.max_length, len(self.values)))[None]))

    def check(self, batch: Batch, where: str) -> None:
        if batch.inputs.dim() != 3 or batch.inputs.shape[-1] != self.values.shape[1]:
            raise InputError(f"{where}: expected inputs [B, T, columns], found {list(batch.inputs.shape)}")

    def loss(self, model: nn.Module, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss(model, outputs, batch) if len(self.labels) else squared_errors(model, outputs, batch)[0]

    def count(self, batch: Batch) -> int:
        return super().count(batch) if len(self.labels) else int((~batch.targets.isnan()).any(-1).sum())

    def preprocessing(self) -> "SeriesPreprocessing":
        return self.prepared


@register
@dataclass(frozen=True)
class SeriesPreprocessing(Preprocessing):
    """The next `length` steps after each table, or the most probable classes of its last step.

    columns: of the table, with mean and standard deviation of the training split; the same of the targets.
    """

    name: ClassVar[str] = "series"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"length": 1, "top": 3})
    endings = ENDINGS
    files = "tables"

    columns: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    targets: tuple[str, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    segment: int = 64

    @classmethod
    def of(cls, series: Series, train: range, segment: int) -> "SeriesPreprocessing":
        moments = []
        for values in (series.values[train.start : train.stop], series.numbers[train.start : train.stop]):
            middle, spread = np.nanmean(values, 0), np.nanstd(values, 0)
            varies = spread > 1e-12 * np.abs(middle)  # of equal values rounding leaves more than 0
            moments += [tuple(middle.tolist()), tuple(np.where(varies, spread, 1.0).tolist())]
        mean, std, *own = moments
        return cls(series.columns, mean, std, series.targets, own[0], own[1], segment, names=series.classes)

    def normalised(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """The values in standard deviations from the mean; 0, the mean, where a column has had none so far."""
        return np.nan_to_num((values - np.array(self.mean)) / np.array(self.std)).astype(np.float32)

    def difference(self, other: Preprocessing) -> str | None:
        if not isinstance(other, SeriesPreprocessing) or self.names:
            return super().difference(other)
        if self.columns != other.columns:
            found = ", ".join(other.columns)
            return f"expected the columns of the run, {', '.join(self.columns)}, found {found}; rename them"
        return None if self.targets == other.targets else self.other_target(other.targets)

    def other_target(self, found: Sequence[str]) -> str:
        """What is wrong with data in which other columns are predicted; () for classes."""
        own, other = (", ".join(targets) or "classes" for targets in (self.targets, found))
        return f"expected the target of the run, {own}, found {other}; leave data.target out"

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
        if options["length"] > 1 and (self.names or self.targets != self.columns):
            raise InputError(
                f"{path}: expected --length 1 for a model that does not predict all that it reads, found "
                f"{options['length']}; leave it out"
            )
        series = read_series(path, self.columns, None, self)
        x, state = torch.from_numpy(self.normalised(series.values))[None], None
        for part in x.split(self.segment, 1):
            outputs, state = reader(part, state)
        if self.names:
            return likely_classes(path, outputs[0, -1], self.names, options["top"])
        steps = [outputs[:, -1:]]
        while len(steps) < options["length"]:
            outputs, state = reader(steps[-1], state)
            steps.append(outputs)
        values = torch.cat(steps, 1)[0].double().numpy() * np.array(self.target_std) + np.array(self.target_mean)
        rows = [dict(zip(self.targets, row, strict=True)) for row in values.tolist()]
        # --- a line of names and one for each step, with its number ---
        cells = [["step", *rows[0]], *([str(i), *(f"{x:.6g}" for x in row.values())] for i, row in enumerate(rows, 1))]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
        count = "step" if len(rows) == 1 else f"{len(rows):,} steps"
        return Predicted(str(path), "\n".join([f"the next {count}", *lines]), {"next": rows})
