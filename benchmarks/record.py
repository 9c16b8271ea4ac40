"""Where a number was measured: goes into every result."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """Commit, command, machine and versions. Must be called where the benchmark's settings are in force."""
    root = Path(__file__).parent
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    dirty = bool(subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip())
    cpu = next(
        (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")), platform.machine()
    )
    return {
        "commit": commit,
        "dirty": dirty,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
