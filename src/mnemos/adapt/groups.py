"""Parameter groups of a cached model: learning rates of their own for the branches and their gates."""

from typing import Any

from torch import Tensor, nn

from .branch import HostBranch


def is_gate(name: str) -> bool:
    """Whether a parameter's name is that of λ, the gate of a cache."""
    return name.rpartition(".")[2] == "mix"


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has weight decay: matrices have it; vectors, biases and λ have none."""
    return parameter.dim() >= 2 and not name.endswith("bias") and not is_gate(name)


def parameter_groups(
    model: nn.Module,
    lr: float,
    branch_lr: float | None = None,
    gate_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups for an optimiser of torch.optim: the host's parameters, those of its branches, and their λ.

        torch.optim.AdamW(mnemos.adapt.parameter_groups(model, lr=1e-5, branch_lr=1e-3, weight_decay=0.05))

    lr: of the host; branch_lr: of the branches (None: lr); gate_lr: of λ (None: branch_lr). Weight decay is as in the
    trainer: on matrices alone. Parameters without requires_grad are left out, and so are groups without parameters.
    """
    branch_lr = lr if branch_lr is None else branch_lr
    rates = {"host": lr, "branch": branch_lr, "gate": branch_lr if gate_lr is None else gate_lr}
    branches = [part for part in model.modules() if isinstance(part, HostBranch)]
    own = {id(parameter) for branch in branches for parameter in branch.parameters()}
    found: dict[tuple[str, bool], list[Tensor]] = {(role, decayed): [] for role in rates for decayed in (True, False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            role = "host" if id(parameter) not in own else "gate" if is_gate(name) else "branch"
            found[role, decays(name, parameter)].append(parameter)
    return [
        {"params": parameters, "lr": rates[role], "weight_decay": weight_decay if decayed else 0.0}
        for (role, decayed), parameters in found.items()
        if parameters
    ]
