"""Controls: evaluations of a trained model with its memory changed, which show whether the model depends on it.

`controls` changes the caches that a model stores. `state_controls` changes the state, a pytree whose first axis is the
row, so that one implementation changes all memories. Rows are read once with the state carried, and once for each
memory and control, where the memory is replaced before each segment after the first:

    emptied    by that of a new row (`reset`)
    exchanged  by that which another row has at the same segment when it is carried (`select`)
    frozen     by the row's own after its first segment

All other parts of the state are carried, so a memory is tested too whose results a later segment reads: the slots of a
Memformer reach the decoder through the encoding of the segment before.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos._compat import pytree
from mnemos.lab.tasks.batch import each, row_count, to_model
from mnemos.lab.tasks.metrics import LOSS
from mnemos.lab.tasks.task import SUPERVISED, Task
from mnemos.memory.gated_cache import caches
from mnemos.modes import evaluating
from mnemos.types import Advances, State, leaves, reset, select

from .recorded import ControlledMemory, Left, ScoredSegments, StateControls
from .scores import ScoreSums, evaluate

CONTROLS = {
    "emptied": "stored caches set to zero",
    "exchanged": "stored caches replaced by noise with each channel's mean and spread",
    "closed": "every gate closed, with the trained weights",
}
ROWS = 8  # rows of the split that are read together
SEGMENTS = 8  # segments with counted targets; a batch that has begun is read to its end
READ = 256  # segments at most, but for a first one with counted targets
PIECES = 4  # segments per row, where the task's rows are read in one call and the model can be cut anywhere
WHOLE = "whole state"  # the name of all memories together
STATE_CONTROLS = {
    "emptied": "replaced by that of a new row",
    "exchanged": "replaced by that of another row",
    "frozen": "replaced by the row's own after its first segment",
}

Key = tuple[str, str]  # (name of the memory, control)
_CARRIED: Key = ("", "carried")


# --- caches that a model stores ---


def controls(
    model: nn.Module, batches: Callable[[], Iterable[object]], task: Task = SUPERVISED
) -> dict[str, dict[str, float]]:
    """Evaluate a model with gated caches under each control: {"emptied": {"loss", …}, "exchanged": …, "closed": …}.

    batches: called once for each of `control_names`, in order. {} for a model without gated caches; "closed" alone
    where it stores no content. Closing the gates also removes the parameters of the cached branch, so by itself it
    shows nothing about the memory. The model is restored. Cost: one evaluation per control.
    """
    scores: dict[str, dict[str, float]] = {}
    if not (names := control_names(model)):
        return scores
    with evaluating(model):  # entered first, because it promotes pending cache updates before the caches are copied
        before = [(one, one.cache.clone(), one.mix.detach().clone()) for one in caches(model)]
        for name in names:
            generator = torch.Generator().manual_seed(0)
            try:
                with torch.no_grad():
                    for one, stored, _ in before:
                        if name == "closed":
                            one.mix.fill_(-torch.inf)
                        elif one.grc.scope == "shared" and one.grc.write:
                            noise = torch.randn(stored.shape, generator=generator).to(stored)
                            noise = stored.mean(0) + noise * stored.std(0, correction=0)
                            one.cache.copy_(torch.zeros_like(noise) if name == "emptied" else noise)
                score = evaluate(model, batches(), task)
            finally:
                with torch.no_grad():
                    for one, stored, mix in before:
                        one.cache.copy_(stored)
                        one.mix.copy_(mix)
            scores[name] = {key: value for key, value in score.items() if key != "count"}
    return scores


def control_names(model: nn.Module) -> list[str]:
    """The controls that `controls` evaluates."""
    if not caches(model):
        return []
    stores = any(cache.grc.write and cache.grc.scope == "shared" for cache in caches(model))
    return list(CONTROLS) if stores else ["closed"]


def legend(names: Iterable[str]) -> str:
    """What the names of these controls mean, in one line."""
    return ", ".join(f"{name} ({CONTROLS[name]})" for name in dict.fromkeys(names))


# --- the state that passes from segment to segment ---


@torch.no_grad()
def state_controls(
    model: nn.Module,
    task: Task,
    split: Literal["valid", "test"] = "test",
    segment_length: int = 0,
    segments: int = SEGMENTS,
) -> StateControls | Left:
    """Score the later segments of some rows with the state as carried and under each control.

    `Left` if no state passes between two scored segments. The first memory is the whole state; parts that have a name
    (`memory_name`) are changed alone too. segment_length: that of the run's rollout. Cost: 1 + 3·memories forwards of
    `ROWS` rows for about `segments` segments. The model's mode and weights and all random generators are unchanged.
    """
    if getattr(model, "state_kind", None) == "none":
        return Left("the model keeps no state")
    with generators.preserve(), evaluating(model):
        cut = None
        groups = [group for group in _groups(task, split, segment_length, segments) if len(group) > 1]
        if not groups and task.splits_rows and getattr(model, "splits", "") == "anywhere":
            cut = -(-task.max_length // PIECES)
            groups = [group for group in _groups(task, split, cut, segments) if len(group) > 1]
        if not groups:
            return Left("the task reads each row in one call, and the model is not cut within it")
        reading = _Reading(model, task)
        # A row that is alone in its batch has no other row's memory, so it is read only if all rows are alone.
        for group in [group for group in groups if row_count(group[0]) > 1] or groups:
            reading.read(group)
    return reading.result(split, cut)


def _groups(task: Task, split: Literal["valid", "test"], length: int, segments: int) -> Iterator[list[Any]]:
    """Successive segments of the same rows, as lists of batches; about `segments` with counted targets in all."""
    group: list[Any] = []
    read = scored = 0
    for batch in task.batches(split, ROWS):
        for part in task.segments(batch, length):
            resets = task.resets(part)
            if group and (resets is None or bool(resets.all())):
                yield group
                group = []
            group.append(part)
            read, scored = read + 1, scored + (task.count(part) > 0)
            if scored and read >= READ:  # a rollout may have thousands
                break
        if scored >= segments or read >= READ:
            break
    if group:
        yield group


class _Reading:
    """Reads groups of segments and adds up the sums of the task's scores by memory, control and segment."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.model, self.task, self.scoring = model, task, ScoreSums(task)
        self.sums: dict[Key, dict[int, Tensor]] = {_CARRIED: {}}
        self.memories: dict[str, str | None] = {}  # label -> name of the part that is changed; None: all of the state
        self.rows = 0

    def read(self, group: list[Any]) -> None:
        """Read the segments of a group, each row until it ends."""
        carried: State = None
        first: State = None
        own: dict[Key, State] = {}  # the state of each reading with a changed part
        rows: Tensor | None = None  # those of the group's rows that have not ended; None: all
        for i, batch in enumerate(group):
            part = to_model(batch, self.model)
            part = part if rows is None else _rows(part, rows)

            # --- leave out the rows that have ended ---
            ended = self.task.resets(part)
            if i and ended is not None and bool(ended.any()):
                going = (~ended).nonzero().flatten()
                if len(going) < min(2, len(ended)):
                    return  # every control has the same segments, so the reading ends where no two rows are left
                rows = going if rows is None else rows[going]
                part, carried, first = _rows(part, going), select(carried, going), select(first, going)
                own = {key: select(state, going) for key, state in own.items()}

            # --- read the segment under every control, then as carried ---
            if i:
                device, count = leaves(carried)[0].device, leaves(carried)[0].shape[0]
                self.rows = max(self.rows, count)
                sources = {"emptied": reset(carried, torch.ones(count, dtype=torch.bool, device=device))}
                if count > 1:
                    sources["exchanged"] = select(carried, torch.arange(count, device=device).roll(1))
                sources["frozen"] = first
                for label, name in self.memories.items():
                    for control, source in sources.items():
                        key = label, control
                        if name is not None:
                            own[key] = self._score(part, graft(own.get(key, carried), source, name), i, key)
                        elif self.task.count(part):
                            self._score(part, source, i, key)
            carried = self._score(part, carried, i, _CARRIED)
            if not i:
                if not leaves(carried):
                    return
                first = carried
                self.memories |= list_memories(carried)

    def _score(self, part: Any, state: State, i: int, key: Key) -> State:
        """Read a segment, add its scores to the sums of `key`, and return the new state. The first is not scored."""
        count = self.task.count(part)
        if not count and isinstance(self.model, Advances):
            return self.task.advance(self.model, part, state)
        outputs, after = self.task.forward(self.model, part, state)
        if i and count:
            sums = self.sums.setdefault(key, {})
            sums[i] = sums.get(i, 0) + self.scoring.of(self.model, outputs, part, count)
        return after

    def result(self, split: str, cut: int | None) -> StateControls | Left:
        carried = self.sums[_CARRIED]
        if not self.memories:
            return Left("the model keeps no state")
        if not carried:
            return Left("no segment that was read after a row's first has a counted target")
        scores = self.scoring.scores(next(iter(carried.values())))
        metric = next((m.name for m in self.task.metrics if m.name in scores), "loss")

        def scored(key: Key) -> ScoredSegments | Left:
            if key[1] == "frozen" and max(carried) < 2:
                return Left("second segments alone were scored, and they read the memory after the first in any case")
            if key not in self.sums:  # exchanged
                return Left("the rows were read one at a time, with no other row beside them")
            sums = self.sums[key]
            total = self.scoring.scores(torch.stack(list(sums.values())).sum(0))
            return ScoredSegments(total, np.array([self.scoring.scores(sums[i])[metric] for i in sorted(sums)]))

        whole = scored(_CARRIED)
        assert isinstance(whole, ScoredSegments)
        return StateControls(
            rows=self.rows,
            segments=tuple(i + 1 for i in sorted(carried)),
            targets=int(sum(vector[1] for vector in carried.values())),
            metric=metric,
            carried=whole,
            memories=tuple(
                ControlledMemory(label, *(scored((label, control)) for control in STATE_CONTROLS))
                for label in self.memories
            ),
            cut=cut,
            split=split,
        )


