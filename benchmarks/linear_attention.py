"""Linear attention, forward and backward: the C++ kernels compared with the PyTorch path, softmax and a peer.

    python benchmarks/linear_attention.py [--tokens 1024 4096 …] [--widths 32 64] [--rounds 9] [--out FILE.json]
    python benchmarks/linear_attention.py --peers softmax --tokens 32 64 128 256 512   # when is it faster than softmax?
    python benchmarks/linear_attention.py --peers none --tokens 4096 16384 65536 262144   # is time linear in N?
    python benchmarks/linear_attention.py --bidirectional --tokens 1024 4096 16384        # all tokens read all tokens

First, all implementations must agree. A round times each of them once, in an order that rotates, together with a
product of two square matrices, which measures the machine's rate at that moment. pytorch-fast-transformers is included
if it is installed; softmax is PyTorch's scaled_dot_product_attention. The useful operations are 14·D·M per token and
head: S summed and read, then S, dq, R, dk and dv. With --bidirectional they are 12·D·M, because S is kept for the
backward, and "chunked" is the composition of a few operations of PyTorch. "Kept" is the memory between native's forward
and backward pass in addition to inputs and output, in floats per token and head.
"""

import argparse
import gc
import importlib.util
import os
import statistics
from collections.abc import Callable

import torch
from command import cells, command, kept, summary, write
from torch import Tensor
from torch.nn import functional as F

from mnemos.lab.measure.timing import race
from mnemos.ops import linear_attention

BATCH, HEADS, SQUARE = 2, 8, 1024
SOFTMAX_UP_TO = 4096  # longer sequences take too long, as the cost is quadratic
OF = "of native's time"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(backend: str, causal: bool) -> Attention:
    return lambda q, k, v: linear_attention(q, k, v, causal, backend=backend)[0]


def softmax(causal: bool) -> Attention:
    """Softmax attention; q, k and v are [B, T, H, D], as in all functions here."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return attention


def fast_transformers(causal: bool, width: int) -> Attention:
    """Its layer; if causal, its product with the feature map and the normaliser of the layer."""
    if not causal:
        from fast_transformers.attention.linear_attention import LinearAttention
        from fast_transformers.masking import FullMask, LengthMask

        layer = LinearAttention(width)

        def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            lengths = LengthMask(torch.full((len(q),), q.shape[1]))
            return layer(q, k, v, FullMask(q.shape[1]), lengths, lengths)  # type: ignore[no-any-return]

        return bidirectional
    from fast_transformers.causal_product import causal_dot_product

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scale = 1 / (torch.einsum("nlhi,nlhi->nlh", q, k.cumsum(1)) + 1e-6)
        heads = (x.permute(0, 2, 1, 3).contiguous() for x in (q, k, v))
        return causal_dot_product(*heads).permute(0, 2, 1, 3) * scale[..., None]

    return attention


def contestants(tokens: int, width: int, causal: bool) -> dict[str, Attention]:
    found = {name: ours(name, causal) for name in ("native", "chunked")}
    if not causal:
        found["native, causal"] = ours("native", True)
    if importlib.util.find_spec("fast_transformers"):
        found["fast-transformers"] = fast_transformers(causal, width)
    return found | ({"softmax": softmax(causal)} if tokens <= SOFTMAX_UP_TO else {})


def step(attention: Attention, given: list[Tensor], upstream: Tensor) -> Callable[[], None]:
    def run() -> None:
        torch.autograd.grad(attention(*given), given, upstream)

    return run


def draw(tokens: int, width: int, batch: int = BATCH, heads: int = HEADS) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(batch, tokens, heads, width, generator=g).requires_grad_() for _ in range(3)]
    return given, torch.randn(batch, tokens, heads, width, generator=g)


def check(width: int, causal: bool) -> None:
    """Compare values and gradients of all implementations of linear attention with float64."""
    given, upstream = draw(333, width)
    exact = [x.detach().double().requires_grad_() for x in given]
    y = linear_attention(*exact, causal)[0]
    wanted = [y, *torch.autograd.grad(y, exact, upstream.double())]
    linear = contestants(SOFTMAX_UP_TO + 1, width, causal)
    linear.pop("native, causal", None)
    for name, attention in linear.items():
        y = attention(*given)
        for a, b in zip([y, *torch.autograd.grad(y, given, upstream)], wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def measure(tokens: int, width: int, options: argparse.Namespace) -> dict:
    given, upstream = draw(tokens, width, options.batch, options.heads)
    causal = not options.bidirectional
    runs = {name: step(attention, given, upstream) for name, attention in contestants(tokens, width, causal).items()}
    runs = {name: run for name, run in runs.items() if not options.peers or name in options.peers}
    a, b = torch.randn(2, SQUARE, SQUARE)
    times = race({**runs, "sgemm": lambda: a @ b}, options.rounds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    pieces = options.batch * tokens * options.heads
    gemm = 2 * SQUARE**3 / medians["sgemm"]
    row = {"tokens": tokens, "width": width, "batch": options.batch, "heads": options.heads}
    row["sgemm GFLOP/s"] = gemm / 1e9
    row |= summary({name: times[name] for name in runs}, "native", OF)
    row["ns a token and head"] = {name: 1e9 * medians[name] / pieces for name in runs}
    # denominators and the first state
    row["kept, floats a token and head"] = kept(lambda *given: linear_attention(*given, causal), given) / pieces
    row["part of sgemm"] = (14 if causal else 12) * width**2 * pieces / medians["native"] / gemm
    print(
        f"{tokens:7} x {width:3}  {cells(row, OF)}  |  "
        f"{row['ns a token and head']['native']:.0f} ns, {row['part of sgemm']:.0%} of sgemm, "
        f"{row['kept, floats a token and head']:.2f} floats kept",
        flush=True,
    )
    return row


def main() -> None:
    sizes = {"batch": BATCH, "heads": HEADS, "rounds": 9, "threads": os.cpu_count() or 1}
    parser = command(__doc__, tokens=[1024, 4096, 16384, 65536], widths=[32, 64], **sizes)
    parser.add_argument("--peers", "--only", nargs="+", help="compared with native (sdpa means softmax); or none")
    parser.add_argument("--bidirectional", action="store_true", help="not causal")
    options = parser.parse_args()
    known = contestants(0, 1, not options.bidirectional)
    if options.peers:
        options.peers = ["native", *("softmax" if name == "sdpa" else name for name in options.peers if name != "none")]
        if unknown := set(options.peers) - set(known):
            parser.error(f"--peers: expected some of none, sdpa, {', '.join(known)}, found {unknown.pop()!r}")
    torch.set_num_threads(options.threads)
    rows = []
    for width in options.widths:
        check(width, not options.bidirectional)
        for tokens in options.tokens:
            rows.append(measure(tokens, width, options))
            gc.collect()
    write(options.out, {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
