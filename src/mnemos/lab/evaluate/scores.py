"""Loss and metrics of a model on a split. Every counted target has the same weight."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.lab.tasks.batch import to_model
from mnemos.lab.tasks.metrics import CorpusMetric, called, sum_functions, values
from mnemos.lab.tasks.task import SUPERVISED, Task
from mnemos.modes import evaluating
from mnemos.types import Advances, InputError, State
from mnemos.types import reset as make_fresh


class CountedElsewhere:
    """A batch that another process counts. This process runs it because all processes must run the model together."""

    def __init__(self, batch: object) -> None:
        self.batch = batch


class ScoreSums:
    """The loss and the metrics that are sums, as float64 vectors [2 + …] that can be added.

    A vector has the summed loss, the number of counted targets, and the sums of the task's metrics.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.functions = task, sum_functions(task.metrics)

    def zeros(self) -> Tensor:
        return torch.zeros(2 + sum(self.functions.values()), dtype=torch.float64)

    def of(self, model: nn.Module, outputs: Any, batch: object, count: int) -> Tensor:
        """The vector of a batch with `count` counted targets."""
        sums = [x for f, width in self.functions.items() for x in called(f, width, model, outputs, batch)]
        loss = self.task.loss(model, outputs, batch)
        return torch.tensor([loss.item(), count, *(x.item() for x in sums)], dtype=torch.float64)

    def scores(self, vector: Tensor) -> dict[str, float]:
        """The means: {"loss", each metric that is a sum}."""
        loss, count, *rest = vector.tolist()
        numbers = iter(rest)
        sums = {function: [next(numbers) for _ in range(width)] for function, width in self.functions.items()}
        return {"loss": loss / count, **values(self.task.metrics, sums, [loss, count])}


def evaluate(
    model: nn.Module,
    batches: Iterable[object],
    task: Task = SUPERVISED,
    total: Callable[[Tensor], Tensor] | None = None,
    gather: Callable[[object], list[Any]] = lambda value: [value],
) -> dict[str, float]:
    """Evaluate a model on batches: {"loss", each of the task's metrics, "count"}.

    loss: the mean over all counted targets, whose number is count. In eval mode and without gradient. If the task
    returns resets, the state is carried from batch to batch, so rows may be split into segments; one without a counted
    target is read by the model's `advance` if it has one and no metric is a `CorpusMetric`.

    With several processes, `total` sums a tensor over them, `gather` lists each process's value by rank, and a batch
    that another process counts is wrapped in `CountedElsewhere`. Raises InputError if no target is counted.
    """
    sums = ScoreSums(task)
    vector = sums.zeros()
    records: dict[Any, list[list[Any]]] = {m.collect: [] for m in task.metrics if isinstance(m, CorpusMetric)}
    # A corpus metric collects from every segment, as it does with several processes.
    advances = total is None and isinstance(model, Advances) and not records
    state: State = None
    with torch.no_grad(), evaluating(model):
        for one in batches:
            counted_here = not isinstance(one, CountedElsewhere)
            batch = to_model(one.batch if isinstance(one, CountedElsewhere) else one, model)
            resets = task.resets(batch)
            if resets is None or bool(resets.all()):  # no row continues; the number of rows may have changed
                state = None
            elif state is not None:
                state = make_fresh(state, resets)
            count = task.count(batch) if counted_here else 0
            if advances and not count:
                state = task.advance(model, batch, state)
                continue
            outputs, state = task.forward(model, batch, state)
            if counted_here:
                vector += sums.of(model, outputs, batch, count)
            for collect, lists in records.items():
                lists.append(collect(model, outputs, batch) if counted_here else [])
    if total is not None:
        vector = total(vector)  # one reduction of all sums
    targets = int(vector[1])
    if not targets:
        raise InputError("expected at least one target to evaluate, found none; give the split more data")
    scores = sums.scores(vector)
    for collect, lists in records.items():
        # In the order of the data: by batch, and within a batch by rank.
        ranks = zip(*gather(lists), strict=True)
        rows = [record for batch in ranks for share in batch for record in share]
        of = [m for m in task.metrics if isinstance(m, CorpusMetric) and m.collect == collect]
        scores |= {m.name: float(m.value(rows)) for m in of}
    names = dict.fromkeys(("loss", *(metric.name for metric in task.metrics)))
    return {name: scores[name] for name in names} | {"count": targets}


def metrics_text(task: Task, score: Mapping[str, float]) -> str:
    """The metrics of an evaluation as one line of text, without the loss."""
    return "  ".join(m.text(score[m.name]) for m in task.metrics if m.form and m.name in score and m.name != "loss")
