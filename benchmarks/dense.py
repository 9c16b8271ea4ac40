"""Dense layers by oneDNN beside PyTorch's own: forward, and forward with gradients; see mnemos.ops.dense_layer.

python benchmarks/dense.py [--threads 1] [--rounds 15]

Both take turns, in one process; times are medians over rounds, "times" PyTorch's own divided by oneDNN's, the median of
each round's. What `dense` itself would choose on this processor is the first line.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from mnemos.lab.run.provenance import processor
from mnemos.ops import dense, dense_layer

SHAPES = [(1, 2048, 2048), (64, 512, 512), (2048, 512, 512), (2048, 512, 2048), (2048, 2048, 2048), (4096, 64, 64)]


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def beside(theirs, ours, rounds):
    """The median times of both in µs, and the median of their ratios."""
    seconds(theirs), seconds(ours)  # the first calls compile
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(rounds)]
    a, b = zip(*pairs, strict=True)
    return statistics.median(a) * 1e6, statistics.median(b) * 1e6, statistics.median(x / y for x, y in pairs)


def row(shape, rounds, choice):
    """A line of the table: forward and gradients by oneDNN, then gradients by the choice."""
    n, width, out = shape
    x, dy = torch.randn(n, width, requires_grad=True), torch.randn(n, out)
    weight, bias = torch.randn(out, width, requires_grad=True), torch.randn(out, requires_grad=True)

    def gradients(function):
        return lambda: torch.autograd.grad(function(x, weight, bias), [x, weight, bias], dy)

    with dense_layer.using(dense_layer.FIXED["onednn"]):
        with torch.no_grad():
            parts = [beside(lambda: F.linear(x, weight, bias), lambda: dense(x, weight, bias), rounds)]
        parts.append(beside(gradients(F.linear), gradients(dense), rounds))
    with dense_layer.using(choice):
        chosen = beside(gradients(F.linear), gradients(dense), rounds)[2]
    cells = [f"{a:,.0f} → {b:,.0f} | {times:.2f}" for a, b, times in parts]
    return f"| {', '.join(f'{n:,}' for n in shape)} | {' | '.join(cells)} | {chosen:.2f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    choice = dense_layer.choice()
    print(f"{processor()}, {options.threads} thread(s), PyTorch {torch.__version__}; {choice}")
    print("| rows, in, out | forward, µs | times | with gradients, µs | times | by choice, times |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        print(row(shape, options.rounds, choice), flush=True)
    x, weight = torch.randn(4, 32), torch.randn(32, 32)
    with torch.no_grad():
        own, ours, _ = beside(
            lambda: [F.linear(x, weight) for _ in range(1000)], lambda: [dense(x, weight) for _ in range(1000)], 31
        )
    print(f"a small product, 4 × 32 by 32 × 32: {own / 1000:.2f} → {ours / 1000:.2f} µs")


if __name__ == "__main__":
    main()
