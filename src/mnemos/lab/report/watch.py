"""The page of runs that are being trained, served to this machine alone and kept new."""

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mnemos import registry
from mnemos.errors import InputError, say
from mnemos.lab.compare.comparison import FILE
from mnemos.lab.run.progress import clock

from .markup import escape
from .page import assemble
from .read import Results, read_tasks
from .run_records import RunRecord

_QUIET = 120.0  # seconds without a record after which the page says that there was none


class Watch(ThreadingHTTPServer):
    """A server of the page of some runs at `address`, which has a token, until `shutdown` or the end of the program.

    folders: run folders, comparison folders, and folders of a comparison that is not finished. It listens on 127.0.0.1
    only, and answers requests that name this host and come from no other page. The page is made again when a file of
    the runs has changed. Raises InputError for folders without runs.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [Path(folder) for folder in folders]
        self._token, self._lock = secrets.token_urlsafe(16), threading.Lock()
        self._results: tuple[str, list[Results]] | None = None  # and their version
        self._page = ("", "")  # version, HTML
        self._read()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.address = f"http://127.0.0.1:{self.server_port}/{self._token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a browser that goes away in the middle of an answer is no error
            say(f"mnemos: the page could not be made ({type(error).__name__}: {error})", file=sys.stderr, flush=True)

    def answer(self, path: str) -> tuple[str, str] | None:
        """(type, text) of the page, or of the state of its runs; None for another path."""
        token, slash, rest = path.partition("?")[0].lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()) or not slash or rest not in ("", "state"):
            return None
        with self._lock:  # pictures are drawn by one thread at a time
            version, results = self._read()
            if rest:
                runs = [(name, run) for one in results for name in one.names for run in one.runs_of(name)]
                left = "; ".join(_progress(name, run) for name, run in runs if not run.result)
                return "application/json", json.dumps({"text": left or "all runs are finished", "version": version})
            if self._page[0] != version:
                status = f'<p id="watch" role="status" data-version="{escape(version)}"></p>'
                self._page = version, assemble(results, status)
            return "text/html", self._page[1]

    def _read(self) -> tuple[str, list[Results]]:
        """(version, results) of the runs: read again if a file of them has another size or time."""
        runs: list[Path] = []
        for folder in self.folders:
            if any((folder / name).is_file() for name in (FILE, "recipe.json")):
                runs.append(folder)
            else:  # a comparison that is not finished
                inside = [
                    path.parent for part in ("*/", "*/*/", "*/*/*/") for path in folder.glob(f"{part}recipe.json")
                ]
                if not inside:
                    found = "no recipe.json in it; wait for the first update"
                    found = found if folder.is_dir() else registry.missing_folder(folder)
                    raise InputError(f"{folder}: expected a folder of runs, found {found}")
                runs += sorted(inside)
        files = []
        for run in runs:
            for file in sorted(file for name in ("*.json", "*.jsonl") for file in run.glob(name)):
                with contextlib.suppress(FileNotFoundError):
                    files.append((str(file), file.stat().st_size, file.stat().st_mtime_ns))
        version = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
        if self._results is None or self._results[0] != version:
            try:
                self._results = version, read_tasks(runs)
            except InputError:  # a line that is being written: the next request reads it whole
                if self._results is None:
                    raise
        return self._results


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    timeout = 30.0

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if host not in self.server.hosts or origin != f"http://{host}" or site not in ("none", "same-origin"):
            return self.send_error(HTTPStatus.FORBIDDEN)  # a page of another site, or a name that leads here
        try:
            answer = self.server.answer(self.path)
        except InputError as error:
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
        if answer is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        body = answer[1].encode(errors="backslashreplace")  # as in a file that is written
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{answer[0]}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (("Cache-Control", "no-store"), ("Content-Security-Policy", "frame-ancestors 'none'")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


def _progress(name: str, run: RunRecord) -> str:
    """How far a run that is not finished has come, and how long the rest of its training takes."""
    training, file = run.recipe.get("train"), run.folder / "metrics.jsonl"
    steps = int(training.get("steps") or 0) if isinstance(training, dict) else 0
    done = int(run.train["step"][-1]) if len(run.train["step"]) else 0
    seconds = float(run.train["seconds"][-1]) if done else math.nan
    quiet = time.time() - (file.stat().st_mtime if file.is_file() else time.time())
    late = f", no record for {clock(quiet)}" if quiet > _QUIET else ""
    name = f"{name}, seed {run.seed}"
    if not done:
        return f"{name}: no update recorded yet{late}"
    if done >= steps > 0:
        return f"{name}: all {steps:,} updates are done, the test is not{late}"
    left = max(0, steps - done) * seconds / done
    left_text = f", {clock(left)} of training left" if math.isfinite(left) else ""
    return f"{name}: update {done:,} of {steps:,}{left_text}{late}"


def watch(folders: Sequence[Path]) -> None:
    """Serve the page of some runs until Ctrl-C, and print its address. Raises InputError as `Watch` does."""
    with Watch(folders) as server:
        say(server.address)
        say(
            "Open this address in a browser of this machine; the page follows the training. Ctrl-C ends it.", flush=True
        )
        server.serve_forever()
