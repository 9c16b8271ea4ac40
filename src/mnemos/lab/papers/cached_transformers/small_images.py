"""Shared by the recipes of small images: hosts that train in a minute or two on one core, and their settings."""

from functools import partial

from mnemos.config import DataConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig
from mnemos.lab.vision.classifiers import ImageConfig, PVTConfig, SwinConfig, ViTConfig

# What the data decide is 0: a run fills it in.
VIT = partial(ViTConfig, image=0, channels=0, classes=0, dim=64, depth=4, num_heads=4, pool="mean")
# PVT version 2 throughout: it learns several times faster from few images than version 1.
PVT = partial(
    PVTConfig, image=0, channels=0, classes=0, version=2, patch=2, dims=(32, 64), depths=(2, 2), num_heads=(2, 4)
)
SWIN = partial(SwinConfig, image=0, channels=0, classes=0, dim=32, depths=(2, 2), num_heads=(2, 4))
WIDER = 3.40625  # replaces mlp_ratio 2: adds the parameters of three gates and four projections of half the width


def small(data: DataConfig, model: ImageConfig, steps: int, batch: int = 64, lr: float = 2e-3) -> Recipe:
    """A recipe of a host without memory on small images, trained by AdamW with a cosine schedule."""
    schedule = ScheduleConfig(name="cosine", warmup=100 / steps)  # a share, which fits a shorter run too
    return Recipe(
        model=model,
        data=data,
        optim=OptimConfig(lr=lr, weight_decay=0.05, schedule=schedule),
        train=TrainConfig(steps=steps, batch_size=batch, eval_every=500, checkpoint_every=1000),
    )
