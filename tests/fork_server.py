"""The server that the tests' processes are forked from: one for all test processes, since it imports for five seconds.

PyTorch is not imported here: the process that starts the others would take seconds for it before they start.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ADDRESS = "MNEMOS_TESTS_SERVER"
_server: Any = forkserver._forkserver


def serve() -> None:
    """Start the server, which imports `serving` while the tests go on; once is enough.

    What its forks print goes nowhere, unless they are a `Process`, which keeps it.
    """
    if address := os.environ.get(ADDRESS):  # the first process has started it
        if not _server._forkserver_address:
            _server._forkserver_address = address
            _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # its forks are handed one
            _server.ensure_running = lambda: None  # which would wait for a server of this process
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["serving"])
    before = os.environ.get("PYTHONPATH")
    paths = [str(TESTS), str(TESTS / "lab/run"), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # Python 3.11's server does not take the path it is told
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        forkserver.ensure_running()
    finally:
        for number, file in enumerate(kept, start=1):
            os.dup2(file, number)
            os.close(file)
        os.close(nowhere)
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def serve_others() -> None:
    """Start it for the test processes that this process will start, which learn its address from the environment.

    From Python 3.14 on a server knows its own process alone; there each test process starts one.
    """
    if sys.version_info < (3, 14):
        serve()
        os.environ[ADDRESS] = _server._forkserver_address
