"""The page of runs that are being trained, served to this machine alone and kept new."""

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mnemos.errors import InputError, say
from mnemos.lab.compare.comparison import FILE
from mnemos.lab.run.progress import clock
from mnemos.types import JSONObject

from .markup import escape
from .page import assemble
from .read import Results, read_tasks
from .run_records import RunRecord

_QUIET = 120.0  # seconds without a record after which the page says that there was none
_CONNECTIONS = 16  # at a time; a browser opens six
_SECONDS = 30.0  # for a request to come, and for an answer to be taken


class Watch(ThreadingHTTPServer):
    """A server of the page of some runs at `address`, which has a token, until `shutdown` or the end of the program.

    folders: run folders, comparison folders, and folders of a comparison that is not finished. It listens on 127.0.0.1
    only, and answers requests that name this host and come from no other page. The page is made again when a file of
    the runs has changed. Raises InputError for folders without runs.
    """

    daemon_threads = True
    request_queue_size = _CONNECTIONS  # a browser whose connection does not fit tries again after a second

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [Path(folder) for folder in folders]
        self._token, self._lock = secrets.token_urlsafe(16), threading.Lock()
        self._known: tuple[str, list[Results]] | None = None
        self._page = ("", "")
        self._read()
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/{self._token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; a connection beyond `_CONNECTIONS` is closed."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error; any other is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            say(f"mnemos: the page could not be made ({type(error).__name__}: {error})", file=sys.stderr, flush=True)

    def answer(self, path: str) -> tuple[str, str] | None:
        """(type, text) of what is at a path; ("", path) for the page without its last slash; None for nothing."""
        token, slash, rest = path.partition("?")[0].lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()) or rest not in ("", "state"):
            return None
        if not slash:  # the page asks for what is below it
            return "", f"/{token}/"
        with self._lock:  # pictures are drawn by one thread at a time
            version, found = self._read()
            if rest:
                return "application/json", json.dumps({"text": _text(_progress(found)), "version": version})
            if self._page[0] != version:
                status = f'<p id="watch" role="status" data-version="{escape(version)}"></p>'
                self._page = version, assemble(found, status)
            return "text/html", self._page[1]

    def _read(self) -> tuple[str, list[Results]]:
        """(version, results) of the runs: read again if a file of them has another size or time."""
        version = _version(self.folders)
        if self._known is None or self._known[0] != version:
            try:
                self._known = version, read_tasks([run for folder in self.folders for run in _runs(folder)])
            except InputError:  # a line that is being written: the next request reads it whole
                if self._known is None:
                    raise
        return self._known


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    timeout = _SECONDS

    def setup(self) -> None:
        """Begin to read a request: `timeout` is for each read, and one that sends a byte now and then never ends."""
        super().setup()
        self._reading = threading.Timer(_SECONDS, self.connection.shutdown, [socket.SHUT_RD])
        self._reading.daemon = True
        self._reading.start()

    def finish(self) -> None:
        """The connection ends."""
        self._reading.cancel()
        super().finish()

    def do_GET(self) -> None:
        """The page, or the state of its runs as JSON."""
        self._reading.cancel()
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if host not in self.server.hosts or origin != f"http://{host}" or site not in ("none", "same-origin"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        try:
            found = self.server.answer(self.path)
        except InputError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        if not found[0]:
            self.send_response(HTTPStatus.PERMANENT_REDIRECT)
            self.send_header("Location", found[1])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = found[1].encode(errors="backslashreplace")  # as in a file that is written
        self.send_response(HTTPStatus.OK)
        fields = {"Content-Type": f"{found[0]}; charset=utf-8", "Content-Length": str(len(body))}
        fields |= {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
        fields |= {"Content-Security-Policy": "frame-ancestors 'none'", "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


def _runs(folder: Path) -> list[Path]:
    """The folder itself, or the runs of a comparison that is not finished."""
    if (folder / FILE).is_file() or (folder / "recipe.json").is_file():
        return [folder]
    found = sorted(path.parent for part in ("*/", "*/*/", "*/*/*/") for path in folder.glob(f"{part}recipe.json"))
    if not found:
        raise InputError(f"{folder}: expected a folder of runs, found no recipe.json in it; wait for the first update")
    return found


def _version(folders: Sequence[Path]) -> str:
    found = []
    for run in (run for folder in folders for run in _runs(folder)):
        for file in sorted(file for name in ("*.json", "*.jsonl") for file in run.glob(name)):
            with contextlib.suppress(FileNotFoundError):
                about = file.stat()
                found.append((str(file), about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _progress(found: Sequence[Results]) -> list[JSONObject]:
    """{name, step, steps, left in seconds, changed} of each run that is not finished."""
    return [_left(name, run) for one in found for name in one.names for run in one.runs_of(name) if not run.result]


def _left(name: str, run: RunRecord) -> JSONObject:
    training = run.recipe.get("train")
    steps = int(training.get("steps") or 0) if isinstance(training, dict) else 0
    step, seconds = run.train["step"], run.train["seconds"]
    at, left = (int(step[-1]), math.nan) if len(step) else (0, math.nan)
    if at and math.isfinite(seconds[-1]):
        left = max(0, steps - at) * seconds[-1] / at
    file = run.folder / "metrics.jsonl"
    changed = file.stat().st_mtime if file.is_file() else time.time()
    return {"name": f"{name}, seed {run.seed}", "step": at, "steps": steps, "left": left, "changed": changed}


def _text(runs: Sequence[JSONObject]) -> str:
    """What the page says of the runs now."""
    lines = []
    for run in runs:
        quiet = time.time() - run["changed"]
        done = f"{run['name']}: update {run['step']:,} of {run['steps']:,}"
        left = f", {clock(run['left'])} of training left" if math.isfinite(run["left"]) else ""
        late = f", no record for {clock(quiet)}" if quiet > _QUIET else ""
        if not run["step"]:
            lines.append(f"{run['name']}: no update recorded yet{late}")
        elif run["step"] >= run["steps"] > 0:
            lines.append(f"{run['name']}: all {run['steps']:,} updates are done, the test is not{late}")
        else:
            lines.append(f"{done}{left}{late}")
    return "; ".join(lines) or "all runs are finished"


def watch(folders: Sequence[Path]) -> None:
    """Serve the page of some runs until Ctrl-C, and print its address. Raises InputError as `Watch` does."""
    with Watch(folders) as server:
        say(server.address)
        say(
            "Open this address in a browser of this machine; the page follows the training. Ctrl-C ends it.", flush=True
        )
        server.serve_forever()
