"""A user's own data as a `Task`: a DataLoader, a data set, or any iterable of batches."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from mnemos import generators
from mnemos._compat import name_worker_dataset
from mnemos.generators import AUGMENT, global_generators
from mnemos.modes import evaluating
from mnemos.types import InputError, State, leaves, likelihood_of

from .batch import IGNORE, Batch, each, row_count, to_model
from .metrics import ACCURACY, KNOWN, LOSS, Metric, SumMetric
from .prefetch import BatchNumber, Prefetched, prefetch
from .row_order import Order
from .task import HeldOut, Split, Task

Loss = Callable[[Any, Any], Tensor]


def as_batch(read: object) -> Batch:
    """A `Batch`, with arrays as tensors, of (inputs, targets) or a mapping {"inputs", "targets", "mask", "reset"}.

    Of a mapping with "labels", as models of Transformers take it, these are the targets, all other entries the inputs.
    """
    batch = read
    if isinstance(read, Mapping) and "labels" in read:
        batch = Batch({name: _as_tensor(x) for name, x in read.items() if name != "labels"}, read["labels"])
    elif isinstance(read, Mapping) and {"inputs", "targets"} <= set(read) <= set(Batch._fields):
        batch = Batch(**read)
    elif not isinstance(read, Batch) and isinstance(read, (tuple, list)) and len(read) == 2:
        batch = Batch(*read)
    if not isinstance(batch, Batch):
        what = f"a mapping with {', '.join(map(str, read))}" if isinstance(read, Mapping) else type(read).__name__
        raise InputError(
            "expected batches (inputs, targets), {'inputs', 'targets'} or a mapping with 'labels', found "
            f"{what}; make such batches, for example by the collate_fn of a DataLoader, or give fit a Task"
        )
    return Batch(*map(_as_tensor, batch))


def _as_tensor(x: Any) -> Any:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def _lists(batch: Mapping[str, Any]) -> list[str]:
    """The entries that are lists of numbers or of tensors [B], position by position: those of rows in lists."""
    return [
        name
        for name, x in batch.items()
        if isinstance(x, (tuple, list))
        and all(isinstance(one, (int, float, list)) or (isinstance(one, Tensor) and one.dim() < 2) for one in x)
    ]


def _rows(batch: Batch) -> int:
    tensors = leaves(batch)
    if not tensors or not all(x.dim() for x in tensors):
        wrong = "a tensor without axes, as in a single row" if tensors else "no tensor in a batch"
        raise InputError(f"expected tensors with an axis of rows in every batch, found {wrong}; use a DataLoader")
    return row_count(batch)


class OwnTask(Task):
    """A user's training and validation data for one model, as `mnemos.fit` takes them. There is no test split.

    A model's own loss counts as a mean over the labels that are not −100; where labels are no int64, as one over rows.
    Batches that have a `reset` carry the state from one to the next. The task reads the first training batch to learn
    what the data hold.
    """

    inputs = "own"
    has_test = False

    def __init__(
        self,
        model: nn.Module,
        train: "Source",
        valid: "Source",
        batch_size: int,
        loss: Loss | None = None,
        metrics: Sequence[Metric] = (),
        seed: int = 0,
    ) -> None:
        self._loss, self._train, self._valid = loss, train, valid
        self._classes = 0  # of the logits; 0 before the first forward
        arguments = inspect.signature(model.forward).parameters
        self._accepts = {name for name in ("state", "mask", "use_cache") if name in arguments}
        first = train.batch(0, batch_size, seed)
        _rows(first)
        inputs, targets = first.inputs, first.targets
        # --- the loss and the metrics ---
        self._own_loss = loss is None and "labels" in arguments and isinstance(inputs, Mapping)
        if self._own_loss and any(isinstance(x, Tensor) and x.dim() < 2 for x in inputs.values()):
            raise InputError(
                "fit: expected batches {'input_ids': [B, T], 'labels', …}, found single rows; put them in a DataLoader"
            )
        if self._own_loss and (listed := _lists({**inputs, "labels": targets})):
            raise InputError(
                f"fit: expected a tensor [B, T] as {listed[0]}, found a list, as a DataLoader makes of rows that hold "
                "lists; let them hold tensors (a data set of the library datasets: with_format('torch')), or give the "
                "DataLoader a collate_fn, such as transformers.default_data_collator"
            )
        whole = isinstance(targets, Tensor) and targets.dtype == torch.int64
        self._by_rows = loss is not None or (self._own_loss and not whole)  # what the loss is a mean over
        self._shifted = self._own_loss and not self._by_rows and targets.dim() == 2 and self._is_shifted(model, first)
        axes = targets.dim() if isinstance(targets, Tensor) else 0
        classes = axes == 1 and whole if self._own_loss else loss is None
        self.metrics = tuple(metrics) or ((ACCURACY,) if classes else (LOSS,))
        if self._own_loss:
            compared = [one for one in KNOWN.values() if one in self.metrics and one.sums is not None]
            if axes == 2 and compared:
                raise InputError(
                    "fit: expected the metric loss for labels [B, T], as a model may compare its outputs with the "
                    f"labels after theirs, found {compared[0].name}; leave it out, or pass a SumMetric of your own"
                )
            self.metrics = tuple(map(_of_logits, self.metrics))
        # --- the form of the batches ---
        self.carries_state = first.reset is not None
        rows_of_tokens = isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()
        self.splits_rows = rows_of_tokens and isinstance(targets, Tensor) and targets.shape == inputs.shape
        self.max_length = inputs.shape[1] if rows_of_tokens else 0
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        self._reads_ids = isinstance(ids, Tensor) and ids.dim() == 2

    # --- batches ---

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        return self._train.batch(index, batch_size, seed)

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        return self._valid.once(batch_size)

    def size(self, split: Split) -> int:
        return (self._train if split == "train" else self._valid).rows

    def epoch(self, batch_size: int) -> float:
        return self._train.epoch(batch_size)

    def check(self, batch: Batch, where: str) -> None:
        rows = row_count(batch)
        # An update takes its rows along the first axis: of the boxes of each picture, in a list, it would take so many.
        if (wrong := next((x for x in leaves(batch) if x.shape[:1] not in ((1,), (rows,))), None)) is not None:
            raise InputError(
                f"{where}: expected rows as the first axis of every tensor, {rows} as of the first one, found "
                f"{list(wrong.shape)}; pad rows to one size, and repeat what all of them share for each"
            )
        if self._own_loss:
            return
        targets = batch.targets
        if self._loss is None and not (isinstance(targets, Tensor) and targets.dtype == torch.int64):
            form = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
            raise InputError(f"{where}: expected targets of int64 for cross-entropy, found {form}; give fit a loss")
        if self._classes:
            wrong = targets[(targets != IGNORE) & ((targets < 0) | (targets >= self._classes))]
            if len(wrong):
                raise InputError(
                    f"{where}: expected targets 0 to {self._classes - 1}, as the model has {self._classes} classes, "
                    f"found {int(wrong[0])}; correct the data, or give the model more classes"
                )
        if batch.mask is not None and "mask" not in self._accepts:
            raise InputError(
                f"{where}: expected a model that takes a mask, found one without; give it an argument mask"
            )

    def close(self) -> None:
        self._train.close()

    # --- the model and its loss ---

    def forward(self, model: nn.Module, batch: Batch, state: State) -> tuple[Any, State]:
        options: dict[str, object] = {"mask": batch.mask} if "mask" in self._accepts else {}
        if "state" in self._accepts:
            options["state"] = state
        if self._own_loss:
            options |= {"labels": batch.targets} | ({"use_cache": False} if "use_cache" in self._accepts else {})
        if isinstance(inputs := batch.inputs, Mapping):
            if batch.mask is None and "mask" in inputs:  # one of their own
                options.pop("mask", None)
            outputs = model(**inputs, **options)
        else:
            outputs = model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)), **options)
        if "state" not in self._accepts:
            return outputs, None
        if not isinstance(outputs, tuple) or len(outputs) != 2:
            raise InputError(
                "fit: expected (outputs, state) from a model whose forward has an argument `state`, found "
                f"{_form(outputs)}; return both, or rename the argument"
            )
        return outputs

    def loss(self, model: nn.Module, outputs: object, batch: Batch) -> Tensor:
        """The sum over what `count` counts, of a mean over that."""
        rows = row_count(batch)
        if self._own_loss:
            mean = getattr(outputs, "loss", None)
            if not isinstance(mean, Tensor) or mean.dim():
                raise InputError(
                    "fit: expected outputs with a scalar `loss` from a model whose forward has an argument `labels`, "
                    f"found {_form(outputs)}; return one as models of Transformers do, or give fit a loss"
                )
            if self._by_rows:
                return mean * rows
            count = self._compared(batch).sum()
            return torch.where(count > 0, mean, mean.nan_to_num()) * count  # a mean over no label is NaN
        if self._loss is None:
            if likelihood_of(model) is None:
                if not isinstance(outputs, Tensor) or outputs.shape[:-1] != batch.targets.shape:
                    shape = ", ".join([*map(str, batch.targets.shape), "classes"])
                    raise InputError(
                        f"fit: expected logits [{shape}] as one tensor from the model, found {_form(outputs)}; return "
                        "the logits alone, give forward an argument `state` if it also returns a state, give fit a "
                        "loss, or give a model of Transformers batches that are mappings with 'labels'"
                    )
                # Later targets are checked before they are copied to the model's device: reading them would wait.
                if not self._classes:
                    self._classes = outputs.shape[-1]
                    self.check(batch, "fit")
            return super().loss(model, outputs, batch)
        loss = self._loss(outputs, batch.targets)
        if loss.dim() > 1 or (loss.dim() == 1 and len(loss) != rows):
            raise InputError(
                f"fit: expected a loss that is a mean over rows (a scalar) or one value per row [{rows}], found shape "
                f"{tuple(loss.shape)}; reduce it over the other axes"
            )
        return loss.sum() if loss.dim() else loss * rows

    @property
    def unit(self) -> str:
        return "tokens" if self._reads_ids else super().unit

    def tokens(self, batch: Batch) -> int:
        """Tokens without padding, also of "input_ids" [B, T] in a mapping; the rows of other batches."""
        if not self._reads_ids:
            return super().tokens(batch)
        ids, mask = batch.inputs["input_ids"], batch.inputs.get("attention_mask")
        known = isinstance(mask, Tensor) and mask.shape == ids.shape
        return int((mask != 0).sum()) if known else ids.numel()

    def _compared(self, batch: Batch) -> Tensor:
        """Which labels a model's own loss is a mean over."""
        labels = batch.targets != IGNORE
        return labels[:, 1:] if self._shifted else labels

    def _is_shifted(self, model: nn.Module, batch: Batch) -> bool:
        """Whether the model's own loss compares the outputs with the labels of the next positions, as causal models do.

        It then does not read the first label of a row, which one row shows. A row that cannot is left to the name that
        Transformers gives the loss.
        """
        labels = batch.targets != IGNORE
        rows = labels[:, 0] & labels[:, 1:].any(1)
        named: bool = getattr(model, "loss_type", "") == "ForCausalLM"
        if not rows.any():
            return named
        row = int(rows.int().argmax())
        try:
            one = to_model(each(batch, lambda x: x[row : row + 1]), model)
            without = one.targets.clone()
            without[:, 0] = IGNORE
            with evaluating(model), torch.no_grad(), generators.preserve():
                both = [self.forward(model, one._replace(targets=x), None)[0] for x in (one.targets, without)]
            return bool(torch.equal(both[0].loss, both[1].loss))
        except Exception:  # what does not fit is said by the first update
            return named

    def count(self, batch: Batch) -> int:
        if self._own_loss and not self._by_rows:
            return int(self._compared(batch).sum())
        return row_count(batch) if self._by_rows else super().count(batch)


