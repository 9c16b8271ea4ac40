"""A model in training: what an update changes, and the snapshot that a checkpoint stores to resume exactly."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mnemos import generators
from mnemos.config import to_dict
from mnemos.lab.tasks.batch import each, to_device
from mnemos.lab.tasks.metrics import Metric
from mnemos.lab.tasks.task import Task
from mnemos.memory.gated_cache import stored
from mnemos.memory_replay.engine import CarriedStates, RolloutEngine
from mnemos.memory_replay.steps import HALF
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject, State

from . import devices
from .checkpoint import load_model_state, model_state
from .model_with_loss import ModelWithLoss
from .optim import Plateau, load_optimiser_state, make_optimiser, optimiser_state
from .recipe import Recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass
class RunningSums:
    """Sums over the updates since the last line of metrics."""

    updates: int = 0
    loss: float = 0.0
    auxiliary: float = 0.0
    auxiliaries: float = 0.0  # how many auxiliary losses layers added
    metrics: list[float] = field(default_factory=list)  # the sums of the task's metrics

    def plus(self, loss: float, auxiliary: float, auxiliaries: float, metrics: list[float]) -> RunningSums:
        summed = [a + b for a, b in zip(self.metrics or [0.0] * len(metrics), metrics, strict=True)]
        more = self.loss + loss, self.auxiliary + auxiliary, self.auxiliaries + auxiliaries
        return RunningSums(self.updates + 1, *more, summed)


@dataclass
class Counters:
    """Totals of the whole run."""

    step: int = 0
    tokens: int = 0  # as the task counts them
    seconds: float = 0.0  # spent in updates, without evaluations and checkpoints
    peak_bytes: int = 0


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, by the task's first metric."""

    step: int = 0  # 0: no evaluation yet
    score: float | None = None
    valid: dict[str, float] = field(default_factory=dict)  # all scores of that evaluation
    since: int = 0  # evaluations after it

    def after(self, step: int, valid: dict[str, float], metric: Metric) -> Best:
        """The state after one more evaluation; a score that is NaN or infinite, or equal, is not better."""
        score, sign = valid[metric.name], 1 if metric.higher_is_better else -1
        if math.isfinite(score) and (self.score is None or sign * score > sign * self.score):
            return Best(step, score, dict(valid))
        return replace(self, since=self.since + 1)


@dataclass(frozen=True)
class Evaluation:
    """The last evaluation of the validation split: its scores, and how many rows and targets were scored."""

    step: int = 0  # 0: none yet
    scores: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    targets: int = 0


