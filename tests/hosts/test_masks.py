"""Causal masks never reach a shared cache, in eager mode, compiled, exported or traced; what is not causal does."""

import functools
from typing import Any

import pytest
import torch
from hosts import build, close, libraries, open_caches
from torch import Tensor, nn

import mnemos
from mnemos import GRC, InputError
from mnemos.hosts.masks import own_tokens, refuse_mask, valid_tokens
from mnemos.memory.gated_cache import caches

T = 7
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
VALID = torch.arange(T) < torch.tensor([7, 4, 2])[:, None]
BLOCKS = torch.arange(T)[:, None] // 3 - torch.arange(T) // 3
DISTANCE = torch.arange(T)[:, None] - torch.arange(T)
HIDDEN = {  # where a query does not see a key
    "causal": LATER,
    "causal, of the last tokens": LATER & (DISTANCE.abs() < 9),
    "causal, of a window": LATER | (DISTANCE > 2),
    "causal by blocks": BLOCKS < 0,
    "causal after a prefix": LATER & (torch.arange(T) > 2),
    "causal and padded": LATER | ~VALID[:, None, None],
    "causal and padded, for queries too": LATER | ~VALID[:, None, None] | ~VALID[:, None, :, None],
    "causal in one row": LATER & (torch.arange(3) == 1)[:, None, None, None],
    "causal, of two tokens": LATER[:2, :2],
}
TAKEN = {
    "nothing": LATER & False,
    "a window": DISTANCE.abs() > 2,
    "padding": (~VALID[:, None, None]).expand(3, 1, T, T),
    "padding, for queries too": ~(VALID[:, None, None] & VALID[:, None, :, None]),
    "padding that sees itself": (~VALID[:, None, None]) & (DISTANCE != 0),
    "a token alone": (torch.arange(T) > 0).expand(T, T).clone(),
    "at random": torch.rand(T, T, generator=torch.Generator().manual_seed(0)) > 0.5,
    "nothing of one token": LATER[:1, :1],
}
PACKED = {  # parts of a row that do not see each other
    "blocks": BLOCKS != 0,
    "two blocks": (torch.arange(T)[:, None] < 5) != (torch.arange(T) < 5),
    "windows in blocks": (BLOCKS.abs() > 1) | (BLOCKS.abs() == 1) & (torch.arange(T) < 6) | (DISTANCE.abs() > 1),
    "blocks and padding": (BLOCKS != 0) | ~(VALID[:, None, None] & VALID[:, None, :, None]),
    "blocks in one row": (BLOCKS != 0) & (torch.arange(3) == 1)[:, None, None, None],
    "blocks that alternate": DISTANCE % 2 != 0,
}


def tokens(mask: Tensor) -> Tensor:
    return torch.randn(3, mask.shape[-1], 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [*HIDDEN, *PACKED, *TAKEN])
def test_which_masks_are_causal_or_packed(name):
    hidden = {**HIDDEN, **PACKED, **TAKEN}[name]
    for low in (-torch.inf, torch.finfo(torch.float32).min, -1e4, -50.0, -21.0):
        for mask, hides in (
            (hidden, True),
            (~hidden, False),
            (torch.zeros(hidden.shape).masked_fill(hidden, low), False),
            ((~hidden).long(), False),
        ):
            call = functools.partial(refuse_mask, mask, tokens(mask), hides)
            if name not in TAKEN:
                with pytest.raises(InputError, match="causally" if name in HIDDEN else "one sequence per row"):
                    call()
            else:
                assert call() is None


def test_padding_that_sees_itself_is_no_token():
    mask = ~TAKEN["padding that sees itself"]
    assert torch.equal(valid_tokens(mask, tokens(mask)), VALID)
    assert torch.equal(valid_tokens(torch.eye(2, dtype=torch.bool)[None, None], tokens(mask)[:1, :2]), VALID[:1, :2])


