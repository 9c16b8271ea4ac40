"""A model in training: what an update changes, and the snapshot that a checkpoint stores to resume exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.config import to_dict
from mnemos.lab.tasks.batch import each, to_device
from mnemos.lab.tasks.metrics import Metric, called, sum_functions
from mnemos.lab.tasks.task import Task
from mnemos.memory.gated_cache import stored
from mnemos.memory_replay.engine import CarriedStates, RolloutEngine, read_in_turn
from mnemos.memory_replay.steps import HALF
from mnemos.modes import evaluating
from mnemos.types import Advances, JSONObject, State, collect_auxiliary_losses, leaves

from . import devices
from .checkpoint import load_model_state, model_state
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
    """The scores of a split, and of how many rows and targets they are."""

    step: int = 0  # 0: none yet, or before training
    scores: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    targets: int = 0


class StateBox:
    """The state that goes into a wrapped model, and those that come out of it, one for each segment.

    The wrappers (precision, DDP, FSDP) convert tensors and pytrees that are passed through them, and leave this object:
    a state stays in float32 under bfloat16 weights too.
    """

    __slots__ = ("after", "before")

    def __init__(self, before: State) -> None:
        self.before = before
        self.after: list[State] = []


class ModelWithLoss(nn.Module):
    """Model and loss in one forward.

    A segment without a counted target is read by the model's `advance`, if it has one. With several processes (`alone`
    is False) every segment takes the whole forward: the rows of another process may have targets, and all must run the
    same parts. searched: DDP searches each forward for parameters without a gradient, and prints a warning if there are
    none; one parameter that is never used, and is not the model's, prevents it.
    """

    def __init__(self, model: nn.Module, task: Task, alone: bool, searched: bool = False) -> None:
        super().__init__()
        if searched:
            self._never_used = nn.Parameter(torch.zeros(1))
        self.model, self.task = model, task
        self._skips = alone and isinstance(model, Advances)
        self._functions = sum_functions(task.metrics, training=True)

    def reads(self, batch: object) -> bool:
        """Whether a batch takes the model's whole forward, and not `advance`."""
        return not self._skips or self.task.count(batch) > 0

    def forward(
        self,
        batches: Sequence[object],
        box: StateBox,
        weights: tuple[float, float] = (1.0, 0.0),
        visible: bool = False,
        advance: bool = False,
    ) -> tuple[Tensor, ...]:
        """(loss, sums) of successive batches; the states are written to `box.after`.

        weights: of the losses and of the auxiliary losses. loss: their weighted sum, a scalar. sums, without gradient:
        [weight × Σ auxiliary losses, their number, the sums of the task's metrics]. visible: something that depends on
        the last state, which will get a gradient, is returned too, by which DDP finds used parameters. advance: only
        compute the new states, and return ().
        """
        added: list[Tensor] = []
        sums: list[Tensor] = []

        def step(batch: object, state: State) -> tuple[Tensor | None, State]:
            if advance or not self.reads(batch):
                return None, self.task.advance(self.model, batch, state)
            with collect_auxiliary_losses() as auxiliary:
                outputs, state = self.task.forward(self.model, batch, state)
                loss = self.task.loss(self.model, outputs, batch)
            added.extend(auxiliary)
            with torch.no_grad():
                functions = self._functions.items()
                own = [x for f, width in functions for x in called(f, width, self.model, outputs, batch)]
            if own:
                sums.append(torch.stack([x.to(loss.device, torch.float32) for x in own]))
            return loss, state

        with collect_auxiliary_losses():  # auxiliary losses that `advance` or a metric adds are dropped
            every, box.after = read_in_turn(step, ((x, self.task.resets(x)) for x in batches), box.before)
        if advance:
            return ()
        losses = [loss for loss in every if loss is not None]
        device = leaves(batches[-1])[0].device
        none = torch.zeros((), device=device)
        loss, extra = torch.stack(losses or [none]).sum() * weights[0], none
        if added:
            extra = torch.stack([x.to(loss.dtype) for x in added]).sum() * weights[1]
            loss = loss + extra
        head = torch.stack([extra.detach().to(device, torch.float32), torch.full_like(none, len(added))])
        zeros = torch.zeros(sum(self._functions.values()), device=device)
        summed = torch.cat([head, torch.stack(sums).sum(0) if sums else zeros])
        if not visible:
            return loss, summed
        # DDP finds the used parameters from the tensors that a forward returns. These scalars have no other use.
        return loss, summed, *(x.flatten()[:1].sum() for x in leaves(box.after[-1]) if x.requires_grad)


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
        self.model.zero_grad()  # a model that was given may have gradients, which the first update would add to its own
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

    def evaluated(self, valid: Evaluation) -> None:
        self.evaluation = valid
        self.plateau = self.plateau.after(valid.scores["loss"], self.recipe.optim.schedule)
        self.best = self.best.after(valid.step, valid.scores, self.task.metrics[0])

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
        """Restore a `snapshot` of the same recipe, on as many processes."""
        states, rank, count = saved["states"], self.fabric.global_rank, self.recipe.train.accumulate
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
            self.carried.load_state_dict(states[rank * count : (rank + 1) * count], fresh, self.fabric.device)
        generators.put(saved["generators"][rank])  # last: no code after it may draw random numbers