class Learner:
    """The model, its optimiser, its carried states and its position in the data, on one process.

    with_loss, wrapped: the model with its loss, and as Fabric wraps it; optimiser, stepper: PyTorch's, and as Fabric
    wraps it. carried: the states that each micro-batch's rows go on from, where the task carries them.
    """

    def __init__(self, fabric: Fabric, recipe: Recipe, task: Task, model: nn.Module | None = None) -> None:
        self.fabric, self.recipe, self.task = fabric, recipe, task
        self.count, self.sums, self.plateau, self.best = Counters(), RunningSums(), Plateau(), Best()
        self.evaluation = Evaluation()
        self._memory_before = devices.peak_bytes(fabric.device) if fabric.device.type != "cuda" else 0
        generators.seed(recipe.train.seed)  # the same weights on every process
        self.model: nn.Module = recipe.model.build() if model is None else model
        self.parameters = sum(p.numel() for p in self.model.parameters())
        searched = devices.uses_ddp(recipe.train)
        self.with_loss = ModelWithLoss(self.model, task, alone=fabric.world_size == 1, searched=searched)
        self.wrapped: Any = fabric.setup_module(self.with_loss)
        # A fused optimiser cannot skip a step (the float16 scaler needs that) and does not support shards everywhere.
        fused = recipe.train.precision != "16-mixed" and recipe.train.strategy != "fsdp"
        self.optimiser = make_optimiser(self.model, recipe.optim, fused)
        self.stepper: Any = fabric.setup_optimizers(self.optimiser)
        self.has_caches = bool(stored(self.model))
        self._read_again: dict[int, Any] = {}  # batches of the last update, by index
        rollout = recipe.train.rollout
        engine = RolloutEngine(
            lambda loss: fabric.backward(loss),
            module=self.model if any(True for _ in self.model.buffers()) else None,
            replay=rollout.replay,
            horizon=rollout.horizon,
            slide=rollout.slide,
            checkpoints=rollout.checkpoints,
            offload=rollout.offload,
            verify=rollout.verify,
            # Fabric enters autocast inside the wrapped model, so replay cannot detect half precision by itself.
            tolerance=HALF if recipe.train.precision.endswith("mixed") else None,
            no_sync=lambda: fabric.no_backward_sync(self.wrapped),
        )
        self.carried = CarriedStates(engine, recipe.train.accumulate)  # of each micro-batch's rows
        if recipe.train.compile:
            # Compiled for training only: each mode, mask and shape compiles separately, which takes seconds.
            self.with_loss.model = torch.compile(self.model)  # type: ignore[assignment]
        generators.seed_process(recipe.train.seed, fabric.global_rank)  # each process draws its own dropout

    def batches(self, update: int) -> list[Any]:
        """The batches of update number `update` (from 0), one for each segment of its rollout."""
        config, rollout = self.recipe.train, self.recipe.train.rollout
        if rollout.segment_length:
            batch = self.task.train_batch(update, config.batch_size, config.seed)
            return list(self.task.segments(batch, rollout.segment_length))
        first = update * rollout.stride
        # Batches that the next update reads again are kept: a task may have to start a pass anew to go back to them.
        kept, self._read_again = self._read_again, {}
        batches = {
            i: kept[i] if i in kept else self.task.train_batch(i, config.batch_size, config.seed)
            for i in range(first, first + rollout.segments)
        }
        if rollout.stride < rollout.segments:
            self._read_again = batches
        return list(batches.values())

    def evaluated(self, valid: dict[str, float], rows: int, targets: int) -> None:
        self.evaluation = Evaluation(self.count.step, dict(valid), rows, targets)
        self.plateau = self.plateau.after(valid["loss"], self.recipe.optim.schedule)
        self.best = self.best.after(self.count.step, valid, self.task.metrics[0])

    def peak(self) -> int:
        """The peak of the memory so far, in bytes, beyond what was in use before."""
        return max(self.count.peak_bytes, devices.peak_bytes(self.fabric.device) - self._memory_before)

    def snapshot(self) -> JSONObject:
        """Everything that the next update depends on. Collective: every process must call it; all get the result."""
        carried = self.carried.state_dict() if self.task.carries_state else []
        own = {"generators": generators.take(), "states": carried}
        everyone = devices.gather(self.fabric, own)
        return {
            "recipe": to_dict(self.recipe),
            "counters": asdict(self.count),
            "sums": asdict(self.sums),
            "plateau": asdict(self.plateau),
            "best": asdict(self.best),
            "evaluation": asdict(self.evaluation),
            "model": model_state(self.model),
            "optimiser": optimiser_state(self.model, self.optimiser),
            "scaler": dict(self.fabric.strategy.precision.state_dict()),
            # One entry per micro-batch: their tensors may differ in length, and padding would round differently.
            "states": [state for one in everyone for state in one["states"]],
            "generators": [one["generators"] for one in everyone],
        }

    def restore(self, saved: JSONObject) -> None:
        """Restore a `snapshot`. Raises InputError for one of another model or number of processes, or made by hand."""
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
        states, taken, config = saved["states"], saved["generators"], self.recipe.train
        if len(taken) != self.fabric.world_size:
            raise InputError(
                f"train.devices × train.num_nodes: expected {len(taken)} process(es), as the run was started with, "
                f"found {self.fabric.world_size}; resume with {len(taken)}"
            )
        self.count, self.sums = Counters(**saved["counters"]), RunningSums(**saved["sums"])
        self.plateau, self.best = Plateau(**saved["plateau"]), Best(**saved["best"])
        self.evaluation = Evaluation(**saved["evaluation"])
        load_model_state(self.model, saved["model"])
        load_optimiser_state(self.model, self.optimiser, saved["optimiser"])
        self.fabric.strategy.precision.load_state_dict(saved["scaler"])

        # --- the states of this process's micro-batches: a checkpoint stores the leaves alone, of all of them ---
        def fresh() -> State:  # its structure is that of every state
            row = to_device(each(self.batches(self.count.step)[0], lambda x: x[:1]), self.fabric.device)
            with torch.no_grad(), evaluating(self.model), self.fabric.autocast():
                return self.task.forward(self.model, row, None)[1]

        if states or (self.task.carries_state and self.count.step):
            wanted, first = self.fabric.world_size * config.accumulate, self.fabric.global_rank * config.accumulate
            if len(states) != wanted:
                raise InputError(f"expected {wanted} carried states, found {len(states)}; use an earlier checkpoint")
            self.carried.load_state_dict(states[first : first + config.accumulate], fresh, self.fabric.device)
        generators.put(taken[self.fabric.global_rank])  # last: no code after it may draw random numbers
