"""The long-range claim: recall of a fact after 4,096 tokens (32 segments), by Memformer and by baselines."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import ModelConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import TransformerConfig

from ..claim import Claim
from ..findings import Finding, Table, spread
from ..perplexities import shape, train
from ..reproduce import Options

BAR = 0.95  # accuracy that Memformer with replay must reach

# One pair and one query, with thousands of distractors between them. In training, the number of distractors is random,
# up to a maximum that grows: slots learn to keep facts over short distances first, in short rows. The last updates use
# the full distance; without them 6 % of the answers at that distance are wrong.
DATA = RecallConfig(pairs=1, symbols=16, queries=1, distance=4096, shortest=16, grow=500, rows=512)
MODEL = MemformerConfig(
    vocab_size=0,
    dim=32,
    encoder_layers=1,
    decoder_layers=1,
    num_heads=4,
    mlp=64,
    segment=128,
    memory=SlotsConfig(slots=8),
    decoder_reads=True,  # the query is in the segment that is decoded, so earlier segments do not contain it
)
OPTIM = OptimConfig(lr=3e-3, schedule=ScheduleConfig("cosine", warmup=50, floor=0.05))
TRAIN = TrainConfig(steps=540, batch_size=128, eval_every=1000, checkpoint_every=100, log_every=20)


@recipe
def recall_memformer() -> Recipe:
    """Recall a fact after 4,096 tokens (32 segments): Memformer, with exact gradients by memory replay."""
    train = replace(TRAIN, rollout=RolloutConfig(segment_length=MODEL.segment))
    return Recipe(MODEL, DATA, OPTIM, train)


def variants() -> Mapping[str, Recipe]:
    """Memformer with replay, the same with the paper's settings, with a horizon of 1, and softmax over two segments.

    In the paper's model the decoder does not read the slots: the value must pass from them through the encoding of a
    segment before the question's.
    """
    base = recall_memformer()
    found: Any = base.model
    segment = base.train.rollout.segment_length
    windowed: ModelConfig = TransformerConfig.classic(
        vocab_size=0,
        dim=found.dim,
        layers=found.encoder_layers + found.decoder_layers,
        num_heads=found.num_heads,
        mlp=found.mlp,
        max_length=0,
        dropout=found.dropout,
        attention=SoftmaxConfig(window=2 * segment),
    )
    truncated = replace(base.train, rollout=replace(base.train.rollout, horizon=1))
    paper = replace(found, preset="paper", decoder_reads=False)
    return {
        "Memformer, replay": base,
        "Memformer as in the paper, replay": replace(base, name=f"{base.name}-paper", model=paper),
        "Memformer, horizon 1": replace(base, name=f"{base.name}-horizon-1", train=truncated),
        f"softmax, window {2 * segment}": replace(base, name="recall-softmax", model=windowed),
    }


def recall(claim: Claim, options: Options) -> Finding:
    """The accuracy at the full distance."""
    found = Finding(
        [],
        [
            f"To train one model: mnemos train recall-memformer. Expected: at least {BAR:.0%} with replay, chance "
            "without. This model's decoder reads the slots; the paper's does not: --model.preset paper "
            "--model.decoder-reads False."
        ],
    )
    if options.recipes_only:
        return found
    recipes = variants()
    trained = train(found, options, "recall", recipes)
    table = Table(
        f"Accuracy {DATA.distance:,} tokens ({DATA.distance // MODEL.segment} segments) after the fact",
        ["", "model here", "right, %", "GFLOP per sequence", "seconds of training"],
    )
    for name, variant in recipes.items():
        row = trained.rows[name]
        accuracy = spread(row["mean"], row["std"])
        table.add(name, shape(variant), accuracy, row["flops"] / 1e9, row["seconds"])
    table.add("guessing", "", spread(1 / DATA.symbols, None), None, None)
    found.tables.append(table)
    return found
