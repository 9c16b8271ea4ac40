"""A model in training: one update of its weights, and the snapshot that a checkpoint stores to resume exactly."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.config import to_dict
from mnemos.errors import TrainingFailed
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.tasks.batch import each, row_count, to_device
from mnemos.lab.tasks.metrics import Metric, sum_functions, values
from mnemos.lab.tasks.task import Task
from mnemos.memory.gated_cache import hold_caches, promote, stored
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject, State, leaves

from . import devices
from .files import Measurement
from .optim import Plateau, load_optimiser_state, make_optimiser, optimiser_state, set_lr
from .recipe import Recipe
from .rollout import ModelWithLoss, RolloutGradients
from .sharding import load_model_state, model_state

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_READ = 128  # updates over which FLOPs are averaged: rows that are padded to the longest of a batch differ in length
_COUNTED = 8  # of these, the updates whose FLOPs are counted, each in about the time of an update


@dataclass
class Tally:
    """Sums over the updates since the last line of metrics."""

    updates: int = 0
    loss: float = 0.0
    auxiliary: float = 0.0
    auxiliaries: float = 0.0  # how many auxiliary losses layers added
    sums: list[float] = field(default_factory=list)  # of the task's metrics

    def plus(self, loss: float, auxiliary: float, auxiliaries: float, sums: list[float]) -> Tally:
        """The sums with those of one more update added."""
        before = self.sums or [0.0] * len(sums)
        return Tally(
            self.updates + 1,
            self.loss + loss,
            self.auxiliary + auxiliary,
            self.auxiliaries + auxiliaries,
            [a + b for a, b in zip(before, sums, strict=True)],
        )


@dataclass
class Counters:
    """Totals of the whole run."""

    step: int = 0
    tokens: int = 0  # as the task counts them
    seconds: float = 0.0  # spent in updates, without evaluations and checkpoints
    peak_bytes: int = 0


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, by the task's first metric; a checkpoint holds it, so that a resumed run has it."""

    step: int = 0  # 0: no evaluation yet
    score: float | None = None
    valid: dict[str, float] = field(default_factory=dict)  # all scores of that evaluation
    since: int = 0  # evaluations after it

    def after(self, step: int, valid: dict[str, float], metric: Metric) -> Best:
        """The state after one more evaluation; a score that is NaN or infinite, or equal, is not better."""
        score = valid[metric.name]
        if math.isfinite(score) and (self.score is None or _better(score, self.score, metric.higher_is_better)):
            return Best(step, score, dict(valid))
        return replace(self, since=self.since + 1)


def _better(score: float, other: float, higher_is_better: bool) -> bool:
    return score > other if higher_is_better else score < other


class MovingAverage:
    """The average a of the weights w of a model in training.

        a ← d·a + (1 − d)·w      with d = min(decay, (t − 1)/(t + 8)) after update t

    It begins with the weights after the first update, and with a small d, so that the start of a short run weighs
    little. Running statistics and stored caches are those of the model. a is in float32 at least; it takes as much
    memory as the parameters.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update `step`."""
        share = 1 - min(self.decay, (step - 1) / (step + 8))
        for name, weight in self.model.named_parameters():
            average = self.weights[name]
            average.lerp_(weight.to(average.dtype), share)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; after it, its own again, bit for bit."""
        own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.use()
        try:
            yield
        finally:
            self._load(own)

    def use(self) -> None:
        """Give the model the averaged weights for good."""
        self._load(self.weights)

    def saved(self) -> dict[str, Tensor]:
        """The average by name, on the CPU."""
        return {name: weight.to("cpu", copy=True) for name, weight in self.weights.items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Go on from what `saved` gave."""
        for name, average in self.weights.items():
            average.copy_(saved[name])

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])


