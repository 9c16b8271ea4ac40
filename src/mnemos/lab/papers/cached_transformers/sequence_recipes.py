"""Sequences with and without a cache: translation (Table 4), language models (Table 5) and Long ListOps (Table 6)."""

from dataclasses import replace
from typing import Any

from mnemos.attention.linear import LinearConfig
from mnemos.attention.relative import RelativeConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig
from mnemos.lab.recipes.family import family
from mnemos.lab.recipes.text import in_words
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.translation.translation import TranslationConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.tokens import TokensConfig
from mnemos.models.encoder_decoder import EncoderDecoderConfig
from mnemos.models.segments import MemoryTransformerConfig, RMTConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

from ..baselines.bigbird.layer import BlockSparseConfig
from ..baselines.reformer.layer import ReformerConfig

# Each track: its files of validation (2014: every 23rd training pair, as in fairseq's recipe, because dev2010 is a part
# of the test set).
_TRACKS = {
    "14-de-en": "",
    "14-es-en": "",
    "14-en-fr": "",
    "15-de-en": "IWSLT15.TED.dev2010*",
    "15-en-vi": "IWSLT15.TED.tst2012*",
    "15-cs-en": "IWSLT15.TED.dev2010*",
}
_LANGUAGES = {"cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "vi": "Vietnamese"}


@family("iwslt{track}-{memory}", track=_TRACKS, memory=("", "cached"))
def iwslt(track: str, memory: str) -> Recipe:
    """Translation of talks by a pre-norm Transformer, with and without a cached encoder (Cached Transformers, Table 4).

    The paper names the model (pre-norm Transformer, 6 + 6 layers; a cache in every encoder layer, ratio 0.5, 64 slots),
    the greatest length 512, Adam with an inverse square root schedule at 1.5e-3, and the average of the last ten
    checkpoints. The rest is fairseq's recipe for IWSLT14: width 512, MLP 1024, 4 heads, dropout 0.3, label smoothing
    0.1, decoupled decay 1e-4, warm-up 4,000, 4,096 tokens per batch, beam 5, lower case, every 23rd training pair for
    validation, and TED's dev and test sets together for testing. IWSLT15 validates on dev2010 (Vietnamese: tst2012) and
    is tested on tst2013. --data.path FOLDER holds the files of a track as they are distributed.
    """
    year, source, target = track.split("-")
    files: dict[str, Any] = {"held_out": 23, "test": "IWSLT14.TED*", "lowercase": True}
    if year == "15":
        files = {"valid": _TRACKS[track], "test": "IWSLT15.TED.tst2013*"}
    about = f"{_LANGUAGES[source]} to {_LANGUAGES[target]}, IWSLT{year} (Cached Transformers, Table 4)"
    if memory:
        about = f"iwslt{track} with a gated cache around every attention of the encoder (Cached Transformers, Table 4)"
    return Recipe(
        about=about,
        model=EncoderDecoderConfig(
            vocab_size=0,
            dim=512,
            encoder_layers=6,
            decoder_layers=6,
            num_heads=4,
            mlp=1024,
            max_length=0,
            dropout=0.3,
            share="target",
            cache=GRC(preset="paper", length=64, ratio=0.5) if memory else None,
        ),
        data=TranslationConfig(path=f"iwslt{track}", source=source, target=target, longest=511, ratio=1.5, **files),
        optim=OptimConfig(
            name="adamw",
            lr=1.5e-3,
            betas=(0.9, 0.98),
            weight_decay=1e-4,
            grad_clip=0.0,
            schedule=ScheduleConfig(name="inverse_sqrt", warmup=4000),
        ),
        train=TrainConfig(steps=50_000, batch_size=1024, eval_every=1000, checkpoint_every=1000, average=10),
    )


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


def _cached(model: TransformerConfig, slots: int) -> TransformerConfig:
    """The model with a shared cache in place of the memory, written after each half of a segment.

    The second half then reads what the first half wrote. A cache that is written once per segment is read by the next
    call, which no gradient reaches: its gates would not be trained.
    """
    cache = GRC(preset="paper", length=slots, block=slots // 2)
    return replace(model, attention=RelativeConfig(memory=0), cache=cache)


# The sizes of `_BASE` for models of memory tokens. The positions, learned within a segment, are chosen here: the width
# per head, 41, is not even, as rotary ones need.
_SEGMENTS: dict[str, Any] = {"vocab_size": 0, "segment": 150, "position": "learned"} | {
    name: getattr(_BASE, name) for name in ("dim", "layers", "num_heads", "mlp", "norm", "activation", "dropout")
}
_TOKENS = 10  # memory tokens
_ROWS: dict[str, tuple[str, ModelConfig]] = {
    "xl-base": ("Words of WikiText-103, Transformer-XL base: 410 wide, a memory of 150", _BASE),
    "xl-base-cached": ("wikitext-xl-base with a gated cache of 150 slots in place of the memory", _cached(_BASE, 150)),
    "mt-base": (
        "wikitext-xl-base as a Memory Transformer: 10 tokens before each 150 words",
        MemoryTransformerConfig(**_SEGMENTS, memory_tokens=_TOKENS),
    ),
    "rmt-base": (
        "wikitext-xl-base as an RMT: 10 memory tokens, gradients through 4 segments",
        RMTConfig(**_SEGMENTS, memory=TokensConfig(_TOKENS)),
    ),
    "xl-large": ("Words of WikiText-103, Transformer-XL large: 1024 wide, a memory of 384", _LARGE),
    "xl-large-cached": (
        "wikitext-xl-large with a gated cache of 384 slots in place of the memory",
        _cached(_LARGE, 384),
    ),
}
_BYTES = {
    "xl-base": "wikitext-xl-base over the bytes of --data.path FOLDER: no perplexity of the paper's",
    "xl-base-cached": "wikitext-xl-base-cached over the bytes of --data.path FOLDER",
}


@family("wikitext-{tokens}-{row}", tokens=("", "bytes"), row=_ROWS)
def cached_wikitext(tokens: str, row: str) -> Recipe | None:
    """Transformer-XL with its memory, a gated cache in its place, or memory tokens (Cached Transformers, Table 5).

    The sizes and schedules are those of Transformer-XL's own scripts (Dai et al. 2019), which the paper says it keeps;
    it gives no number of slots or of memory tokens. Dropout is also that of attention weights, which those scripts
    leave out. Text is read in words, with a tied adaptive softmax; the recipes `wikitext-bytes-…` read the same text as
    bytes. An update of the RMT reads one new segment, as those of the other rows do; the three before it are read
    again.
    """
    about, model = _ROWS[row]
    large = row.startswith("xl-large")
    rollout = RolloutConfig(segments=4, slide=1) if row == "rmt-base" else RolloutConfig()
    recipe = Recipe(
        about=f"{about} (Cached Transformers, Table 5)",
        model=model,
        data=TextConfig(segment=384 if large else 150),
        optim=OptimConfig(
            name="adam",
            lr=2.5e-4,
            weight_decay=0.0,
            grad_clip=0.25,
            schedule=ScheduleConfig(name="cosine", warmup=16_000 if large else 0),
        ),
        train=TrainConfig(
            steps=4_000_000 if large else 200_000,
            batch_size=128 if large else 60,
            eval_every=5000,
            checkpoint_every=1000,
            rollout=rollout,
        ),
    )
    if not tokens:
        return in_words(recipe)
    return replace(recipe, about=_BYTES[row]) if row in _BYTES else None


_LISTOPS: dict[str, tuple[str, str, AttentionConfig]] = {
    "": (" (Table 6, Transformer)", ", GRC-cached: as many slots as tokens, ratio 0.5 (Table 6)", SoftmaxConfig()),
    "bigbird": (
        " (Table 6, BigBird: blocks of 64, 3 random)",
        ", BigBird, GRC-cached (Table 6)",
        BlockSparseConfig(),
    ),
    "reformer": (
        " (Table 6, Reformer with the settings of Long Range Arena)",
        ", Reformer, GRC-cached (Table 6)",
        ReformerConfig(rounds=1, chunk=201, buckets=10),
    ),
    "linear": (
        ", linear attention (not in Table 6)",
        ", linear attention, GRC-cached (not in Table 6)",
        LinearConfig(),
    ),
}


@family("listops-{attention}-{memory}", attention=_LISTOPS, memory=("", "cached"))
def listops(attention: str, memory: str) -> Recipe:
    """Long ListOps at the size of Cached Transformers: four attentions, with and without a cache, hours on a GPU.

    The Reformer has the settings of Long Range Arena's own code, which the paper follows: one round of ten buckets, and
    the 2,001 tokens in ten chunks, which is 201 each; a token reads its chunk and the one before. That code scales the
    scores by √d and leaves the keys as they are; this is the attention as published, with keys of length one.
    """
    plain, cached, config = _LISTOPS[attention]
    return Recipe(
        about=f"Long ListOps at the paper's size{cached if memory else plain}: hours on a GPU",
        model=TransformerConfig.classic(
            vocab_size=0,
            dim=512,
            layers=6,
            num_heads=8,
            mlp=1024,
            max_length=0,
            causal=False,
            dropout=0.1,
            attention=config,
            cache=GRC(preset="paper") if memory else None,
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
