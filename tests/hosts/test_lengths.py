"""How many slots each attention gets, and what the report says of it."""

import copy

import pytest
import torch
from hosts import FEW, build, example, given, libraries, run
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.lab.measure.flops import count_flops
from mnemos.memory.gated_cache import caches


# As the published models at 224², but for their widths and depths.
def pvt_tiny() -> nn.Module:
    library = libraries.transformers()
    sizes = {"hidden_sizes": [8, 10, 20, 16], "num_attention_heads": [1, 2, 5, 8], "depths": [2, 1, 1, 1]}
    return library.PvtForImageClassification(library.PvtConfig(**sizes))


def pvt_v2(name: str = "pvt_v2_b2") -> nn.Module:
    sizes = {"embed_dims": (8, 10, 20, 16), "depths": (2, 1, 1, 1)}
    return libraries.timm().create_model(name, **sizes)


def hf_pvt_v2(**more) -> nn.Module:
    library = libraries.transformers()
    sizes = {"hidden_sizes": [8, 10, 20, 16], "num_attention_heads": [1, 2, 5, 8], "depths": [2, 1, 1, 1]}
    return library.PvtV2ForImageClassification(library.PvtV2Config(**sizes, **more))


def swin_tiny(side: int = 224) -> nn.Module:
    sizes = {"embed_dim": 12, "depths": (2, 1, 1, 1), "img_size": side}
    return libraries.timm().create_model("swin_tiny_patch4_window7_224", **sizes)


def hf_swin_tiny() -> nn.Module:
    library = libraries.transformers()
    return library.SwinForImageClassification(library.SwinConfig(embed_dim=12, depths=[2, 1, 1, 1]))


def vit_small(**more) -> nn.Module:
    sizes = {"embed_dim": 12, "depth": 2, "num_heads": 6, **more}
    return libraries.timm().create_model("vit_small_patch16_224", **sizes)


def hf_vit(**more) -> nn.Module:
    library = libraries.transformers()
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 8}
    return library.ViTForImageClassification(library.ViTConfig(**sizes, **more))


def text() -> nn.Module:
    library = libraries.transformers()
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 8}
    return library.BertModel(library.BertConfig(**sizes, vocab_size=20))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16), 2)


