"""Figure 1 of "Transformers are RNNs": time and peak memory of forward and backward, a sample, as N grows.

    python benchmarks/attention_scaling.py [--longest 65536] [--rounds 5] [--limit 300] [--whole] [--out FILE.json]

One layer of 8 heads x 32 (the paper's models of images; it does not say what Figure 1 has), projections included, N
from 2^9 on, the batch scaled inversely with N down to 1. softmax is torch's fused kernel, which keeps no N x N matrix;
softmax-matrix writes the matrix out, as the paper's did. lsh-R is the Reformer's attention of R rounds, with chunks of
32 and 64 buckets. All are compared with their equations first. A round times each once, in an order that rotates.

Memory is the most that torch's allocator holds at one time beyond what it held before the call, from the profiler's
record of every allocation (scratch space inside a math library is not in it). It is measured in a call of its own.
"""

import argparse
import gc
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from mnemos import registry
from mnemos.evaluate.bench import race, ratio
from mnemos.ops.linear_attention.reference import reference_bidirectional, reference_causal, reference_linear_attention
from mnemos.ops.lsh.reference import reference_lsh_attention
from mnemos.train.run import provenance

HEADS, WIDTH, SHORTEST = 8, 32, 2**9
CHUNK, BUCKETS = 32, 64
NAMES = ["softmax", "softmax-matrix", "linear", "lsh-1", "lsh-4", "lsh-8"]


class Written(nn.Module):
    """An attention whose weights are written out as a matrix."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(x)


def layer(name: str, causal: bool, heads: int = HEADS) -> nn.Module:
    torch.manual_seed(0)
    kind, _, more = name.partition("-")
    settings = {"rounds": int(more), "chunk": CHUNK, "buckets": BUCKETS} if kind == "lsh" else {}
    found = registry.load("attention", kind)(**settings).build(heads * WIDTH, heads, causal)
    return Written(found) if more == "matrix" else found


def step(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    parameters = list(module.parameters())

    def run() -> None:
        torch.autograd.grad(module(x)[0], [x, *parameters], upstream)

    return run


def draw(batch: int, tokens: int, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, tokens, heads * WIDTH, generator=g)
    return x.requires_grad_(), torch.randn(x.shape, generator=g)


def equation(name: str, inner: nn.Module, x: Tensor, causal: bool) -> Tensor:
    """What a layer should return, by plain loops or matrices in float64."""
    if name.startswith("lsh"):
        q, v = (projection(x).unflatten(-1, (2, WIDTH)) for projection in (inner.query, inner.value))
        return inner.output(reference_lsh_attention(q, v, inner.rotations, CHUNK, causal).flatten(2))
    q, k, v = inner.qkv(x).unflatten(-1, (3, 2, WIDTH)).unbind(2)
    if name == "linear":
        schedule = reference_causal if causal else reference_bidirectional
        return inner.output(reference_linear_attention(q, k, v, schedule)[0].flatten(2))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / WIDTH**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return inner.output(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


def check(causal: bool, names: list[str], tokens: int = 333) -> None:
    """Values and gradients in float32 against the equations in float64; lsh-1 takes windows at this length."""
    x, upstream = draw(1, tokens, 2)
    for name in names:
        module = layer(name, causal, 2)
        y = module(x)[0]
        found = [y, *torch.autograd.grad(y, [x, *module.parameters()], upstream)]
        exact = (module.inner if isinstance(module, Written) else module).double()
        wide = x.detach().double().requires_grad_()
        y = equation(name, exact, wide, causal)
        wanted = [y, *torch.autograd.grad(y, [wide, *exact.parameters()], upstream.double())]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
    print(f"all equal their equations at {tokens} tokens", flush=True)


def peak_bytes(run: Callable[[], None]) -> int:
    """The most that is allocated at one time during a call, beyond what was before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(tokens: int, names: list[str], seconds: dict[str, list[float]], options: argparse.Namespace) -> dict:
    """One length; `seconds` a sample at the lengths before say what to skip, and take this one in."""
    batch = max(1, options.tokens // tokens)
    print(f"N = {tokens}, batch {batch}", flush=True)
    x, upstream = draw(batch, tokens)
    runs, skipped = {}, {}
    for name in names:
        predicted = predict(seconds[name]) * batch * (options.rounds + 2)
        if predicted > options.limit:
            skipped[name] = predicted
            seconds[name].append(math.inf)
            if math.isfinite(predicted):
                print(f"  {name}: skipped, {predicted:.0f} s predicted, {options.limit:.0f} allowed", flush=True)
        else:
            runs[name] = step(layer(name, not options.whole), x, upstream)
    memory = {name: peak_bytes(run) / batch for name, run in runs.items()}
    times = race(runs, options.rounds) if runs else {}
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, found in medians.items():
        seconds[name].append(found / batch)
        print(f"  {name:15} {1e3 * found / batch:10.2f} ms  {memory[name] / 2**20:8.1f} MiB a sample", flush=True)
    return {
        "tokens": tokens,
        "batch": batch,
        "ms a sample": {name: 1e3 * found / batch for name, found in medians.items()},
        "bytes a sample": memory,
        "of linear's time": {
            n: ratio(times, n, "linear")._asdict() for n in runs if "linear" in runs and n != "linear"
        },
        "skipped, seconds predicted": {name: found for name, found in skipped.items() if math.isfinite(found)},
    }


def predict(samples: list[float]) -> float:
    """Seconds of a sample at the next length: as many times longer as the last was than the one before, or twice."""
    if not samples:
        return 0.0
    growth = samples[-1] / samples[-2] if len(samples) > 1 else 4.0
    return samples[-1] * max(2.0, growth) if math.isfinite(samples[-1]) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=2**16)
    parser.add_argument("--tokens", type=int, default=2**14, help="batch x N, where N is no longer")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--whole", action="store_true", help="not causal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300, help="seconds one may take at one length")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    check(not options.whole, options.only)
    rows, seconds, tokens = [], {name: [] for name in options.only}, SHORTEST
    while tokens <= options.longest:
        rows.append(measure(tokens, options.only, seconds, options))
        gc.collect()
        tokens *= 2
    if options.out:
        settings = {"heads": HEADS, "width": WIDTH, "chunk": CHUNK, "buckets": BUCKETS, "causal": not options.whole}
        found = {"settings": settings, "rounds": options.rounds, "rows": rows, "provenance": provenance(0, "cpu")}
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
