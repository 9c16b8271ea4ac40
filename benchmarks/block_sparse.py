"""The time of block-sparse attention (BigBird) and of dense attention by length: forward and backward of the layers.

    python benchmarks/block_sparse.py [--lengths 1024 2048 4096 8192 16384] [--dense 8192] [--rounds 3]

One row of width 512, 8 heads, float32, with projections. Each round measures both layers, one after the other, in
one thread. The clock is the CPU time of the process, which other programs disturb less than the wall's. Dense attention
is PyTorch's fused one.
"""

import argparse
import statistics
import time

import torch

from mnemos import BlockSparseConfig, SoftmaxConfig
from mnemos.lab.measure.timing import race

DIM, HEADS = 512, 8


def main() -> None:
    """Print the median and the range of the rounds at each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dense", type=int, default=8192, help="the longest sequence of dense attention")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = {"block-sparse": BlockSparseConfig().build(DIM, HEADS), "dense": SoftmaxConfig().build(DIM, HEADS)}
    for length in options.lengths:
        x = torch.randn(1, length, DIM, requires_grad=True)
        measured = {
            name: lambda layer=layer, x=x: layer(x)[0].sum().backward()
            for name, layer in layers.items()
            if name != "dense" or length <= options.dense
        }
        found = race(measured, options.rounds, time.process_time, 0.0)
        cells = (f"{n} {statistics.median(s):.3f} s ({min(s):.3f} to {max(s):.3f})" for n, s in found.items())
        print(f"{length:6d}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
