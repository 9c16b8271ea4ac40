"""Gated caches in causal decoders of Hugging Face: no leak, and the host's own cache carries the state."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_models import FAMILIES, FEW, ids, in_parts, logits, plain
from hosts import close, open_caches
from refusals import refuses
from torch import Tensor

import mnemos
from mnemos import GRC
from mnemos.hosts.row_caches import RowState
from mnemos.libraries import transformers
from mnemos.memory.gated_cache import caches
from mnemos.memory.row_blocks import CacheState

EVERY = [*FEW, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES if name not in FEW)]
STREAM = GRC(length=4, block=3, scope="stream")
SHARED = GRC(length=4, block=3, preset="paper", inference="transient")
OFFICIAL = GRC(length=4, preset="official")
HEADS = replace(STREAM, mix="heads")


def cached(name: str, grc: GRC = STREAM, **options: Any) -> Any:
    model = plain(name, **options)
    mnemos.cache(model, grc)
    open_caches(model)
    return model


def pad(given: Tensor, *lengths: int) -> tuple[Tensor, Tensor]:
    """Tokens with so many pads at the left of each row, and their mask."""
    mask = torch.arange(given.shape[1]) >= torch.tensor(lengths)[:, None]
    return given.where(mask, 0), mask.long()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("grc", [STREAM, SHARED, HEADS], ids=["stream", "shared", "heads"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.each_value
def test_a_sequence_in_parts_is_the_whole_and_a_row_is_its_tokens(name, grc, attention):
    """Prefill in chunks, then single tokens, with padding on the left; each row alone, without padding, is the same."""
    # Hugging Face's eager attention takes its softmax in single precision, where the mask of doubles is −∞.
    dtype, tolerance = (torch.float64, 1e-10) if attention == "sdpa" else (torch.float32, 1e-3)
    model = cached(name, grc, attn_implementation=attention).to(dtype)
    given, mask = pad(ids(3, 13), 0, 2, 5)
    with torch.no_grad():
        whole = logits(model, given, mask)
        parts = in_parts(model, given, (4, 7, 8, 9, 10), mask)
        close(parts[mask > 0], whole[mask > 0], tolerance)
        behind = logits(model, *(x.flip(1) for x in (given, mask)))  # the same with padding on the right
        for row, valid in enumerate(mask > 0):
            close(whole[row, valid], logits(model, given[row : row + 1, valid])[0], tolerance)
            reverse = given[row : row + 1, valid].flip(1)
            close(behind[row, valid.flip(0)], logits(model, reverse)[0], tolerance)
    mnemos.uncache(model)
    assert (logits(model, given, mask) - whole)[mask > 0].abs().max() > 1e-2


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "static"])
@pytest.mark.each_value
def test_generation_with_the_cache_is_that_without(name, mode):
    model = cached(name)
    given, mask = pad(ids(3, 7), 0, 2, 4)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    options |= {"sampling": {"do_sample": True}, "beams": {"num_beams": 3}}.get(mode, {})
    # falcon_alibi itself takes no static cache
    static = {"cache_implementation": "static"} if mode == "static" and name != "falcon_alibi" else {}
    found = []
    for more in ({"use_cache": True, **static}, {"use_cache": False}):
        torch.manual_seed(3)
        found.append(model.generate(given, **options, **more))
    assert torch.equal(found[0].sequences, found[1].sequences)
    for mine, theirs in zip(found[0].scores, found[1].scores, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grc", [STREAM, SHARED, OFFICIAL], ids=["stream", "shared", "official"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.each_value
def test_a_later_token_changes_no_bit_of_an_earlier_output(name, grc, training):
    """In training with scope="shared" too, where a token reads the mean of all rows' caches."""
    model = cached(name, grc)
    given = ids(2, 13)

    def outputs(tokens: Tensor) -> Tensor:
        return logits(copy.deepcopy(model).train(training), tokens)  # a copy: a training forward stores its cache

    before = outputs(given)
    for j in (1, 3, 6, 7, 12):
        changed = given.clone()
        changed[:, j:] = (changed[:, j:] + 7) % 37 + 3
        found = outputs(changed)
        assert torch.equal(found[:, :j], before[:, :j])
        assert not torch.equal(found[:, j:], before[:, j:])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.each_value
