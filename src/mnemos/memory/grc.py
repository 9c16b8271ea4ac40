"""GRC: the switches of the gated recurrent cache, and the presets that set them together."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from mnemos.config import check_fields
from mnemos.types import InputError


@dataclass(frozen=True)
class GRC:
    """The settings of a gated recurrent cache. A switch left at None takes the preset's value.

    The presets: "paper": source input, candidate linear, gate_init 0, read mean, inference frozen, lift project, no
    convolution. "official", the paper's released module: source output, candidate layernorm_gelu, gate_init −1, read
    sample, inference transient, lift pad, a convolution where a grid is known. "mnemos", the default: source input,
    candidate layernorm_gelu, gate_init −2, read sample, inference transient, lift project, no convolution.

    The default has the paper's source and the release's bounded candidate: with the linear candidate the cache is an
    unbounded linear recurrence. Each row reads its own cache, because reading the batch mean makes a row depend on the
    other rows. The gate starts nearly closed, σ(−2) = 0.12: on short ListOps one run with a gate that started half
    open had 4 points of accuracy less (one seed: log/2026-11-21-first-gate.md).

    Attributes:
        length: slots Tm: one number, one per stage of the model, "auto", the host's length, or "paper": one slot per
            token, but in PVT and Swin the tokens of the first stage are averaged in squares of 4 × 4 and those of the
            second in squares of 2 × 2 (224²: 196, 196, 196 and 49 slots), and in Swin a cache spans the whole grid of
            its stage instead of one window.
        ratio: Dm/D, the width of a slot as a share of the model's; Dm is rounded down to a multiple of the heads.
        preset: the values of the switches that are None.
        gate_init: the initial λ; σ(λ) is the share of the cached branch.
        scope: "shared": one cache for all rows, a buffer. "stream": one cache per row, carried as a state.
        source: what the cache summarises: the layer's input X, or the attention's projected output.
        candidate: what a token writes: a linear map, or one with layer norm and GELU, which is bounded.
        read: keys and values come from the batch mean of C_t, or from each row's own C_t.
        inference: in eval mode, read the stored cache as it is ("frozen"), or C_t of the row's own tokens.
        lift: how the branch's output goes from Dm/H to D/H channels per head: a projection, or zeros.
        mix: where the branch is mixed in. "heads", eq. 2: head by head, before the one projection of both. "channels":
            after the host's projection, by groups of D/H channels. No preset sets it. None: "channels" in a host
            (`mnemos.cache`), and in a layer of this library the only way that its lift has, which is "heads" for
            "project" and "channels" for "pad".
        convolution: add a grouped 3×3 convolution of X, which needs a grid of patches and D % Dm = 0. It is the
            positional term of the release; the paper adds "positional encodings" to image models without saying how.
        resample: how tokens become slots. "grid" is 2-D and needs a grid of patches.
        branch: the attention over the slots.
        block: with causal attention, the tokens between two updates of the cache; None: Tm.
        write: False: the cache is never written (see `unwritten`), and each row reads its own update, with any preset.
            With inference="frozen" given too, it is a constant: a learned parameter [Tm, Dm], which every row reads as
            it is, in training and at inference.
    """

    length: int | tuple[int, ...] | Literal["auto", "paper"] = "auto"
    ratio: float = 0.5
    preset: Literal["paper", "official", "mnemos"] = "mnemos"
    gate_init: float | None = None
    scope: Literal["shared", "stream"] = "shared"
    source: Literal["input", "output"] | None = None
    candidate: Literal["linear", "layernorm_gelu"] | None = None
    read: Literal["mean", "sample"] | None = None
    inference: Literal["frozen", "transient"] | None = None
    lift: Literal["project", "pad"] | None = None
    mix: Literal["heads", "channels"] | None = None
    convolution: bool | None = None
    resample: Literal["nearest", "linear", "grid"] = "nearest"
    branch: Literal["softmax", "linear"] = "softmax"
    block: int | None = None
    write: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "GRC")
        if not 0 < self.ratio <= 1:
            raise InputError(f"GRC.ratio: expected above 0 and at most 1, found {self.ratio}; change it")
        lengths = self.length if isinstance(self.length, tuple) else (self.length,)
        if not lengths or any(not isinstance(length, str) and length < 1 for length in lengths):
            raise InputError(
                f'GRC.length: expected "auto", "paper" or at least 1 slot, found {self.length!r}; change it'
            )
        after = {name: getattr(self, name) or PRESETS[self.preset][name] for name in ("source", "lift")}
        if self.mix == "heads" and after != {"source": "input", "lift": "project"}:
            raise InputError(
                f'GRC.mix: "heads" is before the projection and expects source="input" and lift="project", found '
                f'{after["source"]!r} and {after["lift"]!r}, which follow it; use mix="channels"'
            )
        if self.block is not None and self.block < 1:
            raise InputError(f"GRC.block: expected at least 1 token, found {self.block}; use None for as many as slots")
        if self.scope == "stream" and self.read == "mean":
            raise InputError(
                'GRC.read: scope="stream" has a cache per row and expects "sample", found "mean"; leave it out'
            )
        if self.scope == "stream" and self.inference == "frozen":
            raise InputError(
                'GRC.inference: scope="stream" updates every row and expects "transient", found "frozen"; leave it out'
            )

    @property
    def constant(self) -> bool:
        """Whether the cache is a learned constant: never written, and read as it is."""
        return not self.write and self.inference == "frozen"

    def resolved(self) -> "GRC":
        """The same with every switch set: the given value, else the preset's."""
        switches = dict(PRESETS[self.preset])
        # A row reads its own cache, at inference as in training: it carries it (stream), or has no other (write=False).
        if self.scope == "stream" or (not self.write and not self.constant):
            switches.update(read="sample", inference="transient")
        for name in switches:
            if (given := getattr(self, name)) is not None:
                switches[name] = given
        return replace(self, **switches)

    def unwritten(self) -> "GRC":
        """The never-written baseline of this cache, with which the gain from the memory is measured.

        Where a row reads C_t of its own tokens at inference (inference="transient": the presets "official" and
        "mnemos"), every update starts from the stored cache, which keeps its initial zeros. All reads and parameters
        are those of the written cache. Not causal: the tokens of a call read C_t = update(their own tokens, 0). Causal:
        a block must not read itself, so it reads update(the block before it, 0), across calls too. Nothing older
        reaches an output. A loaded checkpoint may bring a cache that is not zero; it is read as it is, and stays as it
        is. With zeros the reset gate has no effect: that part of the parameters is counted, and cannot help.
        At inference the written cache starts from what is stored, which is fixed, so a gain may be that of a constant.

        Where the stored cache is read as it is at inference (inference="frozen": the preset "paper"), the baseline has
        a constant in its place: a parameter [Tm, Dm], learned with the others, which all rows read at inference as they
        read the written one, and in training too, where the written one holds the batch. These are Tm·Dm parameters
        more, and the gates have no effect. To compare the preset "paper" with a cache that starts from zeros instead,
        let both read per row: GRC(preset="paper", read="sample", inference="transient") and its `unwritten()`.
        """
        found = self.resolved()
        if found.inference == "frozen":
            return replace(self, write=False, inference="frozen")
        return replace(self, write=False, read=found.read, inference="transient")


_PAPER: dict[str, Any] = {
    "source": "input",
    "candidate": "linear",
    "gate_init": 0.0,
    "read": "mean",
    "inference": "frozen",
    "lift": "project",
    "convolution": False,
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    # convolution None: on where the layer knows an image's grid, off for sequences (see GatedCacheAttention).
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
