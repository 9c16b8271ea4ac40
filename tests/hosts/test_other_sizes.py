"""Images of other sizes than the one that a host was made for, and windows with padding."""

import copy

import pytest
from hosts import build, close, libraries, normal, open_caches, tensor
from refusals import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import caches
from mnemos.ops.gated_cache.resampling import Windows

_SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5, "patch_size": 4, "img_size": 16}
_OPTIONS = [{"preset": "official"}, {"resample": "grid", "length": 4}, {"convolution": True}]


def dynamic_vit() -> nn.Module:
    model = libraries.timm().create_model("vit_tiny_patch16_224", dynamic_img_size=True, **_SMALL)
    return model.double()


def images(height: int, width: int, rows: int = 2, seed: int = 0) -> Tensor:
    return normal(seed, rows, 3, height, width).double()


def watched(model: nn.Module) -> list:
    """The grid of every call of a branch."""
    seen: list = []
    for branch in caches(model):
        branch.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get("grid")), with_kwargs=True)
    return seen


SIZES = {
    # host: sizes of images, the patches' sides, arguments of its call
    "timm_vit": ([(16, 16), (24, 8), (8, 24), (32, 16)], (4, 4), {}),
    "hf_vit": ([(24, 8)], (4, 4), {"interpolate_pos_encoding": True}),
    "hf_pvt2": ([(32, 64)], (4, 8), {}),
    "timm_pvt2": ([(32, 64)], (4, 8), {}),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in SIZES for options in _OPTIONS),
        *((name, {"length": "paper"}) for name in ("hf_pvt2", "timm_pvt2")),
    ],
)
def test_a_branch_is_given_the_grid_of_its_call(name, options):
    sizes, sides, more = SIZES[name]
    model = dynamic_vit() if name == "timm_vit" else build(name)
    example = images(64, 64, 1) if name.endswith("pvt2") else None
    mnemos.cache(model, GRC(**({"length": 4} | options)), example=example)
    open_caches(model)
    seen = watched(model)
    for height, width in sizes:
        del seen[:]
        tensor(model.train()(images(height, width), **more)).sum().backward()
        assert seen[:2] == [(height // side, width // side) for side in sides]
        assert all(branch.pending.isfinite().all() for branch in caches(model))
        assert tensor(model.eval()(images(height, width), **more)).isfinite().all()


def test_tokens_that_were_dropped_form_no_grid():
    options = {"patch_drop_rate": 0.5, "dynamic_img_size": True, **_SMALL}
    model = libraries.timm().create_model("vit_tiny_patch16_224", **options).double()
    mnemos.cache(model, GRC(resample="grid", length=4))
    refuses(r"expected the \(height, width\) of 6 tokens, found", model.train(), images(24, 8))
    model.eval()(images(24, 8))


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_grids_of_one_number_of_tokens_and_checkpointing(reentrant):
    model = dynamic_vit()
    mnemos.cache(model, GRC(preset="official", length=4))
    open_caches(model)
    plain = copy.deepcopy(model)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)
    gradients = []
    for each in (model, plain):
        for size in ((24, 8), (16, 16), (8, 24)):  # 12, 16 and 12 tokens
            each.train()(images(*size)).square().sum().backward()
        sum(each(images(*size)).square().sum() for size in ((24, 8), (8, 24))).backward()
        gradients.append([p.grad for p in each.parameters()])
    for a, b in zip(*gradients, strict=True):
        close(a, b)


@pytest.mark.parametrize("length", [4, "paper"])
def test_swin_v2_of_hugging_face_shows_the_grid_of_each_call(length):
    """Windows of 4 × 4 tokens; the layer shifts a grid of one window too, because it was made for a larger one."""
    library = libraries.transformers()
    small = {"patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": [2], "num_heads": [2], "image_size": 32}
    model = library.Swinv2Model(library.Swinv2Config(**small, drop_path_rate=0.0)).double()
    mnemos.cache(model, GRC(length=length))
    layers, tokens, grids = [], [], watched(model)
    for layer in model.encoder.layers[0].blocks:
        layer.register_forward_pre_hook(lambda _, args: layers.append(args[0]))
        layer.attention.self.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    for height, width in ((32, 32), (48, 24), (16, 16), (20, 36)):
        del layers[:], tokens[:], grids[:]
        model.train()(images(height, width))
        assert grids == [(height // 4, width // 4)] * 2
        for branch, windows, whole in zip(caches(model), tokens, layers, strict=True):
            close((branch.windows or branch.padded).at(grids[0]).to_grid(windows), whole)


def test_swin_v1_of_hugging_face_does_not_shift_a_grid_of_one_window():
    windows = Windows((8, 8), (4, 4), (2, 2), pads_first=True)
    assert [windows.at(grid).shift for grid in ((5, 6), (4, 6), (3, 3))] == [(2, 2), (0, 0), (0, 0)]


@pytest.mark.parametrize("name", ["timm_swin", "hf_swin"])
@pytest.mark.parametrize("options", [{}, {"preset": "official"}, {"resample": "grid", "length": 4}])
def test_the_padding_of_windows_is_left_out(name, options):
    """5 × 5 tokens in windows of 4 × 4: of 64 tokens, 39 are padding."""
    small = {"patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": (2,), "num_heads": (2,)}
    if name == "timm_swin":
        model = libraries.timm().create_model("swin_tiny_patch4_window7_224", img_size=20, **small).double()
    else:
        library = libraries.transformers()
        model = library.SwinForImageClassification(library.SwinConfig(image_size=20, **small)).double()
    mnemos.cache(model, GRC(**options))
    open_caches(model)
    masks: list = []
    for branch in caches(model):
        written = branch.written
        branch.written = lambda source, cache, mask, *rest, written=written: (
            masks.append(mask),
            written(source, cache, mask, *rest),
        )[1]
    model.train()(images(20, 20))
    assert [int(mask.sum()) for mask in masks] == [2 * 25, 2 * 25]
    assert all(mask.shape == (8, 16) for mask in masks)
