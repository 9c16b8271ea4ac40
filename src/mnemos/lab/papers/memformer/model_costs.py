"""Figure 5: FLOPs by length and bytes by memory size, for Transformer, Transformer-XL and Memformer of equal size."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from mnemos.attention.relative import RelativeConfig
from mnemos.config import ModelConfig
from mnemos.lab.measure.flops import forward_flops
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.measure.peak import live_peak_of
from mnemos.lab.report.style import RULE
from mnemos.memory.slots import SlotsConfig
from mnemos.memory_replay import replay
from mnemos.models.memformer import Memformer, MemformerConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.types import State, select

from ..claim import Claim
from ..drawing import MARKERS, heading, png, variant_colour
from ..findings import Finding, Table
from ..reproduce import Options
from .replaying import HORIZON, SegmentLoss

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LENGTHS = tuple(2**i for i in range(7, 14))  # tokens of a sequence: 128 to 8,192
SIZES = tuple(2**i for i in range(6, 12))  # slots or tokens of a memory: 64 to 2,048
SEGMENT, MEMORY, BATCH = 128, 1024, 16
# The paper's image model. All three have the same number of layers; MLP widths make their parameters equal.
MEMFORMER = MemformerConfig(dim=128, encoder_layers=4, decoder_layers=8, num_heads=4, mlp=256, segment=SEGMENT)
NAMES = ("Transformer", "Transformer-XL", "Memformer")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes for a batch at one memory size: weights, the state between calls, and what two kinds of call add at most.

    state: between two segments; inside: before the last token of a segment. forward: a forward pass without gradient.
    update: forward and backward passes, with the gradients.
    """

    weights: int
    state: int
    inside: int
    forward: int
    update: int

    @property
    def running(self) -> int:
        """All bytes of the model while it reads a segment without gradient."""
        return self.weights + self.state + self.forward

    @property
    def training(self) -> int:
        """All bytes of the model in an update, without an optimiser's."""
        return self.weights + self.state + self.update


def figure5(claim: Claim, options: Options) -> Finding:
    """Figure 5: FLOPs of a forward pass by length; bytes of the running model by memory size, batches of 16."""
    if options.recipes_only:
        return Finding([], [_ABOUT])
    flops = {name: [sequence_flops(name, n) for n in LENGTHS] for name in NAMES}
    counts = ", ".join(f"{name} {parameters(configuration(name, MEMORY)):,}" for name in NAMES)
    table = Table(
        f"10⁹ FLOPs of a forward pass; memory {MEMORY:,}, segments of {SEGMENT} tokens (parameters: {counts})",
        ["tokens", *NAMES, "Transformer-XL / Memformer"],
    )
    for i, n in enumerate(LENGTHS):
        table.add(f"{n:,}", *(flops[name][i] / 1e9 for name in NAMES), flops[NAMES[1]][i] / flops[NAMES[2]][i])
    held = {name: [memory_of(name, size) for size in SIZES] for name in NAMES[1:]}
    bytes_ = Table(
        f"MiB of a model that runs with a batch of {BATCH}",
        ["memory", "kind", *NAMES[1:], "Transformer-XL / Memformer", "paper"],
    )
    for i, size in enumerate(SIZES):
        xl, ours = (held[name][i] for name in NAMES[1:])
        theirs = PAPER if size == max(SIZES) else None
        bytes_.add(f"{size:,}", "state", *_ratio(xl.state, ours.state), None)
        bytes_.add(f"{size:,}", "state inside a segment", *_ratio(xl.inside, ours.inside), None)
        bytes_.add(f"{size:,}", "running", *_ratio(xl.running, ours.running), theirs)
        bytes_.add(f"{size:,}", "training", *_ratio(xl.training, ours.training), None)
    growth = ", ".join(f"{name} ×{flops[name][-1] / flops[name][-2]:.2f}" for name in NAMES) if len(LENGTHS) > 1 else ""
    notes = [_ABOUT, f"Growth of FLOPs over the last doubling of the length: {growth}.", _HELD]
    path = png(options.out / "figure5.png", (10.0, 4.2), partial(_lay_out, flops=flops, held=held))
    return Finding([table, bytes_], notes, [path])