def _of_logits(metric: Metric) -> Metric:
    """One of this laboratory's metrics for the `logits` among the outputs of a model; others read the outputs."""
    if not isinstance(metric, SumMetric) or metric not in KNOWN.values() or (sums := metric.sums) is None:
        return metric
    return replace(metric, sums=lambda model, outputs, batch: sums(model, outputs.logits, batch))


def _form(outputs: object) -> str:
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {tuple(outputs.shape)}"
    return f"a tuple of {len(outputs)}" if isinstance(outputs, tuple) else f"a {type(outputs).__name__}"


class _RowsAndSeed(NamedTuple):
    rows: list[int]
    seed: int  # with the number of the batch, of what the data set draws
    number: int


class RowSource:
    """A map-style data set, read in an order of ours: batch i is a pure function of (i, batch_size, seed).

    shuffle: every epoch is a new permutation; otherwise the order of the data set, repeated. What the data set draws
    from the global generators is a function of (seed, i). `workers` processes compute batches in advance; options: how
    a DataLoader begins them.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        shuffle: bool,
        workers: int = 0,
        batch_size: int = 0,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.dataset, self.collate, self.workers, self.batch_size = dataset, collate, workers, batch_size
        self.options, self.rows = options, len(dataset)
        if not self.rows:
            raise InputError(f"fit: expected data of at least one row, found an empty {type(dataset).__name__}")
        self._order = Order(self.rows) if shuffle else None
        self._batches = Prefetched(self._make, self._keys, workers, options)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_batches": None, "_order": None}  # a worker process, if not forked, needs neither

    def described(self) -> str:
        return f"{_class_name(self.dataset)} of {self.rows} rows"

    def batch(self, index: int, batch_size: int, seed: int) -> Batch:
        return self._batches.batch(index, batch_size, seed)

    def once(self, batch_size: int) -> Iterator[Batch]:
        """All rows once, in the data set's order. A DataLoader's own batches stay together: a state may pass them."""
        batch_size = self.batch_size or batch_size
        every = list(range(self.rows))
        keys = [_RowsAndSeed(every[i : i + batch_size], 0, i) for i in range(0, self.rows, batch_size)]
        return prefetch(self._make, keys, min(self.workers, len(keys)), self.options)

    def epoch(self, batch_size: int) -> float:
        return self.rows / batch_size

    def close(self) -> None:
        self._batches.close()

    def _keys(self, number: BatchNumber) -> Iterator[_RowsAndSeed]:
        first, batch_size, seed = number
        for i in itertools.count(first):
            if self._order is not None:
                rows = self._order.batch(i, batch_size, seed).tolist()
            else:
                rows = [row % self.rows for row in range(i * batch_size, (i + 1) * batch_size)]
            yield _RowsAndSeed(rows, seed, i)

    def _make(self, key: _RowsAndSeed) -> Batch:
        with global_generators() as put_seed:
            put_seed(key.seed, AUGMENT, key.number)
            several = getattr(self.dataset, "__getitems__", None)  # as a DataLoader asks for rows
            return as_batch(self.collate(several(key.rows) if several else [self.dataset[row] for row in key.rows]))


class BatchSource:
    """An iterable of batches, iterated again and again: batch i is found by reading the batches before it.

    Every pass has generators of its own, seeded by (seed, pass). If the iterable has a `len`, earlier passes are
    skipped.
    """

    def __init__(self, batches: Iterable[object]) -> None:
        if isinstance(batches, Iterator):
            raise InputError(
                f"expected data that can be iterated again, found a {type(batches).__name__} that ends; give a list, "
                "a DataLoader or a class with __iter__"
            )
        self.batches = batches
        try:
            self.length = len(batches)  # type: ignore[arg-type]
        except TypeError:
            self.length = 0
        self.batch_size: int = getattr(batches, "batch_size", None) or 0
        self.rows = self.length * self.batch_size
        self._reading: Iterator[object] = iter(())
        self._begun: tuple[int, int] | None = None  # its seed and its first pass
        self._index = -1
        self._last: object = None  # batch `_index`

    def described(self) -> str:
        return f"{_class_name(self.batches)} of {self.length or 'any number of'} batches"

    def batch(self, index: int, batch_size: int, seed: int) -> Batch:
        first = index // self.length if self.length else 0  # the pass that is read
        if self._begun != (seed, first) or index < self._index:
            self._begun, self._index = (seed, first), first * self.length - 1
            self._reading = self._passes(seed, first)
        while self._index < index:
            self._last = next(self._reading)
            self._index += 1
        return as_batch(self._last)

    def once(self, batch_size: int) -> Iterator[Batch]:
        return map(as_batch, self.batches)

    def epoch(self, batch_size: int) -> float:
        return float(self.length)

    def close(self) -> None:
        self._begun, self._reading = None, iter(())

    def _passes(self, seed: int, first: int) -> Iterator[object]:
        """The batches of pass `first` and of those after it. The generators between two batches are the training's."""
        for number in itertools.count(first):
            with generators.preserve():
                generators.seed_process(seed, number)
                iterator, own = iter(self.batches), generators.take()
            count = 0
            while True:
                with generators.preserve():
                    generators.put(own)
                    batch, own = next(iterator, None), generators.take()
                if batch is None:
                    break
                count += 1
                yield batch
            if not count:
                raise InputError("expected training data of at least one batch, found none; check the data")


