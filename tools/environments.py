"""Tests of what meets other libraries, in three environments: `python tools/environments.py [NAME ...] [-- PYTEST]`.

    oldest   the lower bounds of pyproject.toml (constraints-oldest.txt), in .venv-oldest
    pinned   constraints.txt, in .venv
    newest   constraints.txt, but the newest transformers and timm, in .venv-newest; what is deprecated is an error

Without a name all three, one after another. Words after `--` go to pytest, as in `-- --cases 1 -m "not slow"`. Makes
the environments that are missing, and brings those that are there to their versions. Prints a table, writes
results/environments.json, and exits with 1 if a test fails. Where the package index has PyTorch for CUDA alone,
`oldest` takes 7 GB. Time: ten minutes of one core for each environment, and its installation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "environments.json"
TESTS = [
    *("tests/test_libraries.py", "tests/hugging_face", "tests/trainers"),
    "tests/ops/test_delta_agreement.py",
    *("tests/lab/translation/test_beam_marian.py", "tests/memory_replay/test_replay_models.py"),
    *("tests/memory_replay/test_replay.py", "tests/lab/run/test_export.py", "tests/lab/vision"),
    *(f"tests/hosts/test_{name}.py" for name in ("decoders", "linearising", "pretrained", "remembering")),
    *(f"tests/hosts/test_{name}.py" for name in ("hosts", "host_calls", "matrix")),
]
EXTRAS = "lab,data,hf,text,onnx,translation,vision,detection,tensorboard,trainer"  # dev without linters
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "compressive-transformer-pytorch", "pycocotools"]
SHOWN = ("torch", "torchvision", "transformers", "timm", "accelerate", "peft", "numpy", "safetensors", "tokenizers")
NAMES = ("oldest", "pinned", "newest")
# PEFT causes one warning of what is deprecated by itself.
STRICT = ["-W", "error::FutureWarning", "-W", "ignore:`is_gradient_checkpointing`:FutureWarning"]


def main(arguments: list[str] | None = None) -> int:
    """Install and test; 1 if an environment has a failure."""
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; default: all")
    parser.add_argument("--python", type=Path, help="an environment's interpreter: test there, install nothing")
    asked = parser.parse_args(given[:cut])
    names = asked.names or list(NAMES)
    if unknown := set(names) - set(NAMES):
        parser.error(f"expected names of {', '.join(NAMES)}, found {', '.join(sorted(unknown))}")
    if asked.python and len(names) != 1:
        parser.error(f"--python: expected one NAME, found {len(names)}")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        python = asked.python or install(name)
        found[name] = tested(name, python, given[cut + 1 :])
        RESULTS.write_text(json.dumps({name: found[name] for name in NAMES if name in found}, indent=2) + "\n")
    print("\n" + table({name: found[name] for name in names}))
    return int(any(found[name]["exit_code"] for name in names))


def install(name: str) -> Path:
    """The environment's interpreter, with the versions that it is to have."""
    folder = ROOT / (".venv" if name == "pinned" else f".venv-{name}")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if name == "oldest":
        pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
        tools = [f"{tool}=={pinned[tool]}" for tool in TOOLS]
        subprocess.run([*pip, "-c", "constraints-oldest.txt", "-e", f".[{EXTRAS}]", *tools], check=True, cwd=ROOT)
        return python
    free = ("transformers==", "timm==") if name == "newest" else ()
    with tempfile.TemporaryDirectory() as place:
        constraints = Path(place) / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        constraints.write_text("".join(line for line in lines if not line.startswith(free)) if free else "".join(lines))
        subprocess.run([*pip, "-c", str(constraints), "-e", ".[dev]"], check=True, cwd=ROOT)
        if free:  # also one that pyproject.toml does not take yet
            newer = [one.removesuffix("==") for one in free]
            subprocess.run([*pip, "-c", str(constraints), "--upgrade", *newer], check=True, cwd=ROOT)
    return python


def tested(name: str, python: Path, more: list[str]) -> dict:
    """Counts, seconds and versions of a run of `TESTS`."""
    print(f"{name}: {python}", flush=True)
    versions = subprocess.run(
        [str(python), "-c", f"from importlib.metadata import version\nfor one in {SHOWN}: print(version(one))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    with tempfile.TemporaryDirectory() as place:
        record = Path(place) / "record.json"
        command = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", "--record", str(record)]
        strict = STRICT if name == "newest" else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *strict, *TESTS, *more], cwd=ROOT, env=environment)
        recorded = json.loads(record.read_text()) if record.exists() else {}
    recorded["exit_code"] = done.returncode
    return {"versions": dict(zip(SHOWN, versions, strict=True)), "arguments": more, **recorded}


def table(found: dict[str, dict]) -> str:
    """A line for each environment."""
    rows = [["", *SHOWN, "passed", "failed", "skipped", "seconds"]]
    for name, one in found.items():
        counts = [one.get("passed"), (one.get("failed") or 0) + (one.get("error") or 0), one.get("skipped")]
        rows.append([name, *one["versions"].values(), *map(str, counts), str(one.get("seconds"))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
