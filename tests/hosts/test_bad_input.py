"""Bad input: one clear line, and the model as it was."""

from typing import Any

import pytest
import torch
from hosts import build, close, example, libraries, state
from torch import nn

import mnemos
from mnemos import GRC, InputError
from mnemos.memory.gated_cache import caches


def refused(model: nn.Module, match: str, *args: Any, **kwargs: Any) -> str:
    """cache() with these says so in one line, and leaves the model as it was."""
    before = state(model)
    with pytest.raises(InputError, match=match) as raised:
        mnemos.cache(model, *args, **kwargs)
    assert state(model) == before
    line = str(raised.value)
    assert "\n" not in line
    assert len(line) < 300
    return line


def test_a_model_without_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    refused(model, "mnemos knows, found none; name modules .* with where=")
    refused(nn.Conv2d(3, 4, 1), r"found none; name .* with where=; layers of convolutions take maps \[B, C, H, W\]")
    refused(nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 2, 16), 1), "was left .*decoder.*; 1 more were left")


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("blocks.*.atn", "where='blocks.*.atn' names no module; the nearest is 'blocks.[01].attn'"),
        ("attn", "where='attn' names no module; the nearest is"),
        (["blocks.0.attn", "block.1.attn"], "where='block.1.attn' names no module; the nearest is 'blocks.1.attn'"),
        (lambda name, module: False, "found none: 'blocks.0.attn' was left .not named"),
    ],
)
def test_where_that_names_nothing(where, match):
    refused(build("timm_vit"), match.replace("*", r"\*"), GRC(length=3), where=where)


def test_a_decoder_that_is_named_all_the_same():
    line = refused(build("hf_bart"), "decoder", where="decoder.layers.*.self_attn")
    assert "future" in line
    refused(build("hf_bart"), "across two sequences", where="decoder.layers.*.encoder_attn")


def test_a_causal_attention_that_no_adapter_knows():
    found = libraries.transformers()
    model = found.GPTBigCodeModel(found.GPTBigCodeConfig(n_embd=12, n_layer=1, n_head=2, vocab_size=9))
    assert "is not causal; a causal decoder needs" in refused(model, "no adapter for GPTBigCodeAttention")
    line = refused(model, "h.0.attn: .*found a causal one.* future", where="h.*.attn")
    assert "register_host(mnemos.hosts.DecoderHost(" in line


def test_what_is_no_model_and_what_is_no_cache():
    for grc, found in ((GRC, "the class GRC"), ({}, "a dict"), ({"0": GRC()}, "a dict")):
        refused(nn.Linear(2, 2), f"expected one mnemos.GRC.* found {found}; choose the attentions with where=", grc)
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module"):
        mnemos.cache("a model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grc", "match"),
    [
        ({"ratio": 0.1}, "blocks.0.attn: GRC.ratio: .*3 heads, found 0.1 of dim 24"),
        ({"length": (3, 4)}, "one cache length for each of 1 stages, found 2"),
        ({"resample": "grid", "length": 7}, "4 x 4 grid, found 7; use 6"),
    ],
)
def test_a_cache_that_does_not_fit(grc, match):
    refused(build("timm_vit"), match, GRC(**grc))


def test_masks_that_hide_no_future_are_taken():
    attention = nn.MultiheadAttention(12, 2, batch_first=True).double()
    mnemos.cache(attention, GRC(length=3))
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    window = (torch.arange(7)[:, None] - torch.arange(7)).abs() > 2
    attention.eval()
    plain, _ = attention(x, x, x)
    near, _ = attention(x, x, x, attn_mask=window)
    assert not torch.allclose(near, plain)
    torch.testing.assert_close(attention(x, x, x, attn_mask=window.expand(6, 7, 7))[0], near)
    for nothing in (torch.zeros(7, 7, dtype=torch.bool), torch.zeros(7, 7).double()):
        torch.testing.assert_close(attention(x, x, x, attn_mask=nothing)[0], plain)


def test_an_encoder_that_is_used_causally():
    model = build("torch_encoder")
    mnemos.cache(model, GRC(length=3))
    x, mask = example("torch_encoder").args[0], nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    for options in ({"mask": mask}, {"mask": mask, "is_causal": True}):
        with pytest.raises(InputError, match="causally"):
            model(x, **options)
    with pytest.raises(InputError, match="causally"):
        model.layers[0](x, src_mask=mask)


def test_a_vision_transformer_that_is_told_what_is_padding():
    model = build("timm_vit")
    attention = model.blocks[0].attn.train()
    mnemos.cache(attention, GRC(length=3))
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    valid = torch.arange(7) < torch.tensor([7, 4])[:, None]
    kept = valid[:, None, :, None] & valid[:, None, None]
    for mask in (kept, torch.zeros(2, 1, 7, 7).double().masked_fill(~kept, -torch.inf), valid[:, None, None]):
        left = []
        for call in (lambda m=mask: attention(x, attn_mask=m), lambda: attention(x[:1]), lambda: attention(x[1:, :4])):
            mnemos.memory.clear_caches(attention)
            call()
            left.append(caches(attention)[0].pending.clone())
        close(left[0], (left[1] + left[2]) / 2)
    with pytest.raises(InputError, match="causally"):
        attention(x, attn_mask=torch.ones(7, 7, dtype=torch.bool).tril())
    with pytest.raises(InputError, match="causally"):
        attention(x, is_causal=True)
