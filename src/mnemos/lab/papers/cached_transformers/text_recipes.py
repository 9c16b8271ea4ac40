"""Transformer-XL at the sizes of Table 5: with its segment memory, a gated cache in its place, and memory tokens.

The sizes and schedules are those of Transformer-XL's own scripts (Dai et al. 2019), which the paper says it keeps; it
gives no number of slots or of memory tokens. Dropout is also that of attention weights, which those scripts leave out.
Text is read in words, with a tied adaptive softmax; the recipes `wikitext-bytes-…` read the same text as bytes.
"""

from dataclasses import replace
from typing import Any

from mnemos.attention.relative import RelativeConfig
from mnemos.lab.recipes.in_words import in_words
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.grc import GRC
from mnemos.memory.memory_tokens import TokensConfig
from mnemos.models.memory_tokens import MemoryTransformerConfig, RMTConfig
from mnemos.models.transformer import TransformerConfig

_BASE = TransformerConfig.classic(
    vocab_size=0,
    dim=410,
    layers=16,
    num_heads=10,
    mlp=2100,
    max_length=0,
    norm="post",
    position="none",
    activation="relu",
    dropout=0.1,
    attention=RelativeConfig(memory=150),
)
_LARGE = replace(_BASE, dim=1024, layers=18, num_heads=16, mlp=4096, dropout=0.2, attention=RelativeConfig(memory=384))


def _recipe(model: TransformerConfig, segment: int, steps: int, batch_size: int, warmup: int) -> Recipe:
    return Recipe(
        model=model,
        data=TextConfig(segment=segment),
        optim=OptimConfig(
            name="adam",
            lr=2.5e-4,
            weight_decay=0.0,
            grad_clip=0.25,
            schedule=ScheduleConfig(name="cosine", warmup=warmup),
        ),
        train=TrainConfig(steps=steps, batch_size=batch_size, eval_every=5000, checkpoint_every=1000),
    )


def _cached(base: Recipe, slots: int) -> Recipe:
    """The recipe with a shared cache in place of the memory, written after each half of a segment.

    The second half then reads what the first half wrote. A cache that is written once per segment is read by the next
    call, which no gradient reaches: its gates would not be trained.
    """
    cache = GRC(preset="paper", length=slots, block=slots // 2)
    model: Any = base.model
    return replace(base, model=replace(model, attention=RelativeConfig(memory=0), cache=cache))


@recipe
def wikitext_xl_base() -> Recipe:
    """Words of WikiText-103, Transformer-XL base: 410 wide, a memory of 150 (Cached Transformers, Table 5)."""
    return in_words(wikitext_bytes_xl_base())


@recipe
def wikitext_xl_base_cached() -> Recipe:
    """wikitext-xl-base with a gated cache of 150 slots in place of the memory (Cached Transformers, Table 5)."""
    return _cached(wikitext_xl_base(), 150)


_TOKENS = 10  # memory tokens


def _segments() -> dict[str, Any]:
    """The sizes of `wikitext-xl-base` for models of memory tokens."""
    names = ("dim", "layers", "num_heads", "mlp", "norm", "activation", "dropout")
    return {"vocab_size": 0, "segment": 150, "position": "learned", **{name: getattr(_BASE, name) for name in names}}


@recipe
def wikitext_mt_base() -> Recipe:
    """wikitext-xl-base as a Memory Transformer: 10 tokens before each 150 words (Cached Transformers, Table 5).

    The positions, learned within a segment, are chosen here.
    """
    model = MemoryTransformerConfig(**_segments(), memory_tokens=_TOKENS)
    return in_words(replace(wikitext_bytes_xl_base(), model=model))


@recipe
def wikitext_rmt_base() -> Recipe:
    """wikitext-xl-base as an RMT: 10 memory tokens, gradients through 4 segments (Cached Transformers, Table 5).

    An update reads one new segment, as those of the other rows do; the three before it are read again. The positions,
    learned within a segment, are chosen here: the width per head, 41, is not even, as rotary ones need.
    """
    plain = wikitext_bytes_xl_base()
    train = replace(plain.train, rollout=RolloutConfig(segments=4, slide=1))
    return in_words(replace(plain, model=RMTConfig(**_segments(), memory=TokensConfig(_TOKENS)), train=train))


@recipe
def wikitext_xl_large() -> Recipe:
    """Words of WikiText-103, Transformer-XL large: 1024 wide, a memory of 384 (Cached Transformers, Table 5)."""
    return in_words(_recipe(_LARGE, segment=384, steps=4_000_000, batch_size=128, warmup=16_000))


@recipe
def wikitext_xl_large_cached() -> Recipe:
    """wikitext-xl-large with a gated cache of 384 slots in place of the memory (Cached Transformers, Table 5)."""
    return _cached(wikitext_xl_large(), 384)


@recipe
def wikitext_bytes_xl_base() -> Recipe:
    """wikitext-xl-base over the bytes of --data.path FOLDER: no perplexity of the paper's."""
    return _recipe(_BASE, segment=150, steps=200_000, batch_size=60, warmup=0)


@recipe
def wikitext_bytes_xl_base_cached() -> Recipe:
    """wikitext-xl-base-cached over the bytes of --data.path FOLDER."""
    return _cached(wikitext_bytes_xl_base(), 150)
