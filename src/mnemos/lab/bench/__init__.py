"""The benchmarks of memory in one command: every memory is trained on every task, at its best learning rate.

`memories` and `tasks` are tables, a line each. `run` makes a recipe of each pair, trains them as a comparison does
(`mnemos.lab.compare.runs`), and measures what only these tasks have: longer rows, and bytes of state.
"""

from .run import Options, bench_memory

__all__ = ["Options", "bench_memory"]
