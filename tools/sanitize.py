"""Run the kernels' tests with sanitizers: `make sanitize` or `python tools/sanitize.py [address|thread] [--set SET]`.

The kernels are built twice into a temporary folder, for the processor's best instruction set (or the given one): with
GCC's address and undefined-behaviour sanitizers, and with the thread sanitizer. The tests run in processes that have
the sanitizer's library preloaded; a report of it ends them. For the thread sanitizer the kernels have threads of their
own in place of OpenMP's, whose waiting it does not see. Needs g++ with its sanitizers, on Linux. Time: two minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
from mnemos.native import build as building  # noqa: E402
from mnemos.native import instruction_sets  # noqa: E402

KINDS = {
    "address": (["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], ["libasan.so", "libubsan.so"]),
    "thread": (["-fsanitize=thread", "-DOWN_THREADS"], ["libtsan.so"]),
}
OPTIONS = {
    # Leaks of the interpreter are not the kernels'. The sanitizer must not stop torch's own libraries' odd allocations.
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:alloc_dealloc_mismatch=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:ignore_noninstrumented_modules=1:report_signal_unsafe=0",
}
TESTS = [
    "tests/ops/test_operators.py",
    "tests/ops/test_linear_attention_native.py",
    "tests/ops/test_linear_attention_numerics.py",
    "tests/ops/test_delta_native.py",
    "tests/ops/test_short_convolution.py",
    "tests/ops/test_selective_scan.py",
    "tests/ops/test_softmax_attention.py",
    "tests/ops/test_gated_cache_native.py",
    "tests/ops/test_window_state.py",
    "tests/hugging_face/test_fast.py",
    "tests/generate/test_fused.py",
    "tests/generate/test_fused_keys.py",
    "tests/generate/test_fused_weights.py",
]
PART = "equals or kernels_equal or wide_layers or single_tokens or half_precision or number_of_threads or rows or "
PART += "masked or state or pass_unchanged or fork"
TRIAL = """
import sys, pathlib
from mnemos.native import build
build.LIBRARY = pathlib.Path(sys.argv[1])
import mnemos.native
mnemos.native.INSTRUCTION_SETS = ("baseline",)
assert mnemos.native.library(), mnemos.native.why_not()
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def build(kind: str, variant: tuple[str, int, list[str]], folder: Path) -> Path:
    """Build the kernels as the installation does, with a sanitizer, for one instruction set alone."""
    sources, (_, width, processor) = building.fingerprint(), variant
    flags = [x for x in building.FLAGS if x != "-O3"] + ["-O1", "-g", "-fno-omit-frame-pointer"]
    own = {"fingerprint": lambda: sources, "FLAGS": flags, "LIBRARY": folder / f"libmnemos_{kind}.so"}
    own |= {"BASELINE": ("baseline", width, processor), "X86": []}
    command = " ".join([*building.compiler(), *KINDS[kind][0]])
    with mock.patch.multiple(building, **own), mock.patch.dict(os.environ, CXX=command):
        return building.build()


def run(kind: str, library: Path) -> int:
    """Run the kernels' tests with a sanitizer's library preloaded; returns pytest's status."""
    found = [[*building.compiler(), f"-print-file-name={name}"] for name in KINDS[kind][1]]
    environment = dict(os.environ, **OPTIONS, PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1")
    environment["LD_PRELOAD"] = " ".join(subprocess.check_output(command, text=True).strip() for command in found)
    quiet = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not slow", "--cases", "2", "-k", PART]
    # -s: pytest would keep the reports, and a report ends the process.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # addresses that the shadow covers
    command = [*fixed, sys.executable, "-c", TRIAL, str(library), *quiet, *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> None:
    """Build and run what the command line names; exit with 1 if a sanitizer or a test found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, help="both by default")
    variants = {one[0]: one for one in (building.BASELINE, *building.X86)}
    parser.add_argument("--set", choices=variants, default=instruction_sets()[-1], help="an instruction set")
    options, failed = parser.parse_args(), False
    with tempfile.TemporaryDirectory(dir=building.HERE) as folder:
        for kind in [options.kind] if options.kind else KINDS:
            start = time.monotonic()
            status = run(kind, build(kind, variants[options.set], Path(folder)))
            result = "nothing found" if status == 0 else f"failed with status {status}"
            print(f"{kind} sanitizer, {options.set}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
            failed |= status != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
