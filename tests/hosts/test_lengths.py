"""How many slots each attention gets, for length="auto", "paper" or an example, and what the report says of it."""

import copy
import warnings
from functools import partial

import matrix  # noqa: F401  more models to build
import pytest
import torch
from hosts import FEW, VIT, build, example, given, libraries, run
from refusals import refuses
from torch import Tensor, nn

import mnemos
from mnemos import GRC
from mnemos.hosts import HostBranch
from mnemos.lab.measure.flops import count_flops
from mnemos.memory.gated_cache import caches

PAPER = GRC(preset="paper", length="paper")
HF_PYRAMID = {"hidden_sizes": [8, 10, 20, 16], "num_attention_heads": [1, 2, 5, 8], "depths": [2, 1, 1, 1]}
MAE_DECODER = {"decoder_hidden_size": 12, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
HF_TEXT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 8}


def hugging_face(name: str, **sizes) -> nn.Module:
    kind = getattr(libraries.transformers(), name)
    return kind(kind.config_class(**sizes))


def timm(name: str, **sizes) -> nn.Module:
    return libraries.timm().create_model(name, **sizes)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16), 2)


def mobile_vit() -> nn.Module:
    """Its rows are patches; it says no number, and there is no class token."""
    block = libraries.timm().models.mobilevit.MobileVitBlock
    return nn.Sequential(block(8, transformer_dim=12, num_heads=2, transformer_depth=2))


