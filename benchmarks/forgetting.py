"""How fast does the stored cache forget, and which initial bias of the update gate makes it remember longer?

    nice python benchmarks/forgetting.py --out results/forgetting.json       about five minutes on one core

Every preset is measured at default initialisation, with a number added to the update gate's bias, for N(0, 1) inputs
and five initialisations, at the size of benchmarks/stability.py. There are two half-lives, in updates:

  influence: two caches with different pasts read the same inputs; after how many updates has their distance halved?
  correlation: after how many updates k has the correlation of C_t with C_{t−k} fallen to one half, where each entry is
  taken minus its mean over time?

The correlation of the whole cache ("raw") falls to a constant level above zero, because the biases always write the
same values. This part is not memory. "constant_share" is its share of the cache's mean square; it grows with the batch
size, because the mean over a batch averages differences away ("dilution"). If the candidate did not depend on the
cache, a mean gate g would leave (1 − g)^k after k updates: half-life h = log 2 / −log(1 − g), bias logit(1 − 2^(−1/h)).
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import stability
import torch
from command import command, write
from stability import PRESETS, SEEDS, SIZE, layer, sources, stacked, step, tokens, update
from torch import Tensor

BIASES = (2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0)
LAGS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
WANTED = (1.0, 10.0, 100.0)
BATCHES = (1, 4, 16, 64, 256)
LANES = len(BIASES) * SEEDS


def half_life(share: Tensor) -> Tensor:
    """The k at which share [K, L] (1 at k = 0) first falls to 1/2, [L], interpolated in its logarithm; nan if never."""
    log = share.clamp(min=1e-12).log2()
    below = log <= -1
    k = below.int().argmax(0).clamp(min=1)
    high, low = log.gather(0, k[None])[0], log.gather(0, k[None] - 1)[0]
    return torch.where(below.any(0), k - 1 + (low + 1) / (low - high), torch.nan)


def autocorrelation(seen: Tensor, most: int) -> Tensor:
    """The autocorrelation of seen [N, L, E] minus its mean over time, over all entries: [most + 1, L]."""
    n = seen.shape[0]
    lanes = []
    for moving in (seen - seen.mean(0)).unbind(1):
        power = torch.fft.rfft(moving, 2 * n, dim=0).abs().square()  # zero padding prevents wrap-around
        lanes.append(torch.fft.irfft(power.sum(1))[: most + 1] / (n - torch.arange(most + 1)))
    total = torch.stack(lanes, 1)
    return total / total[0]


def bias_for(wanted: float, halves: list[float | None]) -> float | None:
    """The bias with half-life `wanted`, interpolated in the logarithm of measured half-lives; None outside them."""
    for (b0, h0), (b1, h1) in itertools.pairwise(zip(BIASES, halves, strict=True)):
        if h0 is not None and h1 is not None and h0 <= wanted <= h1:
            return round(b0 + (b1 - b0) * math.log(wanted / h0) / math.log(h1 / h0), 2)
    return None


def measure(
    preset: str, seed: int, updates: int, advance: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    layers = [layer(preset, seed=seed + i) for _ in BIASES for i in range(SEEDS)]
    with torch.no_grad():
        for i, made in enumerate(layers):
            made.update_gate.bias += BIASES[i // SEEDS]
    p, attention = stacked(layers), layers[0]
    entries = torch.arange(0, 17 * 64, 17) % layers[0].cache.numel()  # a sample of slots and channels

    def feed(n: int, start: int, seed: int) -> Tensor:
        x = sources(attention, tokens("normal", n, start, SIZE, seed))
        return x[:, None].expand(-1, LANES, -1, -1, -1).contiguous()

    caches = []
    for past in (1, 2):
        cache = torch.zeros(LANES, *layers[0].cache.shape)
        for start in range(0, updates // 5, 100):
            for source in feed(100, start, 1000 * past + seed):
                cache, _ = advance(source, cache, *p)
        caches.append(cache)
    left, right = caches
    apart, seen, start_cache, raw, gate = [(left - right).flatten(1).norm(dim=1)], [], left, {}, torch.zeros(LANES)
    for start in range(0, updates, 100):
        for t, source in enumerate(feed(100, start, seed)):
            if start + t < updates // 5:
                right, _ = advance(source, right, *p)
            left, _ = advance(source, left, *p)
            if start + t < updates // 5:
                apart.append((left - right).flatten(1).norm(dim=1))
            if start + t + 1 in LAGS:
                both = torch.stack([left.flatten(1), start_cache.flatten(1)], 1)
                both = both - both.mean(2, keepdim=True)
                raw[start + t + 1] = (both[:, 0] * both[:, 1]).sum(1) / both.norm(dim=2).prod(1)
            seen.append(left.flatten(1)[:, entries])
        gate += 100 / updates * update(source, left, *p)[1].update.mean((1, 2, 3))
    trajectory = torch.stack(seen)
    correlation = autocorrelation(trajectory, min(2000, updates // 5))
    constant = trajectory.mean(0).square().sum(1) / trajectory.square().mean(0).sum(1)
    influence = torch.stack(apart) / apart[0]
    found = {"influence": half_life(influence), "correlation": half_life(correlation)}

    def middle(x: Tensor) -> list[Any]:
        """The median over the seeds; None if most of them have no value."""
        x = torch.where(x.isnan(), torch.inf, x).view(-1, SEEDS)
        return [float(f"{v:.4g}") if math.isfinite(v) else None for v in x.median(1).values.tolist()]

    columns: dict[str, list] = {"bias": list(BIASES), "update_mean": middle(gate), "constant_share": middle(constant)}
    columns["half_life_without_candidate"] = [round(math.log(0.5) / math.log(1 - g), 3) for g in middle(gate)]
    for name, value in found.items():
        columns[f"half_life_of_{name}"] = middle(value)
        columns[f"half_life_of_{name}_over_seeds"] = [
            [round(x, 3) if math.isfinite(x) else None for x in v.tolist()] for v in value.view(-1, SEEDS)
        ]
    columns["influence_at_end"] = middle(influence[-1])
    for name, at in (("influence", influence), ("correlation", correlation), ("raw", raw)):
        lags = [k for k in LAGS if k in raw and k < len(correlation)]
        by_lag = [middle(at[k]) for k in lags]
        columns[name] = [dict(zip(map(str, lags), row, strict=True)) for row in zip(*by_lag, strict=True)]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    wanted = {
        f"{h:g}": {name: bias_for(h, columns[f"half_life_of_{name}"]) for name in found}
        | {"without_candidate": round(math.log(2 ** (1 / h) - 1), 2)}
        for h in WANTED
    }
    return [{"preset": preset} | row for row in rows], {"preset": preset, "bias_for_half_life": wanted}


def dilution(preset: str, seed: int, updates: int) -> list[dict[str, Any]]:
    """The constant share of the stored cache's mean square at default initialisation, by batch size."""
    rows = []
    for batch in BATCHES:
        size = SIZE._replace(batch=batch)
        made = layer(preset, seed=seed, size=size)
        p, cache, seen = stacked([made]), torch.zeros(1, *made.cache.shape), []
        for start in range(0, updates, 50):
            for source in sources(made, tokens("normal", 50, start, size, seed)):
                cache, _ = step(source[None], cache, *p)
                seen.append(cache[0])
        kept = torch.stack(seen[updates // 5 :])
        moving = kept.var(0, correction=1).sum() / kept.square().mean(0).sum()
        rows.append({"preset": preset, "batch": batch, "constant_share": round(1 - moving.item(), 4)})
    return rows


def main() -> None:
    parser = command(__doc__, updates=20_000, seed=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    rows, wanted, diluted = [], [], []
    with torch.no_grad():
        stability.check(options.seed)
        for preset in PRESETS:
            found, biases = measure(preset, options.seed, options.updates, torch.compile(step, dynamic=False))
            rows += found
            wanted.append(biases)
            for row in found:
                print(
                    f"{preset:9} bias {row['bias']:+.1f}  g_u {row['update_mean']:.4f}  half-life of influence "
                    f"{row['half_life_of_influence']} {row['half_life_of_influence_over_seeds']}, of correlation "
                    f"{row['half_life_of_correlation']}, without candidate {row['half_life_without_candidate']}; "
                    f"constant {row['constant_share']:.2f}"
                )
            diluted += dilution(preset, options.seed, 500)
            print({row["batch"]: row["constant_share"] for row in diluted[-len(BATCHES) :]})
            print(biases["bias_for_half_life"], f"{time.process_time() - begun:.0f} s of CPU", flush=True)
    result = {"benchmark": "forgetting", "size": SIZE._asdict(), "updates": options.updates, "seeds": SEEDS}
    result |= {"rows": rows, "biases": wanted, "dilution": diluted}
    write(options.out, result | {"cpu_seconds": round(time.process_time() - begun)}, options.seed)


if __name__ == "__main__":
    main()
