"""Causal linear attention on a GPU: the Triton kernels compared with a peer, softmax, our PyTorch path and a copy.

    python benchmarks/linear_attention_gpu.py [--tokens 1024 …] [--widths 32 64 128] [--types bfloat16 float32]
                                              [--budget 65536] [--rounds 9] [--out FILE.json]

First, all implementations of linear attention must agree. A round times each of them once, in an order that rotates,
with CUDA events around a few calls; the median over the rounds is printed. "copy" copies on the device the minimum
number of bytes that the kernels must move (forward: q, k, v in, y out; backward: these and the gradient of y in, three
gradients out); it is the limit set by memory bandwidth. flash-linear-attention is included if it is installed, with the
paper's feature map and its own normaliser; softmax is PyTorch's flash attention. Batch size times tokens is --budget.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.lab.measure.peak import peak_of
from mnemos.lab.measure.timing import ratio
from mnemos.lab.run.provenance import provenance
from mnemos.ops import linear_attention
from mnemos.ops.linear import triton

HEADS, LEAST_MS = 16, 5.0  # a measurement repeats calls for at least LEAST_MS
SOFTMAX_UP_TO, CHUNKED_UP_TO = 65536, 65536
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(backend: str) -> Attention:
    return lambda q, k, v: linear_attention(q, k, v, backend=backend)[0]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; q, k and v are [B, T, H, D], as in all functions here."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def flash_linear_attention() -> Attention:
    """The chunked product and the normaliser of flash-linear-attention, with the paper's feature map."""
    from fla.ops.linear_attn import chunk_linear_attn

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]

    return attention


def linear() -> dict[str, Attention]:
    """All implementations of linear attention."""
    found = {"triton": ours("triton"), "chunked": ours("chunked")}
    if importlib.util.find_spec("fla"):
        found["flash-linear-attention"] = flash_linear_attention()
    return found


def contestants(tokens: int) -> dict[str, Attention]:
    found = {name: run for name, run in linear().items() if name != "chunked" or tokens <= CHUNKED_UP_TO}
    return found | ({"softmax": softmax} if tokens <= SOFTMAX_UP_TO else {})


def draw(tokens: int, width: int, batch: int, dtype: torch.dtype, heads: int = HEADS) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    shape = batch, tokens, heads, width
    given = [torch.randn(shape, generator=g, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    return given, torch.randn(shape, generator=g, device="cuda", dtype=dtype)


def check(width: int, dtype: torch.dtype) -> dict[str, float]:
    """The largest relative error of values and gradients per implementation. Exits if that of Triton is too large."""
    given, upstream = draw(1111, width, 2, dtype, 4)
    exact = [x.detach().double().requires_grad_() for x in given]
    y = linear_attention(*exact, backend="chunked")[0]
    wanted = [y, *torch.autograd.grad(y, exact, upstream.double())]
    errors = {}
    for name, attention in linear().items():
        y = attention(*given)
        found = [y, *torch.autograd.grad(y, given, upstream)]
        errors[name] = max(
            float((a.double() - b).detach().abs().max() / b.detach().abs().max())
            for a, b in zip(found, wanted, strict=True)
        )
    allowed = 1e-4 if dtype == torch.float32 else 2e-2
    if not errors["triton"] < allowed:
        raise SystemExit(
            f"triton: expected an error below {allowed} at D = M = {width}, {dtype}, found {errors['triton']:.1e}"
        )
    return errors


def forward(attention: Attention, given: list[Tensor]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            attention(*given)

    return run


def step(attention: Attention, given: list[Tensor], upstream: Tensor) -> Callable[[], None]:
    def run() -> None:
        torch.autograd.grad(attention(*given), given, upstream)

    return run


def copy(tensors: int, like: Tensor) -> Callable[[], None]:
    """A function that copies as many bytes as `tensors` tensors have; half of them are read and half are written."""
    source = torch.empty(tensors * like.numel() // 2, dtype=like.dtype, device=like.device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return run


def race(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds per call of each function, one per round, like `mnemos.lab.measure.timing.race` on a GPU."""
    calls = {}
    for name, run in runs.items():
        calls[name] = max(1, int(LEAST_MS / max(timed(run, 3), 1e-3)))
    names, times = list(runs), {name: [] for name in runs}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timed(runs[name], calls[name]))
    return times


def timed(run: Callable[[], None], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def measure(tokens: int, width: int, dtype: torch.dtype, options: argparse.Namespace) -> list[dict]:
    batch = max(1, options.budget // tokens)
    given, upstream = draw(tokens, width, batch, dtype)
    rows = []
    for what in ("forward", "forward and backward"):
        alone = what == "forward"
        runs = {
            name: forward(attention, given) if alone else step(attention, given, upstream)
            for name, attention in contestants(tokens).items()
        }
        peaks = {name: peak_of(run, "cuda") for name, run in runs.items()}
        # Forward: three read, one written. Backward: q, k, v, y and y's gradient read, three written.
        times = race({**runs, "copy": copy(4 if alone else 12, upstream)}, options.rounds)
        row = {"what": what, "tokens": tokens, "width": width, "type": str(dtype).removeprefix("torch.")}
        row |= {"batch": batch, "heads": HEADS}
        row["ms"] = {name: statistics.median(found) for name, found in times.items()}
        row["MB"] = {name: peak / 1e6 for name, peak in peaks.items()}
        row["of triton's time"] = {name: ratio(times, name, "triton")._asdict() for name in times if name != "triton"}
        rows.append(row)
        cells = "  ".join(f"{name} {row['ms'][name]:8.3f} ms" for name in times)
        others = "  ".join(f"{name} {found['median']:.2f}x" for name, found in row["of triton's time"].items())
        peak = "  ".join(f"{name} {row['MB'][name]:.0f} MB" for name in peaks)
        print(f"{what:20} {tokens:6} x {width:3} {row['type']:8}  {cells}  |  {others}  |  {peak}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument(
        "--types", nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--budget", type=int, default=65536, help="tokens per batch, over all rows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a GPU, but PyTorch sees no CUDA device; on a CPU use benchmarks/linear_attention.py")
        sys.exit(2)
    if not triton.runs_here():
        print(f"expected working Triton kernels: {triton.why_not()}")
        sys.exit(2)
    rows, errors = [], []
    for name in options.types:
        dtype = getattr(torch, name)
        for width in options.widths:
            errors.append({"width": width, "type": name, "errors": check(width, dtype)})
            print(
                f"{name} {width}: largest error " + ", ".join(f"{n} {e:.1e}" for n, e in errors[-1]["errors"].items())
            )
            for tokens in options.tokens:
                rows += measure(tokens, width, dtype, options)
                gc.collect()
                torch.cuda.empty_cache()
    if options.out:
        found = {"rounds": options.rounds, "errors": errors, "rows": rows}
        found["provenance"] = provenance(0, torch.cuda.get_device_name())
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
