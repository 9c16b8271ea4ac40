"""Check every architecture that `mnemos.cache` knows: `python tools/host_matrix.py [--only NAME ...] [--processes N]`.

The checks are those of tests/hosts/matrix.py. Writes results/host_matrix.json and the table in docs/hosts.md. Takes
about ten minutes on one core. With --only, the named architectures are checked again and the others kept.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))
RESULTS, PAGE = ROOT / "results" / "host_matrix.json", ROOT / "docs" / "hosts.md"
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"


def check(name: str) -> tuple[dict[str, str], float]:
    """What each check says of an architecture, "yes", "no: why", or why it does not apply; and the seconds it took."""
    warnings.simplefilter("ignore")
    from matrix import CHECKS

    start, found = time.perf_counter(), {}
    for column, function in CHECKS.items():
        try:
            said = function(name)
            found[column] = "yes" if said is None else said
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            found[column] = f"no: {type(error).__name__}: {first}"[:200]
    return found, time.perf_counter() - start


def table(rows: dict[str, dict[str, str]]) -> str:
    """The page's table: a tick, a cross, or a dash with a note below."""
    columns = list(next(iter(rows.values())))
    lines = ["| architecture | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    notes: dict[str, list[str]] = {}
    for name, row in rows.items():
        cells = []
        for column in columns:
            said = row[column]
            cells.append("✓" if said == "yes" else "**✗**" if said.startswith("no: ") else "–")
            if said != "yes" and said not in ("takes no padding", "no images"):
                notes.setdefault(f"{column}: {said}", []).append(name)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    passing = sum(all(not said.startswith("no: ") for said in row.values()) for row in rows.values())
    lines += ["", f"{passing} of {len(rows)} architectures pass every check that applies to them.", ""]
    lines += [f"- {note} ({', '.join(names)})" for note, names in notes.items()]
    return "\n".join(lines)


def main() -> None:
    """Run the checks and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=None, help="architectures, by their names in the table")
    parser.add_argument("--processes", type=int, default=1, help="how many architectures are checked at a time (1)")
    options = parser.parse_args()
    only = options.only
    warnings.simplefilter("ignore")
    import torch
    from matrix import MODELS

    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    names = [name for name in MODELS if only is None or name in only]
    checked: dict[str, dict[str, str]] = {}
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for name, (found, seconds) in zip(names, pool.map(check, names), strict=True):
            checked[name] = found
            wrong = [f"{column} ({said})" for column, said in found.items() if said.startswith("no: ")]
            print(f"{name:24s} {seconds:5.1f} s  {'; '.join(wrong) or 'all hold'}", flush=True)
    rows = {name: checked.get(name, before.get(name)) for name in MODELS if name in checked or name in before}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    header = {
        "command": "python tools/host_matrix.py",
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
    }
    RESULTS.write_text(
        json.dumps({**header, "torch": torch.__version__, "rows": rows}, indent=1, sort_keys=False) + "\n"
    )
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN) + len(BEGIN)] + "\n" + table(rows) + "\n" + page[page.index(END) :])


if __name__ == "__main__":
    main()
