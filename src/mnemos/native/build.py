"""Build the native kernels next to this file: `python -m mnemos.native.build`. Needs only a C++ compiler.

The installation runs it too (hatch_build.py), when torch and mnemos cannot be imported yet, so it uses the standard
library only. $CXX, or the first of c++, g++ and clang++, compiles the same sources once per kind of processor. The
target is Python's platform, so that _PYTHON_HOST_PLATFORM names another one to a cross compiler in $CXX.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "libmnemos.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"]
# Name, floats per vector, flags. No -ffast-math: it changes results. No -march=native: the library must run elsewhere.
BASELINE: tuple[str, int, list[str]] = ("baseline", 4, [])
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
X86 = [
    ("avx2", 8, ["-mavx2", "-mfma"]),
    ("avx512", 16, AVX512),
    ("avx512bf16", 16, [*AVX512, "-mavx512bf16"]),  # left out by compilers that do not have it (g++ before 10)
]
MACOS = "11.0"  # the first for arm64; aligned_alloc is there since 10.15

# Sources that are compiled once for each, and of these those that have products of bfloat16 (simd/pairs.h).
PER_PROCESSOR = [str(path.relative_to(HERE).with_suffix("")) for path in sorted(HERE.glob("*/*.cpp"))]
WITH_BFLOAT16 = ["linear/bidirectional"]
ONCE = ("library", "threads")


class BuildError(RuntimeError):
    """Why the kernels could not be built, in one line."""


def fingerprint() -> str:
    """A hash of the sources and the compiler's flags. A library with another one is not loaded."""
    found = hashlib.sha256(repr((FLAGS, BASELINE, X86)).encode())
    for path in sorted([*HERE.rglob("*.cpp"), *HERE.rglob("*.h")]):
        found.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def compiler() -> list[str]:
    """The command of the C++ compiler. Raises BuildError if there is none."""
    if platform.system() == "Windows":
        raise BuildError("the kernels are not ported to Windows")
    given = os.environ.get("CXX", "").split()
    for command in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler: none of {' '.join(given[:1] or COMPILERS)} is on the path")


def target() -> tuple[str, str]:
    """The platform of a wheel that has the kernels (`linux_x86_64`, `macosx_11_0_arm64`), and its processor.

    A library for macOS is of one processor, also where Python is of both ("universal2").
    """
    system, _, machine = sysconfig.get_platform().rpartition("-")
    if system.startswith("macosx"):
        machine = platform.machine() if machine == "universal2" else machine
        system = f"macosx-{MACOS}"
    return f"{system}_{machine}".replace("-", "_").replace(".", "_"), machine.lower()


def build() -> Path:
    """Compile and link the kernels; returns the library's path. Raises BuildError if a step fails. Cost: a minute."""
    command = compiler()
    wheel, machine = target()
    if wheel.startswith("macosx"):
        command = [*command, "-arch", machine, f"-mmacosx-version-min={MACOS}"]
    variants = [BASELINE, *(X86 if machine in ("x86_64", "amd64") else [])]
    links = [] if wheel.startswith("macosx") else ["-ldl"]
    macros = ["-DX86_VARIANTS"] if len(variants) > 1 else []
    if macros and _takes(command, X86[-1][2]):
        macros.append("-DBFLOAT16_VARIANT")
    elif macros:
        variants.pop()
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".build") as folder:
        # In the order in which they are linked: where several have the same inline function of the standard library,
        # the linker keeps the first one, which must run on every processor that needs it.
        interface = [f'-DSOURCES="{fingerprint()}"', *macros]
        jobs = [(name, name, interface if name == "library" else []) for name in ONCE]
        for name, width, flags in variants:
            given = [f"-DWIDTH={width}", f"-DVARIANT={name}", *flags]
            sources = WITH_BFLOAT16 if name == "avx512bf16" else PER_PROCESSOR
            jobs += [(source, f"{source.replace('/', '_')}_{name}", given) for source in sources]
        objects = [str(Path(folder, f"{out}.o")) for _, out, _ in jobs]
        for (source, _, given), out in zip(jobs, objects, strict=True):
            _run([*command, *FLAGS, *given, f"-I{HERE}", "-c", str(HERE / f"{source}.cpp"), "-o", out])
        _run([*command, "-shared", "-o", str(Path(folder, LIBRARY.name)), *objects, "-pthread", *links])
        # Replaced and not overwritten: another process may have the old library open.
        os.replace(Path(folder, LIBRARY.name), LIBRARY)
    return LIBRARY


def _takes(command: list[str], flags: list[str]) -> bool:
    """Whether the compiler has the flags."""
    given = [*command, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(given, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        words = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
        raise BuildError(f"{command[0]} failed: {words}")


if __name__ == "__main__":
    try:
        print(f"built {build()}")
    except BuildError as error:
        sys.exit(f"not built: {error}")
