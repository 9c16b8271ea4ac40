"""Two real processes: the gradients of one with the whole batch, reduced once a rollout."""

import contextlib
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from replay_standins import Cell, agree, plain
from torch import nn

from mnemos import InputError, replay

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="torch without processes")]
ROLLOUTS = 2
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("ddp", 5, {}),
    ("ddp", 1, {}),  # the last state is unused: its parameters must take part all the same
    ("ddp", 6, {"checkpoints": 2}),
    ("ddp", 5, {"truncate_every": 1}),
    ("ddp", 6, {"truncate_every": 3}),
    ("ddp", 5, {"advance": True}),
    ("ddp", 5, {"no_sync": True}),
    ("ddp", 3, {"model": "Recurrent"}),
    ("fsdp", 5, {}),
    ("fsdp", 1, {}),
    ("fsdp", 6, {"truncate_every": 2, "checkpoints": "sqrt"}),
    ("fsdp", 5, {"advance": True}),
]
NAMES = [f"{how}, {count} steps, {', '.join(options) or 'plain'}" for how, count, options in CASES]


class Writer(nn.Module):
    """What writes the state is in no loss but those of later steps; running statistics that differ by process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.write, self.norm = Cell(dropout=0.0), nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False)
        self.double()

    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        loss, _ = self.cell(x, state)
        return loss, self.advance(x, state)

    def advance(self, x: torch.Tensor, state: Any) -> Any:
        self.norm(x[:, 0])
        new = self.cell.advance(x, state)
        return {**new, "h": torch.tanh(self.write(new["h"]))}


class Recurrent(nn.Module):
    """A first step, without a state, uses no recurrent weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.write, self.norm = nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False)
        self.double()

    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        new = self.cell(x[:, 0]) if state is None else self.cell(x[:, 0]) + self.write(state)
        self.norm(x[:, 0])
        return new.square().mean(), torch.tanh(new)


def data(count: int, rows: slice) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(4)
    return [torch.randn(6, 2, 5, generator=drawn, dtype=torch.float64)[rows] for _ in range(count)]


def _rank(rank: int, world: int, folder: str) -> None:
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter, counted = getattr(dist, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append("scatter")
        return scatter(*args, **kwargs)

    setattr(dist, name, counting)

    def hook(_, bucket):
        counted.append("reduce")
        total = bucket.buffer().div_(world)
        return dist.all_reduce(total, async_op=True).get_future().then(lambda f: f.value()[0])

    for number, (how, count, options) in enumerate(CASES):
        given = dict(options)
        own: Any = globals()[given.pop("model", "Writer")]()
        if how == "ddp":
            model: Any = nn.parallel.DistributedDataParallel(own)
            model.register_comm_hook(None, hook)
        else:
            from torch.distributed.fsdp import fully_shard

            model = fully_shard(own)
        if "advance" in given:
            given["advance"] = own.advance if how == "ddp" else _state(model)
        if "no_sync" in given:
            given["no_sync"] = model.no_sync
        counted.clear()
        found: list[Any] = []
        for _ in range(ROLLOUTS):
            out = replay(model, data(count, slice(3 * rank, 3 * rank + 3)), **{"module": model, **given})
            grads = {k: p.grad for k, p in own.named_parameters()}
            found.append({k: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for k, g in grads.items()})
            model.zero_grad()
        torch.save((found, list(counted), out.loss, dict(own.named_buffers())), f"{folder}/{number}.{rank}")
    torch.save((_failure(), _unwrapped()), f"{folder}/failure.{rank}")
    dist.barrier()


def _state(model: Any) -> Any:
    return lambda x, state: model(x, state)[1]


def _failure() -> str:
    """A rollout whose first step has no gradient to reduce says so, and does not leave processes apart."""
    model = nn.parallel.DistributedDataParallel(Writer(), find_unused_parameters=True)

    def step(x: torch.Tensor, state: Any) -> Any:
        loss, new = model(x, state)
        return (loss, new) if state is not None else (loss.detach(), {**new, "h": new["h"].detach()})

    try:
        replay(step, data(3, slice(0, 3)), module=model)
    except InputError as error:
        return str(error)
    return "nothing"


def _unwrapped() -> str:
    """A step that calls the model inside its wrapper would leave each process with gradients of its own."""
    model = nn.parallel.DistributedDataParallel(Writer())
    with model.no_sync():  # the caller's: gradients of several rollouts are reduced later
        replay(model, data(3, slice(0, 3)))
    replay(model.module, data(3, slice(0, 3)), module=model, no_sync=contextlib.nullcontext)  # reduced by hand
    both = nn.ModuleList([model, nn.parallel.DistributedDataParallel(Recurrent())])  # of which one is not called
    replay(model, data(3, slice(0, 3)), module=both)
    try:
        replay(model.module, data(3, slice(0, 3)), module=model)
    except InputError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    processes.together(_rank, str(folder))
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_two_processes_equal_one_and_reduce_once(results, number):
    how, count, options = CASES[number]
    model = globals()[options.get("model", "Writer")]()
    plain(model, data(count, slice(0, 6)), every=options.get("truncate_every", 10**9))
    expected = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    first, second = (torch.load(results / f"{number}.{rank}") for rank in (0, 1))
    for found, counted, _, buffers in (first, second):
        for rollout in found:
            agree(rollout, expected, 1e-12)
        assert counted == [{"ddp": "reduce", "fsdp": "scatter"}[how]] * ROLLOUTS
        assert buffers["norm.num_batches_tracked"] == ROLLOUTS * count
    agree((first[2] + second[2]) / 2, plain(model, data(count, slice(0, 6)))[0], 1e-12)


def test_a_first_step_without_gradient_is_named(results):
    without_gradient, _ = torch.load(results / "failure.0")
    assert "step 0: expected a loss or a state that requires gradient" in without_gradient


def test_a_step_that_does_not_call_the_wrapper_is_refused(results):
    _, unwrapped = torch.load(results / "failure.1")
    assert "expected the first segment to call the DistributedDataParallel of Writer" in unwrapped
