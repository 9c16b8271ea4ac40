"""A convolutional classifier with a gate, and a task of coloured blobs, for tests of training on images."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mnemos.config import ModelConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig
from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.image_task import Colours, ImageTask, View
from mnemos.lab.tasks.pictures import ArrayPictures
from mnemos.lab.tasks.task import DataConfig

CLASSES = 7


class Conv(nn.Module):
    def __init__(self, config: "ConvConfig") -> None:
        super().__init__()
        self.config = config
        self.net = nn.Sequential(nn.Conv2d(config.channels, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1))
        self.drop = nn.Dropout(config.dropout)
        self.mix = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, config.classes)

    def forward(self, x: Tensor, state: None = None, mask: None = None) -> tuple[Tensor, None]:
        return self.head(self.drop(self.net(x).mean((2, 3)) * torch.sigmoid(self.mix))), None


@dataclass(frozen=True)
class ConvConfig(ModelConfig):
    name: ClassVar[str] = "conv"
    inputs: ClassVar[str] = "images"
    classes: int = CLASSES
    image: int = 12
    channels: int = 3
    dropout: float = 0.1

    def build(self) -> Conv:
        return Conv(self)


class Soft(ImageTask):
    """Training targets are probabilities: nine tenths of the label, the rest of another."""

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        batch = super().train_batch(index, batch_size, seed)
        one = torch.nn.functional.one_hot(batch.targets, CLASSES).float()
        return batch._replace(targets=0.9 * one + 0.1 * one.flip(0))


@dataclass(frozen=True)
class BlobsConfig(DataConfig):
    """Images whose class is a colour."""

    name: ClassVar[str] = "blobs"
    size: int = 12
    rows: int = 30
    soft: bool = False
    workers: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def build(self) -> ImageTask:
        random = np.random.default_rng(0)
        colours = random.integers(0, 200, (CLASSES, 3))
        views = {}
        for split, rows in (("train", self.rows), ("valid", 11), ("test", 9)):
            labels = random.integers(0, CLASSES, rows)
            noise = random.integers(0, 56, (rows, 12, 12, 3))
            pixels = (colours[labels][:, None, None] + noise).astype(np.uint8)
            views[split] = View.whole(ArrayPictures(pixels, labels, self.size, self.augment.centre))
        colours = Colours((0.4,) * 3, (0.25,) * 3)
        names = [f"colour {i}" for i in range(CLASSES)]
        return (Soft if self.soft else ImageTask)(views, names, self.size, colours, self.augment, self.workers)


def recipe(model: Any = None, data: Any = None, optim: Any = None, **train: Any) -> Recipe:
    settings = TrainConfig(steps=12, batch_size=4, log_every=2, eval_every=4, checkpoint_every=3, accelerator="cpu")
    schedule = ScheduleConfig("cosine", warmup=3)
    return Recipe(
        ConvConfig(**(model or {})),
        BlobsConfig(**(data or {})),
        OptimConfig(**{"lr": 1e-2, "schedule": schedule, **(optim or {})}),
        replace(settings, **train),
        name="blobs",
        about="a stand-in",
    )
