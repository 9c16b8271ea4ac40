from collections.abc import Callable
from pathlib import Path

import processes
import pytest
from train_standins import Toys, work


@pytest.fixture(scope="session")
def run_apart(forks) -> Callable[..., int]:
    """`run_apart(folder, toys, resume, moment, number)`: `work` in a process of its own; its exit code (-9: killed)."""

    def run(folder: Path, toys: Toys, *arguments: object) -> int:
        return processes.run(work, str(folder), toys, *arguments, timeout=120).returncode

    return run
