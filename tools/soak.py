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
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARTS = ("updates", "tokens", "faults", "operators", "commands")
FOLDERS = [str(ROOT / folder) for folder in ("src", "tests", "tests/lab/run", "tests/soak")]
sys.path[:0] = FOLDERS


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all")
    parser.add_argument("--minutes", type=float, default=60, help="the length of `updates` (60)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/soak.json", help="the result file")
    options = parser.parse_args()
    if {*options.parts} - {*PARTS} or not options.minutes > 0:
        parser.error(f"expected parts among {', '.join(PARTS)} and more than 0 minutes")
    os.environ["PYTHONPATH"] = os.pathsep.join(FOLDERS)  # of the processes that parts start
    failed = []
    for part in options.parts or PARTS:
        result = carry_out(part, options.minutes)
        whole = json.loads(options.out.read_text()) if options.out.exists() else {}
        whole[part] = result
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({name: whole[name] for name in PARTS if name in whole}, indent=2) + "\n")
        numbers = {name: value for name, value in result.items() if type(value) in (int, float) and name != "minutes"}
        failed += [f"{part}: {line}" for line in result["failed"]]
        said = f"{len(result['failed'])} failed" if result["failed"] else "nothing failed"
        print(f"{part}: {', '.join(f'{name} {value:,}' for name, value in numbers.items())}: {said}", flush=True)
    print(*failed, sep="\n", end="\n" * bool(failed))
    return bool(failed)


def carry_out(part: str, minutes: float) -> dict[str, Any]:
    """Run a part; what it found, when, on what and for how long."""
    from mnemos.lab.run.provenance import processor

    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "src", "tests", "tools")),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "minutes": minutes,
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            found = importlib.import_module(f"soak_{part}").run(minutes / 60, Path(folder), progress(part))
        except Exception:  # the other parts go on
            found = {"failed": [traceback.format_exc()]}
    return {**about, "seconds": round(time.monotonic() - began, 1), **found}


def progress(part: str) -> Callable[[str], None]:
    """Prints what a part says, a line a minute."""
    began, last = time.monotonic(), 0.0

    def show(text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 60:
            last = now
            print(f"{part} {(now - began) / 60:.1f} min: {text}", file=sys.stderr, flush=True)

    return show


def git(*words: str) -> str:
    """The output of a git command; nothing outside a checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
