"""The settings of the training of a linearised decoder."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from mnemos.config import check_fields
from mnemos.hosts.linearised import LONGEST
from mnemos.models.shared import check_sizes
from mnemos.types import InputError, JSONObject

HEADS = ("heads",)  # behind the number of `full`


@dataclass(frozen=True)
class LinearisedConfig:
    """The settings of a training; those of the model are the arguments of `mnemos.linearise`.

    Raises InputError for settings out of range.

    Attributes:
        window: last tokens that softmax attention reads.
        sinks: first tokens that it also reads.
        state: what holds the tokens between them; none: window and sinks alone.
        rank: rank of the low-rank updates of the projections; 0: no updates.
        rotary: whether feature maps read queries and keys after rotary positions.
        full: attentions that keep all keys and values, by names or patterns of names, of which :0,2 leaves key heads 0
            and 2 whole; or one number: so many, which the training text needs most (mnemos.rank_attentions); with
            "heads" behind it, so many key heads.
        half_life: tokens after which the state holds half of a token, at most 1,048,576; 0: it never forgets.
        loss: targets of stage 2: the decoder's own next-token distribution (distil), or the text's tokens (labels).
        context: tokens of a piece of text, through which the state is carried.
        length: tokens of an update of stage 2, through which the gradient passes; it divides the context.
        rows: pieces that are read at once.
        transfer_length: tokens of an update of stage 1, attention transfer; it divides the context, and is more than
            the window and the sinks.
        transfer_tokens: tokens of text in stage 1; rounded up to whole groups of pieces, as those of stage 2.
        tokens: tokens of text in stage 2, the next token.
        transfer_rate: learning rate of feature maps in stage 1; that of γ and β is ten times as high, in both stages.
        rate: learning rate of low-rank updates in stage 2.
        map_rate: learning rate of feature maps in stage 2.
        decay: share of the updates at the end of a stage in which the learning rate falls to 0.
        top: most probable tokens that are kept of each distribution of the decoder.
        precision: of the updates' products: 32-true, or bf16-mixed, bfloat16 by autocast with weights in float32, which
            is faster on processors with instructions for it.
        seed: random seed of the low-rank updates' first values and of the order of the text.
    """

    window: int = 64
    sinks: int = 4
    state: Literal["none", "linear", "hedgehog", "delta"] = "delta"
    rank: int = 8
    rotary: bool = False
    full: tuple[str, ...] = ()
    half_life: int = 1024
    loss: Literal["distil", "labels"] = "distil"
    context: int = 4096
    length: int = 512
    rows: int = 1
    transfer_length: int = 2048
    transfer_tokens: int = 147_456
    tokens: int = 262_144
    transfer_rate: float = 3e-2
    rate: float = 2e-3
    map_rate: float = 2e-3
    decay: float = 0.2
    top: int = 64
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "settings")
        check_sizes(self, window=1, sinks=0, rank=0, half_life=0, context=1, length=1, rows=1, transfer_length=1, top=1)
        check_sizes(self, transfer_tokens=0, tokens=0, rate=0, map_rate=0, decay=0)
        unnamed = [one for one in self.full if re.fullmatch(r"[-+.\d]+|heads?|.*\s.*", one)]
        near = 0 if self.state == "none" else self.window + self.sinks
        more = f"more than the {near} tokens of window and sinks"
        divisor = f"a divisor of the context of {self.context} tokens"
        maps = self.state != "none"  # which stage 2 trains, and low-rank updates if they have a rank
        above = "a rate above 0" + ", or one of map_rate" * maps
        for name, holds, expected in (
            ("full", self.full_count is not None or not unnamed, "names, a number, or a number and heads (24 heads)"),
            ("half_life", self.half_life <= LONGEST, f"at most {LONGEST:,} tokens"),
            ("decay", self.decay <= 1, "a share of at most 1"),
            ("length", self.context % self.length == 0, divisor),
            ("transfer_length", self.context % self.transfer_length == 0, divisor),
            ("context", self.context > near, more),
            ("transfer_length", self.transfer_length > near or not self.transfer_tokens, more),
            ("transfer_rate", 0 < self.transfer_rate < math.inf, "a finite rate above 0"),
            ("rate", self.rate < math.inf, "a finite rate"),
            ("map_rate", self.map_rate < math.inf, "a finite rate"),
            ("rate", self.rate + maps * self.map_rate > 0 or not (self.rank and self.tokens), above),
            (
                "map_rate",
                self.map_rate > 0 or self.rank > 0 or not (maps and self.tokens),
                "a rate above 0, or a rank of updates",
            ),
        ):
            if not holds:
                value = getattr(self, name)
                found = repr(" ".join(value)) if name == "full" else value
                raise InputError(f"{name}: expected {expected}, found {found}; change it")

    @property
    def full_count(self) -> int | None:
        """How many attentions, or key heads, are left whole, where `full` is a number."""
        is_number = self.full[:1] and self.full[0].isdecimal() and self.full[1:] in ((), HEADS)
        return int(self.full[0]) if is_number else None

    @property
    def arguments(self) -> JSONObject:
        """The arguments of `mnemos.linearise`, but for `full`."""
        names = ("window", "sinks", "state", "rank", "rotary", "half_life")
        return {name: getattr(self, name) for name in names}
