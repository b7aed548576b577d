"""Drive one headless Chromium over its debugging pipe; needs nothing but the program itself."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lmgeom.errors import BookError

__all__ = ["HOW_TO_GET", "Chromium", "find_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
MACOS = ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",)
HOW_TO_GET = (
    "no Chromium or Chrome found: install one (Debian and Ubuntu: sudo apt install chromium; "
    "macOS: brew install --cask chromium), or name it in the variable CHROMIUM"
)
FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--allow-file-access-from-files=false",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a page that asks for anything outside fails
    "--remote-debugging-pipe",
    "about:blank",
)


# The browser reads descriptor 3 and writes 4: put the pipes' ends there and become the browser.
LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome, the one named by $CHROMIUM first; None where there is none."""
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named)
    found = (shutil.which(name) for name in (*NAMES, *MACOS))
    return next((path for path in found if path), None)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a browser, in earnest if it does not listen."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Chromium:
    """One page of a headless browser, as a context manager.

    Commands and events are those of the Chrome DevTools protocol, sent as JSON over two pipes.

    Args:
        timeout: Seconds to wait for any answer.

    Raises:
        BookError: There is no browser, it does not start, or it does not answer in time.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.events: list[dict[str, Any]] = []
        self._count = 0
        self._buffer = b""
        self._session: str | None = None

    def __enter__(self) -> Chromium:
        program = find_chromium()
        if program is None:
            raise BookError(HOW_TO_GET)
        self._open = contextlib.ExitStack()
        with self._open:
            self._start(program)
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _start(self, program: str) -> None:
        """Start the browser with one page; what is opened is noted for closing."""
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._open.callback(folder.cleanup)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        for descriptor in (self._write, self._read):
            self._open.callback(os.close, descriptor)
        flags = [*FLAGS, f"--user-data-dir={folder.name}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(to_read), str(to_write), program, *flags],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._open.callback(_stop, process)
        os.close(to_read)
        os.close(to_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        answer = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")

    def _message(self, deadline: float) -> dict[str, Any]:
        """Next message of the browser."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 16) if ready else b""
            if not chunk:
                state = "stopped" if ready else f"gave no answer in {self.timeout:.0f} s"
                raise BookError(f"the browser {state}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that arrive meanwhile are kept.

        Args:
            method: Name of the command, such as `Page.navigate`.
            **parameters: Its parameters.

        Returns:
            The result.

        Raises:
            BookError: The browser refuses the command or does not answer.
        """
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.timeout
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._count:
                break
            self.events.append(answer)
        if "error" in answer:
            raise BookError(f"the browser refused {method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, query: str = "") -> None:
        """Load a page from disk and wait for its formulas, fonts and images.

        Args:
            path: An HTML file.
            query: What follows the question mark of its address.
        """
        self.events.clear()
        self.call("Page.navigate", url=f"{path.resolve().as_uri()}{query and '?'}{query}")
        deadline = time.monotonic() + self.timeout
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message(deadline))
        self.evaluate(
            "(async () => { const mathjax = window.MathJax && window.MathJax.startup;"
            " if (mathjax) await mathjax.promise;"
            " for (const image of document.images) image.loading = 'eager';"
            " await Promise.all([...document.images].map(i => i.decode().catch(() => 0)));"
            " await document.fonts.ready; return true; })()"
        )

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page; a promise is awaited.

        Raises:
            BookError: The expression throws.
        """
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            raise BookError(f"JavaScript in the page: {text.splitlines()[0]}")
        return answer["result"].get("value")

    def work(self) -> float:
        """Seconds the page's main thread has worked; a busy machine hardly lengthens them."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return next(float(m["value"]) for m in metrics if m["name"] == "TaskDuration")

    def files(self) -> set[Path]:
        """Files on disk that the page just opened has asked for, itself among them."""
        sent = (e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent")
        urls = (urlsplit(parameters["request"]["url"]) for parameters in sent)
        return {Path(unquote(url.path)) for url in urls if url.scheme == "file"}

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.settle()

    def prefer(self, scheme: str) -> None:
        """Set the reader's preferred color scheme, light or dark, and let the page follow."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.evaluate(
            "(async () => { const theme = () => document.documentElement.dataset.theme;"
            f" for (let i = 0; i < 100 && theme() && theme() !== '{scheme}'; i++)"
            " await new Promise(done => setTimeout(done, 20)); })()"
        )
        self.settle()

    def settle(self) -> None:
        """Wait for the transitions that a change of size or scheme starts."""
        self.evaluate(
            "(async () => { const frame = () => new Promise(requestAnimationFrame);"
            " await frame(); await frame(); await Promise.all("
            "document.getAnimations().map(a => a.finished.catch(() => 0))); })()"
        )
