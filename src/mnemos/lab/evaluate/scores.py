"""Loss and metrics of a model on a split. Every counted target has the same weight."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.lab.tasks.batch import to_model
from mnemos.lab.tasks.metrics import Collect, CorpusMetric, called, sum_functions, values
from mnemos.lab.tasks.task import SUPERVISED, Task
from mnemos.modes import evaluating
from mnemos.types import Advances, InputError, State
from mnemos.types import reset as make_fresh


class CountedElsewhere:
    """A batch that another process counts. This process runs it because all processes must run the model together."""

    def __init__(self, batch: object) -> None:
        self.batch = batch


def evaluate(
    model: nn.Module,
    batches: Iterable[object],
    task: Task = SUPERVISED,
    total: Callable[[Tensor], Tensor] | None = None,
    gather: Callable[[object], list[Any]] = lambda value: [value],
) -> dict[str, float]:
    """Evaluate a model on batches: {"loss", each of the task's metrics, "count"}.

    loss: the mean over all counted targets. count: their number. The model runs in eval mode and without gradient; its
    mode is restored. If the task returns resets, the state is carried from batch to batch, so rows may be split into
    segments; a segment without a counted target is read by the model's `advance` if it has one and no metric is a
    `CorpusMetric`.

    With several processes, `total` sums a tensor over them, `gather` lists each process's value by rank, all processes
    run the whole model for every batch, and a batch that another process counts is wrapped in `CountedElsewhere`.
    Raises InputError if no target is counted.
    """
    state: State = None
    functions = sum_functions(task.metrics)
    corpus = {metric.collect: None for metric in task.metrics if isinstance(metric, CorpusMetric)}
    loss, count = 0.0, 0
    sums = {function: [0.0] * width for function, width in functions.items()}
    records: dict[Collect, list[list[Any]]] = {collect: [] for collect in corpus}
    # A corpus metric collects from every segment, as it does with several processes.
    advances = total is None and isinstance(model, Advances) and not corpus
    with torch.no_grad(), evaluating(model):
        for given in batches:
            counted_here = not isinstance(given, CountedElsewhere)
            batch = to_model(given.batch if isinstance(given, CountedElsewhere) else given, model)
            resets = task.resets(batch)
            if resets is None or bool(resets.all()):  # no row continues; the number of rows may have changed
                state = None
            elif state is not None:
                state = make_fresh(state, resets)
            targets = task.count(batch) if counted_here else 0
            if advances and not targets:
                state = task.advance(model, batch, state)
                continue
            outputs, state = task.forward(model, batch, state)
            if counted_here:
                loss, count = loss + task.loss(model, outputs, batch).item(), count + targets
                for function, added in sums.items():
                    for i, value in enumerate(called(function, functions[function], model, outputs, batch)):
                        added[i] += value.item()
            for collect, lists in records.items():
                lists.append(collect(model, outputs, batch) if counted_here else [])
    # One float64 vector, so one reduction suffices; counts are exact up to 2^53.
    vector = torch.tensor([loss, count, *itertools.chain(*sums.values())], dtype=torch.float64)
    found = (vector if total is None else total(vector)).tolist()
    if not found[1]:
        raise InputError("expected at least one target to evaluate, found none; give the split more data")
    rest = iter(found[2:])
    summed = {function: list(itertools.islice(rest, width)) for function, width in functions.items()}
    whole = {collect: _in_order(gather(lists)) for collect, lists in records.items()}
    scores = {"loss": found[0] / found[1], **values(task.metrics, summed, found[:2])}
    scores |= {m.name: float(m.value(whole[m.collect])) for m in task.metrics if isinstance(m, CorpusMetric)}
    order = ("loss", *(metric.name for metric in task.metrics))
    return {name: scores[name] for name in dict.fromkeys(order)} | {"count": int(found[1])}


def metrics_text(task: Task, score: Mapping[str, float]) -> str:
    """The metrics of an evaluation as one line of text, without the loss."""
    return "  ".join(m.text(score[m.name]) for m in task.metrics if m.form and m.name in score and m.name != "loss")


def _in_order(everyone: list[list[list[Any]]]) -> list[Any]:
    """The records of all processes in the order of the data: by batch, and within a batch by rank."""
    return [record for batch in zip(*everyone, strict=True) for share in batch for record in share]
