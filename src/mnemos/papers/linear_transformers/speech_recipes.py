"""Speech recognition by CTC (§4.3): the paper's models, and small ones that learn spoken digits on two cores.

The paper trained on the Wall Street Journal's sentences, which are not free; these recipes train on strings of single
words that `mnemos.data.spoken` joins, and their error rates are not to be set beside the paper's. An arm is an
attention, all else equal, or the bidirectional LSTM. `mnemos.registry` has their names.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mnemos import registry
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig
from mnemos.data.spoken import SpokenConfig
from mnemos.models.recurrent import BiLSTMConfig
from mnemos.models.speech import SpeechConfig
from mnemos.train.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig

# The paper's, §4.3: 9 layers, 6 heads of 32, MLPs four times as wide; RAdam at 1e-4, halved on a plateau. The LSTM has
# Adam at 1e-3, lowered the same way.
_PLATEAU = ScheduleConfig("plateau", patience=3)
_PAPER = OptimConfig("radam", lr=1e-4, weight_decay=0.0, schedule=_PLATEAU)
_PAPER_LSTM = OptimConfig("adam", lr=1e-3, weight_decay=0.0, schedule=_PLATEAU)
_PAPER_TRAIN = TrainConfig(steps=20_000, batch_size=32, eval_every=250, checkpoint_every=250)

# Three frames as one: 30 ms, of which the shortest digit has four.
_SMALL = SpeechConfig(stack=3, dim=128, layers=4, num_heads=4, mlp=256)
_SMALL_LSTM = BiLSTMConfig(stack=3, dim=96, layers=2)
_SMALL_OPTIM = OptimConfig("radam", lr=2e-3, weight_decay=0.0, schedule=_PLATEAU)
_SMALL_TRAIN = TrainConfig(steps=2500, batch_size=16, eval_every=150, checkpoint_every=500)


def _attention(arm: str) -> AttentionConfig:
    if arm == "lsh":  # as it comes; the paper hashed in four rounds
        found: AttentionConfig = registry.load("attention", "lsh")()
        return found
    return {"softmax": SoftmaxConfig, "linear": LinearConfig}[arm]()


def _paper(arm: str) -> Recipe:
    model: ModelConfig = BiLSTMConfig() if arm == "bilstm" else SpeechConfig(attention=_attention(arm))
    return Recipe(
        name=f"speech-{arm}",
        about=f"spoken strings (--data.path FOLDER of wav files), the paper's size: {_ABOUT[arm]}",
        model=model,
        data=SpokenConfig(),
        optim=_PAPER_LSTM if arm == "bilstm" else _PAPER,
        train=_PAPER_TRAIN,
    )


def _small(arm: str) -> Recipe:
    model: ModelConfig = _SMALL_LSTM if arm == "bilstm" else replace(_SMALL, attention=_attention(arm))
    return Recipe(
        name=f"spoken-digits-{arm}",
        about=f"spoken digits (--data.path FOLDER of wav files), minutes on two cores: {_ABOUT[arm]}",
        model=model,
        data=SpokenConfig(),
        optim=_SMALL_OPTIM,
        train=_SMALL_TRAIN,
    )


_ABOUT = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "lsh": "attention by locality-sensitive hashing",
    "bilstm": "a bidirectional LSTM",
}
_MADE = {"speech": _paper, "spoken-digits": _small}


def __getattr__(name: str) -> Callable[[], Recipe]:
    """The function of each recipe, under its recipe's name."""
    size, _, arm = name.rpartition("-")
    if size not in _MADE or arm not in _ABOUT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_MADE[size], arm)
