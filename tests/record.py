"""`--write-slow FILE`: the tests of which even the quickest case took over a tenth of a second of the processor."""

import time
from pathlib import Path

import pytest

SLOW = 0.1  # seconds of the processor, which a busy machine changes the least
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--write-slow", metavar="FILE", help="write the names of slow tests there")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if config.getoption("write_slow") and not hasattr(config, "workerinput"):  # with several processes the first writes
        config.pluginmanager.register(Slow(Path(config.getoption("write_slow"))))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[BEGAN] = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    yield
    item.user_properties.append(("processor", time.process_time() - item.stash[BEGAN]))


class Slow:
    """Writes the names when the run has ended; of tests that did not run it keeps what the file says."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, {}

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.seconds[report.nodeid] = dict(report.user_properties)["processor"]

    def pytest_terminal_summary(self, terminalreporter):
        quickest = {}
        for case, seconds in self.seconds.items():
            name = case.partition("[")[0]
            quickest[name] = min(seconds, quickest.get(name, seconds))
        before = self.path.read_text().split() if self.path.exists() else []
        names = {name for name in before if name not in quickest}
        names |= {name for name, seconds in quickest.items() if seconds > SLOW}
        self.path.write_text("".join(f"{name}\n" for name in sorted(names)))
        terminalreporter.write_line(f"wrote {len(names)} names to {self.path}")
