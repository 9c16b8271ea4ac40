"""Devices and processes through Lightning Fabric. No other module imports it at run time."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from mnemos.errors import one_line
from mnemos.types import Advances, InputError

from .recipe import TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric  # importing it takes longer than a small run
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_PER_CORE = 4  # processes on a CPU that are worth trying
_left: list[bool] = []  # not empty where the processes of this program have parted (`part`)
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # by which several machines find each other without a launcher


def connect(config: TrainConfig, resumed: str | Path | None = None) -> Fabric:
    """A launched Fabric with the device, precision and processes of a recipe; without a launcher such as torchrun or
    srun, it starts this machine's other processes (docs/machines.md).

    resumed: the folder of a run that goes on, which keeps its number of processes. Raises InputError if the machine
    does not have the devices, or there are other processes than the recipe says.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    # Messages of Fabric and FSDP that a user cannot act on; our models do not write into what a block returns.
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*FSDP2-wrapped module .* returned a view tensor.*")
    _check_processes(config, resumed)
    on_cpu = config.accelerator == "cpu" or (config.accelerator == "auto" and not _has_gpu())
    if config.precision == "16-mixed" and on_cpu:  # Fabric would train in bfloat16, without its scaler
        where = "" if resumed is None else f"; its weights start a new run: {_again(resumed)} --train.precision 32-true"
        raise InputError(
            f"train.precision: expected 32-true or bf16-mixed on a CPU, found 16-mixed, which needs a GPU{where}"
        )
    if _left and config.processes > 1:  # to meet again at the same address may wait without end
        raise InputError(
            "train: expected one training with several processes in a program, found another before it, after which "
            "its processes parted; start a program for each"
        )
    strategy: Any = "auto"
    if config.strategy == "fsdp":
        from lightning_fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(_shard, data_parallel_size=config.processes, tensor_parallel_size=1)
    elif uses_ddp(config):
        from lightning_fabric.strategies import DDPStrategy

        # A short segment may not reach the gates, which then have no gradient; DDP would wait for it without end.
        strategy = DDPStrategy(find_unused_parameters=True)
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            strategy=strategy,
            devices=config.devices,
            num_nodes=config.num_nodes,
            precision=config.precision,
        )
        fabric.launch()
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        asked = f"{config.accelerator!r}, {config.devices} device(s), {config.strategy!r}, {config.precision!r}"
        where = "" if resumed is None else f" in a new run: {_again(resumed)}"
        raise InputError(
            f"train: {asked} is not available on this machine ({one_line(error)}); change train.accelerator or "
            f"train.devices{where}"
        ) from None
    if fabric.world_size > 1:
        # The group is left at exit rather than after training: another training in this program uses the processes.
        # Otherwise gloo's threads abort the program.
        atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
    return fabric


def part() -> None:
    """Let the processes go: afterwards each is alone. Waits for all of them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        if torch.distributed.get_world_size() > 1:
            _left.append(True)
        torch.distributed.destroy_process_group()


def _again(run: str | Path) -> str:
    return f"mnemos train {run}/recipe.json --from {run}"


def _check_processes(config: TrainConfig, resumed: str | Path | None) -> None:
    from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    kept = ""
    if resumed is not None:
        kept = (
            f"a run is resumed with its own number of processes, {config.processes}; with another, start a new run: "
            f"{_again(resumed)} --train.devices N"
        )
    if TorchElasticEnvironment.detect():
        launcher, started, here = "torchrun", int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect():
        launcher, started = "srun", int(os.environ["SLURM_NTASKS"])
        here = started // int(os.environ.get("SLURM_NNODES", "1"))
    else:
        most = _PER_CORE * (os.cpu_count() or 1)
        if config.devices > most and (config.accelerator == "cpu" or (config.accelerator == "auto" and not _has_gpu())):
            raise InputError(
                f"train.devices: expected at most {most} processes on the {os.cpu_count()} cores of this machine, "
                f"found {config.devices}; {kept or 'lower it'}"
            )
        missing = [name for name in _MEETING if name not in os.environ]
        if config.num_nodes > 1 and missing:
            raise InputError(
                f"train.num_nodes is {config.num_nodes}: expected {', '.join(_MEETING)} in the environment on each "
                f"machine, or torchrun or srun, found no {missing[0]}; see docs/machines.md"
            )
        return
    if (here, started) != (config.devices, config.processes):
        raise InputError(
            f"train: {launcher} started {started} processes, {here} per machine: expected train.devices {here} and "
            f"train.num_nodes {started // here}, found {config.devices} and {config.num_nodes}; "
            f"{kept or f'set --train.devices {here} --train.num_nodes {started // here}'}"
        )


def _has_gpu() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available()


def uses_ddp(config: TrainConfig) -> bool:
    """Whether the recipe's model is wrapped in DistributedDataParallel."""
    return config.strategy == "ddp" or (config.strategy == "auto" and config.processes > 1)


def _shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2: each block of the model is gathered when it runs, the other parameters for the whole forward."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = module.model
    assert isinstance(model, nn.Module)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    if isinstance(model, Advances):
        register_fsdp_forward_method(model, "advance")
    return module


def gather(fabric: Fabric, value: T) -> list[T]:
    """The values of all processes in the order of their ranks, on every process."""
    if fabric.world_size == 1:
        return [value]
    everyone = [value] * fabric.world_size
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def any_of(fabric: Fabric, asked: bool) -> bool:
    """Whether `asked` is true on any process; the same result on every process."""
    if fabric.world_size == 1:
        return asked
    votes: Any = fabric.all_reduce(torch.tensor(float(asked), device=fabric.device), reduce_op="sum")
    return votes.item() > 0


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Context with this number of threads within operations on the CPU; 0: with the present number."""
    before = torch.get_num_threads()
    try:
        if count:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process in bytes: GPU memory if it uses a GPU, otherwise resident memory (0 on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
