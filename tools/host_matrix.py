"""Check every architecture that `mnemos.cache` knows: `python tools/host_matrix.py [--only NAME ...]`.

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
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))
RESULTS, PAGE = ROOT / "results" / "host_matrix.json", ROOT / "docs" / "hosts.md"
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
LIBRARIES = {"torch": "torch.nn", "torchvision": "torchvision", "timm": "timm", "hf": "Transformers"}


def check(name: str) -> dict[str, str]:
    """What each check says of an architecture, "yes", "no: why", or why it does not apply."""
    from matrix import CHECKS

    answers = {}
    for column, function in CHECKS.items():
        try:
            answers[column] = function(name) or "yes"
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            answers[column] = f"no: {type(error).__name__}: {first}"[:200]
    return answers


def table(rows: dict[str, dict[str, str]]) -> str:
    """What the page says of all rows: the architectures of each library, and where a check fails or does not apply."""
    names: dict[str, list[str]] = {}
    notes: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        library, _, short = name.partition("_")
        names.setdefault(LIBRARIES[library], []).append(short.lower())
        for column, answer in row.items():
            if answer not in ("yes", "takes no padding", "no images"):
                why = re.sub(r" \(\w+Error\)$", "", answer)
                notes.setdefault((column, why), []).append(f"{LIBRARIES[library]} {short.lower()}")
    passing = sum(not any(answer.startswith("no: ") for answer in row.values()) for row in rows.values())
    lines = [f"{passing} of {len(rows)} pass every check that applies to them.", ""]
    lines += [f"- **{library}**: {', '.join(architectures)}" for library, architectures in names.items()]
    lines += ["", "| | check | why | architectures |", "|---|---|---|---|"]
    for (column, why), architectures in notes.items():
        lines.append(f"| {'✗' if why.startswith('no: ') else '–'} | {column} | {why} | {', '.join(architectures)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the checks and write both files."""
    warnings.simplefilter("ignore")
    import torch
    from matrix import MODELS

    parser = argparse.ArgumentParser(description=__doc__)
    names = {"choices": MODELS, "default": [*MODELS], "metavar": "NAME"}
    parser.add_argument("--only", nargs="+", help="architectures, by their names in tests/hosts: hf_bert", **names)
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for name in parser.parse_args().only:
        start, rows[name] = time.perf_counter(), check(name)
        wrong = [f"{column} ({answer})" for column, answer in rows[name].items() if answer.startswith("no: ")]
        print(f"{name:24s} {time.perf_counter() - start:5.1f} s  {'; '.join(wrong) or 'all hold'}", flush=True)
    rows = {name: rows[name] for name in MODELS if name in rows}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    made = {"command": "python tools/host_matrix.py", "commit": commit.strip(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps({**made, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN) + len(BEGIN)] + "\n" + table(rows) + "\n" + page[page.index(END) :])


if __name__ == "__main__":
    main()
