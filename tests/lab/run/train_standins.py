"""A small model and task of either kind for tests of the training room, and ways to kill a run at a chosen moment."""

import contextlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.config import ModelConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.metrics import ACCURACY, MAJORITY, CorpusMetric
from mnemos.lab.tasks.task import DataConfig
from mnemos.lab.tasks.token_task import TokenTask
from mnemos.memory.gated_cache import GRC, GatedCache, begin_forward, end_forward
from mnemos.ops.gated_cache import batch_mean
from mnemos.types import add_auxiliary_loss

VOCAB, CLASSES, LENGTH = 11, 3, 12
STILL = {"dropout": 0.0, "noise": False, "cached": True}  # of the model: nothing is drawn while it trains


class Memory(NamedTuple):
    seen: Tensor
    nothing: None
    hidden: tuple[Tensor, ...]


class Toy(nn.Module):
    """Recurrent, with dropout and with draws from Python's and NumPy's generators while it trains."""

    def __init__(self, config: "ToyConfig") -> None:
        super().__init__()
        self.config = config
        width = config.dim
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, config.classes or config.vocab_size)
        self.mix = nn.Parameter(torch.zeros(2))
        self.late = nn.Linear(width, width)  # for rows that have seen enough: no gradient before, or in other processes
        self.store = GatedCache(width, 2, GRC(length=2)) if config.cached else None
        if self.store is not None:
            self.store.owned = True
        self.broken = False

    def forward(self, x: Tensor, state: Memory | None = None, mask: Tensor | None = None) -> tuple[Tensor, Memory]:
        began = self.store is not None and self.training and begin_forward([self.store])
        if state is None:
            zeros = x.new_zeros(x.shape[0], self.config.dim, dtype=self.embedding.weight.dtype)
            state = Memory(x.new_zeros(x.shape[0]), None, (zeros,))
        h, y = state.hidden[0], F.dropout(self.embedding(x), self.config.dropout, self.training)
        if self.store is not None:
            new = self.store.update(y[..., : self.store.cache_dim], self.store.cache.clone(), mask)
            y = y + F.pad(new.mean(1, keepdim=True), (0, y.shape[-1] - new.shape[-1]))
            if self.training:
                self.store.stage(*batch_mean(new, None))
            if began:
                end_forward([self.store])
        outputs = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.blocks[0](h) + y[:, t])
            outputs.append(h)
        y = F.gelu(self.blocks[1](torch.stack(outputs, 1)))
        if self.training and self.config.noise:
            y = y * (1 + 0.1 * random.random() + 0.1 * np.random.rand())  # noqa: NPY002
        y = y * (1 + self.mix.sum())
        if self.config.auxiliary and self.training:
            add_auxiliary_loss(self.config.auxiliary * (1 + self.mix.sum()).square())
        late = state.seen > 4 * LENGTH
        if self.config.late and late.any():
            y = y + late[:, None, None] * self.late(y)
        if self.broken:
            y = y * float("nan")
        if self.config.classes:
            y = y.mean(1) if mask is None else (y * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(y), Memory(state.seen + x.shape[1], None, (h,))


class Swift(Toy):
    """One that knows its critical path."""

    def advance(self, x: Tensor, state: Memory | None = None, mask: Tensor | None = None) -> Memory:
        h = x.new_zeros(x.shape[0], self.config.dim, dtype=self.head.weight.dtype) if state is None else state.hidden[0]
        y = F.dropout(self.embedding(x), self.config.dropout, self.training)
        for t in range(x.shape[1]):
            h = torch.tanh(self.blocks[0](h) + y[:, t])
        return Memory(x.new_full((len(x),), x.shape[1]) + (0 if state is None else state.seen), None, (h,))


@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    name: ClassVar[str] = "toy"
    vocab_size: int = VOCAB
    classes: int = CLASSES
    dim: int = 8
    dropout: float = 0.2
    max_length: int = LENGTH
    cached: bool = False
    noise: bool = True
    late: bool = True
    advances: bool = False
    auxiliary: float = 0.0  # of a loss of the model's own

    def build(self) -> Toy:
        return Swift(self) if self.advances else Toy(self)


def _outputs(model: nn.Module, outputs: Tensor, batch: Batch) -> list[float]:
    return outputs.flatten(1).sum(1).tolist()


def _in_order(records: list[float]) -> float:
    return sum(place * record for place, record in enumerate(records, 1))


class ToyTask(TokenTask):
    def __init__(self, config: "ToyDataConfig") -> None:
        self.config = config
        self.vocab_size, self.max_length = VOCAB, LENGTH
        self.classes = 0 if config.language else CLASSES
        self.carries_state = config.language and not config.rows
        self.splits_rows = config.language
        if config.corpus:
            self.metrics = (CorpusMetric("order", True, collect=_outputs, value=_in_order), ACCURACY)
        self.reference = {} if config.language else {MAJORITY: 0.4}

    def _batch(self, key: int, rows: int, fresh: Tensor) -> Batch:
        generator = torch.Generator().manual_seed(key)
        tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
        inputs = tokens[:, :-1].clone()
        if self.config.bad_token == key:
            inputs[-1, -1] = VOCAB
        if self.config.language:
            targets = torch.where(tokens[:, 1:] == 0, IGNORE, tokens[:, 1:])
            return Batch(inputs, targets, None, None if self.config.rows else fresh)
        lengths = torch.randint(1, LENGTH + 1, (rows,), generator=generator)
        mask = torch.arange(LENGTH) < lengths[:, None]
        targets = inputs[:, 0] % CLASSES
        if self.config.bad_label == key:
            targets[0] = CLASSES
        if self.config.ignored:
            targets[:: self.config.ignored] = IGNORE
        return Batch(inputs, targets, mask)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        fresh = (torch.arange(batch_size) + index) % 7 == 0
        return self._batch(1000 * seed + index, batch_size, fresh | (index == 0))

    def batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        for i in range(3):
            # A classification split's last batch is short.
            rows = 1 if i == 2 and not self.config.language else batch_size
            yield self._batch(10**6 + 100 * len(split) + i, rows, torch.full((rows,), i == 0))

    def size(self, split: str) -> int:
        return sum(int((batch.targets != IGNORE).sum()) for batch in self.batches(split, 4))  # as the recipe below


@dataclass(frozen=True)
class ToyDataConfig(DataConfig):
    name: ClassVar[str] = "toy"
    language: bool = False
    rows: bool = False  # of language: whole sequences, no state from batch to batch
    bad_token: int = -1
    bad_label: int = -1
    ignored: int = 0  # every so many-th row is not counted
    corpus: bool = False  # judged by a metric of all rows in their order

    def build(self) -> ToyTask:
        return ToyTask(self)


@dataclass(frozen=True)
class Toys:
    """A recipe of stand-ins, by the few things that tests vary."""

    language: bool = True
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        train = TrainConfig(steps=12, batch_size=4, log_every=2, eval_every=4, checkpoint_every=4, accelerator="cpu")
        schedule = ScheduleConfig("cosine", warmup=3)
        return Recipe(
            ToyConfig(**{"classes": 0 if self.language else CLASSES, **self.model}),
            ToyDataConfig(self.language, **self.data),
            OptimConfig(**{"lr": 1e-2, "schedule": schedule, **self.optim}),
            replace(train, **{**self.train, "rollout": RolloutConfig(**self.train.get("rollout", {}))}),
            name="toy",
            about="a stand-in",
        )


def gradient_norm(model: nn.Module) -> float:
    return torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None)).item()


