"""length="paper": one slot per square of tokens in the first stages of PVT and Swin, and over Swin's whole grid."""

import copy
import json

import pytest
import torch
from hosts import build, example, given, libraries, run
from test_lengths import encoder, hf_pvt_v2, hf_swin_tiny, hf_vit, pvt_tiny, pvt_v2, swin_tiny
from torch import Tensor, nn

import mnemos
from mnemos import GRC
from mnemos.hosts import HostBranch
from mnemos.lab.measure.flops import count_flops
from mnemos.memory.gated_cache import caches

PAPER = GRC(preset="paper", length="paper")
STAGES = [56, 56, 28, 14, 7]  # the sides of the grids of five layers in four stages at 224²
WHOLE = {
    # model: slots, sides of the grids, tokens
    "PVT": (pvt_tiny, [196, 196, 196, 196, 49], STAGES, [3136, 3136, 784, 196, 50]),
    "PVT v2": (pvt_v2, [196, 196, 196, 196, 49], STAGES, [3136, 3136, 784, 196, 49]),
    "PVT v2, HF": (hf_pvt_v2, [196, 196, 196, 196, 49], STAGES, [3136, 3136, 784, 196, 49]),
    "Swin": (swin_tiny, [196, 196, 196, 196, 49], STAGES, [3136, 3136, 784, 196, 49]),
    "Swin, HF": (hf_swin_tiny, [196, 196, 196, 196, 49], STAGES, [3136, 3136, 784, 196, 49]),
    # 200² is 50, 25, 13 and 7 patches a side: squares at the edges are smaller, and windows are padded.
    "Swin, 200": (lambda: swin_tiny(200), [169, 169, 169, 169, 49], [50, 50, 25, 13, 7], [3136, 3136, 784, 196, 49]),
    "ViT": (hf_vit, [196, 196], [14, 14], [197, 197]),
    "text": (encoder, [64, 64], None, [None, None]),
}


@pytest.mark.parametrize("case", WHOLE)
def test_the_papers_lengths(case):
    make, slots, sides, tokens = WHOLE[case]
    report = mnemos.cache(make(), PAPER)
    assert [one.length for one in report.swapped] == slots
    assert [one.input.tokens for one in report.swapped] == tokens
    assert [one.input.rows for one in report.swapped] == [1] * len(slots)
    assert [one.input.grid for one in report.swapped] == ([(n, n) for n in sides] if sides else [None] * len(slots))
    squares = [4, 4, 2, 1, 1] if len(slots) == 5 else [1, 1]
    assert [one.input.pool for one in report.swapped] == squares
    assert ("196 slots of 6 channels, 3 heads, each the mean of 4 x 4 tokens, across all windows" in str(report)) is (
        case in ("Swin", "Swin, HF")
    )


def small_swin(side: int) -> nn.Module:
    sizes = {"embed_dim": 12, "depths": (2, 2), "num_heads": (3, 6), "img_size": side, "window_size": 3}
    return libraries.timm().create_model("swin_tiny_patch4_window7_224", **sizes)


def small_hf_swin(side: int) -> nn.Module:
    library = libraries.transformers()
    sizes = {"embed_dim": 12, "depths": [2, 2], "num_heads": [3, 6], "image_size": side, "window_size": 3}
    return library.SwinForImageClassification(library.SwinConfig(**sizes, drop_path_rate=0.0))


@pytest.mark.parametrize("side", [24, 28])
@pytest.mark.parametrize("make", [small_swin, small_hf_swin])
def test_a_cache_of_swin_summarises_the_grid_that_its_block_divided(make, side):
    """6² and 7² patches in windows of 3², shifted and not; the second with padding."""
    torch.manual_seed(0)
    model = make(side)
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
        squares = [
            image[:, i : i + pool, j : j + pool].mean((1, 2))
            for i in range(0, rows, pool)
            for j in range(0, columns, pool)
        ]
        torch.testing.assert_close(summary, torch.stack(squares, 1))
    # The positional term passes every token back to its own place.
    windows = summaries[1][0].windows
    assert any(windows.shift)
    x = torch.randn(2, windows.grid[0] * windows.grid[1], 5)
    assert torch.equal(windows.to_grid(windows.to_windows(x)), x)


@pytest.mark.parametrize("name", ["timm_swin", "hf_pvt"])
def test_flops_are_counted_and_state_is_saved(name):
    host = build(name, torch.float32)
    model = copy.deepcopy(host)
    # D = 12 over 2 heads: a ratio that leaves an integer for the convolution's groups.
    report = mnemos.cache(model, GRC(preset="paper", length="paper", convolution=True), **given(name, torch.float32))
    inputs = example(name, 1, dtype=torch.float32)
    with torch.no_grad():
        run(model, inputs)
        alone, cached = (count_flops(lambda m=m: run(m.train(), inputs)) for m in (host, model))
    assert cached - alone == report.flops > 0
    again = copy.deepcopy(host)
    mnemos.cache(again, GRC(preset="paper", length="paper", convolution=True), **given(name, torch.float32))
    again.load_state_dict(model.eval().state_dict(), strict=True)
    assert all(cache.cache.any() for cache in caches(again))
    assert torch.equal(run(again.eval(), inputs), run(model, inputs))


def test_a_saved_model_of_hugging_face_keeps_the_papers_length(tmp_path):
    model = build("hf_swin", torch.float32)
    mnemos.cache(model, PAPER)
    inputs = example("hf_swin", 2, dtype=torch.float32)
    run(model.train(), inputs)
    model.eval().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mnemos"][0]["grc"]["length"] == "paper"
    again = mnemos.hosts.from_pretrained(type(model), tmp_path).eval()
    assert [branch.windows for branch in caches(again)] == [branch.windows for branch in caches(model)]
    assert torch.equal(run(again, inputs), run(model, inputs))
