"""Optimisers and schedules from their configuration, and an optimiser's state by parameter name."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, RAdam

from mnemos.types import InputError

from .recipe import OptimConfig, ScheduleConfig
from .sharding import full, place


def make_optimiser(model: nn.Module, config: OptimConfig, fused: bool = True) -> Optimizer:
    """The optimiser of a recipe over a model's parameters, in the groups of `parameter_groups`.

    adamw and radam decay their weights decoupled from the gradient (w ← w − rate·decay·w); adam, as in the
    papers before that, does not decay. `fused`: one kernel over all parameters where PyTorch has one (AdamW and
    Adam); it is to be off where a gradient scaler or sharded parameters want to look at single gradients.
    Raises InputError for values out of range.
    """
    check(config)
    groups = parameter_groups(model, 0.0 if config.name == "adam" else config.weight_decay, config.gate_lr_scale)
    common: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "radam":
        return RAdam(groups, decoupled_weight_decay=True, foreach=True, **common)
    common["fused" if fused else "foreach"] = True
    return (AdamW if config.name == "adamw" else Adam)(groups, **common)


def parameter_groups(model: nn.Module, decay: float, gate_lr_scale: float = 1.0) -> list[dict[str, Any]]:
    """What decays, what does not, and, where there are any, the gates' λ, whose rate is `gate_lr_scale` of the others'.

    Matrices and larger (linear and convolution weights, embeddings: what GPT-2's, Llama's and nanoGPT's trainings
    decay) do; vectors and scalars (biases, norms), anything called `bias`, and `mix`, the λ of a gated cache,
    do not: its 0 is not "no cache" but half of one, so decay would hold the gate half open.
    """
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    gates: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            last = name.rpartition(".")[2]
            spared = parameter.dim() < 2 or last.endswith("bias")
            (gates if last == "mix" else free if spared else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": decay, "share": 1.0},
        {"params": free, "weight_decay": 0.0, "share": 1.0},
        {"params": gates, "weight_decay": 0.0, "share": gate_lr_scale},
    ]
    return groups if gates else groups[:2]


def factor(config: ScheduleConfig, update: int, steps: int) -> float:
    """What the rate is multiplied by at `update` = 1, 2, …, `steps`, with w the warm-up; for plateau see `Plateau`.

    Up to w: start + (1 − start)·update/w, for all but lra. After it: constant 1; cosine floor + (1 − floor)·½(1 +
    cos(π·p)), where p goes from 0 at w to 1 at `steps`; inverse_sqrt √(max(w, 1)/update); step 1, and `floor` after
    `drop_at` updates. lra: min(1, update/w)/√max(update, w).
    """
    warmup = max(config.warmup, 1)
    rising = min(1.0, update / warmup)
    if config.name == "lra":
        return rising / math.sqrt(max(update, warmup))
    if update <= config.warmup:
        return config.start + (1 - config.start) * rising
    if config.name == "cosine":
        progress = min(1.0, (update - config.warmup) / max(1, steps - config.warmup))
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.name == "inverse_sqrt":
        return math.sqrt(warmup / update)
    if config.name == "step" and update > config.drop_at:
        return config.floor
    return 1.0


@dataclass(frozen=True)
class Plateau:
    """What the plateau schedule remembers of the validation losses: a factor of the rate, and since when none is lower.

    For every other schedule the factor stays 1.
    """

    factor: float = 1.0
    best: float | None = None
    since: int = 0  # looks that found no lower loss, since the best one or the last halving

    def after(self, loss: float, config: ScheduleConfig) -> "Plateau":
        """The same after one more look; a loss that is no number is no improvement."""
        if config.name != "plateau":
            return self
        if self.best is None or loss < self.best:
            return Plateau(self.factor, loss, 0) if math.isfinite(loss) else self
        if self.since + 1 < config.patience:
            return Plateau(self.factor, self.best, self.since + 1)
        return Plateau(max(config.floor, 0.5 * self.factor), self.best, 0)


def set_rate(optimiser: Optimizer, config: OptimConfig, update: int, steps: int, plateau: float = 1.0) -> float:
    """Give the optimiser the learning rate of an update, and return it: the gates' λ have their share of it.

    plateau: a further factor, `Plateau.factor`.
    """
    rate = config.lr * factor(config.schedule, update, steps) * plateau
    for group in optimiser.param_groups:
        group["lr"] = rate * group["share"]
    return rate


def optimiser_state(model: nn.Module, optimiser: Optimizer) -> dict[str, dict[str, Any]]:
    """What the optimiser remembers of each parameter, by the parameter's name, whole and on the CPU.

    Collective where parameters are sharded. PyTorch's own `get_optimizer_state_dict` is not used: to load, it
    makes up a state for parameters that have never had a gradient, and a resumed run would differ from then on.
    """
    state = optimiser.state
    return {
        name: {key: full(value) if isinstance(value, Tensor) else value for key, value in state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in state
    }


def load_optimiser_state(model: nn.Module, optimiser: Optimizer, saved: dict[str, dict[str, Any]]) -> None:
    """Put back, bit by bit, what `optimiser_state` took. Raises InputError for parameters that are not there."""
    parameters = dict(model.named_parameters())
    if foreign := sorted(set(saved) - set(parameters)):
        raise InputError(f"expected this model's parameters, found a state of {foreign[0]!r}; use the run's own recipe")
    numbers = {id(p): i for i, p in enumerate(p for group in optimiser.param_groups for p in group["params"])}
    state = {}
    for name, values in saved.items():
        parameter = parameters[name]
        state[numbers[id(parameter)]] = {
            key: place(value, parameter) if isinstance(value, Tensor) else value for key, value in values.items()
        }
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def check(config: OptimConfig) -> None:
    """Raise InputError for values that no optimiser takes."""
    schedule = config.schedule
    for name, right, wanted, value in (
        ("lr", config.lr > 0 and math.isfinite(config.lr), "above 0", config.lr),
        ("betas", all(0 <= b < 1 for b in config.betas), "both at least 0 and below 1", config.betas),
        ("eps", config.eps >= 0, "at least 0", config.eps),
        ("weight_decay", config.weight_decay >= 0, "at least 0", config.weight_decay),
        (
            "gate_lr_scale",
            config.gate_lr_scale >= 0 and math.isfinite(config.gate_lr_scale),
            "at least 0",
            config.gate_lr_scale,
        ),
        ("grad_clip", config.grad_clip >= 0, "at least 0 (0 does not clip)", config.grad_clip),
        ("schedule.warmup", schedule.warmup >= 0, "at least 0", schedule.warmup),
        ("schedule.start", 0 <= schedule.start <= 1, "between 0 and 1", schedule.start),
        ("schedule.floor", 0 <= schedule.floor <= 1, "between 0 and 1", schedule.floor),
        ("schedule.drop_at", schedule.drop_at >= 0, "at least 0", schedule.drop_at),
        ("schedule.patience", schedule.patience >= 1, "at least 1", schedule.patience),
    ):
        if not right:
            raise InputError(f"optim.{name} must be {wanted}, found {value}")