class Learner:
    """The model, its optimiser, its carried state and its position in the data, on one process."""

    def __init__(self, fabric: Fabric, recipe: Recipe, task: Task, model: nn.Module | None = None) -> None:
        self.fabric, self.recipe, self.task = fabric, recipe, task
        self.count, self.tally, self.plateau, self.best = Counters(), Tally(), Plateau(), Best()
        self._memory_before = devices.peak_bytes(fabric.device) if fabric.device.type != "cuda" else 0
        generators.seed(recipe.train.seed)  # the same weights on every process
        self.model: nn.Module = recipe.model.build() if model is None else model
        self.parameters = sum(p.numel() for p in self.model.parameters())
        searched = devices.uses_ddp(recipe.train)
        self._with_loss = with_loss = ModelWithLoss(self.model, task, alone=fabric.world_size == 1, searched=searched)
        self._wrapped = fabric.setup_module(with_loss)
        # A fused optimiser cannot skip a step (the float16 scaler needs that) and does not support shards everywhere.
        fused = recipe.train.precision != "16-mixed" and recipe.train.strategy != "fsdp"
        self.optimiser = make_optimiser(self.model, recipe.optim, fused)
        self._optimiser: Any = fabric.setup_optimizers(self.optimiser)
        self.ema = MovingAverage(self.model, recipe.train.ema) if recipe.train.ema else None
        self._rollout = RolloutGradients(fabric, self._wrapped, with_loss, self.model, task, recipe.train)
        if recipe.train.compile:
            # Compiled for training only: each mode, mask and shape compiles separately, which takes seconds.
            with_loss.model = torch.compile(self.model)  # type: ignore[assignment]
        generators.seed_process(recipe.train.seed, fabric.global_rank)  # each process draws its own dropout

    def update(self) -> dict[str, float]:
        """Update the weights once, on a batch or a rollout: {"loss", "lr", "grad_norm"}.

        The loss is the mean over all counted targets of the update, in whatever way they are split over processes,
        micro-batches and segments. Auxiliary losses of layers are averaged over the update's forwards.
        Raises TrainingFailed if loss or gradient is not finite; the weights are then unchanged.
        """
        began = time.perf_counter()
        config, fabric, step = self.recipe.train, self.fabric, self.count.step + 1
        batches = self._rollout.batches(step - 1, config)
        for batch in batches:
            self.task.check(batch, f"training batch {step - 1}")
        total: Any = fabric.all_reduce(torch.stack(self._gradients(batches)).sum(0), reduce_op="sum")
        loss_mean, auxiliary, auxiliaries, *metric_sums = total.tolist()
        loss_mean /= fabric.world_size
        norm: Any = fabric.clip_gradients(
            self._wrapped, self._optimiser, max_norm=self.recipe.optim.grad_clip or math.inf, error_if_nonfinite=False
        )
        norm = getattr(norm, "full_tensor", lambda: norm)().item()
        rate = set_lr(self.optimiser, self.recipe.optim, step, config.steps, self.plateau.factor)
        self._check_finite(step, loss_mean, norm, rate)
        self._optimiser.step()
        self._optimiser.zero_grad()
        if self.ema is not None:
            self.ema.update(step)

        seconds = self.count.seconds + time.perf_counter() - began
        tokens = self.count.tokens + sum(map(self.task.tokens, batches))
        self.count = Counters(step, tokens, seconds, self.count.peak_bytes)
        self.tally = self.tally.plus(loss_mean, auxiliary / fabric.world_size, auxiliaries, metric_sums)
        return {"loss": loss_mean, "lr": rate, "grad_norm": norm}

    def _gradients(self, batches: list[Any]) -> list[Tensor]:
        """Add the gradients of an update's batches; the sums of each micro-batch."""
        fabric, config = self.fabric, self.recipe.train
        targets = sum(self.task.count(batch) for batch in batches)
        rows = [[to_device(part, fabric.device) for part in self._micro_batches(batch)] for batch in batches]
        # DDP and FSDP average gradients over processes. The loss is a sum over them, so it is scaled by their number;
        # auxiliary losses are averaged.
        weights = fabric.world_size / max(1, targets), 1 / self._rollout.forwards(rows)
        with self._rollout.accumulating_caches():
            return [
                self._rollout.backward(i, list(steps), weights, last=i + 1 == config.accumulate)
                for i, steps in enumerate(zip(*rows, strict=True))
            ]

    def update_flops(self) -> float | None:
        """FLOPs of an update, the mean over the next `_READ` ones, or as many as the run has (`measure.flops`).

            Σ over segments (forward + backward) + the forwards that memory replay computes again

        Gradients are computed under a counter and dropped; updates whose batches have equal shapes are counted once. Of
        more than `_COUNTED` shapes, as many are counted, evenly spaced by size from the smallest to the largest. The
        FLOPs of the others are interpolated linearly in the size, the elements of the batches without masks. A backward
        costs about two forwards, so this is about 3 forwards of all rows of the update, and about 4 with memory replay,
        which computes each segment but the last twice. The optimiser is not counted. Weights, buffers, the carried
        state and the random generators stay as they are. None for several processes, which share an update.
        """
        if self.fabric.world_size > 1:
            return None
        promote(stored(self.model))  # what the last update wrote, as the evaluation that follows would
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        compiled, self._with_loss.model = self._with_loss.model, self.model  # it would hide its operations
        try:
            with generators.preserve(), hold_caches(self.model):
                found = self._mean_flops()
        finally:
            self._with_loss.model = compiled
            self._optimiser.zero_grad()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        return found

    def _mean_flops(self) -> float:
        """The mean FLOPs of the next updates."""
        read = range(self.count.step, self.count.step + min(_READ, self.recipe.train.steps))
        first: dict[tuple[torch.Size, ...], list[Any]] = {}
        shapes, sizes = [], {}
        for step in read:
            batches = self._rollout.batches(step, self.recipe.train)
            shapes.append(_shapes(batches))
            sizes[shapes[-1]] = _size(batches)
            first.setdefault(shapes[-1], batches)  # kept: a task may have to begin a pass again to go back to it
        distinct = sorted(sizes, key=lambda shape: (sizes[shape], shape))
        chosen = np.linspace(0, len(distinct) - 1, min(_COUNTED, len(distinct))).round().astype(int)
        counted = {}
        for shape in (distinct[i] for i in chosen):
            own, trial = self._rollout.carried, copy.copy(self._rollout.carried)
            trial.states = list(own.states)
            self._rollout.carried = trial
            try:
                counted[shape] = count_flops(partial(self._gradients, first[shape]))
            finally:
                self._rollout.carried = own
        x, y = [sizes[shape] for shape in counted], list(counted.values())
        return float(np.mean([counted[s] if s in counted else np.interp(sizes[s], x, y) for s in shapes]))

    def evaluated(self, valid: dict[str, float]) -> None:
        """Pass the scores of an evaluation to the plateau schedule, and remember the best ones."""
        self.plateau = self.plateau.after(valid["loss"], self.recipe.optim.schedule)
        self.best = self.best.after(self.count.step, valid, self.task.metrics[0])

    def _micro_batches(self, batch: object) -> list[object]:
        """This process's share of the batch's rows, in order, split into `accumulate` micro-batches.

        They are of equal size, or differ by a row where a task's batches have as many rows as fit.
        """
        parts, found = self.fabric.world_size * self.recipe.train.accumulate, row_count(batch)
        if self.task.carries_state and found != self.recipe.train.batch_size:
            raise InputError(
                f"data: expected {self.recipe.train.batch_size} rows in every training batch, because a state is "
                f"carried from one to the next, found {found}; leave incomplete batches out"
            )
        if found < parts:
            raise InputError(
                f"data: expected at least {parts} rows in every training batch ({self.fabric.world_size} process(es) × "
                f"{self.recipe.train.accumulate} micro-batch(es)), found {found}; leave incomplete batches out, or "
                "lower train.accumulate"
            )
        first = self.fabric.global_rank * self.recipe.train.accumulate
        ends = [found * (first + i) // parts for i in range(self.recipe.train.accumulate + 1)]
        spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
        return [each(batch, lambda x, span=span: x[span]) for span in spans]  # type: ignore[misc]

    def _check_finite(self, step: int, loss: float, norm: float, rate: float) -> None:
        # In float16 a gradient may overflow: the scaler then skips the step and lowers its scale.
        if math.isfinite(loss) and (math.isfinite(norm) or self.recipe.train.precision == "16-mixed"):
            return
        found = f"loss {loss:.4g}" + (f" with gradient norm {norm}" if math.isfinite(loss) else "")
        raise TrainingFailed(
            f"update {step}: expected a finite loss and gradient, found {found} at learning rate {rate:.3g}; "
            "lower optim.lr or lower optim.grad_clip"
        )

    def _peak(self) -> int:
        return max(self.count.peak_bytes, devices.peak_bytes(self.fabric.device) - self._memory_before)

    def line(self, update: dict[str, float]) -> Measurement:
        """The line of metrics after an update.

        The loss, and the auxiliary loss if layers add one, are means over the updates since the previous line. The
        task's metrics are computed over everything that these updates read.
        """
        tally, self.tally = self.tally, Tally()
        self.count.peak_bytes = self._peak()  # read here and not at each update, because reading takes time
        auxiliary = {"auxiliary_loss": tally.auxiliary / tally.updates} if tally.auxiliaries else {}
        found = {
            "loss": tally.loss / tally.updates,
            **auxiliary,
            **self._metrics(tally.sums, (tally.loss, tally.updates)),
            "lr": update["lr"],
            "grad_norm": update["grad_norm"],
            "seconds": round(self.count.seconds, 3),
            "tokens": self.count.tokens,
        }
        return Measurement("train", self.count.step, found)

    def _metrics(self, sums: list[float], loss: tuple[float, float]) -> dict[str, float]:
        rest = iter(sums)
        functions = sum_functions(self.task.metrics, training=True)
        return values(self.task.metrics, {f: list(islice(rest, n)) for f, n in functions.items()}, loss, training=True)

    def snapshot(self) -> JSONObject:
        """Everything that the next update depends on. Collective: every process must call it; all get the result."""
        carried = self._rollout.carried.state_dict() if self.task.carries_state else []
        own = {"generators": generators.take(), "states": carried}
        everyone = devices.gather(self.fabric, own)
        return {
            "recipe": to_dict(self.recipe),
            "counters": asdict(self.count),
            "tally": asdict(self.tally),
            "plateau": asdict(self.plateau),
            "best": asdict(self.best),
            "model": model_state(self.model),
            "optimiser": optimiser_state(self.model, self.optimiser),
            "ema": {} if self.ema is None else self.ema.saved(),
            "scaler": dict(self.fabric.strategy.precision.state_dict()),
            # One entry per micro-batch: their tensors may differ in length, and padding would round differently.
            "states": [state for one in everyone for state in one["states"]],
            "generators": [one["generators"] for one in everyone],
        }

    def restore(self, saved: JSONObject) -> None:
        """Restore a `snapshot`. Raises InputError if it is of another model or number of processes, or made by hand."""
        try:
            self._restore(saved)
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise InputError(
                f"expected the checkpoint of this run, found one with other content ({type(error).__name__}: "
                f"{(str(error).splitlines() or [''])[0]:.80}); use an earlier checkpoint"
            ) from error

    def _restore(self, saved: JSONObject) -> None:
        taken = saved["generators"]
        if len(taken) != self.fabric.world_size:
            raise InputError(
                f"train.devices × train.num_nodes: expected {len(taken)} process(es), as the run was started with, "
                f"found {self.fabric.world_size}; resume with {len(taken)}"
            )
        self.count, self.tally = Counters(**saved["counters"]), Tally(**saved["tally"])
        self.plateau, self.best = Plateau(**saved["plateau"]), Best(**saved.get("best", {}))
        load_model_state(self.model, saved["model"])
        load_optimiser_state(self.model, self.optimiser, saved["optimiser"])
        if self.ema is not None:
            self.ema.restore(saved["ema"])
        self.fabric.strategy.precision.load_state_dict(saved["scaler"])
        if saved["states"] or (self.task.carries_state and self.count.step):
            self._restore_states(saved["states"])
        generators.put(taken[self.fabric.global_rank])  # last: no code after it may draw random numbers

    def _restore_states(self, everyone: list[list[Tensor | None]]) -> None:
        """The states of this process's micro-batches, from the leaves of all micro-batches."""
        config, world = self.recipe.train, self.fabric.world_size

        def fresh() -> State:  # its structure is that of every state: a checkpoint stores the leaves alone
            first = self._micro_batches(self._rollout.batches(self.count.step, config)[0])[0]
            with torch.no_grad(), evaluating(self.model), self.fabric.autocast():
                return self.task.forward(self.model, to_device(first, self.fabric.device), None)[1]

        if len(everyone) != world * config.accumulate:
            raise InputError(
                f"expected {world * config.accumulate} carried states, found {len(everyone)}; use an earlier checkpoint"
            )
        first = self.fabric.global_rank * config.accumulate
        self._rollout.carried.load_state_dict(everyone[first : first + config.accumulate], fresh, self.fabric.device)


def _shapes(batches: list[Any]) -> tuple[torch.Size, ...]:
    """The shapes of all tensors of batches, in order: source and target have different costs."""
    return tuple(leaf.shape for batch in batches for leaf in leaves(batch))


def _size(batches: list[Any]) -> int:
    """The elements of batches without masks, which only batches of unequal rows have."""
    return sum(leaf.numel() for batch in batches for leaf in leaves(batch) if leaf.dtype != torch.bool)
