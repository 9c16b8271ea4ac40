"""Processes of their own for tests, forked from one server that has imported everything once.

A cold interpreter takes two to five seconds of imports, a fork some hundredths. `fork_server` starts the server. What
is tested of an interpreter itself (its launchers, its imports) still starts one.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")


class Ended(NamedTuple):
    """What `subprocess.run` tells of a process: negative codes are signals."""

    returncode: int
    stdout: str
    stderr: str


class Process:
    """`function(*arguments)` in a process of its own, whose output is kept in files."""

    context: Any = CONTEXT

    def __init__(self, function: Callable[..., Any], *arguments: Any, cwd: Any = None, **environment: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name) / name for name in ("out", "err")]
        self.process = self.context.Process(target=_work, args=(function, arguments, self.files, cwd, environment))
        try:
            self.process.start()
        except EOFError as error:
            raise RuntimeError("the server of processes has ended; `import serving` says why") from error
        self.pid = self.process.pid

    def wait(self, timeout: float = 240) -> Ended:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"a process still ran after {timeout} s; it wrote: {self._written()[1]}")
        ended = Ended(self.process.exitcode, *self._written())
        self.folder.cleanup()
        return ended

    def _written(self) -> list[str]:
        return [path.read_text() if path.exists() else "" for path in self.files]


def _work(
    function: Callable[..., Any], arguments: tuple[Any, ...], files: list[Path], cwd: Any, environment: dict[str, str]
) -> None:
    os.setsid()  # a signal to its group is not one to the tests
    for number, path in enumerate(files, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    os.chdir(cwd or os.getcwd())
    torch.set_num_threads(1)
    function(*arguments)


def run(function: Callable[..., Any], *arguments: Any, timeout: float = 240, cwd: Any = None, **environment) -> Ended:
    """`function(*arguments)` in a process of its own, to its end."""
    return Process(function, *arguments, cwd=cwd, **environment).wait(timeout)


def until(holds: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until something holds, such as a file of another process being there."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.01)


def together(function: Callable[..., Any], *arguments: Any, world: int = 2, timeout: float = 240) -> None:
    """`function(rank, world, *arguments)` in as many processes of one gloo group, all of which must succeed."""
    with tempfile.TemporaryDirectory() as folder:
        port = f"file://{folder}/port"
        processes = [Process(_member, function, rank, world, port, arguments) for rank in range(world)]
        ended = [process.wait(timeout) for process in processes]
    failed = [f"process {rank}: {end.stderr}" for rank, end in enumerate(ended) if end.returncode]
    assert not failed, "\n".join(failed)


def _member(function: Callable[..., Any], rank: int, world: int, port: str, arguments: tuple[Any, ...]) -> None:
    limit = timedelta(minutes=2)  # a process that waits for another that failed says so
    dist.init_process_group("gloo", init_method=port, rank=rank, world_size=world, timeout=limit)
    function(rank, world, *arguments)
    dist.destroy_process_group()


def launched(function: Callable[..., Any], *arguments: Any, world: int = 2, timeout: float = 240) -> list[Ended]:
    """`launch`, to the end of all processes."""
    return [process.wait(timeout) for process in launch(function, *arguments, world=world)]


def launch(
    function: Callable[..., Any], *arguments: Any, world: int = 2, kind: type[Process] = Process
) -> list[Process]:
    """`function(*arguments)` in as many processes as `torchrun` would start, told their ranks in the same way."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    told |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [kind(function, *arguments, **told, **rank) for rank in ranks]
