"""How many small faults the tests find: `python tools/mutate.py --count 100 --seed 0`.

Each fault (see mutations.py) is made in a copy of the tree; the tests most likely to find it run first, then the
contracts, then all others, until one fails. A fault that none finds is a survivor: a test is missing, or the fault
changes nothing that is promised, which the field "explained" of the result then says. It is written by hand and kept.

Known tools run the whole suite, or what a coverage run of hours has mapped, in a new interpreter per fault. Here one
process imports PyTorch once and forks for each fault, and the order of the tests follows the folders, which mirror the
package: most faults are found in seconds.

The result, results/mutants.json, is written after each fault; the same command goes on from there, and tries survivors
that nothing explains again, since tests may have been added. One with another seed begins anew.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mutations import Fault, faults

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src/mnemos")
ROOMS = ("ops", "memory", "attention", "models", "memory_replay", "lab/run", "hosts", "lab/tasks", "lab/evaluate")
ROOMS += ("lab/compare", "lab/vision", "lab/translation", "lab/speech", "generate", "hugging_face", "trainers")
LIMIT = 3600  # seconds for the tests of one stage; pytest's own limit per test finds endless loops long before
CONTRACTS = ["tests/test_contracts.py", "tests/memory_replay/test_replay.py", "tests/test_auxiliary_losses.py"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="how many faults (100)")
    parser.add_argument("--seed", type=int, default=0, help="which faults (0)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutants.json", help="the result file")
    options = parser.parse_args()
    written = json.loads(options.out.read_text()) if options.out.is_file() else {}
    mutants: list[dict[str, Any]] = written["mutants"] if written.get("seed") == options.seed else []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        import_libraries()
        if first_failure(tree, ["tests"], [], "--collect-only") is not None:
            raise SystemExit("expected tests that can be collected; pytest --collect-only tells which cannot")
        chosen = choose(tree, options.count, options.seed)
        mutants = [one for one in mutants if any(same(one, fault.record()) for fault in chosen)]
        print(f"{len(mutants)} of {written.get('faults', 0)} recorded faults are still among those chosen")
        for fault in chosen:
            known = next((one for one in mutants if same(one, fault.record())), None)
            if known is not None and not is_open(known):
                continue
            found_by, seconds = examine(fault, tree)
            if known is None:
                mutants.append(known := {})
            known |= {**fault.record(), "found_by": found_by, "seconds": round(seconds, 1), "commit": commit()}
            write(options.out, options.seed, mutants)
            print(f"{len(mutants)} {found_by or 'SURVIVED'} {fault.file}:{fault.line} {fault.after}", flush=True)
    left = list(filter(is_open, mutants))
    print(f"{len(mutants)} faults, {len(left)} neither found nor explained")
    for one in left:
        print(f"{one['file']}:{one['line']}: {one['before']} -> {one['after']}")


def is_open(one: dict[str, Any]) -> bool:
    """Whether a recorded fault is neither found nor explained."""
    return one["found_by"] is None and "explained" not in one


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records are of one fault, whose line may have moved."""
    return all(one[name] == other[name] for name in ("file", "kind", "before", "after"))


def copy_tree(tree: Path) -> None:
    """Everything under version control as it is now, and the built kernels."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in [*names, *(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE / "native").glob("*.so"))]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)


def choose(tree: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults, as many from each room as from any other; more of them with the same seed begin with the same."""
    rooms = []
    for room in ROOMS:
        every: list[Fault] = []
        for path in sorted((tree / PACKAGE / room).rglob("*.py")):
            every += faults(path.read_text(), str(path.relative_to(tree)))
        if not every:
            raise SystemExit(f"expected files with code in {PACKAGE / room}, found none; correct ROOMS")
        random.Random(f"{seed} {room}").shuffle(every)
        rooms.append(fault for fault in every if fault.changes((tree / fault.file).read_text()))
    return list(itertools.islice(itertools.chain.from_iterable(zip(*rooms, strict=False)), count))


def import_libraries() -> None:
    """What every test process needs, so that its fork does not import it again; nothing of the package."""
    import lightning_fabric
    import numpy
    import pytest
    import torch
    import torch._dynamo
    import torch.distributed

    torch.set_num_threads(1)
    del lightning_fabric, numpy, pytest


