"""Causal masks never reach a shared cache, in eager mode, compiled or exported; what is not causal does."""

import functools
from typing import Any

import pytest
import torch
from hosts import build, close, libraries, open_caches
from refusals import refuses
from torch import Tensor, nn

import mnemos
from mnemos import GRC
from mnemos.hosts.adapters import ADAPTERS
from mnemos.hosts.masks import own_tokens, refuse_mask, valid_tokens
from mnemos.hosts.named import Reader, _read_mask
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
                refuses("causally" if name in HIDDEN else "one sequence per row", call)
            else:
                assert call() is None


def test_padding_that_sees_itself_is_no_token():
    mask = ~TAKEN["padding that sees itself"]
    assert torch.equal(valid_tokens(mask, tokens(mask)), VALID)
    assert torch.equal(valid_tokens(torch.eye(2, dtype=torch.bool)[None, None], tokens(mask)[:1, :2]), VALID[:1, :2])


def test_a_bias_of_keys_hides_none():
    """A float mask [B, T] that is added to scores: padding is −∞, or 20 lower, and not what is a little lower."""
    x, bias = tokens(LATER), torch.linspace(-9, 0, T).masked_fill(~VALID, -torch.inf)
    module = nn.MultiheadAttention(12, 2, batch_first=True)
    known = ADAPTERS["torch.nn.modules.activation:MultiheadAttention"].call
    for read in (known, Reader(("query", "key", "value"))):
        assert torch.equal(read(module, (x, x, x), {"key_padding_mask": bias}).mask, VALID)
    for mask in (bias, bias + 4, VALID.double(), VALID / 3):  # also of both signs; or weights and 0
        assert torch.equal(_read_mask(mask, False, x), VALID)


def test_masks_of_a_named_module_are_of_rows_of_pairs_or_of_heads():
    x, window, pairs = tokens(LATER), ~TAKEN["a window"], VALID[:, None] & VALID[:, :, None]
    for name, mask, wanted in (
        ("mask", VALID[:, None], VALID),
        ("key_padding_mask", ~VALID[:, None], VALID),
        ("mask", VALID[1:2, None], VALID[1:2].expand(3, T)),
        ("mask", window, None),
        ("mask", window.expand(4, T, T), None),
        ("mask", pairs, VALID),
        ("padding_mask", ~pairs, VALID),
    ):
        found = Reader()(None, (x,), {name: mask}).mask
        assert found is wanted is None or torch.equal(found, wanted), name
    several = Reader()(None, (x,), {"mask": VALID, "key_padding_mask": torch.arange(T).expand(3, T) == 0}).mask
    assert torch.equal(several, VALID & (torch.arange(T) > 0))
    square = x[:1].expand(T, T, 12)  # as many rows as tokens: each row's tokens, or pairs
    assert torch.equal(Reader()(None, (square,), {"mask": window}).mask, window)
    assert torch.equal(Reader()(None, (square,), {"key_padding_mask": LATER}).mask, ~LATER)
    refuses("causally", Reader(), None, (square,), {"mask": ~LATER})
    assert Reader()(None, (x,), {"mask": window, "is_causal": False}).mask is None
    refuses("causally", Reader(), None, (x,), {"mask": window, "is_causal": True})


def call(model: nn.Module, name: str, hidden: Tensor, low: float | None) -> None:
    """A call of two rows under a mask as the host takes it: of booleans, or one that lowers."""
    mask = ~hidden if low is None else torch.zeros(T, T, dtype=torch.float64).masked_fill(hidden, low)
    if name == "torch_encoder":
        model(torch.randn(2, T, 12, dtype=torch.float64), mask=hidden if low is None else mask)
    elif name == "timm_vit":
        model.blocks[0].attn(torch.randn(2, T, 24, dtype=torch.float64), attn_mask=mask)
    else:
        part = model.get_encoder() if name == "hf_bart" else model
        part(torch.randint(5, 50, (2, T)), attention_mask=mask.expand(2, 1, T, T))


@pytest.mark.parametrize("low", [None, -50.0])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["hf_bert", "hf_bart", "torch_encoder", "timm_vit"])
def test_calls_of_hosts_with_causal_masks_or_packed_sequences_are_refused(name, training, low):
    model = build(name)
    mnemos.cache(model, GRC(length=4))
    model.train(training)
    for hidden, words in ((PACKED["two blocks"], "one sequence per row"), (LATER, "causally")):
        refuses(words, call, model, name, hidden, low)
    assert all(cache.pending_rows == 0 for cache in caches(model))
    call(model, name, TAKEN["a window"], low)


