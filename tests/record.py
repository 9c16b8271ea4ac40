"""`--record FILE`: what a run of the suite found, as JSON, for a claim that rests on the whole of it."""

import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write date, commit, counts and seconds of this run there")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if config.getoption("record") and not hasattr(config, "workerinput"):  # with several processes the first writes
        config.pluginmanager.register(Recorder(config.getoption("record")))


class Recorder:
    """Writes the file when the run has ended."""

    def __init__(self, path: str) -> None:
        self.path, self.start = Path(path), time.monotonic()

    def pytest_terminal_summary(self, terminalreporter, exitstatus, config):
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in OUTCOMES}
        found = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _git("rev-parse", "HEAD"),
            "dirty": bool(_git("status", "--porcelain", "--", "src", "tests")),
            "exhaustive": config.getoption("exhaustive"),
            "processes": config.getoption("numprocesses", None) or 1,
            "exit_code": int(exitstatus),
            **counts,
            "seconds": round(time.monotonic() - self.start, 1),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=2) + "\n")
        terminalreporter.write_line(f"wrote {self.path}")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    return done.stdout.strip()
