"""A package of another author: a translation task, an encoder-decoder and an attention with a loss of its own.

Everything is said through the public names of mnemos; tests/test_plugin.py installs, trains and compares it.
"""

import math
import os
import signal
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

import mnemos

WORDS, START, STOP = 9, 9, 10
PAD = -1


@mnemos.register
@dataclass(frozen=True)
class CalmConfig(mnemos.AttentionConfig):
    """Linear attention whose outputs are kept small by an auxiliary loss."""

    name: ClassVar[str] = "calm"
    weight: float = 0.1

    def build(self, dim, num_heads, causal=False, dropout=0.0):
        inner = mnemos.registry.load("attention", "linear")().build(dim, num_heads, causal, dropout)
        return Calm(inner, self.weight)


class Calm(nn.Module):
    rows_independent, state_gradient = True, True

    def __init__(self, inner, weight):
        super().__init__()
        self.inner, self.weight = inner, weight
        self.causal, self.splits, self.state_kind = inner.causal, inner.splits, inner.state_kind

    def initial_state(self, batch_size, device=None, dtype=None):
        return self.inner.initial_state(batch_size, device, dtype)

    def forward(self, x, state=None, mask=None):
        y, state = self.inner(x, state, mask)
        mnemos.add_auxiliary_loss(self.weight * y.square().mean())
        return y, state


@mnemos.register
@dataclass(frozen=True)
class TranslatorConfig(mnemos.ModelConfig):
    """An encoder of one attention, and a decoder of another that begins with the mean of what was read."""

    name: ClassVar[str] = "toy-translator"
    inputs: ClassVar[str] = "sentences"
    words: int = 0  # from the data
    dim: int = 16
    attention: mnemos.AttentionConfig = field(default_factory=CalmConfig)

    def build(self):
        return Translator(self)


class Translator(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.source = nn.Embedding(config.words, config.dim)
        self.target = nn.Embedding(config.words, config.dim)
        self.encoder = config.attention.build(config.dim, 2)
        self.decoder = config.attention.build(config.dim, 2, causal=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * config.dim, config.words)

    def forward(self, source, valid, shown):
        x = self.source(source)
        read = (x + self.encoder(x, None, valid)[0]) * valid[..., None]
        y = self.dropout(self.target(shown))
        y = y + self.decoder(y)[0]
        # Position by position: what stands at the same place of the source.
        there = nn.functional.pad(read, (0, 0, 0, shown.shape[1]))[:, : shown.shape[1]]
        return self.head(torch.cat([y, there], -1))


@mnemos.register
@dataclass(frozen=True)
class ToyTranslationConfig(mnemos.DataConfig):
    """Sentences of three to six words, each of which has one translation."""

    name: ClassVar[str] = "toy-translation"
    rows: int = 24
    stop_at: int = -1

    def build(self):
        opened.append(self)
        return Translation(self)


opened = []


class Translation(mnemos.Task):
    """Batches are {"source", "valid", "shown", "wanted"}; judged by BLEU of word pairs over the whole split."""

    inputs = "sentences"

    def __init__(self, config):
        self.config = config
        about = "Words and pairs of words, with a penalty for brevity."
        corpus = mnemos.CorpusMetric("bleu", True, about, "{name} {value:.3f}", collect=sentences, value=bleu)
        self.metrics = (corpus, mnemos.SumMetric("words right", True, sums=words_right))

    @property
    def sizes(self):
        return {"words": STOP + 1}

    def train_batch(self, index, batch_size, seed):
        if index == self.config.stop_at and os.environ.get("TOY_STOPS"):
            os.kill(os.getpid(), signal.SIGTERM)
        return sample(batch_size, 1000 * seed + index + 1)

    def batches(self, split, batch_size):
        whole = sample(self.config.rows, {"valid": 10**7, "test": 10**7 + 1}[split])
        for first in range(0, self.config.rows, batch_size):
            yield {name: x[first : first + batch_size] for name, x in whole.items()}

    def size(self, split):
        return 0 if split == "train" else sum(self.count(batch) for batch in self.batches(split, self.config.rows))

    def forward(self, model, batch, state):
        return model(batch["source"], batch["valid"], batch["shown"]), None

    def loss(self, model, outputs, batch):
        return nn.functional.cross_entropy(
            outputs.flatten(0, 1), batch["wanted"].flatten(), ignore_index=PAD, reduction="sum"
        )

    def count(self, batch):
        return int((batch["wanted"] != PAD).sum())

    def artifacts(self, model, folder, split):
        batch = next(self.batches(split, 3))
        outputs, _ = self.forward(model, batch, None)
        lines = [
            {"meant": " ".join(map(str, wanted)), "written": " ".join(map(str, found))}
            for wanted, found in sentences(model, outputs, batch)
        ]
        about = {"title": "Translations", "given": "meant", "found": "written", "about": "The first test sentences."}
        return {"translations": lines, "examples": {"translations": about}}


def sample(rows, key):
    random = torch.Generator().manual_seed(key)
    lengths = torch.randint(3, 7, (rows,), generator=random)
    place = torch.arange(7)
    source = torch.randint(0, WORDS, (rows, 7), generator=random)
    valid = place < lengths[:, None]
    translated = (source * 2 + 3) % WORDS
    wanted = torch.where(valid, translated, torch.where(place == lengths[:, None], STOP, PAD))
    shown = torch.cat([torch.full((rows, 1), START), wanted[:, :-1].clamp(min=0)], 1)
    return {"source": torch.where(valid, source, 0), "valid": valid, "shown": shown, "wanted": wanted}


def words_right(model, outputs, batch):
    counted = batch["wanted"] != PAD
    return ((outputs.argmax(-1) == batch["wanted"]) & counted).sum(), counted.sum()


def sentences(model, outputs, batch):
    found = []
    for wanted, guess in zip(batch["wanted"].tolist(), outputs.argmax(-1).tolist(), strict=True):
        end = guess.index(STOP) if STOP in guess else len(guess)
        found.append(([w for w in wanted if w not in (PAD, STOP)], guess[:end]))
    return found


def bleu(records):
    written, meant = sum(len(guess) for _, guess in records), sum(len(wanted) for wanted, _ in records)
    score = 1.0
    for n in (1, 2):
        hits = total = 0
        for wanted, guess in records:
            ours, theirs = (Counter(zip(*(s[i:] for i in range(n)), strict=False)) for s in (guess, wanted))
            hits, total = hits + sum((ours & theirs).values()), total + sum(ours.values())
        score *= hits / max(1, total)
    return math.sqrt(score) * min(1.0, math.exp(1 - meant / max(1, written)))


@mnemos.recipe
def toy_translation():
    """A toy translation with an attention that has an auxiliary loss."""
    train = mnemos.TrainConfig(
        steps=12, batch_size=8, log_every=3, eval_every=6, checkpoint_every=3, keep=9, accelerator="cpu"
    )
    return mnemos.Recipe(TranslatorConfig(), ToyTranslationConfig(), mnemos.OptimConfig(lr=0.02), train)


@mnemos.recipe
def toy_translation_linear():
    """The same with linear attention, without the auxiliary loss."""
    one = toy_translation()
    linear = mnemos.registry.load("attention", "linear")()
    return replace(one, model=replace(one.model, attention=linear))