PYRAMID = [3136, 3136, 784, 196]
CASES = {
    # model: slots, tokens, class tokens, sides of the grid, windows
    "PVT": (pvt_tiny, [49] * 5, [*PYRAMID, 50], [0, 0, 0, 0, 1], [56, 56, 28, 14, 7], 1),
    "PVT v2": (pvt_v2, [49] * 5, [*PYRAMID, 49], [0] * 5, [56, 56, 28, 14, 7], 1),
    "PVT v2, pooled": (lambda: pvt_v2("pvt_v2_b2_li"), [49] * 5, [*PYRAMID, 49], [0] * 5, [56, 56, 28, 14, 7], 1),
    "PVT v2, HF": (hf_pvt_v2, [49] * 5, [*PYRAMID, 49], [0] * 5, [56, 56, 28, 14, 7], 1),
    "Swin": (swin_tiny, [49] * 5, [49] * 5, [0] * 5, [7] * 5, [64, 64, 16, 4, 1]),
    "Swin, HF": (hf_swin_tiny, [49] * 5, [49] * 5, [0] * 5, [7] * 5, [64, 64, 16, 4, 1]),
    "Swin, padded": (lambda: swin_tiny(256), [49] * 5, [49] * 5, [0] * 5, [7] * 5, [100, 100, 25, 9, 4]),
    "ViT": (vit_small, [196] * 2, [197] * 2, [1] * 2, [14] * 2, 1),
    "ViT, registers": (lambda: vit_small(reg_tokens=4), [196] * 2, [201] * 2, [5] * 2, [14] * 2, 1),
    "ViT, no class token": (
        lambda: vit_small(class_token=False, global_pool="avg"),
        [196] * 2,
        [196] * 2,
        [0] * 2,
        [14] * 2,
        1,
    ),
    "ViT, HF": (hf_vit, [196] * 2, [197] * 2, [1] * 2, [14] * 2, 1),
    "text": (text, [64] * 2, [None] * 2, [0] * 2, None, 1),
    "torch": (encoder, [64] * 2, [None] * 2, [0] * 2, None, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_is_the_hosts_own_length(case):
    make, slots, tokens, prefix, sides, windows = CASES[case]
    report = mnemos.cache(make())
    assert [one.length for one in report.swapped] == slots
    assert [one.input.tokens for one in report.swapped] == tokens
    assert [one.input.prefix for one in report.swapped] == prefix
    assert [one.input.grid for one in report.swapped] == ([(n, n) for n in sides] if sides else [None] * len(slots))
    assert [one.input.rows for one in report.swapped] == (windows if isinstance(windows, list) else [1] * len(slots))


def test_an_image_that_is_no_square():
    model = hf_vit(image_size=(32, 64), patch_size=(16, 8))
    report = mnemos.cache(model, GRC(preset="official"))
    assert [(one.length, one.input.tokens, one.input.grid) for one in report.swapped] == [(16, 17, (2, 8))] * 2
    model.train()(torch.randn(2, 3, 32, 64))
    timm = vit_small(img_size=(32, 64))
    report = mnemos.cache(timm, GRC(preset="official"))
    assert [(one.length, one.input.tokens, one.input.grid) for one in report.swapped] == [(8, 9, (2, 4))] * 2
    timm.train()(torch.randn(2, 3, 32, 64))
    pvt = pvt_v2()
    pvt.pretrained_cfg = {"input_size": (3, 64, 128)}
    report = mnemos.cache(pvt, GRC(preset="paper"))
    grids = [(16, 32), (8, 16), (4, 8), (2, 4)]
    assert [(one.length, one.input.grid) for one in report.swapped][1:] == [(8, grid) for grid in grids]
    mnemos.uncache(pvt)
    report = mnemos.cache(pvt, GRC(preset="paper"), example=torch.randn(1, 3, 96, 64))
    assert [(one.length, one.input.grid) for one in report.swapped][1:] == [(6, None)] * 4
    pvt.train()(torch.randn(2, 3, 96, 64))


def test_an_example_tells_the_length():
    model = encoder()
    report = mnemos.cache(model, example=torch.randn(11, 2, 12))
    assert [(one.length, one.input.tokens) for one in report.swapped] == [(11, 11)] * 2
    report = mnemos.cache(text(), example={"input_ids": torch.zeros(1, 13, dtype=torch.long)})
    assert [(one.length, one.input.tokens) for one in report.swapped] == [(13, 13)] * 2
    report = mnemos.cache(pvt_v2(), example=torch.randn(1, 3, 64, 64))
    assert [(one.length, one.input.tokens) for one in report.swapped] == [(4, 256), (4, 256), (4, 64), (4, 16), (4, 4)]
    # 96² is patches of 24, 12, 6 and 3 a side, and reduced by 8, 4, 2 and 1 of 3.
    report = mnemos.cache(hf_pvt_v2(), example=(torch.randn(1, 3, 96, 96),))
    assert [(one.length, one.input.tokens) for one in report.swapped] == [(9, 576), (9, 576), (9, 144), (9, 36), (9, 9)]


@pytest.mark.parametrize("name", FEW)
def test_parameters_are_counted(name):
    model = build(name)
    before = sum(p.numel() for p in model.parameters())
    report = mnemos.cache(model, GRC(length=3), **given(name))
    assert report.parameters == sum(p.numel() for p in model.parameters()) - before
    assert len(report.swapped) == len(caches(model))
    for one, branch in zip(report.swapped, caches(model), strict=True):
        sizes = one.length, one.cache_width, one.heads, one.out_width
        assert sizes == (*branch.cache.shape, branch.num_heads, branch.out_dim)
        assert one.name in dict(model.named_modules())


@pytest.mark.each_value
@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "timm_pvt2", "hf_pvt", "hf_swin"])
def test_flops_are_counted(name, preset):
    host = build(name, torch.float32)
    model = copy.deepcopy(host)
    report = mnemos.cache(model, GRC(length=3, preset=preset), **given(name, torch.float32))
    inputs = example(name, 1, dtype=torch.float32)
    with torch.no_grad():
        run(model, inputs)  # a frozen cache is projected
        for training, expected in ((False, report.inference_flops), (True, report.flops)):
            alone, cached = (count_flops(lambda m=m, t=training: run(m.train(t), inputs)) for m in (host, model))
            if not training and preset == "paper":
                cached = count_flops(lambda: run(model, inputs))
            assert cached - alone == expected > 0


def test_what_was_left_is_said():
    report = mnemos.cache(build("hf_bart"), GRC(length=3))
    assert [one.name for one in report.swapped] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    reasons = {one.name: one.why for one in report.left}
    assert reasons.keys() == {"decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"}
    assert "future" in reasons["decoder.layers.0.self_attn"]
    assert "two sequences" in reasons["decoder.layers.0.encoder_attn"]
    whole = nn.Transformer(12, 2, 1, 1, 16, batch_first=True)
    report = mnemos.cache(whole, GRC(length=3))
    assert [one.name for one in report.swapped] == ["encoder.layers.0.self_attn"]
    assert len(report.left) == 2
    x = torch.randn(2, 5, 12)
    whole(x, x, tgt_is_causal=True, tgt_mask=whole.generate_square_subsequent_mask(5)).sum().backward()
    library = libraries.transformers()
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    decoder = library.BertModel(library.BertConfig(**sizes, vocab_size=20, is_decoder=True, add_cross_attention=True))
    with pytest.raises(mnemos.InputError, match="decoder"):
        mnemos.cache(decoder)
