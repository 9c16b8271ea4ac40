"""A series: a table of numbers over time, whose next step or class of each step is predicted from the steps so far."""

import math
import warnings
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
from .tables import READERS, is_number, is_written_whole, read_table
from .task import SPLITS, DataConfig, HeldOut, Split
from .token_task import SegmentedTask

REPEAT, MEAN = "repeating the last value", "the training mean"  # reference scores
NUMBERS = ("int", "uint", "float", "double", "decimal", "bool")  # how the names of their types begin
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
        for names, columns in ((series.columns, series.values), (series.targets, series.numbers)):
            empty = [name for name, one in zip(names, columns[ranges["train"]].T, strict=True) if np.isnan(one).all()]
            if empty:
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
    dtypes = {name: str(getattr(feature, "dtype", "")) for name, feature in table.features.items()}
    numbers = [name for name, dtype in dtypes.items() if dtype.startswith(NUMBERS)]
    # --- the names of columns ---
    has = f"it has the columns {', '.join(dtypes)}, of which {', '.join(numbers) or 'none'} are numbers"
    if (wrong := next((name for name in columns if name not in numbers), None)) is not None:
        whose = "data.columns" if run is None else "the run"
        found = "other values in it" if wrong in dtypes else "no such column"
        hint = near_name(wrong, numbers, has) if run is None and wrong not in dtypes else has
        raise InputError(f"{path}: expected numbers in the column {wrong!r} of {whose}, found {found}; {hint}")
    if target is not None and target not in dtypes:
        raise InputError(
            f"{path}: expected the name of a column in data.target, found {target!r}; {near_name(target, dtypes, has)}"
        )
    # --- what is predicted ---
    labels, names = np.zeros(0, np.int64), () if run is None else run.names
    if target is not None and target not in columns:
        cells = table[target][:]
        filled = [one for one in cells if one is not None and one == one]
        is_whole = dtypes[target].startswith(("float", "double")) and all(map(float.is_integer, filled))
        if is_whole and (is_written_whole(path, [*dtypes].index(target)) if run is None else run.names):
            cells = [int(one) if one is not None and one == one else None for one in cells]
            dtypes[target] = "int64"
        words = [str(one) for one in cells if one is not None]
        whole = dtypes[target].startswith(("int", "uint", "bool")) and len({*words}) <= MOST_CLASSES
        classified = (target not in numbers or whole) if run is None else bool(run.names)
        if target not in numbers and not classified:
            raise InputError(
                f"{path}: expected numbers as {target}, which the run predicts, found words; name another file"
            )
        if classified:
            names = names or tuple(sorted({*words}))
            if run is None and len(names) > len(words) / 2:
                numbered = ", or add it to data.columns to predict its number" if target in numbers else ""
                raise InputError(
                    f"{path}: expected classes that come again as data.target, found {len(names):,} different ones in "
                    f"{len(words):,} rows of {target}; name another column{numbered}"
                )
            if unknown := sorted({*words} - {*names}):
                raise InputError(f"{path}: expected the classes of the run, found {unknown[0]!r}; remove these rows")
            number = {name: i for i, name in enumerate(names)}
            labels = np.array([IGNORE if one is None else number[str(one)] for one in cells], np.int64)
    # --- what is read: no column that only grows, whose later values training never sees, unless there is no other; nor
    # one that only falls, as the time does where the newest row is the first ---
    features = tuple(columns) or tuple(name for name in numbers if not (len(labels) and name == target))
    arrays = {name: np.array(table[name], np.float64) for name in numbers}
    clocks: dict[str, str] = {}  # each with what it does
    for name in features if len(table) > 2 else ():
        if name not in (*columns, target) and len(signs := np.unique(np.sign(np.diff(arrays[name])))) == 1:
            clocks |= {name: "grows"} if signs[0] > 0 else {name: "falls"} if signs[0] < 0 else {}
    clocks = clocks if len(clocks) < len(features) else {}
    features = tuple(name for name in features if name not in clocks)
    targets = () if len(labels) else features if target is None else (target,)
    if not features or not len(table):
        raise InputError(f"{path}: expected rows with columns of numbers, found none; name another file")
    # --- numbers, and for a gap the value before ---
    known = np.array([np.isfinite(arrays[name]) for name in targets], bool).reshape(len(targets), len(table)).T
    gaps = first = 0
    for name in {*features, *targets}:
        finite = np.isfinite(arrays[name])
        last = np.maximum.accumulate(np.where(finite, np.arange(len(table)), -1))
        arrays[name] = np.where(last >= 0, arrays[name][last], np.nan)  # nothing of later steps
        gaps, first = gaps + int((~finite).sum()), first + int((last < 0).sum())
    # --- what is printed about them ---
    about = [f"{plural(len(features), 'column')}: {', '.join(features)}; predicted: {target or 'all'}"]
    if left_out := [name for name in dtypes if name not in (*features, target)]:
        only = {name: f"{name}, which only {does} (--data.columns reads it)" for name, does in clocks.items()}
        about.append(f"left out: {', '.join(only.get(name, name) for name in left_out)}")
        about += filter(None, (_bad_cells(name, table[name][:]) for name in left_out if name not in numbers))
    if without := int((labels == IGNORE).sum()):
        about.append(f"{plural(without, 'step')} without {target} (empty, NA, null, …): read and not scored")
    if gaps:
        mean = f"; {first:,} of them, with none before, as the training mean" if first else ""
        about.append(f"{plural(gaps, 'missing value')}, not scored: read as that of the step before{mean}")
    times = (name for name in dtypes if name in clocks or name not in (*numbers, target))
    about += filter(None, (_jump(name, table[name]) for name in times))
    values, own = (
        np.stack([arrays[n] for n in some], 1) if some else np.zeros((len(table), 0)) for some in (features, targets)
    )
    return Series(features, values, targets, own, known, names if len(labels) else (), labels, tuple(about))