def test_calls_that_say_they_are_causal_are_refused():
    encoder, vit, bert = map(build, ("torch_encoder", "timm_vit", "hf_bert"))
    for model in (encoder, vit, bert):
        mnemos.cache(model, GRC(length=3))
    x, mask = torch.randn(2, T, 12, dtype=torch.float64), torch.zeros(T, T).double().masked_fill(LATER, -torch.inf)
    for wrong in (
        lambda: encoder(x, mask=mask, is_causal=True),
        lambda: encoder.layers[0](x, src_mask=mask),
        lambda: encoder.layers[0].self_attn(x, x, x, None, False, mask),
        lambda: vit.blocks[0].attn(torch.randn(2, T, 24).double(), is_causal=True),
        lambda: bert(torch.randint(5, 50, (2, T)), is_causal=True),
    ):
        refuses("causally", wrong)


def test_masks_that_hide_no_future_hide_no_token_from_the_cache():
    attention = nn.MultiheadAttention(12, 2, batch_first=True).double().eval()
    mnemos.cache(attention, GRC(length=3))
    x = torch.randn(3, T, 12, dtype=torch.float64)
    plain, near = attention(x, x, x)[0], attention(x, x, x, attn_mask=TAKEN["a window"])[0]
    assert not torch.allclose(near, plain)
    close(attention(x, x, x, attn_mask=TAKEN["a window"].expand(6, T, T))[0], near)
    for nothing in (TAKEN["nothing"], torch.zeros(T, T).double()):
        close(attention(x, x, x, attn_mask=nothing)[0], plain)


def test_a_vision_transformer_that_is_told_what_is_padding():
    attention = build("timm_vit").blocks[0].attn.train()
    mnemos.cache(attention, GRC(length=3))
    x = torch.randn(2, T, 24, dtype=torch.float64)
    kept = VALID[:2, None, :, None] & VALID[:2, None, None]
    for mask in (kept, torch.zeros(2, 1, T, T).double().masked_fill(~kept, -torch.inf), VALID[:2, None, None]):
        left = []
        for x_, given in ((x, {"attn_mask": mask}), (x[:1], {}), (x[1:, :4], {})):
            mnemos.memory.clear_caches(attention)
            attention(x_, **given)
            left.append(caches(attention)[0].pending.clone())
        close(left[0], (left[1] + left[2]) / 2)


def test_masks_of_every_kind_are_read():
    x = torch.zeros(2, 4, 3)
    valid = torch.tensor([[True, True, False, False], [True, False, True, True]])
    low = torch.finfo(torch.float32).min
    additive = torch.where(valid, 0.0, low)[:, None, None]
    both = (valid[:, None, None] & valid[:, None, :, None]).expand(2, 1, 4, 4)
    kinds = {
        "booleans": valid,
        "ones and zeros": valid.long(),
        "a mask a query": both,
        "a mask a query and head": both.expand(2, 3, 4, 4),
        "one row of keys": valid[:, None, None],
        "added": additive,
        "added, −∞": additive.clamp(max=0).masked_fill(additive < 0, -torch.inf),
        "added, half": additive.half().masked_fill(additive < 0, torch.finfo(torch.half).min),
        "added a query": torch.where(both, 0.0, low),
    }
    for kind, mask in kinds.items():
        assert torch.equal(valid_tokens(mask, x), valid), kind
    assert valid_tokens(None, x) is None
    assert torch.equal(valid_tokens(valid[:1], x), valid[:1].expand(2, 4))
    for wrong in (valid[:, :3], valid[None], torch.ones(3, 4), torch.ones(4), "causal"):
        refuses(r"attention mask \[2, 4\]", valid_tokens, wrong, x)
    assert valid_tokens(torch.zeros(2, 1, 0, 4), x) is None  # of no query
    assert valid_tokens(torch.zeros(2, 1, 0, 0), x[:, :0]) is None


def test_which_masks_of_decoders_are_refused():
    x = torch.zeros(2, 3, 4)
    for shape in ((2, 3), (1, 5), (2, 1, 3, 3), (1, 2, 3, 8)):
        assert bool(own_tokens(torch.ones(shape), x, 5).all()), shape
    for shape in ((2, 2), (3, 3), (2, 1, 3, 2), (2, 1, 2, 3), (2, 1, 4, 4), (3, 1, 3, 3), (2, 3, 3), (3,)):
        refuses(r"attention mask \[2, 1, 3, N\] or \[2, N\], found", own_tokens, torch.ones(shape), x, 0)
    refuses("found str", own_tokens, "causal", x, 0)
    last = torch.tensor([[1, 1, 0, 1, 0, 0, 0, 0]])  # of a static cache: the keys after the last query are no tokens
    for seen, wanted in ((0, [True, True, False]), (2, [False, True, False]), (9, [False] * 3)):
        assert own_tokens(last, x, seen).tolist() == [wanted] * 2


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
    refuses("causally", valid_tokens, mask, x)