# As the published models at 224², but for their widths and depths.
pvt_tiny = partial(hugging_face, "PvtForImageClassification", **HF_PYRAMID)
hf_pvt_v2 = partial(hugging_face, "PvtV2ForImageClassification", **HF_PYRAMID)
pvt_v2 = partial(timm, "pvt_v2_b2", embed_dims=(8, 10, 20, 16), depths=(2, 1, 1, 1))
pvt_v2_pooled = partial(timm, "pvt_v2_b2_li", embed_dims=(8, 10, 20, 16), depths=(2, 1, 1, 1))
swin_tiny = partial(timm, "swin_tiny_patch4_window7_224", embed_dim=12, depths=(2, 1, 1, 1))
hf_swin_tiny = partial(hugging_face, "SwinForImageClassification", embed_dim=12, depths=[2, 1, 1, 1])
vit_small = partial(timm, "vit_small_patch16_224", embed_dim=12, depth=2, num_heads=6)
vit_without_class = partial(vit_small, class_token=False, global_pool="avg")
hf_vit = partial(hugging_face, "ViTForImageClassification", **HF_TEXT)
text = partial(hugging_face, "BertModel", **HF_TEXT, vocab_size=20)
# Its encoder sees a quarter of the patches, its decoder all.
masked_autoencoder = partial(hugging_face, "ViTMAEForPreTraining", **VIT, **MAE_DECODER, mask_ratio=0.75)
AUTO = GRC()
PYRAMID = [3136, 3136, 784, 196]  # tokens of four layers in three stages at 224²
STAGES = [56, 56, 28, 14, 7]  # the sides of the grids of five layers in four stages
SQUARES, WHOLE = [*[196] * 4, 49], [4, 4, 2, 1, 1]  # the paper's slots, and the sides of what each is the mean of
WINDOWS = [64, 64, 16, 4, 1]
CASES = {
    # model, GRC: slots, tokens, class tokens, sides of the grid, windows, sides of the squares of a slot
    "PVT": (pvt_tiny, AUTO, 49, [*PYRAMID, 50], [0, 0, 0, 0, 1], STAGES, 1, 1),
    "PVT v2": (pvt_v2, AUTO, 49, [*PYRAMID, 49], 0, STAGES, 1, 1),
    "PVT v2, pooled": (pvt_v2_pooled, AUTO, 49, [*PYRAMID, 49], 0, STAGES, 1, 1),
    "PVT v2, HF": (hf_pvt_v2, AUTO, 49, [*PYRAMID, 49], 0, STAGES, 1, 1),
    "Swin": (swin_tiny, AUTO, 49, 49, 0, [7] * 5, WINDOWS, 1),
    "Swin, HF": (hf_swin_tiny, AUTO, 49, 49, 0, [7] * 5, WINDOWS, 1),
    "Swin, padded": (partial(swin_tiny, img_size=256), AUTO, 49, 49, 0, [7] * 5, [100, 100, 25, 9, 4], 1),
    "ViT": (vit_small, AUTO, 196, 197, 1, [14] * 2, 1, 1),
    "ViT, registers": (partial(vit_small, reg_tokens=4), AUTO, 196, 201, 5, [14] * 2, 1, 1),
    "ViT, no class": (vit_without_class, AUTO, 196, 196, 0, [14] * 2, 1, 1),
    "ViT, HF": (hf_vit, AUTO, 196, 197, 1, [14] * 2, 1, 1),
    "ViT, masked": (masked_autoencoder, AUTO, [4, 4, 16], [5, 5, 17], 1, [None, None, 4], 1, 1),
    "MobileViT": (mobile_vit, AUTO, 64, None, 0, None, 1, 1),
    "text": (text, AUTO, 64, None, 0, None, 1, 1),
    "torch": (encoder, AUTO, 64, None, 0, None, 1, 1),
    "PVT, paper": (pvt_tiny, PAPER, SQUARES, [*PYRAMID, 50], [0, 0, 0, 0, 1], STAGES, 1, WHOLE),
    "PVT v2, paper": (pvt_v2, PAPER, SQUARES, [*PYRAMID, 49], 0, STAGES, 1, WHOLE),
    "PVT v2, HF, paper": (hf_pvt_v2, PAPER, SQUARES, [*PYRAMID, 49], 0, STAGES, 1, WHOLE),
    "Swin, paper": (swin_tiny, PAPER, SQUARES, [*PYRAMID, 49], 0, STAGES, 1, WHOLE),
    "Swin, HF, paper": (hf_swin_tiny, PAPER, SQUARES, [*PYRAMID, 49], 0, STAGES, 1, WHOLE),
    # 200² is 50, 25, 13 and 7 patches a side: squares at the edges are smaller, and windows are padded.
    "Swin, 200, paper": (
        partial(swin_tiny, img_size=200),
        PAPER,
        [*[169] * 4, 49],
        [*PYRAMID, 49],
        0,
        [50, 50, 25, 13, 7],
        1,
        WHOLE,
    ),
    "ViT, paper": (hf_vit, PAPER, 196, 197, 1, [14] * 2, 1, 1),
    "torch, paper": (encoder, PAPER, 64, None, 0, None, 1, 1),
    "torchvision_maxvit": (None, AUTO, 16, 16, 0, None, [4, 4, 1, 1], 1),
    "torchvision_swin": (None, AUTO, 16, [12544, 3136, 3136], 0, [112, 56, 56], 1, 1),
    "timm_maxvit": (None, AUTO, 4, 4, 0, None, [1024, 1024, 256, 256], 1),
    "timm_convit": (None, AUTO, 16, [16, 17], [0, 1], [4, 4], 1, 1),
    "timm_naflexvit": (None, AUTO, 256, None, 4, None, 1, 1),
    "timm_xcit": (None, AUTO, 4, 4, 0, [2, 2], 1, 1),
    "hf_dinov3": (None, AUTO, 16, 19, 3, [4, 4], 1, 1),
    "hf_segformer": (None, AUTO, 784, [3136, 784], 0, [56, 28], 1, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_hosts_own_length_and_the_papers(case):
    make, grc, slots, tokens, prefix, sides, windows, squares = CASES[case]
    model = make() if make else build(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a whole model says what its tokens are
        report = mnemos.cache(model, grc)
    layers = len(report.swapped)
    assert layers == max(len(x) if isinstance(x, list) else 2 for x in (tokens, sides, windows))

    def each(expected: object) -> list:
        return expected if isinstance(expected, list) else [expected] * layers

    assert [one.length for one in report.swapped] == each(slots)
    assert [one.input.tokens for one in report.swapped] == each(tokens)
    assert [one.input.prefix for one in report.swapped] == each(prefix)
    assert [one.input.grid for one in report.swapped] == [n and (n, n) for n in each(sides)]
    assert [one.input.rows for one in report.swapped] == each(windows)
    assert [one.input.pool for one in report.swapped] == each(squares)
    said = "196 slots of 6 channels, 3 heads, each the mean of 4 x 4 tokens, across all windows" in str(report)
    assert said is (case in ("Swin, paper", "Swin, HF, paper"))


@pytest.mark.parametrize(
    ("make", "options", "height", "width", "slots", "grids"),
    [
        (
            partial(hf_vit, image_size=(32, 64), patch_size=(16, 8)),
            {"preset": "official"},
            32,
            64,
            [16] * 2,
            [(2, 8)] * 2,
        ),
        (partial(vit_small, img_size=(32, 64)), {"preset": "official"}, 32, 64, [8] * 2, [(2, 4)] * 2),
        (pvt_v2, {"preset": "paper"}, 64, 128, [8] * 5, [(16, 32), (16, 32), (8, 16), (4, 8), (2, 4)]),
        # Squares of 4 x 4 tokens, then of 2 x 2.
        (pvt_v2, vars(PAPER), 64, 128, [32, 32, 32, 32, 8], [(16, 32), (16, 32), (8, 16), (4, 8), (2, 4)]),
    ],
    ids=["hf", "timm", "pyramid", "pyramid, paper"],
)
def test_an_image_that_is_no_square(make, options, height, width, slots, grids):
    model = make()
    if make is pvt_v2:
        model.pretrained_cfg = {"input_size": (3, height, width)}
    report = mnemos.cache(model, GRC(**options))
    assert [(one.length, one.input.grid) for one in report.swapped] == list(zip(slots, grids, strict=True))
    model.train()(torch.randn(2, 3, height, width))


@pytest.mark.parametrize(
    ("make", "inputs", "slots", "tokens"),
    [
        (encoder, torch.randn(11, 2, 12), 11, [11, 11]),
        (text, {"input_ids": torch.zeros(1, 13, dtype=torch.long)}, 13, [13, 13]),
        (pvt_v2, torch.randn(1, 3, 96, 64), 6, [384, 384, 96, 24, 6]),
        # 96² is patches of 24, 12, 6 and 3 a side, and reduced by 8, 4, 2 and 1 of 3.
        (hf_pvt_v2, (torch.randn(1, 3, 96, 96),), 9, [576, 576, 144, 36, 9]),
        (partial(build, "timm_naflexvit"), torch.randn(1, 3, 16, 24).double(), 24, [28, 28]),
    ],
    ids=["torch", "text", "timm", "hf", "prefix"],
)
def test_an_example_tells_the_length(make, inputs, slots, tokens):
    report = mnemos.cache(make(), example=inputs)
    assert [(one.length, one.input.tokens) for one in report.swapped] == [(slots, n) for n in tokens]


PARTS = {  # a part of a model, and which of its attentions it has; None: it does not say what its tokens are
    ("timm_swin", "layers.0"): [0],
    ("timm_swin", "layers.1.blocks.1"): [2],
    ("hf_swin", "swin.encoder.layers.0"): [0],
    ("hf_swin", "swin.encoder.layers.1.blocks.1"): [2],
    ("timm_pvt2", "stages.0"): None,
    ("torchvision_swin", "features.1.0"): None,
    ("hf_segformer", "segformer.stages.0.blocks.0"): None,
    ("torchvision_vit", "encoder.layers.encoder_layer_0"): None,
}


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_part_of_a_model_has_what_its_own_modules_say(name, part):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = mnemos.cache(build(name).get_submodule(part)).swapped
    numbers = PARTS[name, part]
    assert any("without the model around" in str(one.message) for one in said) is (numbers is None)
    if numbers is None:
        assert [(one.length, one.input.tokens, one.input.grid) for one in found] == [(64, None, None)]
    else:
        whole = mnemos.cache(build(name)).swapped
        for one, other in zip(found, [whole[i] for i in numbers], strict=True):
            assert (one.length, one.input.tokens) == (other.length, other.input.tokens)
            assert (one.input.rows, one.input.grid) == (other.input.rows, other.input.grid)


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
@pytest.mark.parametrize(
    "grc",
    [
        *(GRC(length=3, preset=preset) for preset in ("paper", "official", "mnemos")),
        GRC(preset="paper", length="paper", convolution=True),
    ],
    ids=["paper", "official", "mnemos", "pooled"],
)
@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "timm_pvt2", "hf_pvt", "hf_swin"])
def test_flops_are_counted(name, grc):
    host = build(name, torch.float32)
    model = copy.deepcopy(host)
    report = mnemos.cache(model, grc, **given(name, torch.float32))
    inputs = example(name, 1, dtype=torch.float32)
    with torch.no_grad():
        run(model, inputs)  # a frozen cache is projected
        for training, expected in ((False, report.inference_flops), (True, report.flops)):
            alone, cached = (count_flops(lambda m=m, t=training: run(m.train(t), inputs)) for m in (host, model))
            if not training and caches(model)[0].grc.inference == "frozen":
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
    decoder = hugging_face("BertModel", **HF_TEXT, vocab_size=20, is_decoder=True, add_cross_attention=True)
    refuses("decoder", mnemos.cache, decoder)


SMALL = {"embed_dim": 12, "depths": [2, 2], "num_heads": [3, 6], "window_size": 3}


@pytest.mark.parametrize("side", [24, 28])
@pytest.mark.parametrize("make", [swin_tiny, hf_swin_tiny])
def test_a_cache_of_swin_summarises_the_grid_that_its_block_divided(make, side):
    """6² and 7² patches in windows of 3², shifted and not; the second with padding."""
    torch.manual_seed(0)
    model = make(img_size=side, **SMALL) if make is swin_tiny else make(image_size=side, drop_path_rate=0.0, **SMALL)
    mnemos.cache(model, PAPER)
    grids: list[Tensor] = []
    summaries: list[tuple[HostBranch, Tensor]] = []
    for name, module in model.named_modules():
        if name.endswith(("norm1", "layernorm_before")):
            module.register_forward_hook(lambda _, __, output: grids.append(output.flatten(1, -2)))
        if isinstance(module, HostBranch):
            module.register_forward_pre_hook(
                lambda branch, args: summaries.append((branch, branch.summarised(args[0], None)[0]))
            )
    with torch.no_grad():
        model(torch.randn(2, 3, side, side))
    assert len(grids) == len(summaries) == 4
    for (branch, summary), grid in zip(summaries, grids, strict=True):
        (rows, columns), pool = branch.grid, branch.pool
        image = grid.view(2, rows, columns, -1)
        corners = [(i, j) for i in range(0, rows, pool) for j in range(0, columns, pool)]
        squares = [image[:, i : i + pool, j : j + pool].mean((1, 2)) for i, j in corners]
        torch.testing.assert_close(summary, torch.stack(squares, 1))
    # The positional term passes every token back to its own place.
    windows = summaries[1][0].windows
    assert any(windows.shift)
    x = torch.randn(2, windows.grid[0] * windows.grid[1], 5)
    assert torch.equal(windows.to_grid(windows.to_windows(x)), x)
