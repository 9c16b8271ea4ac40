"""Check every architecture that `mnemos.cache` knows: `python tools/host_matrix.py [--only NAME ...] [--processes N]`.

The checks are those of tests/hosts/matrix.py. Writes results/host_matrix.json and the lists in docs/hosts.md. Takes
about ten minutes on one core. With --only, the named architectures are checked again and the others kept.
"""

import argparse
import json
import platform
import re
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


LIBRARIES = {"torch": "torch.nn", "torchvision": "torchvision", "timm": "timm", "hf": "Transformers"}


def table(rows: dict[str, dict[str, str]]) -> str:
    """What the page says of all rows: the architectures of each library, and where a check fails or does not apply."""
    names: dict[str, list[str]] = {}
    notes: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        library, _, short = name.partition("_")
        names.setdefault(LIBRARIES[library], []).append(short.lower())
        for check, said in row.items():
            if said != "yes" and said not in ("takes no padding", "no images"):
                said = re.sub(r" \(\w+Error\)$", "", said)
                notes.setdefault((check, said), []).append(f"{LIBRARIES[library]} {short.lower()}")
    passing = sum(all(not said.startswith("no: ") for said in row.values()) for row in rows.values())
    lines = [f"{passing} of {len(rows)} pass every check that applies to them.", ""]
    lines += [f"- **{library}**: {', '.join(found)}" for library, found in names.items()]
    lines += ["", "| | check | why | architectures |", "|---|---|---|---|"]
    for (check, said), found in notes.items():
        lines.append(f"| {'✗' if said.startswith('no: ') else '–'} | {check} | {said} | {', '.join(found)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the checks and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=None, help="architectures, by their names in tests/hosts: hf_bert")
    parser.add_argument("--processes", type=int, default=1, help="how many architectures are checked at a time (1)")
    options = parser.parse_args()
    only = options.only
    warnings.simplefilter("ignore")
    import torch
    from matrix import MODELS

    if unknown := [name for name in only or () if name not in MODELS]:
        parser.error(f"--only: expected names of {', '.join(MODELS)}, found {', '.join(unknown)}")
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    if strange := [name for name in MODELS if name.partition("_")[0] not in LIBRARIES]:
        parser.error(f"expected names in tests/hosts that begin with {', '.join(LIBRARIES)} and _, found {strange[0]}")
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
