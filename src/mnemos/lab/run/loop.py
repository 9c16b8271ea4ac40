"""The training loop: a run is `train`, an update of the weights `update`, the gradients of its segments `gradients`."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.evaluate.scores import metrics_text
from mnemos.lab.tasks.batch import each, row_count, to_device
from mnemos.lab.tasks.metrics import sum_functions, values
from mnemos.memory.gated_cache import accumulate_caches
from mnemos.memory_replay.distributed import broadcast_buffers
from mnemos.types import Advances, InputError, JSONObject, State, leaves

from . import devices
from .files import Measurement
from .learner import Counters, Evaluation, RunningSums, StateBox
from .optim import set_lr

if TYPE_CHECKING:
    from .learner import Learner
    from .run import Run


def train(run: Run, on_evaluation: Callable[[nn.Module, int], JSONObject | None]) -> None:
    """Train an open run to its last step: update, line of metrics, checkpoint, evaluation, and again.

    A run that is killed at any moment and opened again gives the same numbers, bit for bit: the batches are a function
    of the update's number, a checkpoint holds all that an update depends on (`Learner.snapshot`), and an evaluation
    leaves every random generator as it was.
    """
    config, task, learner = run.recipe.train, run.task, run.learner
    functions = sum_functions(task.metrics, training=True)
    constant = run.recipe.optim.schedule.last_constant(config.steps)  # a run that is trained for longer goes on from it

    def due(every: int) -> bool:
        return learner.count.step % every == 0 or learner.count.step == config.steps

    def line(one: Evaluation, began: float) -> Measurement:
        return Measurement("valid", one.step, {**one.scores, "seconds": round(time.perf_counter() - began, 3)})

    def say(one: Evaluation, when: str = "") -> None:
        text = f"{when}valid loss {one.scores['loss']:.4f}  {metrics_text(task, one.scores)}".rstrip()
        run.display.message(f"{run.recipe.name} {learner.count.step}: {text}")

    def evaluate() -> None:
        began, step = time.perf_counter(), learner.count.step
        # Nothing is noted before all is scored: an evaluation that is interrupted is repeated from its start.
        learner.evaluated(run.scores("valid"))
        if config.keep_best and learner.best.step == step:
            run.save_best()
        lines = [line(learner.evaluation, began)]
        if run.files is not None:
            with generators.preserve():
                gates = on_evaluation(learner.model, step)
            if gates is not None:
                lines.append(Measurement("gates", step, gates))
        run.record(lines)
        say(learner.evaluation)

    # --- where the run stands ---
    if not learner.count.step and config.init_from is not None:  # so that it can be seen what training adds
        began = time.perf_counter()
        before = run.scores("valid")
        run.record([line(before, began)])
        say(before, "before training: ")
    elif learner.count.step != learner.evaluation.step and (run.ended or due(config.eval_every)):
        evaluate()  # the checkpoint was saved before the evaluation at this step, which may not have ended

    # `patience` evaluations without a better score end the run.
    while learner.count.step < config.steps and not 0 < config.patience <= learner.best.since:
        numbers = update(learner)
        run.display.updated(learner.count.step, numbers, partial(devices.peak_bytes, run.fabric.device))

        # --- the line, the checkpoint, the evaluation: in this order, by which a resumed run knows what is done ---
        if due(config.log_every):
            sums, learner.sums = learner.sums, RunningSums()
            learner.count.peak_bytes = learner.peak()  # read here and not at each update, because reading takes time
            means = {"loss": sums.loss / sums.updates}
            means |= {"auxiliary_loss": sums.auxiliary / sums.updates} if sums.auxiliaries else {}
            rest = iter(sums.metrics)
            sums_of = {f: list(itertools.islice(rest, n)) for f, n in functions.items()}
            means |= values(task.metrics, sums_of, (sums.loss, sums.updates), training=True)
            means |= {"lr": numbers["lr"], "grad_norm": numbers["grad_norm"]}
            means |= {"seconds": round(learner.count.seconds, 3), "tokens": learner.count.tokens}
            run.record([Measurement("train", learner.count.step, means)])
        run.check_signals()
        if due(config.checkpoint_every) or learner.count.step == constant:
            run.save()
        if due(config.eval_every):
            evaluate()
    run.save()  # again where the last update had one: now it holds the last evaluation, which is not repeated


def update(learner: Learner) -> dict[str, float]:
    """Update the weights once, on a batch or a rollout: {"loss", "lr", "grad_norm"}.

    The loss is the mean over all counted targets of the update, in whatever way they are split over processes,
    micro-batches and segments. Auxiliary losses of layers are averaged over the update's forwards.
    Raises TrainingFailed if loss or gradient is not finite; the weights are then unchanged.
    """
    began = time.perf_counter()
    fabric, task, config, optim = learner.fabric, learner.task, learner.recipe.train, learner.recipe.optim
    step = learner.count.step + 1
    batches = learner.batches(step - 1)
    for batch in batches:
        task.check(batch, f"training batch {step - 1}")

    # --- gradients ---
    total: Any = fabric.all_reduce(torch.stack(gradients(learner, batches)).sum(0), reduce_op="sum")
    loss, auxiliary, auxiliaries, *metrics = total.tolist()
    loss, auxiliary = loss / fabric.world_size, auxiliary / fabric.world_size
    norm: Any = fabric.clip_gradients(
        learner.wrapped, learner.stepper, max_norm=optim.grad_clip or math.inf, error_if_nonfinite=False
    )
    norm = getattr(norm, "full_tensor", lambda: norm)().item()  # of sharded gradients

    # --- the step ---
    rate = set_lr(learner.optimiser, optim, step, config.steps, learner.plateau.factor)
    # In float16 a gradient may overflow: the scaler then skips the step and lowers its scale.
    if not math.isfinite(loss) or not (math.isfinite(norm) or config.precision == "16-mixed"):
        description = f"loss {loss:.4g}" + (f" with gradient norm {norm}" if math.isfinite(loss) else "")
        raise TrainingFailed(
            f"update {step}: expected a finite loss and gradient, found {description} at learning rate {rate:.3g}; "
            "lower optim.lr or lower optim.grad_clip"
        )
    learner.stepper.step()
    learner.stepper.zero_grad()

    seconds = learner.count.seconds + time.perf_counter() - began
    tokens = learner.count.tokens + sum(map(task.tokens, batches))
    learner.count = Counters(step, tokens, seconds, learner.count.peak_bytes)
    learner.sums = learner.sums.plus(loss, auxiliary, auxiliaries, metrics)
    return {"loss": loss, "lr": rate, "grad_norm": norm}


def gradients(learner: Learner, batches: list[Any]) -> list[Tensor]:
    """Add the gradients of an update's batches, one batch for each segment of its rollout.

    Returns for each micro-batch [Σ losses, Σ auxiliary losses, number of auxiliary losses, the sums of the task's
    metrics]; the losses are multiplied by their weights. Raises InputError for batches of too few rows, and for several
    segments of a model that keeps no state.
    """
    task, fabric, config, model = learner.task, learner.fabric, learner.recipe.train, learner.model
    carried, rollout, many, world = learner.carried, config.rollout, config.accumulate, fabric.world_size
    replayed = carried.engine.replays(len(batches))
    splits = many > 1 or rollout.segments > 1 or rollout.segment_length > 0

    # --- this process's share of the rows, in order: micro-batches of equal size, or of one row more or less ---
    rows: list[list[Any]] = []
    for batch in batches:
        count, parts, first = row_count(batch), world * many, fabric.global_rank * many
        if task.carries_state and count != config.batch_size:
            raise InputError(
                f"data: expected {config.batch_size} rows in every training batch, because a state is carried from one "
                f"to the next, found {count}; leave incomplete batches out"
            )
        if count < parts:
            raise InputError(
                f"data: expected at least {parts} rows in every training batch ({world} process(es) × {many} "
                f"micro-batch(es)), found {count}; leave incomplete batches out, or lower train.accumulate"
            )
        spans = [slice(count * i // parts, count * (i + 1) // parts) for i in range(first, first + many)]
        rows.append([to_device(each(batch, lambda x, span=span: x[span]), fabric.device) for span in spans])  # type: ignore[misc]

    # DDP and FSDP average gradients over processes. The loss is a sum over them, so it is scaled by their number;
    # auxiliary losses are averaged over the forwards.
    forwards = sum(learner.with_loss.reads(part) for batch in rows for part in batch)
    weights = world / max(1, sum(map(task.count, batches))), 1 / max(1, forwards)

    # --- one rollout for each micro-batch; stored caches are written once, from all of them ---
    micro_batches = []
    with accumulate_caches(model) if learner.has_caches and splits else contextlib.nullcontext():
        for number, segments in enumerate(zip(*rows, strict=True)):
            sums: list[Tensor] = []  # one entry for each call with gradient; these read each segment exactly once

            def read(segments: Sequence[Any], state: State, sums: list[Tensor] = sums) -> tuple[Tensor, list[State]]:
                box, grad = StateBox(state), torch.is_grad_enabled()
                loss, own, *_ = learner.wrapped(segments, box, weights, visible=replayed and grad)
                sums.extend([own] if grad else [])
                return loss, box.after

            def advance(segment: Any, state: State) -> State:
                box = StateBox(state)
                learner.wrapped([segment], box, advance=True)
                return box.after[-1]

            # Gradients are summed over processes once, after the last micro-batch.
            advances = advance if isinstance(model, Advances) else None
            if replayed:  # or DDP shares them in the first pass, and the replay starts from this process's own
                broadcast_buffers(learner.wrapped)
            losses = carried.backward(number, read, list(segments), advances, last=number + 1 == many)
            if len(segments) > 1 and not leaves(carried.states[number]):
                raise InputError(
                    "train.rollout: expected a model that keeps a state between segments, found one that keeps none; "
                    "use another attention or model, or one segment per update"
                )
            if not task.carries_state:
                carried.states[number] = None
            if replayed:  # the losses are in the order of the segments, the sums in that of the replay
                losses, sums = losses.sum()[None], [torch.stack(sums).sum(0)]
            # `loss` includes the auxiliary losses, whose sum is the first entry of `own`.
            calls = [torch.cat([(loss - own[0])[None], own]) for loss, own in zip(losses, sums, strict=True)]
            micro_batches.append(torch.stack(calls).sum(0))
    return micro_batches
