"""Parameter groups of a model with a memory: learning rates of their own for the memory and for gates."""

from typing import Any

from torch import Tensor, nn

from mnemos.memory.tokens import TokenMemory

from .branch import HostBranch


def is_gate(name: str) -> bool:
    """Whether a parameter's name is that of λ, the gate of a cache."""
    return name.rpartition(".")[2] == "mix"


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has weight decay: matrices have it; vectors, biases, λ and constants of caches have none."""
    return parameter.dim() >= 2 and not name.endswith("bias") and name.rpartition(".")[2] not in ("mix", "cache")


def parameter_groups(
    model: nn.Module,
    lr: float,
    branch_lr: float | None = None,
    gate_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups for an optimiser of torch.optim: the host's parameters, those of its memory, and the gates λ.

        torch.optim.AdamW(mnemos.hosts.parameter_groups(model, lr=1e-5, branch_lr=1e-3, weight_decay=0.05))

    The memory is the branches of `mnemos.cache` and the memory tokens of `mnemos.remember`. lr: of the host; branch_lr:
    of the memory (None: lr); gate_lr: of λ (None: branch_lr). Weight decay is as in the trainer: on matrices alone.
    Parameters without requires_grad are left out, and so are groups without parameters.
    """
    branch_lr = lr if branch_lr is None else branch_lr
    rates = {"host": lr, "branch": branch_lr, "gate": branch_lr if gate_lr is None else gate_lr}
    memories = [part for part in model.modules() if isinstance(part, HostBranch | TokenMemory)]
    own = {id(parameter) for memory in memories for parameter in memory.parameters()}
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
