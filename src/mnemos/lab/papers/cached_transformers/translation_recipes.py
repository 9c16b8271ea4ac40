"""The six translation tracks of Table 4: a pre-norm Transformer of 6 + 6 layers, with and without a cached encoder.

The paper names the model (pre-norm Transformer, 6 + 6 layers; a cache in every encoder layer, ratio 0.5, 64 slots), the
greatest length 512, Adam with an inverse square root schedule at 1.5e-3, and the average of the last ten checkpoints.
The rest is fairseq's recipe for IWSLT14: width 512, MLP 1024, 4 heads, dropout 0.3, label smoothing 0.1, decoupled
decay 1e-4, warm-up 4,000, 4,096 tokens per batch, beam 5, lower case, every 23rd training pair for validation, and
TED's dev and test sets together for testing. IWSLT15 validates on dev2010 (Vietnamese: tst2012) and is tested on
tst2013. --data.path FOLDER holds the files of a track as they are distributed.
"""

from dataclasses import replace
from typing import Any

from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.translation.translation import TranslationConfig
from mnemos.memory.grc import GRC
from mnemos.models.encoder_decoder import EncoderDecoderConfig

_MODEL = EncoderDecoderConfig(
    vocab_size=0,
    dim=512,
    encoder_layers=6,
    decoder_layers=6,
    num_heads=4,
    mlp=1024,
    max_length=0,
    dropout=0.3,
    share="target",
)
_CACHE = GRC(preset="paper", length=64, ratio=0.5)
# IWSLT14: the recipe's validation pairs are training pairs, and dev2010 is a part of the test set.
_YEAR14: dict[str, Any] = {"held_out": 23, "test": "IWSLT14.TED*", "lowercase": True}
_YEAR15: dict[str, Any] = {"valid": "IWSLT15.TED.dev2010*", "test": "IWSLT15.TED.tst2013*"}


def _track(year: int, source: str, target: str, **files: Any) -> Recipe:
    return Recipe(
        model=_MODEL,
        data=TranslationConfig(
            path=f"iwslt{year}-{source}-{target}", source=source, target=target, longest=511, ratio=1.5, **files
        ),
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


def _cached(base: Recipe) -> Recipe:
    model: Any = base.model
    return replace(base, model=replace(model, cache=_CACHE))


@recipe
def iwslt14_de_en() -> Recipe:
    """German to English, IWSLT14 (Cached Transformers, Table 4)."""
    return _track(14, "de", "en", **_YEAR14)


@recipe
def iwslt14_de_en_cached() -> Recipe:
    """iwslt14-de-en with a gated cache around every attention of the encoder (Cached Transformers, Table 4)."""
    return _cached(iwslt14_de_en())


@recipe
def iwslt14_es_en() -> Recipe:
    """Spanish to English, IWSLT14 (Cached Transformers, Table 4)."""
    return _track(14, "es", "en", **_YEAR14)


@recipe
def iwslt14_es_en_cached() -> Recipe:
    """iwslt14-es-en with a gated cache around every attention of the encoder (Cached Transformers, Table 4)."""
    return _cached(iwslt14_es_en())


@recipe
def iwslt14_en_fr() -> Recipe:
    """English to French, IWSLT14 (Cached Transformers, Table 4)."""
    return _track(14, "en", "fr", **_YEAR14)


@recipe
def iwslt14_en_fr_cached() -> Recipe:
    """iwslt14-en-fr with a gated cache around every attention of the encoder (Cached Transformers, Table 4)."""
    return _cached(iwslt14_en_fr())


@recipe
def iwslt15_de_en() -> Recipe:
    """German to English, IWSLT15 (Cached Transformers, Table 4)."""
    return _track(15, "de", "en", **_YEAR15)


@recipe
def iwslt15_de_en_cached() -> Recipe:
    """iwslt15-de-en with a gated cache around every attention of the encoder (Cached Transformers, Table 4)."""
    return _cached(iwslt15_de_en())


@recipe
def iwslt15_en_vi() -> Recipe:
    """English to Vietnamese, IWSLT15 (Cached Transformers, Table 4)."""
    return _track(15, "en", "vi", **{**_YEAR15, "valid": "IWSLT15.TED.tst2012*"})


@recipe
def iwslt15_en_vi_cached() -> Recipe:
    """iwslt15-en-vi with a gated cache around every attention of the encoder (Cached Transformers, Table 4)."""
    return _cached(iwslt15_en_vi())


@recipe
def iwslt15_cs_en() -> Recipe:
    """Czech to English, IWSLT15 (Cached Transformers, Table 4)."""
    return _track(15, "cs", "en", **_YEAR15)


@recipe
def iwslt15_cs_en_cached() -> Recipe:
    """iwslt15-cs-en with a gated cache around every attention of the encoder (Cached Transformers, Table 4)."""
    return _cached(iwslt15_cs_en())