def _rows(batch: Any, rows: Tensor) -> Any:
    return each(batch, lambda x: x[rows])


def list_memories(state: State) -> dict[str, str | None]:
    """What a state's controls change: all of it, and each named part that does not hold all of its numbers alone."""

    def size(part: State) -> int:  # floating-point numbers; counters are not counted
        return sum(leaf.numel() for leaf in leaves(part) if leaf.is_floating_point())

    named: dict[str, int] = {}
    for node in pytree.tree_leaves(state, is_leaf=_is_memory):
        if _is_memory(node) and node.memory_name is not None and (numbers := size(node)):
            named[node.memory_name] = named.get(node.memory_name, 0) + numbers
    if len(named) == 1 and size(state) == sum(named.values()):
        return dict.fromkeys(named)
    return {WHOLE: None, **{name: name for name in named}}


def _is_memory(node: object) -> bool:
    return hasattr(node, "memory_name")


def graft(state: State, source: State, name: str) -> State:
    """The state, with the parts of this name taken from `source`."""
    others = iter(pytree.tree_leaves(source, is_leaf=_is_memory))

    def grafted(node: object) -> object:
        other = next(others)
        return other if getattr(node, "memory_name", None) == name else node

    return pytree.tree_map(grafted, state, is_leaf=_is_memory)


def control_lines(measured: StateControls | Left, task: Task) -> list[str]:
    """What `state_controls` measured, as lines for a terminal."""
    if isinstance(measured, Left):
        return [f"  state: {measured.left}"]
    metric = next((m for m in task.metrics if m.name == measured.metric), LOSS)
    carried = measured.carried.scores[metric.name]
    rows = [("as carried", metric.text(carried))]
    for memory in measured.memories:
        for control, about in STATE_CONTROLS.items():
            score = getattr(memory, control)
            text = score.left if isinstance(score, Left) else ""
            if isinstance(score, ScoredSegments):
                value = score.scores[metric.name]
                text = f"{metric.text(value)} ({value - carried:+.4f})  {about}"
            rows.append((f"{memory.name} {control}", text))
    width = max(len(name) for name, _ in rows)
    numbers = measured.segments
    where = f"segments {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"segment {numbers[0]}"
    rows_read = "1 row" if measured.rows == 1 else f"{measured.rows} rows at once"
    return [f"  state, {where} of {rows_read}:", *(f"    {name:{width}}  {text}" for name, text in rows)]
