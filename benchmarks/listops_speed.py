"""Distinct accepted ListOps samples per minute at Long Range Arena's lengths, with one and two processes.

    python benchmarks/listops_speed.py --out results/listops_speed.json

First, labels are compared with an evaluator that shares no code with the generator.
"""

import argparse
import json
import time
from pathlib import Path

from mnemos.lab.run.provenance import provenance
from mnemos.lab.tasks.listops import Rules, SampleStream, evaluate, to_text


def check(seed: int) -> None:
    with SampleStream(Rules(), seed) as stream:
        rows = stream.take(300)
    for i in range(len(rows)):
        if evaluate(to_text(rows.row(i))) != rows.labels[i]:
            raise SystemExit(f"sample {i} of seed {seed} has a wrong label; nothing was timed")


def measure(workers: int, seconds: float, seed: int) -> dict[str, float]:
    """Samples per minute after the processes have started, and the time to start them."""
    begun = time.perf_counter()
    with SampleStream(Rules(), seed, workers) as stream:
        stream.take(1)
        start = time.perf_counter()
        samples, tokens = 0, 0
        while time.perf_counter() < start + seconds:
            rows = stream.take(500)
            samples, tokens = samples + len(rows), tokens + len(rows.tokens)
        wall = time.perf_counter() - start
    return {
        "workers": workers,
        "samples_per_minute": round(60 * samples / wall),
        "samples": samples,
        "mean_length": round(tokens / samples, 1),
        "seconds": round(wall, 2),
        "seconds_to_first_sample": round(start - begun, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--seconds", type=float, default=10.0, help="the duration of each measurement")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check(options.seed)
    rows = [measure(workers, options.seconds, options.seed) for workers in (1, 2)]
    for row in rows:
        print(f"{row['workers']} process(es): {row['samples_per_minute']:,} samples per minute")
    result = {
        "benchmark": "listops_speed",
        "metric": "distinct accepted samples per minute",
        "rules": Rules()._asdict(),
        "seed": options.seed,
        "rows": rows,
        "provenance": provenance(options.seed, "cpu"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