def test_every_parameter_has_a_gradient_also_through_the_carried_state(name):
    """Two calls, the second with the first one's cache: the gradient of the loss is that of one call."""
    whole, parts = cached(name).train(), cached(name).train()
    given = ids(3, 13)
    weight = torch.linspace(-1, 1, 60, dtype=torch.float64)
    (logits(whole, given)[:, 7:] * weight).sum().backward()
    (in_parts(parts, given, (7,))[:, 7:] * weight).sum().backward()
    for (key, mine), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
        if "position_embeddings" not in key:
            assert theirs.grad is not None, key
            assert theirs.grad.abs().sum() > 0, key
            close(mine.grad, theirs.grad, 1e-5 if name in ("gemma3", "cohere") else 1e-10)  # their norms are in float32


def test_a_training_forward_stores_the_mean_of_the_rows_that_completed_a_block():
    model = cached("llama", SHARED).train()
    branch = caches(model)[0]
    start = branch.cache.clone()
    given, mask = pad(ids(3, 7), 0, 3, 5)  # rows of two blocks, one and none
    inputs = []
    handle = branch.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    logits(model, given, mask)
    handle.remove()
    x = inputs[0][..., : branch.cache_dim]
    rows = []
    with torch.no_grad():
        for row, first, blocks in ((0, 0, 2), (1, 3, 1)):
            cache = start
            for n in range(blocks):
                cache = branch.update(x[row : row + 1, first + 3 * n : first + 3 * n + 3], cache)[0]
            rows.append(cache)
    model.eval()
    close(branch.cache, torch.stack(rows).mean(0))


def memory_alone(grc: GRC) -> Any:
    """A decoder of one layer whose attention is its memory alone, in training mode."""
    model = cached("llama", grc, num_hidden_layers=1).train()
    with torch.no_grad():
        caches(model)[0].mix.fill_(torch.inf)
    return model


@pytest.mark.parametrize(
    ("grc", "rows", "end"),
    [
        (STREAM, [1], 13),
        (replace(STREAM, write=False), [1], 9),
        (replace(SHARED, read="sample"), [1], 13),
        (replace(SHARED, read="mean"), [0, 1, 2], 13),
    ],
    ids=["stream", "unwritten", "sample", "mean"],
)
def test_a_token_reaches_the_blocks_after_its_own(grc, rows, end):
    """All of them; where the cache is never written, only the next one. In training a mean is that of all rows."""
    expected = torch.zeros(3, 13, dtype=torch.bool)
    expected[1, 4] = True  # the token's own output, from its embedding
    expected[rows, 6:end] = True
    given, mask = ids(3, 13), torch.ones(3, 13, dtype=torch.long)
    other = given.clone()
    other[1, 4] = (other[1, 4] + 7) % 37 + 3
    found = [logits(memory_alone(grc), tokens, mask) for tokens in (given, other)]
    assert torch.equal((found[0] != found[1]).any(-1), expected)
    given, mask = pad(ids(3, 13), 0, 3, 13)  # a row of padding has no part in the mean
    found, without = (logits(memory_alone(grc), given[:n], mask[:n])[:2] for n in (3, 2))
    close(found[mask[:2] > 0], without[mask[:2] > 0])


def prefilled(model: Any, given: Tensor, mask: Tensor) -> Any:
    past = transformers().DynamicCache(config=model.config)
    logits(model, given, mask, past)
    return past


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda past: past.reorder_cache(torch.tensor([1, 0, 0])), [1, 0, 0]),
        (lambda past: past.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda past: past.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
        (copy.deepcopy, [0, 1, 2]),
        (lambda past: pickle.loads(pickle.dumps(past)), [0, 1, 2]),
    ],
    ids=["reorder", "repeat", "select", "deepcopy", "pickle"],
)
@torch.no_grad()
def test_the_state_follows_the_rows_of_the_hosts_cache(change, rows):
    model = cached("llama")
    given, mask = pad(ids(3, 13), 0, 2, 5)
    past = prefilled(model, given[:, :8], mask[:, :8])
    past = change(past) or past
    taken = torch.tensor(rows)
    expected = logits(model, given[taken], mask[taken])[:, 8:]
    found = [logits(model, given[taken, n : n + 1], mask[taken, : n + 1], past) for n in range(8, 13)]
    close(torch.cat(found, 1), expected)
    past.reset()
    valid = mask[taken] > 0
    close(*(logits(model, given[taken], mask[taken], one)[valid] for one in (past, None)))


