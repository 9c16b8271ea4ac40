"""Does the stored cache stay finite? 100,000 updates of every preset with extreme inputs and extreme weights.

    nice python benchmarks/stability.py --out results/stability.json       less than ten minutes on one core

A lane is the cache of one preset with one kind of input and one kind of weights: float32, Tm = 16 slots, Dm = 32
channels, batch size 4. It starts at zero and stores the mean over the batch. Lanes run together (vmap of
`gated_update`, compiled). First, a few updates are compared with the layer itself: its training forward pass and
`promote`.

Theory, per slot, with b_t = W_cS·S̄ + b_c and R = diag(g_r):

  LN(GELU): bounded. A layer norm's z has Σz = 0 and Σz² ≤ Dm, so |z_i| ≤ √(Dm − 1) and |C̃| ≤ √(Dm − 1)·|gain| +
  |shift|. C_t is a convex mixture of C_{t−1} and C̃, and the stored cache is a mean of such mixtures. By induction
  every channel has |C_t| ≤ max(|C_0|, √(Dm − 1)·|gain| + |shift|), for all inputs and all weights of the gates and of
  W_c. In float32 the squares inside the norm must not overflow (see "limits").

  linear: C_t = A_t·C_{t−1} + diag(g_u)·b_t with A_t = diag(1 − g_u) + diag(g_u)·W_cC·R. The max norm of A_t is at most
  max_i (1 − g_u,i + g_u,i·Σ_j |W_cC,ij|·g_r,j). It is therefore sufficient that the absolute row sums of W_cC are at
  most q < 1: then |C_t| ≤ max(|C_0|, max|b|/(1 − q)). With constant gates the cache is unstable exactly if A has an
  eigenvalue outside the unit circle. If g_u is equal in all channels, this is the case if an eigenvalue z of W_cC·R has
  |1 − g_u + g_u·z| > 1. A real z > 1 is unstable for every g_u > 0; a complex z of the same size is damped by a small
  g_u. Default initialisation (uniform, ±1/√(2·Dm)) puts the eigenvalues of W_cC in a disc of radius 1/√6 = 0.41 for
  every Dm. It is unstable from W_c × 4.9 with all g_r = 1/2, × 3.5 with half of the g_r at 1 and half at 0, and × 2.4
  with all at 1.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from command import command, write
from torch import Tensor

from mnemos import GRC
from mnemos.attention import GatedCacheAttention
from mnemos.memory.gated_cache import promote
from mnemos.ops.gated_cache import GateValues, gated_update, resample

PRESETS = ("paper", "official", "mnemos")
INPUTS = {
    "normal": "N(0, 1)",
    "constant": "1 everywhere, in every update",
    "repeated": "the same N(0, 1) batch in every update",
    "x100": "100·N(0, 1)",
    "x1e4": "1e4·N(0, 1)",
    "tiny": "1e-4·N(0, 1)",
    "zero": "0",
    "one token": "N(0, 1), T = 1 resampled to all slots",
    "alternating": "+1e4 everywhere, then −1e4",
    "bf16": "N(0, 1) rounded to bfloat16",
    "spikes": "0 except for one entry of 1e4 per sample, at a random position",
}
WEIGHTS = {
    "default": "as initialised",
    "candidate x2": "W_c × 2",
    "candidate x4.5": "W_c × 4.5",
    "gates open": "g_u = g_r = 1 for all inputs",
    "edge": "W_cC scaled: the largest real part among the eigenvalues of W_cC·diag(mean g_r) is 1.05",
}


class Size(NamedTuple):
    """Rows of a batch, slots (as many as tokens), model width (the cache has half of it), and heads."""

    batch: int = 4
    slots: int = 16
    width: int = 64
    heads: int = 4


SIZE = Size()


def layer(preset: str, weights: str = "default", seed: int = 0, size: Size = SIZE) -> GatedCacheAttention:
    """A layer of the library, with its gates and candidate changed according to WEIGHTS."""
    torch.manual_seed(seed)
    made = GatedCacheAttention(size.width, size.heads, grc=GRC(length=size.slots, preset=preset))  # type: ignore[arg-type]
    d = made.cache_dim
    with torch.no_grad():
        if weights.startswith("candidate x"):
            made.candidate.weight *= float(weights.removeprefix("candidate x"))
        elif weights == "gates open":
            for gate in (made.update_gate, made.reset_gate):
                gate.weight.zero_()
                gate.bias.fill_(50.0)
        elif weights == "edge":
            seen = torch.cat([torch.randn(1000, d), torch.zeros(1000, d)], 1)
            reset = torch.sigmoid(made.reset_gate(seen)).mean(0)
            half = made.candidate.weight[:, d:]
            half *= 1.05 / torch.linalg.eigvals(half * reset).real.max()
        elif weights != "default":
            raise ValueError(weights)
    return made


@functools.lru_cache(maxsize=2)
def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """N(0, 1) noise, cached because several kinds of input use it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(kind: str, n: int, start: int, size: Size, seed: int) -> Tensor:
    """The inputs x [n, B, T, D] of updates start … start + n − 1; [1, B, T, D] if all are equal.

    A pure function of its arguments: the same calls return the same numbers.
    """
    draw = 10**9 * seed + start + 1
    n = 1 if kind in ("constant", "repeated", "zero") else n
    shape = (n, size.batch, 1 if kind == "one token" else size.slots, size.width)
    if kind in ("constant", "zero"):
        return torch.full(shape, float(kind == "constant"))
    if kind == "alternating":
        sign = 1 - 2 * (torch.arange(start, start + n) % 2)
        return (1e4 * sign)[:, None, None, None].expand(shape)
    if kind == "repeated":
        return noise(shape, draw - start - 1)
    if kind == "spikes":
        generator = torch.Generator().manual_seed(draw)
        place = torch.randint(shape[2] * shape[3], (*shape[:2], 1), generator=generator)
        return torch.zeros(*shape[:2], shape[2] * shape[3]).scatter_(2, place, 1e4).view(shape)
    x = noise(shape, draw)
    if kind == "bf16":
        return x.bfloat16().float()
    return x * {"normal": 1.0, "one token": 1.0, "x100": 1e2, "x1e4": 1e4, "tiny": 1e-4}[kind]


