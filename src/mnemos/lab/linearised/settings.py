"""The settings of the training of a linearised decoder."""

from dataclasses import dataclass
from typing import Literal

from mnemos.types import JSONObject


@dataclass(frozen=True)
class LinearisedConfig:
    """The settings of a training; those of the model are the arguments of `mnemos.linearise`.

    Attributes:
        window: tokens that softmax attention reads.
        sinks: first tokens that it also reads.
        state: of the tokens between them: "none", "linear", "hedgehog" or "delta".
        rank: of the low-rank updates of the projections; 0 for none.
        rotary: whether feature maps read queries and keys after rotary positions.
        loss: of stage 2, "distil" or "labels".
        context: tokens of a piece of text, through which the state is carried.
        length: tokens of an update, through which the gradient passes.
        rows: pieces that are read at once.
        transfer_length: tokens of an update of stage 1, whose first has position 0.
        transfer_tokens: of stage 1; rounded up to whole groups of pieces, as `tokens`.
        tokens: of stage 2.
        transfer_rate: the learning rate of stage 1.
        rate: that of low-rank updates in stage 2.
        map_rate: that of feature maps in stage 2.
        decay: the share of the updates at the end of a stage in which the rate falls to 0.
        top: tokens whose probabilities are kept of each of the teacher's distributions.
        seed: of the low-rank updates' first values and of the order of the text.
    """

    window: int = 64
    sinks: int = 4
    state: str = "hedgehog"
    rank: int = 8
    rotary: bool = True
    loss: Literal["distil", "labels"] = "distil"
    context: int = 4096
    length: int = 512
    rows: int = 1
    transfer_length: int = 2048
    transfer_tokens: int = 49_152
    tokens: int = 262_144
    transfer_rate: float = 1e-2
    rate: float = 2e-3
    map_rate: float = 2e-3
    decay: float = 0.2
    top: int = 64
    seed: int = 0

    @property
    def arguments(self) -> JSONObject:
        """The arguments of `mnemos.linearise`."""
        names = ("window", "sinks", "state", "rank", "rotary")
        return {name: getattr(self, name) for name in names}
