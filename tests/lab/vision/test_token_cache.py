"""Tokens kept for the next batch: what is kept, when it is committed, what is refused."""

import copy

import processes
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mnemos.lab.vision.attention_cache import AttentionCache, TokenCache
from mnemos.memory.gated_cache import accumulate_caches, clear_caches, hold_caches, stored
from mnemos.types import InputError


def tokens(seed: int = 1, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cache(images: int = 2) -> TokenCache:
    return TokenCache(images, 5, 3).double()


def kept(module: TokenCache) -> torch.Tensor:
    """What the next forward would see behind its own tokens."""
    with torch.no_grad(), hold_caches(module):
        return module(tokens(9))[0, 5:]


def test_the_first_images_of_the_batch_before_stand_behind_every_row():
    module = cache()
    for seed in (1, 2, 3):
        longer = module(tokens(seed))
        assert longer.shape == (4, 15, 3)
        assert torch.equal(longer[:, :5], tokens(seed))
        if seed == 1:
            assert torch.equal(longer[:, 5:], tokens(1).repeat(1, 2, 1)), "its own, while there is nothing"
        else:
            assert torch.equal(longer[:, 5:], tokens(seed - 1)[:2].flatten(0, 1).expand(4, -1, -1))


def test_it_is_frozen_in_eval_and_under_a_probe():
    module = cache()
    module(tokens(1))
    before = module.eval().cache.clone()
    module(tokens(2))
    module.train()
    with hold_caches(module):
        module(tokens(3))
    module.eval()
    assert torch.equal(module.cache, before)
    assert torch.equal(before, tokens(1)[:2].flatten(0, 1))


def test_kept_tokens_carry_no_gradient_and_own_ones_do():
    module = cache()
    first = tokens(1).requires_grad_()
    module(first)
    x = tokens(2).requires_grad_()
    module(x).sum().backward()
    assert first.grad is None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_keeps_once(reentrant):
    plain, checked = cache(), cache()
    for seed in (1, 2, 3):
        x, z = tokens(seed).requires_grad_(), tokens(seed).requires_grad_()
        plain(x).square().sum().backward()
        checkpoint(checked, z, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x.grad, z.grad)
        assert torch.equal(kept(plain), kept(checked))


def test_micro_batches_keep_what_the_whole_batch_would():
    whole, parts = cache(), cache()
    whole(tokens(1))
    with accumulate_caches(parts):
        for part in tokens(1).split(2):
            parts(part)
    assert torch.equal(whole.eval().cache, parts.eval().cache)


def test_a_forward_that_fails_keeps_nothing():
    module = cache()
    module(tokens(1))
    before = module.eval().cache.clone()
    module.train()
    with pytest.raises(InputError, match=r"images=2.* found 1"):
        module(tokens(2, rows=1))
    assert torch.equal(module.eval().cache, before)


def test_copies_saves_and_emptying():
    module = cache()
    module(tokens(1))
    other = copy.deepcopy(module)
    other(tokens(2))
    fresh = cache()
    fresh.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(kept(fresh), kept(module))
    assert not torch.equal(kept(other.eval()), kept(module))
    clear_caches(module)
    assert module.cache.abs().max() == 0
    assert stored(module) == [module]


def test_autocast_keeps_float32():
    module = TokenCache(1, 5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(tokens().bfloat16()).dtype == torch.bfloat16
        assert module(tokens().bfloat16()).dtype == torch.bfloat16
    assert module.eval().cache.dtype == torch.float32


@pytest.mark.parametrize("x", [torch.zeros(2, 4, 3), torch.zeros(2, 5, 4), torch.zeros(5, 3)])
def test_other_tokens_are_refused(x):
    with pytest.raises(InputError, match=r"\[B, 5, 3\], found"):
        TokenCache(1, 5, 3)(x)


@pytest.mark.parametrize("images", [0, -1, 1.5, "1"])
def test_other_numbers_of_images_are_refused(images):
    with pytest.raises(InputError, match="images"):
        AttentionCache(images)


def _rank(rank: int, world: int, out: str) -> None:
    module = cache()
    for seed in (1, 2):
        module(tokens(seed, 5).split([2, 3])[rank])
    torch.save(module.eval().cache, f"{out}{rank}")


@pytest.mark.slow
def test_two_processes_keep_what_one_would(tmp_path):
    processes.together(_rank, str(tmp_path / "out"))
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"out{rank}"), tokens(2, 5)[:2].flatten(0, 1))
