"""Bad input to `mnemos.cache`: one clear line, and the model as it was. Masks that are refused: `test_masks`."""

from functools import partial

import pytest
from hosts import build, libraries, state
from refusals import refuses
from torch import nn

import mnemos
from mnemos import GRC, InputError


def big_code() -> nn.Module:
    found = libraries.transformers()
    return found.GPTBigCodeModel(found.GPTBigCodeConfig(n_embd=12, n_layer=1, n_head=2, vocab_size=9))


vit, bart, linear = partial(build, "timm_vit"), partial(build, "hf_bart"), partial(nn.Linear, 2, 2)
ONE = "expected one mnemos.GRC.* found {}; choose the attentions with where="
REFUSED = [
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {}, "mnemos knows, found none; name modules .* with where="),
    (lambda: nn.Conv2d(3, 4, 1), {}, r"found none; .*layers of convolutions take maps \[B, C, H, W\]"),
    (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 2, 16), 1), {}, "was left .*decoder.*; 1 more were"),
    (vit, {"where": "blocks.*.atn"}, r"where='blocks.\*.atn' names no module; the nearest is 'blocks.[01].attn'"),
    (vit, {"where": "attn"}, "where='attn' names no module; the nearest is"),
    (vit, {"where": ["blocks.0.attn", "block.1.attn"]}, "'block.1.attn' names no module; the nearest is 'blocks.1.at"),
    (vit, {"where": lambda name, module: False}, "found none: 'blocks.0.attn' was left .not named"),
    (bart, {"where": "decoder.layers.*.self_attn"}, "decoder.*future"),
    (bart, {"where": "decoder.layers.*.encoder_attn"}, "across two sequences"),
    (big_code, {}, "no adapter for GPTBigCodeAttention.* is not causal; a causal decoder needs"),
    (big_code, {"where": "h.*.attn"}, r"h.0.attn: .*found a causal one.* future.*register_host\(.*DecoderHost\("),
    (linear, {"grc": GRC}, ONE.format("the class GRC")),
    (linear, {"grc": {}}, ONE.format("a dict")),
    (vit, {"grc": GRC(ratio=0.1)}, "blocks.0.attn: GRC.ratio: .*3 heads, found 0.1 of dim 24"),
    (vit, {"grc": GRC(length=(3, 4))}, "one cache length for each of 1 stages, found 2"),
    (vit, {"grc": GRC(resample="grid", length=7)}, "4 x 4 grid, found 7; use 6"),
    (vit, {"grc": GRC(length=18)}, "blocks.0.attn: expected 17 slots at most, found 18; lower"),
    (lambda: build("timm_swin").layers[0], {"grc": GRC(length="paper")}, "tokens of a known grid, found 16 tokens"),
    (lambda: nn.DataParallel(vit()), {}, "found DataParallel; call mnemos.cache.. first"),
    (linear, {"where": []}, r"where=\[\] chose nothing"),
]


@pytest.mark.parametrize(("make", "given", "match"), REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(make, given, match):
    model = make()
    before = state(model)
    with pytest.raises(InputError, match=match) as raised:
        mnemos.cache(model, **given)
    assert state(model) == before
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_as_many_slots_as_tokens_are_taken():
    assert [one.length for one in mnemos.cache(vit(), GRC(length=17)).swapped] == [17, 17]


def test_there_is_nothing_to_undo_without_a_cache():
    model = vit()
    before = state(model)
    refuses(r"cache\(\) was called on, found none; nothing to undo", mnemos.uncache, model)
    assert state(model) == before


def test_what_is_no_model():
    refuses(r"expected a torch\.nn\.Module", mnemos.cache, "a model")
