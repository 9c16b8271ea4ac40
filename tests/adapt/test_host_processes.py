"""Two real processes: DDP of uneven batches, and FSDP2, equal one process with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hosts import build, example, given, loss, open_caches
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import accumulate, caches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without processes"),
]
SHARES = [3, 5]
ALL = sum(SHARES)
DDP_CASES = [
    # host, preset, what else: layers that run again, micro-batches
    ("timm_vit", "mnemos", ""),
    ("timm_vit", "paper", "recomputed"),
    ("torch_padded", "paper", ""),
    ("torch_padded", "official", "micro"),
    ("timm_swin", "mnemos", "micro"),
]
FSDP_CASES = [("timm_vit", "mnemos", ""), ("timm_vit", "paper", "recomputed")]


def cached(name: str, preset: str, more: str) -> nn.Module:
    model = build(name)
    torch.manual_seed(4)
    mnemos.cache(model, GRC(preset=preset, length=4), **given(name))
    open_caches(model)
    if more == "recomputed":
        model.set_grad_checkpointing()
    return model.train()


def steps(model: Any, own: nn.Module, name: str, more: str, rank: int | None, world: int = 1) -> dict[str, Any]:
    """Three updates on this process's rows, all of them for rank None; what they have done."""
    start, stop = (0, ALL) if rank is None else (sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    optimizer = torch.optim.SGD(own.parameters(), 1e-2)
    losses = []
    for seed in (1, 2, 3):
        batch = example(name, ALL, seed)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        if more == "micro":  # of two a process, those of one update
            with accumulate(own):
                for a, b in ((start, start + 1), (start + 1, stop)):
                    value = loss(model, batch.rows(a, b)) * world / ALL
                    value.backward()
                    total += value.detach()
        else:
            value = loss(model, batch.rows(start, stop)) * world / ALL
            value.backward()
            total += value.detach()
        optimizer.step()
        if rank is not None:
            dist.all_reduce(total)
        losses.append(total / world)
    return {"losses": losses}


def _rank(rank: int, world: int, cases: list, sharded: bool, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/port", rank=rank, world_size=world)
    torch.set_num_threads(1)
    for number, (name, preset, more) in enumerate(cases):
        own = cached(name, preset, more)
        if sharded:
            from torch.distributed.fsdp import fully_shard

            for block in own.blocks:
                fully_shard(block)
            model: Any = fully_shard(own)
        else:
            model = nn.parallel.DistributedDataParallel(own)
        found = steps(model, own, name, more, rank, world)
        if not sharded and rank == 0:
            own.eval()  # one process alone: must not wait for the others
        elif sharded:
            own.eval()
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in own.state_dict().items()}
        found["caches"] = [branch.cache for branch in caches(own)]
        if rank == 0:
            torch.save({**found, "state": full}, f"{folder}/{number}")
        else:
            own.eval()
            torch.save([branch.cache for branch in caches(own)], f"{folder}/{number}.other")
        dist.barrier()
    dist.destroy_process_group()


def compare(cases: list, sharded: bool, folder: Path) -> None:
    mp.spawn(_rank, (2, cases, sharded, str(folder)), nprocs=2)
    for number, (name, preset, more) in enumerate(cases):
        case = f"{name}, {preset}, {more}"
        found = torch.load(folder / str(number))
        model = cached(name, preset, "" if more == "micro" else more)
        expected = steps(model, model, name, "", None)
        model.eval()
        torch.testing.assert_close(found["losses"], expected["losses"], msg=lambda m, c=case: f"{c}: {m}")
        state = model.state_dict()
        assert list(found["state"]) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(found["state"][key], value, msg=lambda m, c=case, k=key: f"{c}, {k}: {m}")
        for a, b, c in zip(found["caches"], torch.load(folder / f"{number}.other"), caches(model), strict=True):
            torch.testing.assert_close(a, c.cache, msg=lambda m, c=case: f"{c}: {m}")
            assert torch.equal(a, b), "the processes have different caches"
            assert c.cache.abs().max() > 0


def test_two_processes_equal_one_with_the_whole_batch(tmp_path):
    compare(DDP_CASES, False, tmp_path)


def test_a_sharded_model_equals_a_whole_one(tmp_path):
    compare(FSDP_CASES, True, tmp_path)
