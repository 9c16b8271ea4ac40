"""Whether a recipe's model and batches fit into this machine's memory, found out before memory is used for them."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mnemos.config import ModelConfig
from mnemos.lab.tasks.task import Task
from mnemos.types import InputError, leaves

from .recipe import TrainConfig

MOST_MODULES = 30_000  # the deepest published models have some thousand; building more takes minutes
_BYTES = {"bf16-true": 2, "64-true": 8}  # of a weight, by precision; 4 for the others
_TRAINED = 3  # tensors beside each trained weight: its gradient and two moments of the optimiser
_GIB = 2**30


def on_meta(config: ModelConfig) -> nn.Module:
    """The model on the meta device, where it takes no memory for its weights.

    Raises InputError for sizes that PyTorch cannot represent, and as soon as there are more than `MOST_MODULES`.
    """
    try:
        with torch.device("meta"), _counted():
            model: nn.Module = config.build()
    except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
        if isinstance(error, TypeError) and "Overflow" not in str(error):
            raise
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model: expected sizes of which tensors can be made, found {problem}; lower them") from None
    return model


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Inside, building a model of too many modules in this thread raises InputError."""
    count, here = 0, threading.get_ident()

    def register(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == here
        if count > MOST_MODULES:
            raise InputError(
                f"model: expected at most {MOST_MODULES:,} modules, found more; lower its number of layers"
            )

    handle = register_module_module_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


def check_memory(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Raise InputError if weights, gradients and optimiser need more than the free memory of the device's machine.

    model: on the meta device, or one that is made already, whose weights are then not counted on their own device.
    Frozen parameters have no gradient and no moments. This is a lower bound of what training needs: activations are not
    counted. On the CPU the processes of a machine share its memory.
    """
    size, needed, count, weights = _BYTES.get(config.precision, 4), 0, 0, 0
    for parameter in model.parameters():
        made = parameter.device.type == device.type
        count += parameter.numel()
        weights += parameter.numel() * size * (not made)
        needed += parameter.numel() * size * ((not made) + _TRAINED * parameter.requires_grad)
    if config.strategy == "fsdp":
        needed = max(needed // config.processes, weights)
    if device.type == "cpu":
        needed *= config.devices
    free = free_bytes(device)
    if free is not None and needed > free:
        raise InputError(
            f"model: expected one that fits into the free memory, {free / _GIB:,.1f} GiB, found {count:,} parameters, "
            f"whose training needs at least {needed / _GIB:,.1f} GiB; lower its sizes"
        )


def check_batch(task: Task, config: TrainConfig) -> None:
    """Raise InputError if a training batch of the longest rows does not fit into the machine's free memory.

    Only the data are counted: `Task.example` times the rows. Each process builds the whole batch on the CPU. Without
    this check, building such a batch takes hours before memory ends.
    """
    row = sum(leaf.nbytes for leaf in leaves(task.example()))
    needed, free = row * config.batch_size * config.devices, free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise InputError(
            f"train.batch_size: expected rows that fit into the free memory, {free / _GIB:,.1f} GiB, found "
            f"{config.batch_size:,}, whose data alone need {needed / _GIB:,.1f} GiB; lower it"
        )


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU, or of this machine or container with its swap; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [total for total in (_of_machine(), _of_container()) if total is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] + sizes.get("SwapFree", 0) if "MemAvailable" in sizes else None


def _of_container() -> int | None:
    """The limit of the control group, if there is one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            return int(Path(path).read_text())
    return None