@pytest.mark.parametrize("low", [None, -50.0])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["hf_bert", "hf_bart", "torch_encoder"])
def test_packed_sequences_are_refused(name, training, low):
    model = build(name)
    mnemos.cache(model, GRC(length=4))
    model.train(training)
    hidden = PACKED["two blocks"]
    mask = ~hidden if low is None else torch.zeros(T, T, dtype=torch.float64).masked_fill(hidden, low)
    if name == "torch_encoder":
        x, given = torch.randn(2, T, 12, dtype=torch.float64), {"mask": hidden if low is None else mask}
    else:
        x, given = torch.randint(5, 50, (2, T)), {"attention_mask": mask.expand(2, 1, T, T)}
    part = model.get_encoder() if name == "hf_bart" else model
    with pytest.raises(InputError, match="one sequence per row"):
        part(x, **given)
    assert all(cache.pending_rows == 0 for cache in caches(model))


def test_what_an_additive_mask_hides_is_relative_to_each_query():
    """Softmax does not see what lowers all keys of a query, or a whole row of the batch."""
    mask, x = torch.zeros(2, 1, T, T), torch.zeros(2, T, 4)
    mask[1] -= 25
    mask[0, :, :4] -= 30  # queries
    assert bool(valid_tokens(mask, x).all())
    mask[0, ..., 6] -= 50  # a key, for all queries
    assert valid_tokens(mask, x).tolist() == [[True] * 6 + [False], [True] * 7]
    mask[0] = torch.where(LATER, -50.0, 0.0)
    mask[0, :, :4] -= 30
    with pytest.raises(InputError, match="causally"):
        valid_tokens(mask, x)


def test_what_raises_a_key_hides_no_other():
    """A mask hides by lowering. What is causal by softmax is refused all the same."""
    mask, x = torch.zeros(2, 1, T, T), torch.zeros(2, T, 4)
    mask[0, ..., 1] = 25  # a key, for all queries
    mask[1, 0, 3, 2] = 25  # a key, for one
    mask[0, ..., 6] = -50
    assert valid_tokens(mask, x).tolist() == [[True] * 6 + [False], [True] * 7]
    grows = 5.0 * (torch.arange(T) + 3)
    for causal in (torch.where(LATER, -50.0, 0.0) + grows, torch.where(DISTANCE > 0, 25.0, 0.0)):
        with pytest.raises(InputError, match="causally"):
            valid_tokens(causal[None, None], x)
    decoder = torch.where(LATER, -torch.inf, 0.0)[None, None].repeat(2, 1, 1, 1)
    decoder[..., 0] += 25
    decoder[0, 0, 6, 6] = -50
    assert own_tokens(decoder, x, 0).tolist() == [[True] * 6 + [False], [True] * 7]
    with pytest.raises(InputError, match="one sequence per row"):
        own_tokens(torch.where(LATER | PACKED["two blocks"], -50.0, 0.0)[None, None] + grows, x, 0)