PAPER = 8.1  # the paper's ratio of memory, "in large memory size setting"
_ABOUT = (
    f"Width {MEMFORMER.dim}, {MEMFORMER.num_heads} heads, {MEMFORMER.encoder_layers} + {MEMFORMER.decoder_layers} "
    "layers in Memformer, and equally many layers in the others, whose MLPs are widened to equal parameters. The "
    f"Transformer reads the whole sequence at once, the others read {SEGMENT} tokens at a time. A multiply-add counts "
    "as 2 FLOPs; attention is counted without masking."
)
_HELD = (
    "State: the bytes kept between two segments with a full memory; inside a segment, before its last token, Memformer "
    "also keeps the keys and values of its decoder. Running: weights, state, and the most bytes of "
    "other tensors at one time while one more segment is read without gradient. Training: weights, state, and the most "
    "bytes of other tensors in an update, without an optimiser. An update of Memformer is memory replay over "
    f"{HORIZON} segments, with the states that it stores, so that encoder and writer have gradients; one of "
    "Transformer-XL is a segment, as no gradient enters its memory. Only tensors count: a GPU also has workspaces, and "
    "memory that was freed and is kept. The paper's 8.1 is of the GPU's memory \"on the actual models\" with a large "
    "memory; the paper does not say whether in inference or in training."
)


def _ratio(xl: int, ours: int) -> tuple[float, float, float]:
    return xl / 2**20, ours / 2**20, xl / ours


def configuration(name: str, memory: int) -> ModelConfig:
    """The model `name` with a memory of `memory` slots or tokens, and the parameter count of Memformer at `MEMORY`."""
    if name == "Memformer":
        return replace(MEMFORMER, memory=SlotsConfig(slots=memory))
    layers = MEMFORMER.encoder_layers + MEMFORMER.decoder_layers
    base = TransformerConfig.classic(dim=MEMFORMER.dim, layers=layers, num_heads=MEMFORMER.num_heads)
    if name == "Transformer-XL":
        base = replace(base, position="none", attention=RelativeConfig(memory=memory))
    wanted = parameters(replace(MEMFORMER, memory=SlotsConfig(slots=MEMORY)))
    narrow, wide = (parameters(replace(base, mlp=mlp)) for mlp in (1, 2))
    return replace(base, mlp=1 + round((wanted - narrow) / (wide - narrow)))


def parameters(config: ModelConfig) -> int:
    """The number of parameters of a model. No memory is allocated for them."""
    with torch.device("meta"):
        model: nn.Module = config.build()
    return sum(p.numel() for p in model.parameters())


def sequence_flops(name: str, length: int) -> int:
    """The FLOPs of a forward pass of one sequence, counted while it runs."""
    return forward_flops(_built(name, MEMORY), _tokens(1, length), segment=0 if name == "Transformer" else SEGMENT)


def memory_of(name: str, size: int) -> MemoryUse:
    """The bytes of a model for a batch whose memory is full."""
    model = _built(name, size)
    with torch.no_grad():
        state: State = None
        for _ in range(-(-size // SEGMENT) if name == "Transformer-XL" else 1):
            _, state = model(_tokens(1, SEGMENT), state)
        state = select(state, torch.zeros(BATCH, dtype=torch.int64))  # one stream in every row of the batch
        _, inside = model(_tokens(BATCH, SEGMENT - 1), state)
        kept = state_bytes(state), state_bytes(inside)
        del inside
        forward = live_peak_of(lambda: model(_tokens(BATCH, SEGMENT), state))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return MemoryUse(weights, *kept, forward, live_peak_of(lambda: _update(model, state)))


def _update(model: nn.Module, state: State) -> None:
    """An update from `state`: of Memformer by memory replay, so that its encoder and writer have gradients too."""
    step, tokens = SegmentLoss(model), _tokens(BATCH, SEGMENT + 1)
    if isinstance(model, Memformer):
        replay(step, [tokens] * HORIZON, state, advance=step.advance, verify=False)
    else:
        step(tokens, state)[0].backward()


def _built(name: str, memory: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = configuration(name, memory).build()
    return model.eval()


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.arange(length).remainder(256).expand(rows, -1).contiguous()


def _lay_out(figure: "Figure", flops: dict[str, list[int]], held: dict[str, list[MemoryUse]]) -> None:
    left = figure.add_axes((0.06, 0.13, 0.42, 0.68))
    for i, name in enumerate(NAMES):
        left.plot(LENGTHS, [n / 1e9 for n in flops[name]], color=variant_colour(i), marker=MARKERS[i], markersize=5)
    heading(
        left, "FLOPs of a forward pass, 10⁹", [(variant_colour(i), name, MARKERS[i]) for i, name in enumerate(NAMES)]
    )
    left.set_xlabel("tokens in the sequence")
    right = figure.add_axes((0.56, 0.13, 0.42, 0.68))
    for i, name in enumerate(NAMES[1:], start=1):
        mib = [one.running / 2**20 for one in held[name]], [one.state / 2**20 for one in held[name]]
        for values, line in zip(mib, ("-", "--"), strict=True):
            right.plot(SIZES, values, color=variant_colour(i), marker=MARKERS[i], markersize=5, linestyle=line)
    heading(right, f"Running model, {BATCH} streams, MiB (dashed: state)", [])
    right.set_xlabel("size of the memory, tokens or slots")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.grid(axis="y", color=RULE[0])
