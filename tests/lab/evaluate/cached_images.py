"""Small cached image models with some history, and a task of pictures made of noise."""

from dataclasses import replace

import numpy as np
import torch

from mnemos import GRC
from mnemos.attention.gated import GatedBranch
from mnemos.lab.evaluate.branches import first_calls
from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.image_task import Colours, ImageTask
from mnemos.lab.tasks.pictures import ArrayPictures
from mnemos.lab.vision.classifiers import PVTConfig, SwinConfig, ViTConfig

VIT = ViTConfig(image=16, patch=4, dim=16, depth=3, num_heads=2, classes=4)
PVT = PVTConfig(image=16, dims=(8, 12), depths=(1, 1), num_heads=(1, 2), classes=4)
SWIN = SwinConfig(image=16, patch=2, window=4, dim=8, depths=(2, 1), num_heads=(1, 2), classes=4)


def photos(side=16, classes=4, sizes=(40, 12, 24)):
    """Noise of a class's own colour."""
    random = np.random.default_rng(0)
    splits = {}
    for split, size in zip(("train", "valid", "test"), sizes, strict=True):
        labels = np.arange(size) % classes
        base = labels[:, None, None, None] * 40 + np.array([0, 30, 60])
        pixels = (base + random.integers(0, 60, (size, side, side, 3))).astype(np.uint8)
        splits[split] = ArrayPictures(pixels, labels, side, 1.0)
    colours = Colours((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    return ImageTask(splits, [f"class {i}" for i in range(classes)], side, colours, AugmentConfig(policy="none"))


def cached(config, seed=0, **grc):
    """A cached model with some history: stored caches that a few training forwards made, and uneven λ."""
    torch.manual_seed(seed)
    model = replace(config, cache=GRC(**grc)).build()
    with torch.no_grad():
        for layer in layers(model).values():
            layer.mix.copy_(torch.linspace(-1, 1, len(layer.mix)))
    model.train()
    for _ in range(3):
        model(torch.randn(4, 3, config.image, config.image))
    return model.eval()


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, GatedBranch)}


def seen(model, inputs):
    with torch.no_grad():
        return first_calls(model, layers(model), inputs)