def sources(made: GatedCacheAttention, x: Tensor) -> Tensor:
    """The summary S̄ [n, B, Tm, Dm] that the layer computes from x [n, B, T, D] or from its attention's output."""
    shape, x = x.shape[:2], x.flatten(0, 1)
    if made.grc.source == "output":
        x = made.inner.project(made.inner.heads(x)[0])
    return resample(x[..., : made.cache_dim], made.cache.shape[0]).unflatten(0, shape)


def stacked(layers: Sequence[GatedCacheAttention]) -> tuple[Tensor, ...]:
    """Weights and biases of W_u, W_r and W_c, and gain and shift of the norm if there is one; one lane per layer."""
    modules = [[m.update_gate, m.reset_gate, m.candidate, m.candidate_norm] for m in layers]
    return tuple(
        torch.stack([getattr(m[i], name).detach() for m in modules])
        for i in range(4)
        for name in ("weight", "bias")
        if modules[0][i] is not None
    )


def update(source: Tensor, cache: Tensor, *p: Tensor) -> tuple[Tensor, GateValues]:
    """C_t [L, B, Tm, Dm] and the gates of L lanes, from source [L, B, Tm, Dm], cache [L, Tm, Dm] and p of `stacked`."""

    def one(source: Tensor, cache: Tensor, *p: Tensor) -> tuple[Tensor, GateValues]:
        return gated_update(source, cache, p[0:2], p[2:4], p[4:6], p[6:8] or None)  # type: ignore[arg-type]

    return torch.func.vmap(one)(source, cache, *p)


def step(source: Tensor, cache: Tensor, *p: Tensor) -> tuple[Tensor, Tensor]:
    """The next stored cache [L, Tm, Dm], the mean over the batch, and the largest |C_t| of each lane [L]."""
    new = update(source, cache, *p)[0]
    return new.mean(1), new.abs().amax((1, 2, 3))


