"""Whether a recipe's model can be built and trained on this machine, found out before memory is used for it."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mnemos.config import ModelConfig
from mnemos.types import InputError

from .recipe import TrainConfig

MOST_MODULES = 30_000  # the deepest published models have some thousand; building more takes minutes
_BYTES = {"bf16-true": 2, "64-true": 8}  # of a weight, by precision; 4 for the others
_COPIES = 4  # of each weight: itself, its gradient and two moments of the optimiser
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

    model: on the meta device. This is a lower bound of what training needs: activations are not counted. On the CPU
    the processes of a machine share its memory.
    """
    size = _BYTES.get(config.precision, 4)
    count = sum(parameter.numel() for parameter in model.parameters())
    needed = count * size * _COPIES
    if config.strategy == "fsdp":
        needed = max(needed // config.processes, count * size)
    if device.type == "cpu":
        needed *= config.devices
    free = free_bytes(device)
    if free is not None and needed > free:
        raise InputError(
            f"model: expected one that fits into the free memory, {free / _GIB:,.1f} GiB, found {count:,} parameters, "
            f"whose training needs at least {needed / _GIB:,.1f} GiB; lower its sizes"
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
