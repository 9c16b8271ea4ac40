"""Long ListOps in 64 to 128 symbols: four attentions, with and without the paper's cache, in minutes on one core.

The trees have the rules of Long Range Arena (10 levels, 10 arguments); only the length is shorter. Block-sparse
attention and Reformer are scaled with it, so that they stay sparse: 128 symbols are 32 blocks, as 2,000 symbols are at
the paper's size, and a block of queries reads 8 of them; a query of Reformer reads at most 32 keys.
`mnemos compare … --baselines` adds the never-written baseline and the one of equal parameters.
"""

from mnemos.attention.block_sparse import BlockSparseConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.reformer import ReformerConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.memory.grc import GRC
from mnemos.models.transformer import HeadConfig, TransformerConfig

DATA = ListOpsConfig(min_length=63, max_length=129, train_size=64_000, valid_size=1_000, test_size=5_000)
_CACHE = GRC(preset="paper")
_BIGBIRD = BlockSparseConfig(block=4)
_REFORMER = ReformerConfig(rounds=2, chunk=8)


def _recipe(attention: AttentionConfig, cache: GRC | None = None) -> Recipe:
    return Recipe(
        model=TransformerConfig.classic(
            vocab_size=0,
            dim=64,
            layers=2,
            num_heads=4,
            mlp=128,
            max_length=0,
            causal=False,
            attention=attention,
            cache=cache,
            head=HeadConfig(classes=10, hidden=128),
        ),
        data=DATA,
        optim=OptimConfig(lr=2e-3, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(steps=1500, eval_every=500),
    )


@recipe
def listops_128() -> Recipe:
    """ListOps of 64 to 128 symbols, a small Transformer: a minute of one core."""
    return _recipe(SoftmaxConfig())


@recipe
def listops_128_cached() -> Recipe:
    """listops-128 with the paper's cache around every attention: as many slots as symbols, ratio 0.5."""
    return _recipe(SoftmaxConfig(), _CACHE)


@recipe
def listops_128_bigbird() -> Recipe:
    """listops-128 with BigBird's attention: blocks of 4 read 8 of 32 blocks, 3 of them random."""
    return _recipe(_BIGBIRD)


@recipe
def listops_128_bigbird_cached() -> Recipe:
    """listops-128-bigbird with the paper's cache around every attention."""
    return _recipe(_BIGBIRD, _CACHE)


@recipe
def listops_128_reformer() -> Recipe:
    """listops-128 with Reformer's attention: 2 rounds of chunks of 8 that read the chunk before them."""
    return _recipe(_REFORMER)


@recipe
def listops_128_reformer_cached() -> Recipe:
    """listops-128-reformer with the paper's cache around every attention."""
    return _recipe(_REFORMER, _CACHE)


@recipe
def listops_128_linear() -> Recipe:
    """listops-128 with linear attention."""
    return _recipe(LinearConfig())


@recipe
def listops_128_linear_cached() -> Recipe:
    """listops-128-linear with the paper's cache around every attention."""
    return _recipe(LinearConfig(), _CACHE)