def check(seed: int = 0, size: Size = SIZE) -> None:
    """Compare consecutive calls of `step` with the layer's own training forward pass and `promote`."""
    for preset in PRESETS:
        layers = [layer(preset, weights, seed, size) for weights in WEIGHTS for _ in INPUTS]
        kinds = [kind for _ in WEIGHTS for kind in INPUTS]
        p = stacked(layers)
        for t in range(6):
            xs = {kind: tokens(kind, 1, t, size, seed) for kind in INPUTS}
            with torch.no_grad():
                source = torch.stack([sources(m, xs[kind])[0] for m, kind in zip(layers, kinds, strict=True)])
                wanted, peak = step(source, torch.stack([m.cache for m in layers]), *p)
                for m, kind in zip(layers, kinds, strict=True):
                    m.train()(xs[kind][0])
                    promote([m])
            found = torch.stack([m.cache for m in layers])
            scale = peak.clamp(min=1)[:, None, None]
            torch.testing.assert_close(found / scale, wanted / scale, atol=2e-5, rtol=2e-5)
        assert max(found.abs().max() for found in (m.cache for m in layers)) > 0


def effective_rank(cache: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values, [L, Tm, Dm] -> [L]; 0 for a cache of zeros."""
    values = torch.linalg.svdvals(cache.double())
    total = values.sum(-1)
    share = values / total.clamp(min=1e-300)[:, None]
    return torch.where(total > 0, torch.special.entr(share).sum(-1).exp(), 0)


def radius(gates: GateValues, candidate: Tensor) -> Tensor:
    """The spectral radius of A with its mean over the batch; the maximum over the slots, [L]."""
    d = candidate.shape[1]
    half = candidate[:, None, None, :, d:]  # [L, 1, 1, Dm, Dm]
    moved = (gates.update[..., None] * half * gates.reset[..., None, :]).mean(1)
    return torch.linalg.eigvals(moved + torch.diag_embed((1 - gates.update).mean(1))).abs().amax((-1, -2))


def snapshot(source: Tensor, cache: Tensor, after: Tensor, p: tuple[Tensor, ...]) -> dict[str, list]:
    """The values recorded at a checkpoint, one per lane; None for a cache that is not finite."""
    finite = after.flatten(1).isfinite().all(1) & cache.flatten(1).isfinite().all(1)
    after, cache = (torch.where(finite[:, None, None], c, 0) for c in (after, cache))
    gates = update(source, cache, *p)[1]
    found = {"rms": after.double().square().mean((1, 2)).sqrt(), "rank": effective_rank(after)}
    for name, gate in gates._asdict().items():
        found[f"{name}_mean"] = gate.mean((1, 2, 3))
        found[f"{name}_saturated"] = ((gate < 0.05) | (gate > 0.95)).float().mean((1, 2, 3))
    if len(p) == 6:
        found["radius"] = radius(gates, p[4])
    return {
        name: [float(f"{v:.4g}") if ok else None for v, ok in zip(values.tolist(), finite, strict=True)]
        for name, values in found.items()
    }


def run(
    p: tuple[Tensor, ...],
    feed: Callable[[int, int], Tensor],
    updates: int,
    size: Size = SIZE,
    advance: Callable[..., tuple[Tensor, Tensor]] = step,
    chunk: int = 100,
) -> dict[str, Any]:
    """Run every lane of p for `updates` updates; feed(n, start) returns their summaries [n, L, B, Tm, Dm].

    Returns "finite", "first" (the first update, counted from 1, whose C_t is not finite, or None), "peak" (the largest
    finite |C_t| of any row), "cache", and the snapshots at "checkpoints" (1, 10, 100, … and the last update).
    """
    lanes, d = p[0].shape[:2]
    cache = torch.zeros(lanes, size.slots, d)
    marks = sorted({10**k for k in range(9) if 10**k <= updates} | {updates})
    peak, first = torch.zeros(lanes), torch.zeros(lanes, dtype=torch.int64)
    shots = []
    for start in range(0, updates, chunk):
        n = min(chunk, updates - start)
        source, peaks = feed(n, start), []
        for t in range(n):
            before = cache
            cache, largest = advance(source[t], before, *p)
            peaks.append(largest)
            if start + t + 1 in marks:
                shots.append(snapshot(source[t], before, cache, p))
        seen = torch.stack(peaks)
        bad = ~seen.isfinite()
        new = (first == 0) & bad.any(0)
        first = torch.where(new, start + 1 + bad.int().argmax(0), first)
        peak = torch.maximum(peak, torch.where(bad, 0, seen).amax(0))
    return {
        "finite": (first == 0).tolist(),
        "first": [int(f) or None for f in first],
        "peak": peak.tolist(),
        "cache": cache,
        "checkpoints": marks,
        "snapshots": {name: [list(v) for v in zip(*(s[name] for s in shots), strict=True)] for name in shots[0]},
    }


def table(
    preset: str, updates: int, seed: int, size: Size = SIZE, kinds: Sequence[str] = tuple(INPUTS), **how: Any
) -> list[dict[str, Any]]:
    """One row per lane: every kind of weights with every kind of input."""
    made = [layer(preset, weights, seed, size) for weights in WEIGHTS]
    names = [(weights, kind) for weights in WEIGHTS for kind in kinds]
    p = stacked([m for m in made for _ in kinds])

    def feed(n: int, start: int) -> Tensor:
        # All kinds of weights have the same attention, which is drawn before they are changed, so they share S̄.
        seen = [sources(made[0], tokens(kind, n, start, size, seed)).expand(n, -1, -1, -1) for kind in kinds]
        return torch.stack(seen, 1).repeat(1, len(made), 1, 1, 1)

    found = run(p, feed, updates, size, **how)
    rows = []
    for i, (weights, kind) in enumerate(names):
        row = {"preset": preset, "weights": weights, "input": kind, "updates": updates}
        row |= {"finite": found["finite"][i], "first_not_finite": found["first"][i], "peak": found["peak"][i]}
        rows.append(row | {"checkpoints": found["checkpoints"]} | {k: v[i] for k, v in found["snapshots"].items()})
    return rows


def limits(seed: int) -> list[dict[str, Any]]:
    """The largest input scale at which a preset stays finite, and the share of the cache lost to one infinite input."""
    rows = []
    for preset in PRESETS:
        made = layer(preset, seed=seed)
        x = sources(made, tokens("normal", 1000, 0, SIZE, seed))
        largest = None
        for power in range(39):
            y = sources(made, 10.0**power * tokens("normal", 20, 0, SIZE, seed))
            if not run(stacked([made]), lambda n, start, y=y: y[start : start + n, None], 20)["finite"][0]:
                break
            largest = power
        cache = torch.zeros(1, *made.cache.shape)
        for t in range(1000):
            now = x[t].clone()
            if t == 99:
                now[0, 0, 0] = torch.inf
            cache, _ = step(now[None], cache, *stacked([made]))
        rows.append({"preset": preset, "largest_finite_power_of_ten": largest})
        rows[-1]["lost_900_updates_after_one_infinity"] = (~cache.isfinite()).float().mean().item()
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per preset and kind of weights: how many inputs keep it finite, and the largest |C|."""
    for preset, weights in dict.fromkeys((r["preset"], r["weights"]) for r in rows):
        mine = [r for r in rows if (r["preset"], r["weights"]) == (preset, weights)]
        bad = [f"{r['input']} ({r['first_not_finite']})" for r in mine if not r["finite"]]
        peak = max(r["peak"] for r in mine if r["finite"]) if len(bad) < len(mine) else float("nan")
        print(f"{preset:9}{weights:16}{len(mine) - len(bad):3} of {len(mine)} finite, |C| ≤ {peak:.4g}", end="")
        print(f"; not: {', '.join(bad)}" if bad else "", flush=True)


def main() -> None:
    parser = command(__doc__, updates=100_000, seed=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    seed = options.seed
    with torch.no_grad():
        check(seed)
        how = {"advance": torch.compile(step, dynamic=False)}
        rows = []
        for preset in PRESETS:
            rows += table(preset, options.updates, seed, **how)
            show(rows[-len(WEIGHTS) * len(INPUTS) :])
            print(f"{time.process_time() - begun:.0f} s of CPU", flush=True)
        ends = limits(seed)
    print(*ends, sep="\n")
    result = {"benchmark": "stability", "size": SIZE._asdict(), "inputs": INPUTS, "weights": WEIGHTS, "rows": rows}
    write(options.out, result | {"limits": ends, "cpu_seconds": round(time.process_time() - begun)}, seed)


if __name__ == "__main__":
    main()
