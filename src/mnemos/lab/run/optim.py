"""Optimisers and learning-rate schedules from their configuration; the optimiser's state by parameter name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, RAdam

from mnemos.hosts.branch import decays, is_gate
from mnemos.types import InputError, JSONObject

from .checkpoint import full, place
from .recipe import OptimConfig, ScheduleConfig


def make_optimiser(model: nn.Module, config: OptimConfig, fused: bool = True) -> Optimizer:
    """The optimiser of a recipe for a model's parameters, in the groups of `parameter_groups`.

    fused: one kernel over all parameters where PyTorch has one; off with a gradient scaler or sharded parameters, which
    need each gradient by itself.
    """
    groups = parameter_groups(model, 0.0 if config.name == "adam" else config.weight_decay, config.gate_lr_scale)
    common: JSONObject = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "radam":
        return RAdam(groups, decoupled_weight_decay=True, foreach=True, **common)
    common["fused" if fused else "foreach"] = True
    return (AdamW if config.name == "adamw" else Adam)(groups, **common)


def parameter_groups(model: nn.Module, weight_decay: float, gate_lr_scale: float = 1.0) -> list[JSONObject]:
    """The parameters that are trained, in groups of one weight decay and one factor of the learning rate, `lr_scale`.

    Matrices, convolutions and embeddings have weight decay; vectors, scalars, biases and λ, the `mix` of a gated cache,
    have none: λ = 0 is a half-open gate, which decay would hold half open. λ has the factor `gate_lr_scale`; a model
    with `lr_scales`, {name: factor}, says that of some others.
    """
    scales: Mapping[str, float] = getattr(model, "lr_scales", {})
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gate = is_gate(name)
            decay = weight_decay if decays(name, parameter) and not gate else 0.0
            scale = gate_lr_scale if gate else scales.get(name, 1.0)
            groups.setdefault((decay, scale), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), parameters in sorted(groups.items(), key=lambda item: (-item[0][0], item[0][1]))
    ]


def factor(config: ScheduleConfig, update: int, steps: int) -> float:
    """The factor of the learning rate at `update` = 1, 2, …, `steps`, with w `warmup_steps`; for plateau see `Plateau`.

    Up to w: start + (1 − start)·update/w, except for lra. After w: constant 1; cosine floor + (1 − floor)·½(1 +
    cos(π·p)) with p from 0 at w to 1 at `steps`; inverse_sqrt √(max(w, 1)/update); step floorⁿ, where n of
    the `drop_at` are below `update`; trapezoid 1, then a straight line from 1 to `floor`, which it would reach at
    `steps` + 1. lra: min(1, update/w)/√max(update, w). Updates beyond `steps`, as a measurement of their time makes
    them, have the last one's.
    """
    update, length = min(update, steps), config.warmup_steps(steps)
    warmup = max(length, 1)
    rising = min(1.0, update / warmup)
    if config.name == "lra":
        return rising / math.sqrt(max(update, warmup))
    if update <= length:
        return config.start + (1 - config.start) * rising
    if config.name == "cosine":
        progress = (update - length) / (steps - length)
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.name == "inverse_sqrt":
        return math.sqrt(warmup / update)
    if config.name == "step":
        return float(config.floor ** sum(update > at for at in config.drops))
    if config.name == "trapezoid" and update > (last := config.last_constant(steps)):
        return config.floor + (1 - config.floor) * (steps - update + 1) / (steps - last)
    return 1.0


@dataclass(frozen=True)
class Plateau:
    """State of the plateau schedule: the learning rate's factor, 1 for every other, and the least validation loss."""

    factor: float = 1.0
    best: float | None = None
    since: int = 0  # evaluations without a lower loss, since the best one or the last halving

    def after(self, loss: float, config: ScheduleConfig) -> "Plateau":
        """The state after one more evaluation; a loss that is NaN or infinite is no improvement."""
        if config.name != "plateau":
            return self
        if self.best is None or loss < self.best:
            return Plateau(self.factor, loss, 0) if math.isfinite(loss) else self
        if self.since + 1 < config.patience:
            return Plateau(self.factor, self.best, self.since + 1)
        return Plateau(max(config.floor, 0.5 * self.factor), self.best, 0)


def set_lr(optimiser: Optimizer, config: OptimConfig, update: int, steps: int, plateau: float = 1.0) -> float:
    """Set and return an update's learning rate; λ has `gate_lr_scale` times as much. plateau: `Plateau.factor`."""
    lr = config.lr * factor(config.schedule, update, steps) * plateau
    for group in optimiser.param_groups:
        group["lr"] = lr * group["lr_scale"]
    return lr


def optimiser_state(model: nn.Module, optimiser: Optimizer) -> dict[str, JSONObject]:
    """The optimiser's state by the parameters' names, unsharded and on the CPU. Collective if parameters are sharded.

    PyTorch's `get_optimizer_state_dict` is not used because its loading creates a state for parameters that never had a
    gradient, after which a resumed run differs.
    """
    state = optimiser.state
    return {
        name: {key: full(value) if isinstance(value, Tensor) else value for key, value in state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in state
    }


def load_optimiser_state(model: nn.Module, optimiser: Optimizer, saved: dict[str, JSONObject]) -> None:
    """Load what `optimiser_state` returned, bit for bit."""
    parameters = dict(model.named_parameters())
    numbers = {id(p): i for i, p in enumerate(p for group in optimiser.param_groups for p in group["params"])}
    state = {}
    for name, values in saved.items():
        parameter = parameters[name]
        state[numbers[id(parameter)]] = {
            key: place(value, parameter) if isinstance(value, Tensor) else value for key, value in values.items()
        }
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def check(config: OptimConfig) -> None:
    """Raise InputError for values out of range."""
    schedule = config.schedule
    share = 0 <= schedule.warmup < 1
    steps = schedule.warmup > 0 and float(schedule.warmup).is_integer()
    drops = min(schedule.drops, default=1) >= (schedule.name == "step")
    for name, right, wanted in (
        ("lr", config.lr > 0 and math.isfinite(config.lr), "above 0"),
        ("betas", all(0 <= b < 1 for b in config.betas), "both at least 0 and below 1"),
        ("eps", config.eps >= 0, "at least 0"),
        ("weight_decay", config.weight_decay >= 0, "at least 0"),
        ("gate_lr_scale", config.gate_lr_scale >= 0 and math.isfinite(config.gate_lr_scale), "at least 0"),
        ("grad_clip", config.grad_clip >= 0, "at least 0 (0: no clipping)"),
        ("schedule.warmup", share or steps, "a number of steps, or a share of them from 0 to below 1"),
        ("schedule.start", 0 <= schedule.start <= 1, "between 0 and 1"),
        ("schedule.floor", 0 <= schedule.floor <= 1, "between 0 and 1"),
        ("schedule.fall", 0 <= schedule.fall <= 1, "between 0 and 1"),
        ("schedule.drop_at", drops, "at least 0, and 1 for the schedule step"),
        ("schedule.patience", schedule.patience >= 1, "at least 1"),
    ):
        if not right:
            raise InputError(f"optim.{name} must be {wanted}, found {attrgetter(name)(config)}")
