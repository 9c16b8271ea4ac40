"""Language models of bytes whose memories have the same size: 32 KiB of state per stream, after a segment of 64 bytes.

All have width 128, about a million parameters and the same batches. Documents have at most 2,048 bytes, so that the
reference, whose state grows with them, stays affordable. Two recipes have another size: the LSTM's state is smaller,
and that of the reference grows to 8 MiB. Models that read a segment as a whole also keep its keys and values while they
read it; these pass to no other segment and are not counted.
"""

from dataclasses import replace
from typing import Any

from mnemos.attention.compressive import CompressiveConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.relative import RelativeConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import ModelConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.associations import AssociationsConfig
from mnemos.memory.grc import GRC
from mnemos.memory.memory_tokens import TokensConfig
from mnemos.memory.slots import SlotsConfig
from mnemos.models.armt import ARMTConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.memory_tokens import RMTConfig
from mnemos.models.transformer import TransformerConfig

_DOCUMENT = 2048  # bytes
_SIZES: dict[str, Any] = {"vocab_size": 0, "dim": 128, "layers": 4, "num_heads": 4, "mlp": 512}
_BLOCKS: dict[str, Any] = {**_SIZES, "norm": "pre", "activation": "gelu"}  # of all Transformers here
_MODEL = TransformerConfig.classic(**_SIZES, max_length=0, position="rotary")
_XL = TransformerConfig.classic(**_SIZES, max_length=0, position="none", attention=RelativeConfig(memory=16))


def _recipe(model: ModelConfig) -> Recipe:
    """Four segments per update, with gradient through all of them where a memory passes it on."""
    return Recipe(
        model=model,
        data=TextConfig(segment=64, longest=_DOCUMENT),
        optim=OptimConfig(lr=1e-3, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(
            steps=1500,
            batch_size=4,
            valid_rows=2048,
            test_rows=8192,
            rollout=RolloutConfig(segments=4, replay=False),
        ),
    )


@recipe
def text_state_xl() -> Recipe:
    """Bytes with 32 KiB of state: Transformer-XL with the inputs of the last 16 bytes in each of 4 layers."""
    return _recipe(_XL)


@recipe
def text_state_cached() -> Recipe:
    """text-state-xl with a gated cache per stream in place of its memory: 16 slots, and 16 bytes to be written."""
    cache = GRC(length=16, block=16, scope="stream")
    return _recipe(replace(_XL, attention=RelativeConfig(memory=0), cache=cache))


@recipe
def text_state_xl_cached() -> Recipe:
    """text-state-xl with half of its memory, and beside it a gated cache per stream of 8 slots."""
    return _recipe(replace(_XL, attention=RelativeConfig(memory=8), cache=GRC(length=8, block=8, scope="stream")))


@recipe
def text_state_compressive() -> Recipe:
    """text-state-xl as a Compressive Transformer: 8 bytes, and 8 slots for the 32 bytes before them."""
    return _recipe(replace(_XL, attention=CompressiveConfig(memory=8, compressed=8, ratio=4)))


@recipe
def text_state_rmt() -> Recipe:
    """text-state-xl as a Recurrent Memory Transformer: 64 memory tokens, rewritten every 64 bytes; rotary."""
    return _recipe(RMTConfig(**_BLOCKS, memory=TokensConfig(64)))


@recipe
def text_state_armt() -> Recipe:
    """text-state-xl as an associative RMT: a matrix of 16 × 128 in each layer, written by 16 tokens every 64 bytes."""
    return _recipe(ARMTConfig(**_BLOCKS, memory=AssociationsConfig(16, key_dim=8, nu=1)))


@recipe
def text_state_memformer() -> Recipe:
    """text-state-xl as a Memformer: 32 slots, written every 32 bytes, and the encoding of the last 32 bytes."""
    model = MemformerConfig(
        vocab_size=0,
        encoder_layers=2,
        decoder_layers=2,
        segment=32,
        memory=SlotsConfig(slots=32, temperature=0.125),
        decoder_reads=True,
    )
    return _recipe(model)


@recipe
def text_state_linear() -> Recipe:
    """text-state-xl with linear attention: running sums of 8 heads, 17 × 16 each; sinusoids, embeddings times √128."""
    model = replace(_MODEL, num_heads=8, position="sinusoidal", scale_embedding=True, attention=LinearConfig())
    return _recipe(model)


@recipe
def text_state_window() -> Recipe:
    """text-state-xl with attention to a sliding window: the keys and values of the 8 bytes before each byte."""
    return _recipe(replace(_MODEL, attention=SoftmaxConfig(window=9)))


@recipe
def text_state_lstm() -> Recipe:
    """text-state-xl as an LSTM of two layers: 3.4 KiB of state, as many parameters as the Transformers."""
    return _recipe(LSTMConfig(vocab_size=0, dim=216, layers=2))


@recipe
def text_state_full() -> Recipe:
    """text-state-xl with attention to the whole document: a reference whose state grows by 4 KiB per byte, to 8 MiB."""
    return _recipe(replace(_MODEL, attention=SoftmaxConfig(window=_DOCUMENT)))
