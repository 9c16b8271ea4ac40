"""Recipes of a series of numbers: small Transformers that read a value a step, with the memories of streams."""

from dataclasses import replace

from mnemos.attention.linear import LinearConfig
from mnemos.attention.recurrent import GatedDeltaConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.lab.run.recipe import Recipe, TrainConfig
from mnemos.lab.tasks.series import SeriesConfig
from mnemos.memory.gated_cache import GRC
from mnemos.models.transformer import TransformerConfig

from .family import cosine, family

_MODEL = TransformerConfig(
    vocab_size=0, features=0, dim=64, layers=2, num_heads=4, mlp=128, max_length=0, attention=SoftmaxConfig(window=64)
)
_CACHED = replace(_MODEL, cache=GRC(length=16, block=32, scope="stream"))
_MODELS = {
    "": ("softmax attention to the last 64 steps", _MODEL),
    "linear": ("linear attention, whose memory is one matrix per head", replace(_MODEL, attention=LinearConfig())),
    "gated-delta": ("the gated delta rule, which forgets and corrects", replace(_MODEL, attention=GatedDeltaConfig())),
    "cached": ("the last 64 steps, and a gated cache per stream", _CACHED),
}


@family("series-{memory}", memory=_MODELS)
def series(memory: str) -> Recipe:
    """Predict the next step of a table of numbers over time, or the class of each step (`--data.path FILE.csv`)."""
    how, model = _MODELS[memory]
    return Recipe(
        about=f"A series of numbers (--data.path FILE.csv), the next step: {how}",
        model=model,
        data=SeriesConfig(),
        optim=cosine(2e-3, warmup=0.1),
        train=TrainConfig(steps=500, batch_size=8, log_every=50, eval_every=250),
    )
