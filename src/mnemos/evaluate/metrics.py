"""Loss and metrics of a model on a split, every counted target weighing the same."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.data.batch import fed
from mnemos.data.metrics import CorpusMetric, sum_functions, values
from mnemos.data.task import SUPERVISED, Task
from mnemos.modes import evaluating
from mnemos.types import Advances, InputError, State
from mnemos.types import reset as make_fresh


class Uncounted:
    """A batch that this process runs only because all processes must call the model; another process counts it."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    task: Task = SUPERVISED,
    total: Callable[[Tensor], Tensor] | None = None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> dict[str, float]:
    """{"loss", each of the task's metrics, "count"} of a model over batches (or `Uncounted` ones).

    loss: the mean over all counted targets; count: their number. The model runs in eval mode and without gradient, and
    is left in the mode that it had. Where the task's `resets` says which rows start anew, the state is carried from one
    batch to the next, so rows may come in segments; a segment without a counted target is read by the model's
    `advance`, if it has one. For several processes that share the batches, `total` sums a tensor over them and
    `gather` returns the list of their values by rank; all then run the same parts of the model for every batch. Raises
    InputError if no target is counted.
    """
    state: State = None
    functions = sum_functions(task.metrics)
    corpus = {metric.collect: None for metric in task.metrics if isinstance(metric, CorpusMetric)}
    loss, count = 0.0, 0
    sums = {function: [0.0] * width for function, width in functions.items()}
    records: dict[Any, list[list[Any]]] = {collect: [] for collect in corpus}
    advances = total is None and isinstance(model, Advances)
    with torch.no_grad(), evaluating(model):
        for given in batches:
            ours = not isinstance(given, Uncounted)
            batch = fed(given if ours else given.batch, model)
            resets = task.resets(batch)
            if resets is None or bool(resets.all()):  # no row continues; the number of rows may have changed
                state = None
            elif state is not None:
                state = make_fresh(state, resets)
            targets = task.count(batch) if ours else 0
            if advances and not targets:
                state = task.advance(model, batch, state)
                continue
            outputs, state = task.forward(model, batch, state)
            if ours:
                loss, count = loss + task.loss(model, outputs, batch).item(), count + targets
                for function, held in sums.items():
                    for i, value in enumerate(function(model, outputs, batch)):
                        held[i] += value.item()
            for collect, lists in records.items():
                lists.append(collect(model, outputs, batch) if ours else [])
    # One vector, in the widest type: counts stay exact to 2^53.
    vector = torch.tensor([loss, count, *itertools.chain(*sums.values())], dtype=torch.float64)
    found = (vector if total is None else total(vector)).tolist()
    if not found[1]:
        raise InputError("expected at least one target to score, found none; give the split more data")
    rest = iter(found[2:])
    summed = {function: list(itertools.islice(rest, width)) for function, width in functions.items()}
    whole = {collect: _in_order(gather(lists)) for collect, lists in records.items()}
    scores = {"loss": found[0] / found[1], **values(task.metrics, summed, found[:2])}
    scores |= {m.name: m.value(whole[m.collect]) for m in task.metrics if isinstance(m, CorpusMetric)}
    order = ("loss", *(metric.name for metric in task.metrics))
    return {name: scores[name] for name in dict.fromkeys(order)} | {"count": int(found[1])}


def told(task: Task, score: dict[str, Any]) -> str:
    """The text of every metric but the loss, for a line of output."""
    return "  ".join(m.text(score[m.name]) for m in task.metrics if m.name in score and m.name != "loss")


def _in_order(everyone: list[list[list[Any]]]) -> list[Any]:
    """The records of all processes in the order of the data: batch by batch, in each by rank."""
    return [record for batch in zip(*everyone, strict=True) for share in batch for record in share]
