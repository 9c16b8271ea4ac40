"""Two real processes: DDP of uneven batches, and FSDP2, equal one process with the whole batch."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from decoder_models import plain
from hosts import cached, example, loss, open_caches
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import accumulate_caches, caches

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="torch without processes")]
SHARES = [3, 5]
ALL = sum(SHARES)
CASES = [
    # sharded or not, host, preset, and what else: layers that run again, micro-batches
    ("ddp", "timm_vit", "paper", "recomputed"),
    ("ddp", "torch_padded", "paper", ""),
    ("ddp", "torch_padded", "official", "micro"),
    ("ddp", "timm_swin", "mnemos", "micro"),
    ("fsdp", "timm_vit", "mnemos", ""),
    ("fsdp", "timm_vit", "paper", "recomputed"),
]


def trained(name: str, preset: str, more: str) -> nn.Module:
    """A cached host in training mode."""
    model = cached(name, preset)
    if more == "recomputed":
        model.set_grad_checkpointing()
    return model.train()


def steps(model: Any, own: nn.Module, name: str, more: str, rank: int | None, world: int = 1) -> dict[str, Any]:
    """Two updates on this process's rows, all of them for rank None; what they have done."""
    start, stop = (0, ALL) if rank is None else (sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    optimizer = torch.optim.SGD(own.parameters(), 1e-2)
    losses = []
    for seed in (1, 2):
        batch = example(name, ALL, seed)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        pieces = [(start, start + 1), (start + 1, stop)] if more == "micro" else [(start, stop)]
        with accumulate_caches(own) if more == "micro" else nullcontext():  # those of one update
            for piece in pieces:
                value = loss(model, batch.rows(*piece)) * world / ALL
                value.backward()
                total += value.detach()
        optimizer.step()
        if rank is not None:
            dist.all_reduce(total)
        losses.append(total / world)
    return {"losses": losses}


def distributed(own: nn.Module, how: str, **options: Any) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(own)
    from torch.distributed.fsdp import fully_shard

    for block in own.blocks:
        fully_shard(block, **options)
    return fully_shard(own, **options)


def _rank(rank: int, world: int, folder: str) -> None:
    for number, (how, name, preset, more) in enumerate(CASES):
        own = trained(name, preset, more)
        found = steps(distributed(own, how), own, name, more, rank, world)
        if how == "ddp" and rank == 1:
            dist.barrier()  # the first process alone leaves training and saves: it must not wait for the others
        own.eval()
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in own.state_dict().items()}
        torch.save({**found, "state": full}, f"{folder}/{number}.{rank}")
        if how == "ddp" and rank == 0:
            dist.barrier()
        dist.barrier()
    torch.save(_in_mixed_precision(), f"{folder}/half.{rank}")
    torch.save(_of_one_block(rank), f"{folder}/short.{rank}")


def _in_mixed_precision() -> list[torch.Tensor]:
    """The caches of a model whose sharded weights are lent in half precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    own = trained("timm_vit", "mnemos", "").float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = distributed(own, "fsdp", mp_policy=policy)
    for seed in (1, 2):
        loss(model, example("timm_vit", ALL, seed, torch.float32)).backward()
    own.eval()
    return [branch.cache for branch in caches(own)]


def _of_one_block(rank: int) -> list[dict[str, torch.Tensor]]:
    """The gradients of causal models after two updates of rows in which no block was completed."""
    decoder = plain("gpt2")
    mnemos.cache(decoder, GRC(length=4, preset="paper"))
    own = mnemos.Transformer(vocab_size=60, dim=12, layers=1, num_heads=2, mlp=8, max_length=8, cache=GRC(length=4))
    found = []
    for model in (decoder, own.double()):
        open_caches(model)
        parallel = nn.parallel.DistributedDataParallel(model.train())
        for seed in (1, 2):
            tokens = torch.randint(3, 40, (2, 3), generator=torch.Generator().manual_seed(2 * seed + rank))
            y = parallel(tokens)
            (y[0] if isinstance(y, tuple) else y.logits).square().sum().backward()
        found.append({key: p.grad for key, p in model.named_parameters()})
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    processes.together(_rank, str(folder))
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case).strip() for case in CASES])
def test_two_processes_equal_one_with_the_whole_batch(results, number):
    _, name, preset, more = CASES[number]
    first, second = (torch.load(results / f"{number}.{rank}") for rank in (0, 1))
    model = trained(name, preset, "" if more == "micro" else more)
    expected = steps(model, model, name, "", None)
    model.eval()
    torch.testing.assert_close(first["losses"], expected["losses"])
    state = model.state_dict()
    assert list(first["state"]) == list(state)
    for key, value in state.items():
        torch.testing.assert_close(first["state"][key], value, msg=lambda m, k=key: f"{k}: {m}")
        assert torch.equal(second["state"][key], first["state"][key]), f"{key} differs from process to process"
    assert all(branch.cache.abs().max() > 0 for branch in caches(model))


def test_rows_of_one_block_have_a_gradient_of_zero_for_the_gates(results):
    for gradients in torch.load(results / "short.0"):
        gates = {key: g for key, g in gradients.items() if "_gate." in key or ".candidate" in key}
        assert len(gates) in (8, 12)
        assert all(g is not None and not g.any() for g in gates.values())
        assert all(g.any() for key, g in gradients.items() if "weight" in key and key not in gates)


def test_sharded_weights_of_half_precision_keep_the_cache_in_float32(results):
    model = trained("timm_vit", "mnemos", "").float()
    for seed in (1, 2):
        loss(model, example("timm_vit", ALL, seed, torch.float32))
    model.eval()
    for found, branch in zip(torch.load(results / "half.0"), caches(model), strict=True):
        assert found.dtype == torch.float32
        assert (found - branch.cache).norm() < 0.05 * branch.cache.norm()
