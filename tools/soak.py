"""Long trials: `make soak MINUTES=60` or `python tools/soak.py [PART ...] [--minutes 60] [--out FILE]`.

    updates    as many updates of one training as fit in MINUTES, watched from outside
    tokens     a million tokens through every registered model that has a state (ten thousand if the state grows)
    faults     fifty SIGKILLs in one run, two processes of which one is killed, full disks, damaged checkpoints, races
    operators  ten thousand random calls of every public operator, beside its oracle
    commands   random recipes and command lines

MINUTES is the length of `updates`; every other part is shortened in the same proportion to an hour. Each part replaces
its own entry of the result, with its commit, so that parts can be run one by one. Exit code 1 if something failed.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARTS = ("updates", "tokens", "faults", "operators", "commands")
for place in ("tests/lab/run", "tests", "tests/soak", "src"):
    sys.path.insert(0, str(ROOT / place))


def main() -> int:
    """The command line."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all")
    parser.add_argument("--minutes", type=float, default=60, help="the length of `updates` (60)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/soak.json", help="the result file")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown or not options.minutes > 0:
        parser.error(f"expected parts among {', '.join(PARTS)} and more than 0 minutes")
    environment = os.pathsep.join(str(ROOT / place) for place in ("src", "tests", "tests/lab/run", "tests/soak"))
    os.environ["PYTHONPATH"] = environment  # of the processes that parts start
    failed = []
    for part in options.parts or PARTS:
        found = carry_out(part, options.minutes)
        record(options.out, part, found)
        failed += [f"{part}: {line}" for line in found["failed"]]
        print(f"\r\x1b[K{part}: {summary(found)}" if sys.stderr.isatty() else f"{part}: {summary(found)}", flush=True)
    for line in failed:
        print(line)
    return bool(failed)


def carry_out(part: str, minutes: float) -> dict[str, Any]:
    """Run a part; what it found, when, on what and for how long."""
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "src", "tests", "tools")),
        "machine": machine(),
        "minutes": minutes,
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            found = importlib.import_module(f"soak_{part}").run(minutes / 60, Path(folder), Progress(part))
        except Exception:  # the other parts go on
            found = {"failed": [traceback.format_exc()]}
    return {**about, "seconds": round(time.monotonic() - began, 1), **found}


class Progress:
    """Prints what a part says: one line that changes on a terminal; elsewhere a line a minute."""

    def __init__(self, part: str) -> None:
        self.part, self.began, self.last = part, time.monotonic(), 0.0

    def __call__(self, text: str) -> None:
        """Show what is going on."""
        now = time.monotonic()
        line = f"{self.part} {(now - self.began) / 60:.1f} min: {text}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line[:150]}", end="", file=sys.stderr, flush=True)
        elif now - self.last > 60:
            self.last = now
            print(line, file=sys.stderr, flush=True)


def summary(found: dict[str, Any]) -> str:
    """A part in one line."""
    shown = {name: value for name, value in found.items() if isinstance(value, int | float) and name != "minutes"}
    numbers = ", ".join(f"{name} {value:,}" for name, value in shown.items() if not isinstance(value, bool))
    count = len(found["failed"])
    return f"{numbers}: {'nothing failed' if not count else f'{count} failed'}"


def record(path: Path, part: str, found: dict[str, Any]) -> None:
    """Replace a part's entry in the result file."""
    whole = json.loads(path.read_text()) if path.exists() else {}
    whole[part] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: whole[name] for name in PARTS if name in whole}, indent=2) + "\n")


def git(*words: str) -> str:
    """The output of a git command; nothing outside a checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """The processor and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    raise SystemExit(main())
