"""Devices and processes, by Lightning Fabric: the only room of the house that knows it."""

from __future__ import annotations

import atexit
import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mnemos.types import InputError

from .recipe import TrainConfig

if TYPE_CHECKING:  # its import takes longer than a small run
    from lightning_fabric import Fabric


def connect(config: TrainConfig) -> Fabric:
    """A launched Fabric: the device, the precision and the processes that a recipe asks for.

    strategy "auto": one device, or DDP on several. With several devices and no torchrun, the other processes are
    started here, by running this program again; under torchrun they are there already.
    Raises InputError where the machine does not have what is asked for.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    _hush()

    strategy: Any = "auto"
    if config.strategy == "fsdp":
        from lightning_fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(_shard, data_parallel_size=config.devices, tensor_parallel_size=1)
    elif config.strategy == "ddp" or config.devices > 1:
        from lightning_fabric.strategies import DDPStrategy

        # Gates that a short segment does not reach have no gradient that time; DDP would wait for it for ever.
        strategy = DDPStrategy(find_unused_parameters=True)
    try:
        fabric = Fabric(
            accelerator=config.accelerator, strategy=strategy, devices=config.devices, precision=config.precision
        )
        fabric.launch()
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        asked = f"{config.accelerator!r}, {config.devices} device(s), {config.strategy!r}, {config.precision!r}"
        problem = " ".join(str(error).split())
        raise InputError(f"train: {asked} is not to be had here ({problem}); change accelerator or devices") from None
    if fabric.world_size > 1:
        # Not at the end of a training: another one in this program goes on with the same processes.
        atexit.register(_leave)
    return fabric


def _leave() -> None:
    """Take leave of the other processes; gloo's threads abort a program that ends without it."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _shard(module: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2: each of the model's blocks is gathered when it runs; what is outside them stays for the whole forward.

    FSDP2 wants every process to reach the same parameters in an update. Where the rows decide which gates run (a
    causal gated cache whose rows are reset at different places), use DDP.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model: Any = module.model
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    if hasattr(model, "advance"):
        register_fsdp_forward_method(model, "advance")
    return module


def _hush() -> None:
    """Keep what Fabric, DDP and FSDP say about themselves off the screen: none of it is the user's to act on."""
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    for message in (
        ".*find_unused_parameters=True was specified.*",  # right: see connect
        ".*FSDP2-wrapped module .* returned a view tensor.*",  # our models do not write into what a block returns
    ):
        warnings.filterwarnings("ignore", message)


def gather(fabric: Fabric, value: Any) -> list[Any]:
    """Every process's value, in the order of their ranks, on all of them."""
    if fabric.world_size == 1:
        return [value]
    everyone: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def any_of(fabric: Fabric, asked: bool) -> bool:
    """Whether some process says yes: the same answer on all of them."""
    if fabric.world_size == 1:
        return asked
    votes: Any = fabric.all_reduce(torch.tensor(float(asked), device=fabric.device), reduce_op="sum")
    return votes.item() > 0


def device_name(device: torch.device) -> str:
    """What a result says it ran on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held: of the GPU's where it uses one, else of the machine's (0 on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
