import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
from train_standins import Toys, work


@pytest.fixture(scope="session")
def run_apart() -> Callable[..., int]:
    """`run_apart(folder, toys, resume, moment, number)`: `work` in a process of its own; its exit code (-9: killed)."""
    # A server that has imported everything once: a process then costs a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_fabric", "train_standins", "mnemos.train.loop"])

    def run(folder: Path, toys: Toys, *arguments: object) -> int:
        process = context.Process(target=work, args=(str(folder), toys, *arguments))
        process.start()
        process.join(120)
        assert process.exitcode is not None, "the run hangs"
        return process.exitcode

    return run
