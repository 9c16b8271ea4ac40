"""Figure 1: time and memory of a forward and backward pass of each attention, by sequence length."""

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mnemos.lab.measure.peak import peak_of
from mnemos.ops.linear import linear_attention

from ..baselines.reformer.operator import draw_rotations, reformer_attention
from ..claim import Claim
from ..drawing import MARKERS, heading, png, variant_colour
from ..findings import Finding, Table
from ..reproduce import Options

if TYPE_CHECKING:
    from matplotlib.figure import Figure


HEADS, WIDTH = 8, 32
CHUNK, BUCKETS = 32, 64  # of the Reformer, at every length
TOKENS = 2**13  # per batch: longer sequences mean fewer rows
LENGTHS = tuple(2**i for i in range(9, 17))
LIMIT = 4.0  # seconds; longer calls are not made
ROOM = 4 * 2**30  # bytes; larger N x N weight matrices are not allocated
ROUNDS = 3
ATTENTIONS = ("softmax, written out", "softmax", "lsh-1", "lsh-4", "lsh-8", "linear")
Measured = dict[str, list[tuple[int, float, float | None]]]  # by attention: length, seconds and bytes per sample


def figure1(claim: Claim, options: Options) -> Finding:
    """Figure 1: time and peak memory per sample for N = 2⁹ … 2¹⁶, all on this CPU."""
    if options.recipes_only:
        return Finding([], [_ABOUT])
    found = measure(LENGTHS)
    times = Table("Milliseconds per sample, forward and backward", ["N", *ATTENTIONS])
    memory = Table("Peak MiB per sample", ["N", *ATTENTIONS])
    lengths = [n for n, _, _ in found["linear"]]
    by_attention = {name: {n: (seconds, size) for n, seconds, size in rows} for name, rows in found.items()}
    for n in lengths:
        cells = [by_attention[name].get(n) for name in ATTENTIONS]
        times.add(str(n), *(None if cell is None else 1e3 * cell[0] for cell in cells))
        sizes = [None if cell is None or cell[1] is None else cell[1] / 2**20 for cell in cells]
        memory.add(str(n), *sizes)
    notes = [_ABOUT, f"A dash: a call would need more than {LIMIT:g} s or {ROOM / 2**30:g} GiB.", _growth(found)]
    path = png(options.out / "figure1.png", (10.0, 4.2), partial(_lay_out, found=found))
    return Finding([times, memory], notes, [path])


_ABOUT = (
    f"Causal attention without projections, {HEADS} heads of width {WIDTH}, float32, batches of {TOKENS:,} tokens or "
    "one "
    'sample. "softmax, written out" stores its N x N weights, as in the paper; "softmax" is PyTorch\'s fused kernel. '
    f"LSH is the Reformer's attention, in chunks of {CHUNK} and with {BUCKETS} buckets. Medians of {ROUNDS} rounds."
)


def measure(lengths: tuple[int, ...]) -> Measured:
    """Measure every attention at every length. An attention stops before a call that would take longer than `LIMIT`."""
    found: Measured = {name: [] for name in ATTENTIONS}
    for n in lengths:
        rows = max(1, TOKENS // n)
        torch.manual_seed(0)
        q, k, v = (torch.randn(rows, n, HEADS, WIDTH, requires_grad=True) for _ in range(3))
        upstream = torch.randn(rows, n, HEADS, WIDTH)
        wanted = [name for name in ATTENTIONS if _affordable(name, found, n)]
        calls = {name: partial(_forward_backward, name, q, k, v, upstream) for name in wanted}
        times: dict[str, list[float]] = {name: [] for name in calls}
        peaks = {name: peak_of(call) for name, call in calls.items()}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        for name, peak in peaks.items():
            size = None if peak is None else peak / rows
            found[name].append((n, statistics.median(times[name]) / rows, size))
    return found


def _affordable(name: str, found: Measured, n: int) -> bool:
    """Whether a call at length n stays within the limits, estimated from length n/2 (softmax ×4, others ×2)."""
    if not found[name]:
        return True
    before, seconds, _ = found[name][-1]
    if 2 * before != n:
        return False
    if name == "softmax, written out" and 8 * HEADS * n * n * max(1, TOKENS // n) > ROOM:
        return False
    growth = 4 if name.startswith("softmax") else 2
    return seconds * growth * max(1, TOKENS // n) <= LIMIT


def _forward_backward(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upstream: torch.Tensor) -> None:
    if name.startswith("softmax"):
        heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel([SDPBackend.MATH] if name != "softmax" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    elif name == "linear":
        y, _ = linear_attention(q, k, v)
    else:
        y = reformer_attention(q, v, _rotations(int(name.removeprefix("lsh-"))), CHUNK, causal=True)
    torch.autograd.grad(y, (q, v) if name.startswith("lsh") else (q, k, v), upstream)


def _rotations(rounds: int) -> tuple[torch.Tensor, ...]:
    return draw_rotations(rounds, HEADS, WIDTH, (BUCKETS,), torch.Generator().manual_seed(0))


def _growth(found: Measured) -> str:
    """A sentence: how the time of each attention grew over its last doubling of the length."""
    ratios = []
    for name, rows in found.items():
        if len(rows) > 1:
            ratios.append(f"{name} ×{rows[-1][1] / rows[-2][1]:.1f} (to N = {rows[-1][0]:,})")
    return f"Growth of the time per sample over the last doubling of the length: {', '.join(ratios)}."


def _lay_out(figure: "Figure", found: Measured) -> None:
    for place, title in enumerate(("Time per sample, ms", "Memory per sample, MiB")):
        axes = figure.add_axes((0.06 + 0.5 * place, 0.13, 0.42, 0.68))
        for i, name in enumerate(ATTENTIONS):
            values = [(n, size / 2**20 if size else None) if place else (n, 1e3 * s) for n, s, size in found[name]]
            rows = [(n, value) for n, value in values if value is not None]
            axes.plot(
                [n for n, _ in rows], [y for _, y in rows], color=variant_colour(i), marker=MARKERS[i], markersize=4
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        # One legend above the first panel serves both.
        heading(
            axes, title, [] if place else [(variant_colour(i), name, MARKERS[i]) for i, name in enumerate(ATTENTIONS)]
        )
        axes.set_xlabel("N, tokens")
