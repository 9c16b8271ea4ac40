"""The time that `import mnemos` adds to `import torch`, and the time of `mnemos --help`, each in a new process.

python benchmarks/import_time.py [--out results/import_time.json]
"""

import statistics
import subprocess
import sys
from functools import partial

from command import command, write

from mnemos.lab.measure.timing import race

RUNS = {
    "import torch": ["-c", "import torch"],
    "import torch, mnemos": ["-c", "import torch, mnemos"],
    "import torch, mnemos; mnemos.Transformer": ["-c", "import torch, mnemos; mnemos.Transformer"],
    "mnemos --help": ["-m", "mnemos", "--help"],
}


def main() -> None:
    parser = command(__doc__, rounds=15)
    options = parser.parse_args()
    # The first call of each, which is not timed, reads the files from disk.
    starts = {
        name: partial(subprocess.run, [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        for name, arguments in RUNS.items()
    }
    times = race(starts, options.rounds, least=0.0)
    base = times["import torch"]
    rows = []
    for name, found in times.items():
        added = statistics.median(a - b for a, b in zip(found, base, strict=True))
        rows.append({"name": name, "seconds": statistics.median(found), "more than import torch": added})
        print(f"{name:42} {rows[-1]['seconds']:.3f} s   {added:+.3f} s")
    write(options.out, {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
