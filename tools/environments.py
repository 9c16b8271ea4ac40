"""Tests of what meets other libraries, in three environments: `python tools/environments.py [NAME ...] [-- PYTEST]`.

    oldest   the lower bounds of pyproject.toml (constraints-oldest.txt), in .venv-oldest
    pinned   constraints.txt, in .venv
    newest   constraints.txt, but the newest transformers and timm, in .venv-newest; what is deprecated is an error

Without a name all three, one after another. Words after `--` go to pytest, as in `-- --cases 1 -m "not slow"`. Makes
the environments that are missing, and brings those that are there to their versions. Prints a line for each, writes
results/environments.json, and exits with 1 if a test fails. Where the package index has PyTorch for CUDA alone,
`oldest` takes 7 GB. Time: ten minutes of one core for each environment, and its installation.
"""

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
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "compressive-transformer-pytorch"]
SHOWN = ("torch", "torchvision", "transformers", "timm", "accelerate", "peft", "numpy", "safetensors", "tokenizers")
NAMES = ("oldest", "pinned", "newest")
# PEFT causes one warning of what is deprecated by itself.
STRICT = ["-W", "error::FutureWarning", "-W", "ignore:`is_gradient_checkpointing`:FutureWarning"]


def main(arguments: list[str]) -> int:
    """Install and test; 1 if an environment has a failure."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, of_pytest = arguments[:cut] or list(NAMES), arguments[cut + 1 :]
    if {*names} - {*NAMES}:
        sys.exit(f"expected names of {', '.join(NAMES)}, found {', '.join(names)}\n\n{__doc__}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        results[name] = test(name, install(name), of_pytest)
        RESULTS.write_text(json.dumps({name: results[name] for name in NAMES if name in results}, indent=2) + "\n")
    for name in names:
        one = results[name]
        counts = ", ".join(f"{one.get(word) or 0} {word}" for word in ("passed", "failed", "error", "skipped"))
        print(
            f"{name}: {counts}, {one.get('seconds')} s; {' '.join('='.join(pair) for pair in one['versions'].items())}"
        )
    return int(any(results[name]["exit_code"] for name in names))


def install(name: str) -> Path:
    """The environment's interpreter, with the versions that it is to have."""
    python = ROOT / (".venv" if name == "pinned" else f".venv-{name}") / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pinned = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    free = ("transformers", "timm") if name == "newest" else ()
    wanted = ["-e", ".[dev]"]
    if name == "oldest":
        tools = [line.strip() for line in pinned if line.partition("==")[0] in TOOLS]
        wanted, pinned = ["-e", f".[{EXTRAS}]", *tools], (ROOT / "constraints-oldest.txt").read_text().splitlines(True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(line for line in pinned if line.partition("==")[0] not in free)
        constraints.flush()
        pip = [str(python), "-m", "pip", "install", "--quiet", "-c", constraints.name]
        subprocess.run([*pip, *wanted], check=True, cwd=ROOT)
        if free:  # also one that pyproject.toml does not take yet
            subprocess.run([*pip, "--upgrade", *free], check=True, cwd=ROOT)
    return python


def test(name: str, python: Path, more: list[str]) -> dict:
    """Counts, seconds and versions of a run of `TESTS`."""
    print(f"{name}: {python}", flush=True)
    code = f"from importlib.metadata import version\nfor one in {SHOWN}: print(version(one))"
    versions = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", "--record", str(record)]
        strict = STRICT if name == "newest" else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *strict, *TESTS, *more], cwd=ROOT, env=environment)
        recorded = json.loads(record.read_text()) if record.exists() else {}
    recorded["exit_code"] = done.returncode
    return {"versions": dict(zip(SHOWN, versions, strict=True)), "arguments": more, **recorded}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
