"""Recipes of Cached Transformers: the main job on short ListOps, and Long ListOps at the paper's size (Table 6)."""

from dataclasses import replace

from mnemos.attention.linear import LinearConfig
from mnemos.data.listops import ListOpsConfig
from mnemos.memory.grc import GRC
from mnemos.models.transformer import HeadConfig, TransformerConfig
from mnemos.train.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig

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


def demo() -> Recipe:
    """A small Transformer on ListOps of 5 to 24 symbols: learns it in about a minute on two cores."""
    return Recipe(
        name="demo",
        about="a small Transformer on short ListOps: about a minute on two cores",
        model=TransformerConfig(
            vocab_size=16,
            dim=64,
            layers=2,
            num_heads=4,
            mlp=128,
            max_length=24,
            causal=False,
            head=HeadConfig(classes=10, hidden=128),
        ),
        data=_SHORT,
        optim=OptimConfig(lr=3e-3, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(steps=6000, batch_size=64, log_every=50, eval_every=500, checkpoint_every=2000),
    )


def _with_model(recipe: Recipe, name: str, about: str, **fields: object) -> Recipe:
    return replace(recipe, name=name, about=about, model=replace(recipe.model, **fields))


def demo_cached() -> Recipe:
    """The demo's twin, with a gated recurrent cache around every attention."""
    return _with_model(
        demo(), "demo-cached", "the demo with a gated recurrent cache around every attention", cache=GRC()
    )


def demo_wider() -> Recipe:
    """The demo with a wider MLP: as many parameters as the cached twin, and no memory."""
    return _with_model(
        demo(), "demo-wider", "the demo with a wider MLP: the cached twin's parameters, no memory", mlp=210
    )


def demo_linear() -> Recipe:
    """The demo with linear attention."""
    return _with_model(demo(), "demo-linear", "the demo with linear attention", attention=LinearConfig())


def listops() -> Recipe:
    """Long ListOps as in the paper: 6 layers of width 512, 5,000 updates of 32 (SPEC of Table 6)."""
    return Recipe(
        name="listops",
        about="Long ListOps at the paper's size (Table 6, Transformer): hours on a GPU",
        model=TransformerConfig(
            vocab_size=16,
            dim=512,
            layers=6,
            num_heads=8,
            mlp=1024,
            max_length=1999,
            causal=False,
            dropout=0.1,
            head=HeadConfig(classes=10, hidden=1024),
        ),
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


def listops_cached() -> Recipe:
    """Long ListOps as in the paper, GRC-cached: the cache as long as the sequence, ratio 0.5 (Table 6)."""
    about = "Long ListOps at the paper's size, GRC-cached (Table 6): hours on a GPU"
    return _with_model(listops(), "listops-cached", about, cache=GRC(preset="paper"))