def test_what_raises_a_key_hides_no_other():
    """A mask hides by lowering. What is causal by softmax is refused all the same."""
    mask, x = torch.zeros(2, 1, T, T), torch.zeros(2, T, 4)
    mask[0, ..., 1] = 25  # a key, for all queries
    mask[1, 0, 3, 2] = 25  # a key, for one
    mask[0, ..., 6] = -50
    assert valid_tokens(mask, x).tolist() == [[True] * 6 + [False], [True] * 7]
    grows = 5.0 * (torch.arange(T) + 3)
    for causal in (torch.where(LATER, -50.0, 0.0) + grows, torch.where(DISTANCE > 0, 25.0, 0.0)):
        refuses("causally", valid_tokens, causal[None, None], x)
    decoder = torch.where(LATER, -torch.inf, 0.0)[None, None].repeat(2, 1, 1, 1)
    decoder[..., 0] += 25
    decoder[0, 0, 6, 6] = -50
    assert own_tokens(decoder, x, 0).tolist() == [[True] * 6 + [False], [True] * 7]
    padding = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 1, 1]])  # of two keys before these three tokens
    assert own_tokens(padding, x[:, :3], 2).tolist() == [[True, True, False], [False, True, True]]
    packed = torch.where(LATER | PACKED["two blocks"], -50.0, 0.0)[None, None] + grows
    refuses("one sequence per row", own_tokens, packed, x, 0)


def test_masks_of_every_head_and_biases_for_positions():
    """[B·H, T, T], as MultiheadAttention takes them: causal where no head sees a later token. A bias is no mask."""
    for bias in (-2.0 * DISTANCE.abs(), DISTANCE.clamp(max=0) * 3.0):  # the second lowers what is later alone
        assert refuse_mask(bias, tokens(bias)) is None
    half = torch.stack([LATER, LATER & False]).repeat(3, 1, 1)
    assert refuse_mask(half, tokens(half), hides=True) is None
    refuses("causally", refuse_mask, LATER.expand(6, T, T), tokens(half), hides=True)


@pytest.mark.parametrize("rows", [3, 6, 9])
def test_masks_of_every_window(rows):
    """[windows, T, T], of rows that are the windows of one image after another: each is judged by itself."""
    for hidden, match in ((BLOCKS != 0, "one sequence per row"), (LATER, "causally")):
        masks = torch.stack([LATER & False, hidden, LATER & False])
        refuses(match, refuse_mask, masks, torch.zeros(rows, T, 4), hides=True)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_masks_of_every_head_are_not_divided_among_rows(rows):
    attention = libraries.timm().layers.attention.Attention(12, 4).eval()
    mnemos.cache(attention, GRC(length=4))
    x, heads = torch.zeros(rows, T, 12), torch.stack([LATER, LATER, LATER & False, LATER & False])
    attention(x, attn_mask=~heads)  # a later token is seen by two heads
    refuses("causally", attention, x, attn_mask=~LATER.expand(4, T, T))


def test_a_mask_is_judged_again_when_it_is_written():
    mask = torch.zeros(T, T)
    assert refuse_mask(mask, tokens(mask)) is None
    mask.masked_fill_(LATER, -torch.inf)
    refuses("causally", refuse_mask, mask, tokens(mask))
    with torch.inference_mode():
        other = torch.zeros(T, T)
        assert refuse_mask(other, tokens(other)) is None
        other.masked_fill_(LATER, -torch.inf)
        refuses("causally", refuse_mask, other, tokens(other))


class Calls(nn.Module):
    """One tensor and a mask in, one tensor out: for tracers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.attention(x, attn_mask=mask)


def cached(name: str) -> nn.Module:
    torch.manual_seed(0)
    timm = libraries.timm().layers.attention.Attention
    attention = nn.MultiheadAttention(12, 2, batch_first=True) if name == "torch" else timm(12, 2)
    mnemos.cache(attention, GRC(length=4))
    open_caches(attention)
    return Calls(attention).eval()


def exported(model: nn.Module, *args: Tensor) -> Any:
    return torch.export.export(model, args).module()


def compiled(model: nn.Module, *args: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


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


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    attention = nn.MultiheadAttention(12, 2, batch_first=True).eval()
    mnemos.cache(attention, GRC(length=3))
    x = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(2, 12)])
    refuses("found nested tensors; pad them", attention, x, x, x, need_weights=False)


def test_queries_and_keys_that_are_computed_twice():
    """As in DETR: query and key are two tensors of equal values, and the value has no positions."""
    attention = nn.MultiheadAttention(12, 2, batch_first=True).double()
    mnemos.cache(attention, GRC(length=4))
    open_caches(attention)
    attention.eval()
    x, position = torch.randn(2, 3, T, 12, dtype=torch.float64)
    q = x + position
    close(attention(q, x + position, x)[0], attention(q, q, x)[0])
    x[0, 0, 0] = torch.nan  # equal all the same
    assert attention(x + position, x + position, x)[0][1:].isfinite().all()
    for key in (q + 1, torch.cat([q, q], 1)):
        refuses("the same values as query and key", attention, q, key, key)
