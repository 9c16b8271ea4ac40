"""A small Transformer on short ListOps, with a gated cache, and its baselines: the smallest classification task."""

from dataclasses import replace

from mnemos.attention.linear import LinearConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.memory.grc import GRC
from mnemos.models.transformer import HeadConfig, TransformerConfig

_SHORT = ListOpsConfig(
    min_length=4,
    max_length=25,
    max_depth=3,
    max_arguments=4,
    digit_probability=0.5,
    train_size=200_000,
    valid_size=1_000,
    test_size=5_000,
)
_MODEL = TransformerConfig.classic(
    vocab_size=0,
    dim=64,
    layers=2,
    num_heads=4,
    mlp=128,
    max_length=0,
    causal=False,
    head=HeadConfig(classes=10, hidden=128),
)


@recipe
def short_listops() -> Recipe:
    """A small Transformer on ListOps of 5 to 24 symbols: about a minute on two cores."""
    return Recipe(
        model=_MODEL,
        data=_SHORT,
        optim=OptimConfig(lr=3e-3, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(steps=6000, batch_size=64, log_every=50, eval_every=500, checkpoint_every=2000),
    )


@recipe
def short_listops_cached() -> Recipe:
    """short-listops with a gated recurrent cache around every attention."""
    return replace(short_listops(), model=replace(_MODEL, cache=GRC()))


@recipe
def short_listops_cached_unwritten() -> Recipe:
    """short-listops-cached with a cache that is never written: the cached branch without a memory."""
    return replace(short_listops(), model=replace(_MODEL, cache=GRC().unwritten()))


@recipe
def short_listops_wider() -> Recipe:
    """short-listops with wider MLPs: as many parameters as short-listops-cached, without a memory."""
    return replace(short_listops(), model=replace(_MODEL, mlp=210))


@recipe
def short_listops_linear() -> Recipe:
    """short-listops with linear attention."""
    return replace(short_listops(), model=replace(_MODEL, attention=LinearConfig()))