def look(model: nn.Module, step: int) -> dict[str, Any]:
    """An `on_evaluation` that draws from every generator, as careless ones do."""
    random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    return {"layers": [model.mix.sum().item()]}


def train(
    recipe: Recipe,
    folder: str | Path,
    resume: bool = False,
    on_evaluation: Any = None,
    longer: bool = False,
    count_flops: bool = False,
    **named: Any,
) -> dict[str, Any]:
    """Train a recipe in a folder, and return the content of its result.json."""
    from mnemos.lab.run.run import Run

    run = Run.open(recipe, folder, resume, steps=recipe.train.steps if longer else None, **named)
    return run.train(on_evaluation, count_flops).to_json()


def work(folder: str, toys: Toys, resume: bool = False, moment: str = "", number: int = 0, quiet: bool = True) -> None:
    """Train in this process; at a chosen moment the process sends itself a signal. For processes of their own."""
    from mnemos.lab.errors import Interrupted

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing if quiet else sys.stderr):
        if moment:
            prepare(moment, number)
        try:
            train(toys.recipe(), folder, resume, look)
        except Interrupted:
            raise SystemExit(130) from None


def send(sign: signal.Signals = signal.SIGKILL) -> None:
    os.kill(os.getpid(), sign)


def prepare(moment: str, number: int) -> None:
    """Arrange for the signal: `number` says at which update, or which call."""
    import safetensors.torch

    from mnemos.lab.evaluate import scores
    from mnemos.lab.run import checkpoint, folder, loop, run

    calls = iter(range(1, 10**6))
    if moment in ("mid-update", "SIGTERM", "SIGINT"):  # gradients are there, the step is not
        sign = getattr(signal, moment, signal.SIGKILL)
        before(loop, "set_lr", lambda optimiser, optim, step, *_: step == number and send(sign))
    elif moment in ("saved", "saved best"):
        name = f"{'best' if 'best' in moment else 'step'}-{number:08d}.safetensors"
        after(checkpoint, "write", lambda path, _: path.name == name and send())
    elif moment == "half-written":

        def half(tensors: Any, path: Path, about: Any) -> None:
            whole(tensors, path, about)
            if path.name.startswith(f"step-{number:08d}"):
                os.truncate(path, path.stat().st_size // 2)
                send()

        whole, safetensors.torch.save_file = safetensors.torch.save_file, half
    elif moment in ("fsync", "replace"):
        before(os, moment, lambda *_: next(calls) == number and send())
    elif moment == "pruning":
        before(checkpoint, "prune", lambda folder, step, *kept: step == number and send())
    elif moment == "half-a-line":

        def cut(self: Any, lines: Any) -> None:
            if lines[-1].step == number:
                path = self.folder / "metrics.jsonl"
                os.truncate(path, path.stat().st_size - 9)
                send()

        after(folder.RunFolder, "record", cut)
    elif moment == "looking":
        before(run, "evaluate", lambda *_: next(calls) == number and send())
    elif moment == "SIGTERM-looking":
        before(scores, "to_model", lambda *_: next(calls) == number and send(signal.SIGTERM))
    else:
        raise ValueError(moment)


def before(owner: Any, name: str, action: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: (action(*args), original(*args))[1])


def after(owner: Any, name: str, action: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: (original(*args), action(*args))[0])
