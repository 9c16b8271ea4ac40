"""A headless Chromium driven by its DevTools protocol over two pipes: no driver and no package are needed."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time

import pytest

SWITCHES = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
SWITCHES += " --disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9, "Enter": 13, "Home": 36, "End": 35}
TEXT = {"Enter": "\r", "Space": " "}


def find():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. `errors` has what the console or the page's policy complained of."""

    def __init__(self, write, read):
        self._write, self._read, self._number, self._buffer, self.errors = write, read, 0, b"", []
        self._session = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        kind, about = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        elif kind == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(about["args"]))

    def open(self, url, width=1400, height=1000, dark=False, scripts=True):
        self._call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.size(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def size(self, width, height):
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, expression):
        """The value of an expression of JavaScript; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression, seconds=30):
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, f"not true in {seconds} s: {expression}"
            time.sleep(0.02)

    def key(self, name):
        """Press and release a key, such as ArrowRight, Tab or Space."""
        about = {"key": " " if name == "Space" else name, "code": name}
        about["windowsVirtualKeyCode"] = 32 if name == "Space" else KEYS[name]
        self._call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": TEXT[name]} if name in TEXT else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def point(self, x, y):
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path, whole=False):
        """Write a PNG of what is seen, or of the whole page."""
        import base64

        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser():
    """A browser with an empty profile; the test is skipped, with the reason, where there is none."""
    if (program := find()) is None:
        pytest.skip("no chromium here to open the page with")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol's pipes are the descriptors 3 and 4 of the browser.
        command = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        process = subprocess.Popen(
            ["bash", "-c", command, program, *SWITCHES.split(), f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            process.kill()
            process.wait()
            os.close(ours_in)
            os.close(ours_out)
