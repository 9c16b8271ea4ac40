"""The cache's commit: once a forward and never twice, under everything that runs a forward more than once."""

import contextlib

import pytest
import torch
from refusals import refuses
from torch.utils.checkpoint import checkpoint

from mnemos import GRC, InputError, Transformer
from mnemos.attention import GatedCacheAttention
from mnemos.memory import gated_cache
from mnemos.memory.gated_cache import accumulate_caches, caches, clear_caches, hold_caches


def layer(preset="mnemos", seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return GatedCacheAttention(8, 2, grc=GRC(length=4, preset=preset)).to(dtype)


def batch(rows=4, seed=1):
    return torch.randn(rows, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def empty(module):
    return not module.cache.any()


@pytest.mark.parametrize("end", [lambda m: m(batch(seed=2)), lambda m: m.eval(), lambda m: m.state_dict()])
def test_a_forward_is_committed_at_the_next_one_at_eval_and_at_a_save(end):
    """Into the buffer that is there."""
    module = layer()
    where = module.cache.data_ptr()
    module(batch())[0].sum().backward()
    assert empty(module), "the forward itself commits nothing"
    pending = module.pending.clone()
    end(module)
    assert torch.equal(module.cache, pending)
    assert dict(module.named_buffers())["cache"].data_ptr() == where


def test_any_number_of_checkpointed_forwards_may_read_one_content():
    module = layer()
    with accumulate_caches(module):
        rows = [checkpoint(lambda x: module(x)[0], batch(seed=i), use_reentrant=False) for i in range(10)]
        sum(y.sum() for y in rows).backward()
    assert module.mix.grad is not None


def test_eight_checkpointed_forwards_that_read_different_contents_are_kept():
    def gradients(count, run):
        module = layer()
        sum(run(module, batch(seed=i)).sum() for i in range(count)).backward()
        return [p.grad for p in module.parameters()]

    plain, repeated = lambda m, x: m(x)[0], lambda m, x: checkpoint(lambda y: m(y)[0], x, use_reentrant=False)
    for found, wanted in zip(gradients(8, repeated), gradients(8, plain), strict=True):
        torch.testing.assert_close(found, wanted)
    refuses("a stored cache: expected to know .* found 8 contents", gradients, 9, repeated)


def test_a_repeated_forward_whose_first_one_was_not_seen_reads_what_is_stored():
    stored = torch.randn(3, 4)
    found = gated_cache.Reads().again(stored)
    assert torch.equal(found, stored)
    assert found is not stored


def test_eval_writes_nothing_and_clearing_forgets():
    module = layer().eval()
    module(batch())
    assert empty(module.train().eval())
    module.train()(batch())
    clear_caches(module)
    assert empty(module.eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float32 takes the kernels
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_commits_once_and_changes_no_gradient(reentrant, dtype):
    plain, checked = layer(dtype=dtype), layer(dtype=dtype)
    for seed in (1, 2, 3):
        grads = []
        for module in (plain, checked):
            x = batch(seed=seed).to(dtype).requires_grad_()
            module.zero_grad()
            y = module(x)[0] if module is plain else checkpoint(lambda x: checked(x)[0], x, use_reentrant=reentrant)
            y.square().sum().backward()
            grads.append([x.grad, *(p.grad.clone() for p in module.parameters())])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(plain.cache, checked.cache)
        torch.testing.assert_close(plain.pending, checked.pending)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("micro", [False, True])
def test_function_transforms_commit_what_a_backward_does(dtype, micro):
    plain, other = layer(dtype=dtype), layer(dtype=dtype)

    def loss(weights, x):
        return torch.func.functional_call(other, weights, (x,))[0].square().sum()

    for seed in (1, 2):
        plain.zero_grad()
        weights = {key: p.detach() for key, p in other.named_parameters()}
        with contextlib.ExitStack() as stack:
            if micro:
                for module in (plain, other):
                    stack.enter_context(accumulate_caches(module))
            for x in batch(seed=seed).to(dtype).split(2 if micro else 4):
                plain(x)[0].square().sum().backward()
                found = torch.func.grad(loss)(weights, x)
                if not micro:
                    for key, p in plain.named_parameters():
                        torch.testing.assert_close(found[key], p.grad, rtol=1e-4, atol=1e-5)
        for name in ("cache", "pending", "pending_rows"):
            torch.testing.assert_close(getattr(other, name), getattr(plain, name))
    rows = batch().to(dtype)[:, None]
    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with pytest.raises(InputError, match=r"found one sample .*hold_caches"):
        each(weights, rows)
    with hold_caches(other):
        alone = each(weights, rows)["mix"][1]
        torch.testing.assert_close(alone, torch.func.grad(loss)(weights, rows[1])["mix"], rtol=1e-4, atol=1e-5)


def test_two_forwards_before_a_backward_do_not_disturb_each_other():
    module, other = layer(), layer()
    losses = [module(batch(seed=s))[0].square().sum() for s in (1, 2)]
    losses[0].backward()
    other(batch(seed=1))[0].square().sum().backward()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_forward_that_fails_half_way_commits_nothing():
    torch.manual_seed(0)
    model = Transformer(vocab_size=7, dim=8, layers=3, num_heads=2, mlp=8, max_length=16, cache=GRC(length=2))
    x = torch.randint(7, (2, 16))
    model(x)
    good = [c.pending.clone() for c in caches(model)]
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    stored = [c.cache.clone() for c in caches(model)]
    for a, b in zip(stored, good, strict=True):
        assert torch.equal(a, b), "what the last whole forward left was committed"
    model.eval()
    for a, c in zip(stored, caches(model), strict=True):
        assert torch.equal(a, c.cache), "what the broken one left was not"


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_micro_batch_that_fails_drops_the_update_of_all(failed):
    module = layer()
    with accumulate_caches(module):
        for i, piece in enumerate(batch(6).split(2)):
            with contextlib.suppress(InputError, RuntimeError):
                module(piece[..., :3] if i == failed else piece)
    assert module.complete
    assert empty(module.eval())
    module.train()(batch())
    assert not empty(module.eval())


def test_a_probe_can_be_told_not_to_write():
    module = layer()
    module(batch())
    before = module.pending.clone()
    with hold_caches(module), torch.no_grad():
        module(batch(seed=5))
    assert empty(module)
    assert torch.equal(module.eval().cache, before)


def test_empty_rows_leave_the_mean():
    module, alone = layer(), layer()
    x = batch(3)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    module(x, None, mask)
    alone(x[[0, 2]])
    torch.testing.assert_close(module.eval().cache, alone.eval().cache)
    module.train()(x, None, torch.zeros_like(mask))
    torch.testing.assert_close(module.eval().cache, alone.cache)


def test_loading_forgets_what_was_pending():
    module, fresh = layer(), layer(seed=3)
    module(batch())
    fresh(batch(seed=2))
    fresh.load_state_dict(module.state_dict())
    torch.testing.assert_close(fresh.eval().cache, module.eval().cache)
    on_meta = GatedCacheAttention(8, 2, grc=GRC(length=4)).to("meta")
    on_meta.load_state_dict(module.state_dict(), assign=True)
    on_meta.train()(batch())
    on_meta.eval()


@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
def test_gate_activity_can_be_recorded(preset):
    module = layer(preset)
    with hold_caches(module), gated_cache.traced(module) as records:
        module(batch())
    (record,) = records.values()
    assert set(record) == {"update_mean", "update_saturated", "reset_mean", "reset_saturated"}
    assert all(0 <= v <= 1 for values in record.values() for v in values)
    assert module.observer_of_gates is None


def test_an_accumulation_that_fails_commits_nothing():
    module = layer()
    with pytest.raises(ZeroDivisionError), accumulate_caches(module):  # noqa: PT012
        module(batch())
        assert not module.state_dict()["cache"].any(), "a save in between takes no part of an update"
        raise ZeroDivisionError
    assert empty(module.eval())


@pytest.mark.parametrize("failed", ["neither", "this", "other"])
def test_an_update_of_two_processes_is_the_mean_over_their_rows(failed, monkeypatch):
    """The sums of one are added where the other reduces its own. A failure in either drops the update of both."""
    monkeypatch.setattr(gated_cache, "several_processes", lambda: True)

    def process(pieces, fails, others=0):
        module, sent = layer(), []
        monkeypatch.setattr(gated_cache.dist, "all_reduce", lambda x: (sent.append(x.clone()), x.add_(others)))
        with accumulate_caches(module), contextlib.suppress(InputError):
            for x in pieces:
                module(x[..., :3] if fails else x)
        return module, sent[0]

    _, others = process([batch(6)[4:]], failed == "other")
    module, _ = process(batch(6)[:4].split([1, 3]), failed == "this", others)
    whole = layer()
    monkeypatch.undo()
    whole(batch(6))
    wanted = whole.eval().cache if failed == "neither" else torch.zeros_like(whole.cache)
    torch.testing.assert_close(module.eval().cache, wanted)


def test_a_process_without_a_valid_row_takes_the_update_of_the_other(monkeypatch):
    module, other, empty_rows = layer(), layer(), torch.zeros(4, 6, dtype=torch.bool)
    other(batch())
    sums = torch.cat([other.pending_rows, 4 * other.pending.flatten()])
    monkeypatch.setattr(gated_cache, "several_processes", lambda: True)
    monkeypatch.setattr(gated_cache.dist, "all_reduce", lambda x: x.add_(sums))
    module(batch(), None, empty_rows)
    torch.testing.assert_close(module.eval().cache, other.eval().cache)
    sums = torch.zeros_like(sums)  # nor has the other one
    module.train()(batch(), None, empty_rows)
    torch.testing.assert_close(module.eval().cache, other.cache)
    module.train()(batch(), None, empty_rows)
    monkeypatch.setattr(gated_cache.dist, "all_reduce", lambda x: x[:-1].add_(torch.ones(len(x) - 1)))
    with accumulate_caches(module):
        pass  # the other one's batches, of one row in all
    assert (module.eval().cache == 1).all()


def test_the_mean_that_is_read_is_that_of_all_processes(monkeypatch):
    module, sums = layer(), iter([torch.tensor([6.0, 4.0]), torch.tensor([2.0])])  # of the rows of the others
    mean, rows = torch.tensor([1.0, 4.0], requires_grad=True), torch.tensor([2.0])
    assert module.read_mean(mean, rows) == (mean, rows)
    monkeypatch.setattr(gated_cache, "several_processes", lambda: True)
    monkeypatch.setattr("torch.distributed.nn.functional.all_reduce", lambda x: x + next(sums))
    monkeypatch.setattr(gated_cache.dist, "all_reduce", lambda x: x.add_(next(sums)))
    found, count = module.read_mean(mean, rows)
    assert (found.tolist(), count.tolist(), rows.tolist()) == ([2, 3], [4], [2])
    assert torch.autograd.grad(found.sum(), mean)[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
def test_an_infinity_in_a_batch_is_not_stored(preset):
    module, twin = layer(preset), layer(preset)
    for model in (module, twin):
        model(batch())
    spoiled = batch(seed=2)
    spoiled[0, 0, 0] = torch.inf
    module(spoiled)
    module.eval(), twin.eval()
    assert module.cache.isfinite().all()
    lost = (module.cache == twin.cache).all(-1)
    assert lost[0], "the slot that saw it keeps what it held"
    assert preset == "official" or not lost[1:].any(), "the others move on"  # whose attention spreads it to all
    assert module(batch(seed=3))[0].isfinite().all()


def test_what_padding_holds_spoils_no_gradient():
    module, x = layer(), batch()
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = mask[2, 4:] = False
    grads = []
    for held in (0.0, torch.nan):
        module.zero_grad()
        cache = module.update(torch.where(mask[..., None], x, held)[..., :4], module.cache, mask)
        cache.sin().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