Source = RowSource | BatchSource


def source(data: object) -> Source:
    """The batches of a map-style data set (also inside a DataLoader), or of an iterable. Reads none of them."""
    if isinstance(data, DataLoader):
        rows: Any = data.dataset
        batches: Any = data.batch_sampler  # of the user's own the loader has neither the sampler nor the batch size
        sampler = batches.sampler if type(batches) is BatchSampler else None
        shuffle = type(sampler) is RandomSampler and not sampler.replacement
        ordered = (shuffle or type(sampler) is SequentialSampler) and len(sampler) == len(rows)  # type: ignore[arg-type]
        # A subclass of DataLoader may iterate otherwise.
        if ordered and type(data) is DataLoader and not isinstance(rows, IterableDataset):
            options = {name: getattr(data, name) for name in ("multiprocessing_context", "timeout", "prefetch_factor")}
            options["worker_init_fn"] = partial(_begin_worker, rows, data.worker_init_fn)
            return RowSource(rows, data.collate_fn, shuffle, data.num_workers, batches.batch_size, options)
        return BatchSource(data)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return RowSource(data, default_collate, shuffle=True)
    if not isinstance(data, Iterable):
        raise InputError(
            f"expected a DataLoader, a data set or an iterable of batches, found {type(data).__name__}; put rows in a "
            "DataLoader"
        )
    return BatchSource(data)


def _begin_worker(dataset: object, begin: Callable[[int], None] | None, worker: int) -> None:
    name_worker_dataset(dataset)
    if begin is not None:
        begin(worker)


def _class_name(data: object) -> str:
    return f"{type(data).__module__}.{type(data).__qualname__}"


def rows_in_a_batch(data: Source, seed: int) -> int:
    """The batch size that the data have: a DataLoader's, or the rows of an iterable's first batch; else 0."""
    if data.batch_size or isinstance(data, RowSource):
        return data.batch_size
    return _rows(data.batch(0, 1, seed))
