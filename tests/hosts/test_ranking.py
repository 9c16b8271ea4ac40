"""Which attentions need their far past: losses in a window against Transformers' own attention under a written mask."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_models import plain
from refusals import refuses
from torch import Tensor
from torch.nn import functional as F

import mnemos
from mnemos.hosts.ranking import WindowLoss, rank, show_heads
from mnemos.libraries import transformers

FAMILIES = ("llama", "gpt2", "gemma3", "opt", "Cohere2", "phi")


def llama(layers: int = 4) -> Any:
    model = plain("llama", num_hidden_layers=layers).float()
    with torch.no_grad():  # far from the start, so that attentions do much and differ from each other
        for i, layer in enumerate(model.model.layers):
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
                projection.weight *= 2 + i
    return model


def pieces(count: int = 2, length: int = 30) -> list[Tensor]:
    return list(torch.randint(3, 40, (count, length), generator=torch.Generator().manual_seed(1)))


@torch.no_grad()
def nats_by_mask(model: Any, ids: Tensor, first: int, window: int, heads: dict[int, Collection[int]]) -> float:
    """The oracle without sinks: softmax under a mask, in which these key heads of these layers have the window."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any, scaling: float, **_: Any) -> Any:
        t, groups = q.shape[2], q.shape[1] // k.shape[1]
        seen = torch.ones(q.shape[1], t, t).tril()
        for head in heads.get(module.layer_idx, ()):
            seen[head * groups : (head + 1) * groups] = torch.ones(t, t).tril().triu(1 - window)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        weights = ((q @ k.mT) * scaling).masked_fill(seen == 0, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2), weights

    transformers().AttentionInterface.register("windowed_by_mask", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("windowed_by_mask")
    try:
        found = model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)
    return float(F.cross_entropy(found[first - 1 : -1], ids[first:]))


