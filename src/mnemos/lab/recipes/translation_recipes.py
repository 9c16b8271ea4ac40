"""Small translation models of Multi30k, captions of images in English and German; each trains in hours on one core.

Sizes and schedule are those of the text-only Transformer-Tiny of Wu et al. 2021 ("Good for Misconceived Reasons"): 41.0
tokenised BLEU on test2016, the best of its sizes. Text is lower-cased, as there; norms are before the layers here.
"""

from dataclasses import replace
from typing import Any

from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.translation.translation import TranslationConfig
from mnemos.memory.grc import GRC
from mnemos.models.encoder_decoder import EncoderDecoderConfig

_MODEL = EncoderDecoderConfig(
    vocab_size=0, dim=128, encoder_layers=4, decoder_layers=4, num_heads=4, mlp=256, max_length=0, dropout=0.3
)
_CACHE = GRC(length=64)


@recipe
def multi30k_en_de() -> Recipe:
    """Captions from English to German (Multi30k in --data.path FOLDER), 2.6 million parameters."""
    return Recipe(
        model=_MODEL,
        data=TranslationConfig(source="en", target="de", lowercase=True),
        optim=OptimConfig(
            name="adam",
            lr=5e-3,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            grad_clip=0.0,
            schedule=ScheduleConfig(name="inverse_sqrt", warmup=2000),
        ),
        # An epoch has 115 batches: ten checkpoints are nine epochs, as fairseq averages the last ten epochs.
        train=TrainConfig(steps=8000, batch_size=1024, eval_every=500, checkpoint_every=100, average=10),
    )


@recipe
def multi30k_demo() -> Recipe:
    """multi30k-en-de in some minutes on two cores: 2 + 2 layers, 4,000 sub-words, 1,000 updates of 2,048 tokens."""
    base = multi30k_en_de()
    data: Any = base.data
    return replace(
        base,
        model=replace(_MODEL, encoder_layers=2, decoder_layers=2, dropout=0.1),
        data=replace(data, subwords=4000, batch_tokens=2048),
        optim=replace(base.optim, schedule=ScheduleConfig(name="cosine", warmup=200)),
        train=replace(base.train, steps=1000, eval_every=250, checkpoint_every=250, average=0),
    )


@recipe
def multi30k_de_en() -> Recipe:
    """multi30k-en-de in the other direction."""
    base = multi30k_en_de()
    data: Any = base.data
    return replace(base, data=replace(data, source="de", target="en"))


@recipe
def multi30k_en_de_cached() -> Recipe:
    """multi30k-en-de with a gated cache of 64 slots around every attention of the encoder."""
    return _cached(multi30k_en_de())


@recipe
def multi30k_de_en_cached() -> Recipe:
    """multi30k-de-en with a gated cache of 64 slots around every attention of the encoder."""
    return _cached(multi30k_de_en())


@recipe
def multi30k_demo_cached() -> Recipe:
    """multi30k-demo with a gated cache of 64 slots around every attention of the encoder."""
    return _cached(multi30k_demo())


def _cached(base: Recipe) -> Recipe:
    model: Any = base.model
    return replace(base, model=replace(model, cache=_CACHE))
