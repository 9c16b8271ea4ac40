"""The benchmarks of memory in one command: every memory is trained on every task, at its best learning rate."""

from .run import Options, bench_memory

__all__ = ["Options", "bench_memory"]