def test_what_cannot_be_right_is_refused():
    model = cached("llama")
    given = ids(2, 8)
    foreign = prefilled(plain("llama"), given, torch.ones_like(given))
    refuses("8 tokens this model's gated caches have read, found 0", logits, model, given, None, foreign)
    past = prefilled(model, given, torch.ones_like(given))
    past.crop(0)
    refuses("generate without drafts", past.crop, -2)
    drafts = {"prompt_lookup_num_tokens": 5, "do_sample": False, "max_new_tokens": 30}
    refuses("generate without drafts", model.generate, given[:1].repeat(1, 3), **drafts)
    assert not past.is_croppable
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, :5], layer.values[:, :, :5]
    refuses(r"5 tokens.*found 8", logits, model, given, None, past)
    later = torch.ones(8, 8, dtype=torch.bool).triu(1)
    later[4:, :4] = True
    for packed in (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])},
        {"cu_seq_lens_q": torch.tensor([0, 4, 8])},
        {"attention_mask": torch.zeros(1, 1, 8, 8).double().masked_fill(later, -50.0)},
    ):
        refuses("one sequence per row", model, given[:1], use_cache=False, **packed)
    refuses("grid", mnemos.cache, plain("llama"), GRC(resample="grid"))


def trained(model: Any, call: Any) -> list[Tensor]:
    """The gradients and stored caches of two forwards of padded rows and one backward; `call` runs the model."""
    weight = torch.linspace(-1, 1, 60, dtype=next(model.parameters()).dtype)
    losses = []
    for seed in (2, 3):
        given, mask = pad(ids(3, 13, seed), 0, 2, 5)
        losses.append((logits(call, given, mask)[mask > 0] * weight).sum())
    sum(losses).backward()
    return [*(p.grad for p in model.parameters()), *(branch.cache.clone() for branch in caches(model.eval()))]


@pytest.mark.parametrize("how", [(True, torch.float32), (False, torch.float32), (False, torch.float64)])
@pytest.mark.parametrize("grc", [STREAM, SHARED], ids=["stream", "shared"])
@pytest.mark.parametrize("name", FEW)
@pytest.mark.each_value
def test_gradient_checkpointing_trains_the_same(name, grc, how):
    """Reentrant or not, in float32, which takes the kernels on a CPU, or in float64."""
    reentrant, dtype = how
    model = cached(name, grc).train().to(dtype)
    plainly = copy.deepcopy(model)
    expected = trained(plainly, plainly)
    if reentrant:
        model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for mine, theirs in zip(trained(model, model), expected, strict=True):
        close(mine, theirs, 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("low", [-50.0, -1e9, torch.finfo(torch.float32).min])
def test_an_additive_mask_of_any_depth_hides_padding(low):
    model = cached("gpt2")
    given, mask = pad(ids(3, 13), 0, 2, 5)
    t = given.shape[1]
    seen = torch.ones(t, t, dtype=torch.bool).tril() & (mask > 0)[:, None]
    seen = (seen | torch.eye(t, dtype=torch.bool) & (mask == 0)[:, None])[:, None]  # padding sees itself alone
    seen = seen & (mask > 0)[:, None, None]
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(given, attention_mask=added, position_ids=positions, use_cache=False).logits
        for row, valid in enumerate(mask > 0):
            close(found[row, valid], logits(model, given[row : row + 1, valid])[0])


@torch.no_grad()
def test_biases_of_far_positions_hide_no_token():
    """ALiBi lowers early tokens far below the last ones."""
    model, given = cached("falcon_alibi", replace(STREAM, block=8)).float(), ids(1, 300)
    close(in_parts(model, given, (100, 299)), logits(model, given), 1e-4)


def test_rows_that_were_read_under_autocast_go_on_without_it():
    model = cached("llama").float()
    ids, kept = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1)), transformers().DynamicCache()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            for part in (ids[:, :9], ids[:, 9:10]):
                model(part, past_key_values=kept)
        found = model(ids[:, 10:11], past_key_values=kept).logits[:, 0]
        wanted = model(ids[:, :11]).logits[:, -1]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05 * wanted.abs().max().item())


def test_what_is_computed_of_a_cache_is_kept_until_another_is_read():
    """Also while rows are selected, as beams do it."""
    rows, computed, order = RowState(), [], torch.tensor([1, 0, 1])

    def project():
        return rows.project(rows.current().cache, lambda cache: (computed.append(1) or 2 * cache,))[0]

    for count in (1, 2):
        state = CacheState.fresh(2, 3, torch.zeros(4, 5))
        rows.extend(3, state._replace(cache=torch.randn(2, 4, 5)))
        if count == 1:
            assert torch.equal(project(), 2 * rows.current().cache)
        before = rows.current().cache
        rows.map(lambda x: x[order])
        assert torch.equal(project(), 2 * before[order])
        assert (len(computed), rows.rows, rows.length) == (count, 3, 3 * count)