def stages(fault: Fault, tree: Path) -> list[list[str]]:
    """Lists of test files, the likeliest first: those that are named as the file or import it, its room's, the rest."""
    parts = Path(fault.file).relative_to(PACKAGE).with_suffix("").parts
    room = "tests/" + "/".join(parts[: 2 if parts[0] == "lab" else 1]) + "/"
    module = ".".join(("mnemos", *parts)).removesuffix(".__init__")
    imports = re.compile(
        rf"^ *(import {re.escape(module)}\b|from {re.escape(module)} import"
        rf"|from {re.escape(module.rpartition('.')[0])} import .*\b{re.escape(module.rpartition('.')[2])}\b)",
        re.MULTILINE,
    )
    files = sorted(str(path.relative_to(tree)) for path in (tree / "tests").rglob("test_*.py"))
    in_room = [name for name in files if name.startswith(room)]
    words = [word for word in parts[1:] if word != "__init__"]
    own = [name for name in in_room if any(word in Path(name).stem for word in words)]
    own += [name for name in files if imports.search((tree / name).read_text())]
    done: set[str] = set()
    lists = []
    contracts = [name for name in files if name in CONTRACTS]
    for names in (own, in_room, contracts, files):
        lists.append([name for name in dict.fromkeys(names) if name not in done])
        done.update(names)
    return [stage for stage in lists if stage]


def examine(fault: Fault, tree: Path) -> tuple[str | None, float]:
    """The first test that the fault fails, or None; and seconds. A test that fails without the fault does not count."""
    start, path, failing = time.monotonic(), tree / fault.file, list[str]()
    source = path.read_text()
    for stage in stages(fault, tree):
        while True:
            path.write_text(fault.apply(source))
            try:
                test = first_failure(tree, stage, failing)
            finally:
                path.write_text(source)
            if test is None:
                break
            named = "::" in test  # otherwise it must not happen without the fault: libraries may have gone since
            tests, options = ([test], []) if named else (stage, ["--collect-only"] * (test == "collection"))
            again = None if test in _SOUND else first_failure(tree, tests, [] if named else failing, *options)
            if again is None:
                _SOUND.update([test] if named else [])
                return test, time.monotonic() - start
            if "::" not in again:
                raise SystemExit(f"expected tests that run without a fault, found {again}; run {' '.join(tests)}")
            failing.append(again)
    return None, time.monotonic() - start


_SOUND: set[str] = set()  # tests that passed in the tree without a fault


def first_failure(tree: Path, tests: list[str], without: list[str], *more: str) -> str | None:
    """The id of the first test that fails, "collection" or "crash" where none is known by name; None where all pass.

    Raises TimeoutError for a stage that has not ended after LIMIT: such a fault is neither found nor a survivor.
    """
    with tempfile.TemporaryDirectory() as folder:
        child = multiprocessing.get_context("fork").Process(target=_run, args=(tree, tests, without, folder, more))
        child.start()
        child.join(LIMIT)
        ended = child.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # also what a failed test has left running
        child.join()
        if ended is None:
            raise TimeoutError(f"expected {len(tests)} test files to end within {LIMIT} s; run them by hand")
        if ended in (0, 5):  # 5: nothing to run
            return None
        note = Path(folder, "failed")
        return note.read_text() if note.exists() else "collection" if ended > 0 else "crash"


def _run(tree: Path, tests: list[str], without: list[str], folder: str, more: tuple[str, ...]) -> None:
    """In a process of its own: the tests, until one fails, whose id is written to a file of the folder."""
    import pytest

    class First:
        @staticmethod
        def pytest_runtest_logreport(report: Any) -> None:
            if report.failed:
                Path(folder, "failed").write_text(report.nodeid)

    os.setpgid(0, 0)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree / "src"))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "300", *more]
    options += ["--basetemp", f"{folder}/tests", *(f"--deselect={name}" for name in without)]
    code = 1
    try:
        code = int(pytest.main([*tests, *options], plugins=[First()]))
    finally:
        os._exit(code)  # threads that a test has left running are not waited for


def write(path: Path, seed: int, mutants: list[dict[str, Any]]) -> None:
    """Write the result file."""
    survivors = [one for one in mutants if one["found_by"] is None]
    summary = {
        "seed": seed,
        "faults": len(mutants),
        "found": len(mutants) - len(survivors),
        "survivors": len(survivors),
        "survivors explained": sum("explained" in one for one in survivors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**summary, "mutants": mutants}, indent=1, ensure_ascii=False) + "\n")


def commit() -> str:
    """The commit's short hash."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
