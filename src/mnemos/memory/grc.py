"""GRC: the switches of the gated recurrent cache, and the presets that set them together."""

from dataclasses import dataclass, replace
from typing import Literal

from mnemos.config import check_fields
from mnemos.types import InputError


@dataclass(frozen=True)
class GRC:
    """What a gated recurrent cache is like. A switch left at None takes the preset's value.

    ============ ================ ============================== =========================
    switch       paper            official (the released module) mnemos (the default)
    ============ ================ ============================== =========================
    source       input            output                         input
    candidate    linear           layernorm_gelu                 layernorm_gelu
    gate_init    0                -1                             -2
    read         mean             sample                         sample
    inference    frozen           transient                      transient
    lift         project          pad                            project
    convolution  no               where a grid is known          no
    ============ ================ ============================== =========================

    The default keeps the paper's source and the release's bounded candidate: with the linear candidate the cache is
    an unbounded linear recurrence. It reads each row's own cache, because reading the batch mean makes a row depend
    on its neighbours, and starts with the gate nearly shut, σ(−2) = 0.12: on short ListOps a gate that starts half
    open cost 4 points of accuracy (log/2026-11-21-first-gate.md).
    """

    length: int | tuple[int, ...] | Literal["auto"] = "auto"  # slots Tm; one a stage; or the host's own length
    ratio: float = 0.5  # Dm/D, rounded down to a multiple of the heads
    preset: Literal["paper", "official", "mnemos"] = "mnemos"
    gate_init: float | None = None  # λ at the start; σ(λ) is the cached branch's share
    scope: Literal["shared", "stream"] = "shared"  # one cache for the batch, or one a row, carried as state
    source: Literal["input", "output"] | None = None  # what is summarised: X, or the attention's projected output
    candidate: Literal["linear", "layernorm_gelu"] | None = None
    read: Literal["mean", "sample"] | None = None  # keys and values from the batch mean of C_t, or each row's own
    inference: Literal["frozen", "transient"] | None = None  # read as stored, or updated by the row, never stored
    lift: Literal["project", "pad"] | None = None  # how o_mem of Dm/H channels a head becomes D/H
    convolution: bool | None = None  # add a grouped 3x3 convolution of X (needs a grid and D % Dm = 0)
    resample: Literal["nearest", "linear", "grid"] = "nearest"  # tokens to slots; grid: 2-D, needs a grid
    branch: Literal["softmax", "linear"] = "softmax"  # the attention over the slots
    block: int | None = None  # causal: tokens between two updates; None: Tm

    def __post_init__(self) -> None:
        check_fields(self, "GRC")
        if not 0 < self.ratio <= 1:
            raise InputError(f"GRC ratio must be above 0 and at most 1, found {self.ratio}")
        lengths = self.length if isinstance(self.length, tuple) else (self.length,)
        if not lengths or any(length != "auto" and length < 1 for length in lengths):
            raise InputError(f'GRC length must be "auto" or at least 1 slot, found {self.length!r}')
        if self.block is not None and self.block < 1:
            raise InputError(f"GRC block must be at least 1 token, found {self.block}")
        if self.scope == "stream" and self.read == "mean":
            raise InputError('scope="stream" keeps a cache a row, so read="mean" has nothing to average; leave it out')
        if self.scope == "stream" and self.inference == "frozen":
            raise InputError('scope="stream" carries a cache a row, which inference="frozen" would stop; leave it out')

    def resolved(self) -> "GRC":
        """The same with every switch set: what was given wins, the preset gives the rest."""
        switches = dict(PRESETS[self.preset])
        if self.scope == "stream":  # a row's own cache is read, and carried at inference as in training
            switches.update(read="sample", inference="transient")
        for name in switches:
            if (given := getattr(self, name)) is not None:
                switches[name] = given
        return replace(self, **switches)


_PAPER = {
    "source": "input",
    "candidate": "linear",
    "gate_init": 0.0,
    "read": "mean",
    "inference": "frozen",
    "lift": "project",
    "convolution": False,
}
PRESETS: dict[str, dict] = {
    "paper": _PAPER,
    # convolution: on wherever the host is an image of known grid; a sequence has none (see GatedCacheAttention).
    "official": {
        "source": "output",
        "candidate": "layernorm_gelu",
        "gate_init": -1.0,
        "read": "sample",
        "inference": "transient",
        "lift": "pad",
        "convolution": None,
    },
    "mnemos": {**_PAPER, "candidate": "layernorm_gelu", "gate_init": -2.0, "read": "sample", "inference": "transient"},
}