def test_biases_of_far_positions_hide_no_token_of_a_decoder():
    """ALiBi lowers early tokens far below the last ones: pieces and prefixes give what the whole call gives."""
    transformers = libraries.transformers()
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=True)).eval()
    mnemos.cache(model, GRC(scope="stream", length=4, block=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        ids = torch.randint(20, (1, 300))
        whole, first = model(ids).logits, model(ids[:, :100], use_cache=True)
        rest = [model(x, past_key_values=first.past_key_values).logits for x in (ids[:, 100:299], ids[:, 299:])]
    torch.testing.assert_close(torch.cat([first.logits, *rest], 1), whole, atol=1e-4, rtol=1e-4)


def test_a_bias_for_positions_is_no_mask():
    for bias in (-2.0 * DISTANCE.abs(), DISTANCE.clamp(max=0) * 3.0):  # the second lowers what is later alone
        assert refuse_mask(bias, tokens(bias)) is None


def test_masks_of_every_head():
    """[B·H, T, T], as MultiheadAttention takes them: causal where no head sees a later token."""
    half = torch.stack([LATER, LATER & False]).repeat(3, 1, 1)
    assert refuse_mask(half, tokens(half), hides=True) is None
    with pytest.raises(InputError, match="causally"):
        refuse_mask(LATER.expand(6, T, T), tokens(half), hides=True)


@pytest.mark.parametrize("rows", [3, 6, 9])
def test_masks_of_every_window(rows):
    """[windows, T, T], of rows that are the windows of one image after another: each is judged by itself."""
    for hidden, match in ((BLOCKS != 0, "one sequence per row"), (LATER, "causally")):
        masks = torch.stack([LATER & False, hidden, LATER & False])
        with pytest.raises(InputError, match=match):
            refuse_mask(masks, torch.zeros(rows, T, 4), hides=True)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_masks_of_every_head_are_not_divided_among_rows(rows):
    attention = libraries.timm().layers.attention.Attention(12, 4).eval()
    mnemos.cache(attention, GRC(length=4))
    x, heads = torch.zeros(rows, T, 12), torch.stack([LATER, LATER, LATER & False, LATER & False])
    attention(x, attn_mask=~heads)  # a later token is seen by two heads
    with pytest.raises(InputError, match="causally"):
        attention(x, attn_mask=~LATER.expand(4, T, T))


def test_a_mask_is_judged_again_when_it_is_written():
    mask = torch.zeros(T, T)
    assert refuse_mask(mask, tokens(mask)) is None
    mask.masked_fill_(LATER, -torch.inf)
    with pytest.raises(InputError, match="causally"):
        refuse_mask(mask, tokens(mask))
    with torch.inference_mode():
        other = torch.zeros(T, T)
        assert refuse_mask(other, tokens(other)) is None
        other.masked_fill_(LATER, -torch.inf)
        with pytest.raises(InputError, match="causally"):
            refuse_mask(other, tokens(other))


class Calls(nn.Module):
    """One tensor and a mask in, one tensor out: for tracers."""

    def __init__(self, attention: nn.Module, name: str) -> None:
        super().__init__()
        self.attention, self.name = attention, name

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.attention(x, attn_mask=mask)


def cached(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "torch":
        attention: nn.Module = nn.MultiheadAttention(12, 2, batch_first=True)
    else:
        attention = libraries.timm().layers.attention.Attention(12, 2)
    mnemos.cache(attention, GRC(length=4))
    open_caches(attention)
    return Calls(attention, name).eval()


def exported(model: nn.Module, *args: Tensor) -> Any:
    return torch.export.export(model, args).module()


def compiled(model: nn.Module, *args: Tensor, backend: str = "eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


def traced(model: nn.Module, *args: Tensor) -> Any:
    with torch.no_grad():
        return torch.jit.trace(model, args, check_trace=False)


@pytest.mark.parametrize("how", [exported, compiled])
@pytest.mark.parametrize("name", ["torch", pytest.param("timm", marks=pytest.mark.exhaustive)])
def test_a_graph_refuses_causal_masks_when_it_runs(name, how):
    model, x = cached(name), torch.randn(3, T, 12)
    bias = -0.1 * DISTANCE.abs()
    graph = how(model, x, bias)
    close(graph(x, bias), model(x, bias), 1e-5)
    with pytest.raises(Exception, match="called causally"):
        graph(x, bias.masked_fill(LATER, -torch.inf))
    with pytest.raises(Exception, match="one sequence per row"):
        graph(x, bias.masked_fill(PACKED["blocks"], -50.0))


@pytest.mark.parametrize("training", [True, False])
def test_a_causal_mask_of_four_dimensions_given_to_bert(training):
    model, ids = build("hf_bert"), torch.randint(5, 50, (3, T))
    mnemos.cache(model, GRC(length=3))
    model.train(training)
    allowed = ~LATER & VALID[:, None, None]
    added = torch.zeros(3, 1, T, T, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    for mask in (allowed, added, ~LATER[None, None]):
        with pytest.raises(InputError, match="causally"):
            model(input_ids=ids, attention_mask=mask)
    model(input_ids=ids, attention_mask=VALID[:, None, None].expand(3, 1, T, T))


def positions(attention: nn.Module, x: Tensor, position: Tensor) -> Tensor:
    """As in DETR: query and key are two tensors of equal values, and the value has no positions."""
    return attention(x + position, x + position, x, need_weights=False)[0]


def test_queries_and_keys_that_are_computed_twice():
    attention = nn.MultiheadAttention(12, 2, batch_first=True).double()
    mnemos.cache(attention, GRC(length=4))
    open_caches(attention)
    attention.eval()
    x, position = torch.randn(2, 3, T, 12, dtype=torch.float64)
    q = x + position
    expected = attention(q, q, x, need_weights=False)[0]
    close(positions(attention, x, position), expected)
    x[0, 0, 0] = torch.nan  # equal all the same
    assert positions(attention, x, position)[1:].isfinite().all()
    for key in (q + 1, torch.cat([q, q], 1)):
        with pytest.raises(InputError, match="the same values as query and key"):
            attention(q, key, key)
