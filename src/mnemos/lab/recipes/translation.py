"""Small translation models of Multi30k, captions of images in English and German; each trains in hours on one core.

Sizes and schedule are those of the text-only Transformer-Tiny of Wu et al. 2021 ("Good for Misconceived Reasons"): 41.0
tokenised BLEU on test2016, the best of its sizes. Text is lower-cased, as there; norms are before the layers here.
"""

from dataclasses import replace

from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig
from mnemos.lab.translation.translation import TranslationConfig
from mnemos.memory.gated_cache import GRC
from mnemos.models.encoder_decoder import EncoderDecoderConfig

from .family import altered, family, variant

_MODEL = EncoderDecoderConfig(
    vocab_size=0, dim=128, encoder_layers=4, decoder_layers=4, num_heads=4, mlp=256, max_length=0, dropout=0.3
)
_OPTIM = OptimConfig(
    name="adam",
    lr=5e-3,
    betas=(0.9, 0.98),
    weight_decay=0.0,
    grad_clip=0.0,
    schedule=ScheduleConfig(name="inverse_sqrt", warmup=2000),
)
# An epoch has 115 batches: ten checkpoints are nine epochs, as fairseq averages the last ten epochs.
_TRAIN = TrainConfig(steps=8000, batch_size=1024, eval_every=500, checkpoint_every=100, average=10)
_EN_DE = Recipe(_MODEL, TranslationConfig(source="en", target="de", lowercase=True), _OPTIM, _TRAIN)
_RECIPES = {
    "en-de": replace(
        _EN_DE, about="Captions from English to German (Multi30k in --data.path FOLDER), 2.6 million parameters"
    ),
    "demo": Recipe(
        about="multi30k-en-de in some minutes on two cores: 2 + 2 layers, 4,000 sub-words",
        model=replace(_MODEL, encoder_layers=2, decoder_layers=2, dropout=0.1),
        data=TranslationConfig(source="en", target="de", lowercase=True, subwords=4000, batch_tokens=2048),
        optim=replace(_OPTIM, schedule=ScheduleConfig(name="cosine", warmup=200)),
        train=replace(_TRAIN, steps=1000, eval_every=250, checkpoint_every=250, average=0),
    ),
    "de-en": altered(_EN_DE, about="multi30k-en-de in the other direction", data={"source": "de", "target": "en"}),
}


@family("multi30k-{size}-{memory}", size=_RECIPES, memory=("", "cached"))
def multi30k(size: str, memory: str) -> Recipe:
    """Translate captions of images (Multi30k), with and without a gated cache in the encoder."""
    plain = _RECIPES[size]
    if not memory:
        return plain
    about = f"multi30k-{size} with a gated cache of 64 slots around every attention of the encoder"
    return variant(plain, about, cache=GRC(length=64))