def _bad_cells(name: str, cells: Sequence[Any]) -> str | None:
    """A warning about a column of which most values are numbers, all of it left out for some words or as text."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    # With decimal commas too, as the message says how to write them.
    words = [i for i, one in enumerate(cells) if isinstance(one, str) and not is_number(one.replace(",", ".", 1))]
    if texts and not words:  # as JSON in quotes, or decimal commas
        return f"warning: {name} is left out, for its numbers are text, first {texts[0]!r}: write them as 0.5, unquoted"
    numbers = sum(cell is not None for cell in cells) - len(words)
    if not words or numbers <= len(cells) / 2:
        return None
    return (
        f"warning: {name} is left out, for {len(words):,} of {len(cells):,} values are no numbers, first "
        f"{cells[words[0]]!r} in row {words[0] + 1:,}: correct them, or leave these cells empty"
    )


def _jump(name: str, values: Sequence[Any]) -> str | None:
    """A warning where a column of times goes back, or leaves some out where most of its steps are alike."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of times with a zone
            times = np.array(values[:], None if isinstance(values[0], int | float) else "datetime64[us]")
        steps = np.diff(times.astype(np.float64))
    except (ValueError, TypeError, OverflowError):  # words
        return None
    if len(back := np.flatnonzero(steps <= 0)) and not np.isnan(times).any():
        does = "goes back" if (steps < 0).any() else "stands still"
        return (
            f"warning: the column {name} {does} after {len(back):,} of the rows, first after row {back[0] + 1:,}; the "
            f"model takes the order of rows for that of time: sort them by {name}, and give it one row for each time"
        )
    usual = np.median(steps) if len(steps) else 0.0
    if usual <= 0 or np.isnan(times).any() or np.isclose(steps, usual, rtol=0.15).mean() <= 0.5:  # months are alike
        return None
    holes = np.flatnonzero(steps > 1.5 * usual)
    if not len(holes):
        return None
    return (
        f"warning: the column {name} jumps after {len(holes):,} of the rows, first after row {holes[0] + 1:,}, by "
        f"{steps[holes[0]] / usual:.3g} usual steps; the model takes rows for equally spaced: add the missing ones"
    )


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

    def carried(self, split: HeldOut, batch_size: int) -> None:
        return None  # a held-out split is one document

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

    def sample_outputs(self, *_: Any) -> bool:
        raise InputError("expected a run of a model that generates text or images, found a series; use mnemos predict")


@register
@dataclass(frozen=True)
class SeriesPreprocessing(Preprocessing):
    """The next `length` steps after each table, or the most probable classes of its last step.

    columns: of the table, with mean and standard deviation of the training split; the same of the targets.
    """

    name: ClassVar[str] = "series"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"length": 1, "top": 3})
    endings = tuple(READERS)
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
        if (self.columns, self.targets) == (other.columns, other.targets):
            return None
        return (
            f"expected the columns of the run, {', '.join(self.columns)}, found {', '.join(other.columns)}; rename them"
        )

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        if options["length"] > 1 and (self.names or self.targets != self.columns):
            raise InputError(
                "--length: expected 1 for a model that does not predict all that it reads, found "
                f"{options['length']}; leave it out"
            )
        return super().predict(model, files, options)

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
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
