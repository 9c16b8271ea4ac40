"""The demonstration: a fact is told in real text and asked for up to 512 words later. Which memory still has it?

Every model has two layers of 64 channels, reads the same rows, and sees at most the last `WINDOW` words at once, or
nothing but its memory. None has positions, but for Memformer's bias by distance. `make demo` trains and compares them.
"""

from dataclasses import replace

from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.told import ToldConfig
from mnemos.memory.grc import GRC
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import TransformerConfig

WINDOW = 32  # words that an attention reads, and words per segment
_STEPS = 250
_MODEL = TransformerConfig.classic(
    vocab_size=0,
    dim=64,
    layers=2,
    num_heads=4,
    mlp=128,
    max_length=0,
    position="none",
    attention=SoftmaxConfig(window=WINDOW),
)


@recipe
def demo() -> Recipe:
    """Recall a fact told in real text, softmax attention to the last 32 words: a window without a memory."""
    return Recipe(
        model=_MODEL,
        data=ToldConfig(grow=int(0.8 * _STEPS), rows=500),
        optim=OptimConfig(lr=3e-3, schedule=ScheduleConfig(name="cosine", warmup=50, floor=0.05)),
        train=TrainConfig(steps=_STEPS, batch_size=32, log_every=10, eval_every=125, checkpoint_every=125),
    )


@recipe
def demo_linear() -> Recipe:
    """demo with linear attention: its memory is one matrix per head."""
    return replace(demo(), model=replace(_MODEL, attention=LinearConfig()))


@recipe
def demo_cached() -> Recipe:
    """demo with a gated recurrent cache per stream around every attention: 8 slots, written every 32 words."""
    return replace(demo(), model=replace(_MODEL, cache=GRC(length=8, block=WINDOW, scope="stream")))


@recipe
def demo_memformer() -> Recipe:
    """demo with Memformer: 8 slots, written every 32 words, exact gradients by memory replay."""
    model = MemformerConfig(
        vocab_size=0,
        dim=64,
        encoder_layers=1,
        decoder_layers=1,
        num_heads=4,
        mlp=128,
        segment=WINDOW,
        memory=SlotsConfig(slots=8),
        decoder_reads=True,  # the question is in the segment that is decoded, so the decoder must read the memory
    )
    base = demo()
    return replace(base, model=model, train=replace(base.train, rollout=RolloutConfig(segment_length=WINDOW)))