def test_losses_are_those_of_softmax_under_a_mask() -> None:
    model, texts = llama(), [pieces()[0], pieces()[1].int()]
    with WindowLoss(model, texts, window=5, sinks=0, first=9) as loss:
        every = {name: i for i, name in enumerate(loss.names)}
        found = {
            full: loss(full, keep=len(full) % 2 == 0)
            for full in ((), loss.names[:2], loss.names, loss.names[1:], loss.names[::3])
        }
        heads = {name: [0, 1] for name in loss.names} | {loss.names[2]: [0]}
        head = loss.with_heads(heads)
        some = loss.with_heads({loss.names[0]: (1, 0), loss.names[1]: (1,)})
        again = loss(loss.names[1:])
    for full, nats in found.items():
        windowed = {i: (0, 1) for name, i in every.items() if name not in full}
        expected = [nats_by_mask(model, ids.long(), 9, 5, windowed) for ids in texts]
        torch.testing.assert_close(nats.tolist(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(again, found[tuple(every)[1:]])
    expected = [nats_by_mask(model, ids.long(), 9, 5, {2: (1,)}) for ids in texts]
    torch.testing.assert_close(head.tolist(), expected, rtol=1e-5, atol=1e-5)
    windowed = {1: (0,)} | {i: (0, 1) for i in range(2, len(every))}
    expected = [nats_by_mask(model, ids.long(), 9, 5, windowed) for ids in texts]
    torch.testing.assert_close(some.tolist(), expected, rtol=1e-5, atol=1e-5)
    spread = torch.stack(list(found.values())).std(0)
    assert bool((spread > 1e-3).all())  # the window does change these losses


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_kept_of_lower_blocks_changes_nothing(name: str) -> None:
    """And a hybrid with the same attentions whole has the same loss; afterwards the model is as before, bit for bit."""
    model, (ids,) = plain(name).float(), pieces(1)
    call = lambda: model(input_ids=ids[None], use_cache=False).logits[0].detach()  # noqa: E731
    before = call()
    with WindowLoss(model, [ids], window=6, sinks=2, first=10) as loss:
        names = loss.names
        for whole in ((), names[:1], names):
            fresh = loss(whole)
            loss(names, keep=True)
            assert torch.equal(loss(whole), fresh)
            assert torch.equal(loss(whole, keep=True), fresh)
            loss._kept = None
        fresh = loss(names[:1])
    assert torch.equal(call(), before)
    assert not any("linearised" in key for key, _ in model.named_modules())
    if len(names) < 2:
        return
    report = mnemos.linearise(model, window=6, sinks=2, state="none", full=names[:1])
    assert [one.name for one in report.changed] == list(names[1:])
    assert f"left {names[0]}: full= leaves it whole" in str(report)
    assert str(report).endswith("beside the keys and values of what is left")
    torch.testing.assert_close(float(fresh), float(F.cross_entropy(call()[9:-1], ids[10:])), rtol=1e-5, atol=1e-5)


def test_nothing_is_kept_of_blocks_that_are_called_twice() -> None:
    model, (ids,) = llama(2), pieces(1)
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3
    model.config.layer_types = ["full_attention"] * 3
    with WindowLoss(model, [ids], window=6, sinks=2, first=10) as loss:
        fresh = loss(loss.names)
        loss(loss.names, keep=True)
        assert torch.equal(loss(loss.names), fresh)


def test_nothing_is_kept_of_blocks_whose_forward_was_replaced() -> None:
    model, (ids,) = llama(2), pieces(1)
    with WindowLoss(model, [ids], window=6, sinks=2, first=10) as loss:
        expected = loss(loss.names[1:])
    calls = []
    for block in model.model.layers:  # as accelerate's hooks do
        own = block.forward
        block.forward = lambda *args, own=own, **options: (calls.append(1), own(*args, **options))[1]
    with WindowLoss(model, [ids], window=6, sinks=2, first=10) as loss:
        for _ in range(2):
            loss(loss.names, keep=True)
        assert torch.equal(loss(loss.names[1:]), expected)
    assert len(calls) == 3 * 2
    assert all("forward" in vars(block) for block in model.model.layers)


def test_the_order_is_that_of_trying_each() -> None:
    model, texts = llama(), [ids[: 30 - 9 * i] for i, ids in enumerate(pieces())]
    calls: list[tuple[int, int]] = []
    options: Any = {"window": 5, "sinks": 1, "first": 8}
    ranking = mnemos.rank_attentions(model, texts, **options, heads=True, progress=lambda *n: calls.append(n))
    assert calls == [(n, 19) for n in range(1, 20)]  # one whole, eight key heads, 4 + 3 + 2 + 1

    with WindowLoss(model, texts, **options) as loss:
        mean = lambda nats: sum(float(x) * n for x, n in zip(nats, (22, 13), strict=True)) / 35  # noqa: E731
        left, order, nats = list(loss.names), list[str](), [mean(loss(loss.names))]
        alone = {name: mean(loss([x for x in left if x != name])) - nats[0] for name in left}
        every = {name: (0, 1) for name in left}
        by_head = {name: [mean(loss.with_heads({**every, name: (1 - i,)})) - nats[0] for i in (0, 1)] for name in left}
        while left:
            value, name = min((mean(loss([x for x in left if x != one])), one) for one in left)
            left.remove(name)
            order, nats = [name, *order], [value, *nats]
        apart = rank(loss, jointly=False, heads=False)
        by_alone = sorted(loss.names, key=lambda name: -alone[name])
        sums = [mean(loss(by_alone[:n])) for n in range(5)]
    assert ranking.names == loss.names
    assert ranking.order == tuple(order)
    torch.testing.assert_close(ranking.nats, tuple(nats), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ranking.alone, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ranking.heads, by_head, rtol=1e-9, atol=1e-9)
    assert (ranking.window, ranking.sinks, ranking.tokens) == (5, 1, 35)
    assert apart.order == tuple(by_alone)
    torch.testing.assert_close(apart.nats, tuple(sums), rtol=1e-9, atol=1e-9)

    assert set(ranking.full(2)) == set(order[:2])
    assert list(ranking.full(3)) == [name for name in ranking.names if name in order[:3]]
    assert ranking.closed(0) == 0
    assert ranking.closed(4) == 1
    assert ranking.closed(1) == pytest.approx((nats[0] - nats[1]) / (nats[0] - nats[4]))
    lines = str(ranking).splitlines()
    assert [line.split()[:2] for line in lines[3:7]] == [[str(n), name] for n, name in enumerate(order, 1)]
    refuses("expected 0 to 4 attentions, found 5", ranking.full, 5)

    losses = sorted(((by_head[name][i], name, i) for name in by_head for i in (0, 1)), reverse=True)
    for count in range(9):
        heads = {(name, i) for _, name, i in losses[:count]}
        assert ranking.full_heads(count) == tuple(
            name if len(some) == 2 else f"{name}:{some[0]}"
            for name in ranking.names
            if (some := [i for i in (0, 1) if (name, i) in heads])
        )
    refuses("expected 0 to 8 key heads, found 9", ranking.full_heads, 9)
    refuses("set heads=True", apart.full_heads, 1)
    for wrong in (1.5, "2", True, -1):
        for ask in (ranking.full, ranking.full_heads, ranking.closed):
            refuses(f"found {wrong!r}; change it", ask, wrong)
    below = str(ranking).splitlines()[-4:]
    assert [line.split() for line in below] == [[name, *(f"{x:.4f}" for x in by_head[name])] for name in ranking.names]
    assert "there is no gap to close" in str(ranking)
    assert "%" not in str(ranking)
    assert show_heads({"a": [1.0, 1.0], "b": [0.5]}, 1).count("*") == 2  # of equal losses one, and in the title
    losing = str(replace(ranking, nats=(4.0, 3.5, 3.0, 2.5, 2.0), heads=None)).splitlines()
    assert [line.split()[2] for line in losing[2:]] == ["25%", "50%", "75%", "100%"]


def test_what_is_refused() -> None:
    model, texts = llama(2), pieces()
    for given, message in (
        ({"pieces": []}, "found none; give longer ones"),
        ({"pieces": texts, "first": 30}, r"more than first=30 token ids, found \[30\], \[30\]"),
        ({"pieces": [[3, 4, 5] * 20]}, "token ids, found list;"),
        ({"pieces": texts[0]}, r"pieces \[T\], .* found \[\], \[\]"),
        ({"pieces": [texts[0][None]]}, r"pieces \[T\], .* found \[1, 30\]; .*its row"),
        ({"pieces": [texts[0] * 1.0]}, "expected token ids from 0 to below .*, found torch.float32 from"),
        ({"pieces": [texts[0], texts[1] + 1000]}, "below .*, found torch.int64 from 10[0-9]{2} to 10"),
        ({"first": 0}, "first: expected at least 1, found 0"),
        ({"window": 26}, "window=26 and sinks=4 together, found at most 30"),
        ({"window": 0}, "linearise.window: expected at least 1"),
        ({"window": 5, "where": "model.layers.9.self_attn"}, "names no module"),
        ({"model": model.model, "window": 5}, "found a LlamaModel without logits"),
        ({"model": "llama", "window": 5}, "found a str; pass the model"),
    ):
        refuses(message, mnemos.rank_attentions, **{"model": model, "pieces": texts, "first": 3, **given})
        assert not hasattr(model.config, "mnemos_linearised")
    ranking = mnemos.rank_attentions(model, texts, window=5, first=8)
    for full, message in (
        ("model.layers.9.self_attn", r"full='model\.layers.9\.self_attn' names no module"),
        ("model.layers.*.self_attn", "full= leaves it whole"),
        ({"model.layers.0.self_attn": [0]}, "found full= dict"),
        (8, r"found full=8 .*rank_attentions\(model, pieces\)\.full\(8\)"),
        (ranking, r"found full= AttentionRanking; give .*\.full\(COUNT\)"),
        ("model.layers.0", "found 'model.layers.0', which is none; name 'model.layers.0.self_attn' and the like"),
        (["model.layers.0.self_attn", "model.layers.1.mlp"], "found 'model.layers.1.mlp', which is none"),
        ("", "found 'the model', which is none"),
        ([8], "full: expected names of modules, found 8; give strings"),
    ):
        refuses(message, mnemos.linearise, model, full=full)
    mnemos.linearise(model, window=6)
    refuses(r"found a linearised one; call mnemos\.unlinearise", mnemos.rank_attentions, model, texts, first=3)
