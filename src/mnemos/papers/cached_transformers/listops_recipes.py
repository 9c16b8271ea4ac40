"""Long ListOps at the paper's size (Table 6)."""

from dataclasses import replace

from mnemos.data.listops import ListOpsConfig
from mnemos.memory.grc import GRC
from mnemos.models.transformer import HeadConfig, TransformerConfig
from mnemos.train.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe

_MODEL = TransformerConfig(
    vocab_size=0,
    dim=512,
    layers=6,
    num_heads=8,
    mlp=1024,
    max_length=0,
    causal=False,
    dropout=0.1,
    head=HeadConfig(classes=10, hidden=1024),
)


@recipe
def listops() -> Recipe:
    """Long ListOps at the paper's size (Table 6, Transformer): hours on a GPU."""
    return Recipe(
        model=_MODEL,
        data=ListOpsConfig(),
        optim=OptimConfig(
            lr=0.05,
            betas=(0.9, 0.98),
            eps=1e-9,
            weight_decay=0.1,
            grad_clip=0.0,
            schedule=ScheduleConfig(name="lra", warmup=1000),
        ),
        train=TrainConfig(steps=5000, batch_size=32, eval_every=500, checkpoint_every=500),
    )


@recipe
def listops_cached() -> Recipe:
    """Long ListOps at the paper's size, GRC-cached: as many slots as tokens, ratio 0.5 (Table 6): hours on a GPU."""
    return replace(listops(), model=replace(_MODEL, cache=GRC(preset="paper")))
