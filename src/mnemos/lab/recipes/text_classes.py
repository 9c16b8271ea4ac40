"""Recipes of texts in class folders: an encoder that reads them in segments, with and without a gated cache."""

from mnemos.lab.hosted.encoder import HostedEncoderConfig
from mnemos.lab.run.recipe import Recipe, TrainConfig
from mnemos.lab.tasks.text_classes import TextClassesConfig
from mnemos.memory.gated_cache import GRC

from .family import cosine, family

_READ = {"": "the logits of the segments, averaged", "last": "the last segment alone"}


@family("texts-{read}-{memory}", read=_READ, memory=("", "cached"))
def texts(read: str, memory: str) -> Recipe:
    """Classify texts longer than an encoder reads, in segments: `--model hf:NAME` chooses the encoder.

    `--model.frozen N` keeps its lower layers. `mnemos compare ... --baselines` adds to a cached one the cache that is
    never written, and adapters with as many parameters.
    """
    cache = GRC(scope="stream") if memory else None
    encoder = "an encoder with a gated cache per text, carried from segment to segment" if memory else "an encoder"
    return Recipe(
        about=f"Texts in class folders, {encoder}; the class is read from {_READ[read]}",
        model=HostedEncoderConfig(vocab_size=0, classes=0, segment=0, read="last" if read else "mean", cache=cache),
        data=TextClassesConfig(),
        optim=cosine(1e-3, warmup=0.1),
        train=TrainConfig(steps=500, batch_size=8, log_every=10, eval_every=100),
    )
