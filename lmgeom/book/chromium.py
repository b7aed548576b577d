"""Drive one headless Chromium over its debugging pipe; needs nothing but the program itself."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

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
)


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome, the one named by $CHROMIUM first; None where there is none."""
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named)
    found = (shutil.which(name) for name in (*NAMES, *MACOS))
    return next((path for path in found if path), None)


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
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={self._folder.name}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")
        # The browser reads descriptor 3 and writes 4; the shell puts the pipes' ends there.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script, program, *flags, "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

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

    def open(self, path: Path) -> None:
        """Load a page from disk and wait for its formulas, fonts and images.

        Args:
            path: An HTML file.
        """
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
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

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._settle()

    def prefer(self, scheme: str) -> None:
        """Set the reader's preferred color scheme, light or dark, and let the page follow."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.evaluate(
            "(async () => { const theme = () => document.documentElement.dataset.theme;"
            f" for (let i = 0; i < 100 && theme() && theme() !== '{scheme}'; i++)"
            " await new Promise(done => setTimeout(done, 20)); })()"
        )
        self._settle()

    def _settle(self) -> None:
        """Wait for the transitions that a change of size or scheme starts."""
        self.evaluate(
            "(async () => { const frame = () => new Promise(requestAnimationFrame);"
            " await frame(); await frame(); await Promise.all("
            "document.getAnimations().map(a => a.finished.catch(() => 0))); })()"
        )
