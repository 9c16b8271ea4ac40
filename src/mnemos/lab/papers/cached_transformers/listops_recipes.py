"""Long ListOps at the paper's size (Table 6): four attentions, with and without a cache."""

from dataclasses import replace

from mnemos.attention.block_sparse import BlockSparseConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.reformer import ReformerConfig
from mnemos.config import AttentionConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.memory.grc import GRC
from mnemos.models.transformer import HeadConfig, TransformerConfig

_MODEL = TransformerConfig.classic(
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


@recipe
def listops_bigbird() -> Recipe:
    """Long ListOps at the paper's size (Table 6, BigBird: blocks of 64, 3 random): hours on a GPU."""
    return _with(BlockSparseConfig())


@recipe
def listops_bigbird_cached() -> Recipe:
    """Long ListOps at the paper's size, BigBird, GRC-cached (Table 6): hours on a GPU."""
    return _with(BlockSparseConfig(), GRC(preset="paper"))


@recipe
def listops_reformer() -> Recipe:
    """Long ListOps at the paper's size (Table 6, Reformer, with this library's rounds and chunks): hours on a GPU."""
    return _with(ReformerConfig())


@recipe
def listops_reformer_cached() -> Recipe:
    """Long ListOps at the paper's size, Reformer, GRC-cached (Table 6): hours on a GPU."""
    return _with(ReformerConfig(), GRC(preset="paper"))


@recipe
def listops_linear() -> Recipe:
    """Long ListOps at the paper's size, linear attention (not in Table 6): hours on a GPU."""
    return _with(LinearConfig())


@recipe
def listops_linear_cached() -> Recipe:
    """Long ListOps at the paper's size, linear attention, GRC-cached (not in Table 6): hours on a GPU."""
    return _with(LinearConfig(), GRC(preset="paper"))


def _with(attention: AttentionConfig, cache: GRC | None = None) -> Recipe:
    """`listops` with another attention in every layer."""
    return replace(listops(), model=replace(_MODEL, attention=attention, cache=cache))
