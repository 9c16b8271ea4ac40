"""A package of another author: a regression task, a model and recipes.

Everything is said through the public names of mnemos; tests/test_plugin.py installs, trains and compares it.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

import mnemos


@mnemos.register
@dataclass(frozen=True)
class WeigherConfig(mnemos.ModelConfig):
    """One attention, and a number for each sequence."""

    name: ClassVar[str] = "toy-weigher"
    inputs: ClassVar[str] = "bags"
    width: int = 0  # from the data
    attention: mnemos.AttentionConfig = field(default_factory=mnemos.LinearConfig)

    def build(self):
        return Weigher(self)


class Weigher(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.input, self.output = nn.Linear(config.width, 16), nn.Linear(16, 1)
        self.attention, self.dropout = config.attention.build(16, 2, causal=False), nn.Dropout(0.1)

    def forward(self, x, valid):
        x = self.dropout(self.input(x))
        x = x + self.attention(x, None, valid)[0]
        return (self.output(x)[..., 0] * valid).sum(1)


@mnemos.register
@dataclass(frozen=True)
class BagsConfig(mnemos.DataConfig):
    """Bags of three to six vectors; what is asked for is the sum of all their numbers."""

    name: ClassVar[str] = "toy-bags"
    rows: int = 24

    def build(self):
        opened.append(self)
        return Bags(self)


opened = []


class Bags(mnemos.Task):
    """Batches are {"x", "valid", "wanted"}; judged by the correlation over the whole split."""

    inputs = "bags"
    sizes: ClassVar = {"width": 3}

    def __init__(self, config):
        self.config = config
        about = "The correlation of all weights, found and wanted."
        corpus = mnemos.CorpusMetric("r", True, about, "{name} {value:.3f}", collect=pairs, value=correlation)
        self.metrics = (corpus, mnemos.SumMetric("near", True, sums=near))

    def train_batch(self, index, batch_size, seed):
        return sample(batch_size, 1000 * seed + index + 1)

    def batches(self, split, batch_size):
        whole = sample(self.config.rows, {"valid": 10**7, "test": 10**7 + 1}[split])
        for first in range(0, self.config.rows, batch_size):
            yield {name: x[first : first + batch_size] for name, x in whole.items()}

    def size(self, split):
        return 0 if split == "train" else self.config.rows

    def forward(self, model, batch, state):
        return model(batch["x"], batch["valid"]), None

    def loss(self, model, outputs, batch):
        return (outputs - batch["wanted"]).square().sum()

    def count(self, batch):
        return len(batch["wanted"])

    def artifacts(self, model, folder, split):
        batch = next(self.batches(split, 3))
        found = pairs(model, self.forward(model, batch, None)[0], batch)
        lines = [{"meant": f"{wanted:.3f}", "weighed": f"{one:.3f}"} for one, wanted in found]
        about = {"title": "Weights", "given": "meant", "found": "weighed", "about": "The first test bags."}
        return {"weights": lines, "examples": {"weights": about}}


def sample(rows, key):
    random = torch.Generator().manual_seed(key)
    valid = torch.arange(6) < torch.randint(3, 7, (rows, 1), generator=random)
    x = torch.randn(rows, 6, 3, generator=random)
    return {"x": x, "valid": valid, "wanted": (x * valid[..., None]).sum((1, 2))}


def near(model, outputs, batch):
    return ((outputs - batch["wanted"]).abs() < 1).sum(), torch.tensor(len(outputs))


def pairs(model, outputs, batch):
    return list(zip(outputs.tolist(), batch["wanted"].tolist(), strict=True))


def correlation(records):
    return float(torch.tensor(records).T.corrcoef()[0, 1])


@mnemos.recipe
def toy_bags():
    """Toy bags weighed with linear attention."""
    train = mnemos.TrainConfig(steps=12, batch_size=8, log_every=3, eval_every=6, accelerator="cpu")
    return mnemos.Recipe(WeigherConfig(), BagsConfig(), mnemos.OptimConfig(lr=0.02), train)


@mnemos.recipe
def toy_bags_softmax():
    """The same with softmax attention."""
    one = toy_bags()
    return replace(one, model=replace(one.model, attention=mnemos.SoftmaxConfig()))
