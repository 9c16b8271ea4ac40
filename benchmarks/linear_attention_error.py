"""The error of linear attention in float32 after a million tokens, compared with float64.

    python benchmarks/linear_attention_error.py [--tokens 1000000] [--out FILE.json]    ten minutes of one core

B = 1, H = 2, D = M = 32, φ = elu + 1. Values have mean 0 or mean 1, and inputs are scaled by 1, 1e4 and 1e-4. Single
steps use values of mean 1, whose sums grow most. An error is the maximum over the last 4,096 tokens, divided by the
largest float64 output among them. "half way" is the error at N/2; the difference shows growth. For bfloat16, float64
reads the rounded inputs. The limit then applies to the final sums s and z, each divided by its largest value, because
the rounding of y hides all other errors; "drift" is the error of y at the end divided by that half way.

Limits for float32: 1e-5 in chunks, 5e-5 in single steps.
"""

import os

import torch
from command import command, write
from torch import Tensor

from mnemos.ops import backends, linear_attention

HEADS, WIDTH, WINDOW, CHUNK, BLOCK = 2, 32, 4096, 1024, 64
BARS = {"whole": 1e-5, "chunks": 1e-5, "steps": 5e-5}
INPUTS = [("mean 0", 0.0, 1.0), ("mean 1", 1.0, 1.0), ("mean 1, x 1e4", 1.0, 1e4), ("mean 1, x 1e-4", 1.0, 1e-4)]
Given = tuple[Tensor, Tensor, Tensor]


def draw(tokens: int, mean: float, scale: float) -> Given:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, HEADS, WIDTH, generator=g) for _ in range(3))
    return q * scale, k * scale, (v + mean) * scale


def exact(given: Given, eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and z in float64, from the running sums of the equations, BLOCK tokens at a time."""
    s, z = torch.zeros(1, HEADS, WIDTH, WIDTH).double(), torch.zeros(1, HEADS, WIDTH).double()
    parts = []
    for a in range(0, given[0].shape[1], BLOCK):
        q, k, v = (x[:, a : a + BLOCK].double() for x in given)
        q, k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).tril()
        num = torch.einsum("bhij,bjhm->bihm", weights, v) + torch.einsum("bihd,bhdm->bihm", q, s)
        den = weights.sum(-1).transpose(1, 2) + torch.einsum("bihd,bhd->bih", q, z) + eps
        s, z = s + torch.einsum("bjhd,bjhm->bhdm", k, v), z + k.sum(1)
        parts.append(num / den[..., None])
    return torch.cat(parts, 1), s, z


def run(given: Given, length: int, backend: str) -> tuple[Tensor, list[Tensor]]:
    """y and the final sums, computed in calls of `length` tokens."""
    y, state = torch.empty_like(given[2]), None
    for a in range(0, y.shape[1], length):
        here = slice(a, a + length)
        q, k, v = (x[:, here] for x in given)
        y[:, here], state = linear_attention(q, k, v, state=state, backend=backend)
    return y, [x.double() for x in state or ()]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def measure(given: Given, steps: bool, backend: str, wanted: tuple[Tensor, Tensor, Tensor]) -> list[dict]:
    tokens = given[0].shape[1]
    ways = {"whole": tokens, "chunks": CHUNK}
    if steps:
        ways |= {"steps": 1}
    rows = []
    for name, length in ways.items():
        y, sums = run(given, length, backend)
        at = {"half way": tokens // 2, "at the end": tokens}
        found = {when: off(y[:, n - WINDOW : n], wanted[0][:, n - WINDOW : n]) for when, n in at.items()}
        row = {"backend": backend, "way": name, "type": str(given[0].dtype).removeprefix("torch."), **found}
        row["sums"] = max(off(a, b) for a, b in zip(sums, wanted[1:], strict=True))
        if given[0].dtype == torch.float32:
            row["bar"], row["holds"] = BARS[name], found["at the end"] <= BARS[name]
        else:
            row["bar"], row["holds"] = BARS[name], row["sums"] <= BARS[name]
            row["drift"] = found["at the end"] / found["half way"]
        rows.append(row)
    return rows


def main() -> None:
    parser = command(__doc__, tokens=1_000_000, threads=os.cpu_count() or 1)
    parser.add_argument("--backends", nargs="+", default=backends("linear_attention"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.tokens < 2 * WINDOW:
        parser.error(f"--tokens: expected at least {2 * WINDOW}, found {options.tokens}")
    rows: list[dict] = []
    with torch.no_grad():
        for name, mean, scale in INPUTS:
            for dtype in (torch.float32, torch.bfloat16)[: 1 if scale != 1 else 2]:
                q, k, v = (x.to(dtype) for x in draw(options.tokens, mean, scale))
                wanted = exact((q, k, v))
                for backend in options.backends:
                    steps = name == "mean 1" and dtype == torch.float32
                    for row in measure((q, k, v), steps, backend, wanted):
                        rows.append({"inputs": name, **row})
                        print(
                            f"{name:15} {row['type']:9} {backend:8} {row['way']:18} y {row['at the end']:.1e} "
                            f"(half way {row['half way']:.1e})  sums {row['sums']:.1e}  limit {row['bar']:.0e} "
                            f"{'met' if row['holds'] else 'NOT MET'}",
                            flush=True,
                        )
    sizes = {"tokens": options.tokens, "heads": HEADS, "width": WIDTH, "chunk": CHUNK, "window": WINDOW}
    write(options.out, {**sizes, "rows": rows})


if __name__ == "__main__":
    main()
