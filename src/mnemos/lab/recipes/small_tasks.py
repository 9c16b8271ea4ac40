"""Small models of tasks that are generated or small: told facts, ListOps, recall, images pixel by pixel."""

from dataclasses import replace
from typing import Any

from mnemos import BlockSparseConfig, ReformerConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig, recipe
from mnemos.lab.tasks.fact_recall import ToldConfig
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import HeadConfig

from .family import about_lines, cosine, family, transformer

WINDOW = 32  # words that an attention of the demo reads, and words per segment
_SIZES: dict[str, Any] = {"dim": 64, "num_heads": 4, "mlp": 128}
_DEMO = transformer(**_SIZES, layers=2, position="none", attention=SoftmaxConfig(window=WINDOW))
_DEMO_MEMFORMER = MemformerConfig(
    **_SIZES,
    vocab_size=0,
    encoder_layers=1,
    decoder_layers=1,
    segment=WINDOW,
    memory=SlotsConfig(slots=8),
    decoder_reads=True,  # the question is in the segment that is decoded, so the decoder must read the memory
)
_DEMOS: dict[str, ModelConfig] = {
    "": _DEMO,
    "linear": replace(_DEMO, attention=LinearConfig()),
    "cached": replace(_DEMO, cache=GRC(length=8, block=WINDOW, scope="stream")),
    "memformer": _DEMO_MEMFORMER,
}
_ABOUT = about_lines("""
-: Recall a fact told in real text, softmax attention to the last 32 words: a window without a memory
linear: demo with linear attention: its memory is one matrix per head
cached: demo with a gated recurrent cache per stream around every attention: 8 slots, written every 32 words
memformer: demo with Memformer: 8 slots, written every 32 words, exact gradients by memory replay
""")


@family("demo-{memory}", memory=_DEMOS)
def demo(memory: str) -> Recipe:
    """A fact is told in real text and asked for up to 512 words later: `make demo` compares the memories.

    Every model has two layers of 64 channels, reads the same rows, and sees at most the last `WINDOW` words at once, or
    nothing but its memory. None has positions, but for Memformer's bias by distance.
    """
    rollout = RolloutConfig(segment_length=WINDOW if memory == "memformer" else 0)
    return Recipe(
        about=_ABOUT[memory],
        model=_DEMOS[memory],
        data=ToldConfig(grow=200, rows=500),
        optim=cosine(3e-3, warmup=50, floor=0.05),
        train=TrainConfig(
            steps=250, batch_size=32, log_every=10, eval_every=125, checkpoint_every=125, rollout=rollout
        ),
    )


_LISTOPS = transformer(**_SIZES, layers=2, causal=False, head=HeadConfig(classes=10, hidden=128))
_SHORT = {
    "": _LISTOPS,
    "cached": replace(_LISTOPS, cache=GRC()),
    "cached-unwritten": replace(_LISTOPS, cache=GRC().unwritten()),
    "wider": replace(_LISTOPS, mlp=210),
    "linear": replace(_LISTOPS, attention=LinearConfig()),
}
_SHORT_ABOUT = about_lines("""
-: A small Transformer on ListOps of 5 to 24 symbols: about a minute on two cores
cached: short-listops with a gated recurrent cache around every attention
cached-unwritten: short-listops-cached with a cache that is never written: the cached branch without a memory
wider: short-listops with wider MLPs: as many parameters as short-listops-cached, without a memory
linear: short-listops with linear attention
""")


@family("short-listops-{variant}", variant=_SHORT)
def short_listops(variant: str) -> Recipe:
    """A small Transformer on short ListOps, with a gated cache and its baselines: the smallest classification task."""
    trees: dict[str, Any] = {"min_length": 4, "max_length": 25, "max_depth": 3, "max_arguments": 4}
    return Recipe(
        about=_SHORT_ABOUT[variant],
        model=_SHORT[variant],
        data=ListOpsConfig(**trees, digit_probability=0.5, train_size=200_000, valid_size=1_000, test_size=5_000),
        optim=cosine(3e-3, warmup=100),
        train=TrainConfig(steps=6000, batch_size=64, log_every=50, eval_every=500, checkpoint_every=2000),
    )


# Block-sparse attention and Reformer are scaled with the length, so that they stay sparse: 128 symbols are 32 blocks,
# as 2,000 are at the paper's size, and a block of queries reads 8 of them; a query of Reformer reads at most 32 keys.
LISTOPS_128 = ListOpsConfig(min_length=63, max_length=129, train_size=64_000, valid_size=1_000, test_size=5_000)
_ATTENTIONS: dict[str, AttentionConfig] = {
    "": SoftmaxConfig(),
    "bigbird": BlockSparseConfig(block=4),
    "reformer": ReformerConfig(rounds=2, chunk=8),
    "linear": LinearConfig(),
}
_ATTENTIONS_ABOUT = about_lines("""
-: ListOps of 64 to 128 symbols, a small Transformer: a minute of one core
bigbird: listops-128 with BigBird's attention: blocks of 4 read 8 of 32 blocks, 3 of them random
reformer: listops-128 with Reformer's attention: 2 rounds of chunks of 8 that read the chunk before them
linear: listops-128 with linear attention
""")


@family("listops-128-{attention}-{memory}", attention=_ATTENTIONS, memory=("", "cached"))
def listops_128(attention: str, memory: str) -> Recipe:
    """Long ListOps in 64 to 128 symbols: four attentions, with and without the paper's cache, in minutes on one core.

    The trees have the rules of Long Range Arena (10 levels, 10 arguments); only the length is shorter.
    `mnemos compare … --baselines` adds the never-written baseline and the one of equal parameters.
    """
    about = _ATTENTIONS_ABOUT[attention]
    if memory:
        slots = "" if attention else ": as many slots as symbols, ratio 0.5"
        plain = f"listops-128-{attention}".removesuffix("-")
        about = f"{plain} with the paper's cache around every attention{slots}"
    return Recipe(
        about=about,
        model=replace(_LISTOPS, attention=_ATTENTIONS[attention], cache=GRC(preset="paper") if memory else None),
        data=LISTOPS_128,
        optim=cosine(2e-3, warmup=100),
        train=TrainConfig(steps=1500, eval_every=500),
    )


_OPTIM = cosine(1e-3, warmup=100)


@recipe
def recall() -> Recipe:
    """Associative recall: find the value that was paired with a key."""
    return Recipe(transformer(), RecallConfig(), _OPTIM, TrainConfig(steps=2000, batch_size=64))


_PIXELS = transformer(dim=64, mlp=128, causal=False, head=HeadConfig(classes=10))


@recipe
def digits() -> Recipe:
    """Classify scikit-learn's 1,797 digits, each as 64 tokens."""
    return Recipe(_PIXELS, DigitsConfig(), _OPTIM, TrainConfig(steps=1000, batch_size=32))


@recipe
def mnist() -> Recipe:
    """Classify MNIST, each image as 784 tokens, with linear attention (--data.path FOLDER with the idx files)."""
    model = replace(_PIXELS, attention=LinearConfig())
    return Recipe(model, MNISTConfig(), _OPTIM, TrainConfig(steps=2000, batch_size=32))
