"""Ctrl-C while a library is imported, and a killed process of several: one line from the processes that remain."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest

import mnemos
from mnemos.lab.cli import main

SOURCE = str(Path(mnemos.__file__).parents[1])
# A compiled library loses the KeyboardInterrupt that is raised in its import, or makes another error of it.
TORCH = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    os.getpid()
except KeyboardInterrupt:
    raise ImportError("a part of the library is missing") from None
"""


def _heed() -> None:
    """A shell starts programs in the background with Ctrl-C ignored; their children ignore it too, unless this runs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_in_the_import_of_a_library_is_one_line(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(TORCH)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCE])}
    command = [sys.executable, "-m", "mnemos", "show", "short-listops"]
    given: dict = {"env": environment, "timeout": 60, "check": False, "preexec_fn": _heed}
    ended = subprocess.run(command, capture_output=True, text=True, **given)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "mnemos: interrupted\n")

    terminal, end = pty.openpty()
    try:
        assert subprocess.run(command, stderr=end, **given).returncode == 130
        said = os.read(terminal, 1000).decode()
    finally:
        os.close(end)
        os.close(terminal)
    assert "\x1b[?25h" in said  # a progress bar hides the cursor
    assert said.endswith("mnemos: interrupted\r\n")


def _train(folder: str) -> None:
    few = ["--data.train-size", "20", "--data.valid-size", "10", "--data.test-size", "10", "--train.accelerator", "cpu"]
    long = ["--train.devices", "2", "--train.steps", "100000", "--train.log-every", "1"]
    raise SystemExit(main(["train", "short-listops", *few, *long, "--out", folder]))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_killed_process_ends_the_others_in_one_line(tmp_path, forks, killed):
    pair = processes.launch(_train, str(tmp_path / "run"))
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        processes.until(lambda: metrics.exists() and metrics.stat().st_size)
    finally:
        os.kill(pair[killed].pid, signal.SIGKILL)
    assert pair[killed].wait().returncode == -signal.SIGKILL
    ended = pair[1 - killed].wait()
    assert ended.returncode == 1, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("mnemos: ")]
    assert len(said) == 1, ended.stderr
    assert "found that one has ended" in said[0]
    assert "Traceback" not in ended.stderr
