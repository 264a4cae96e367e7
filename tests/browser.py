"""Headless Chromium, driven over a pipe (`--remote-debugging-pipe`), so that a test sees a page as its reader does."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE_S = 120
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--mute-audio",
    "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """One page, and what went wrong in it."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """Exceptions of scripts, and what the browser logged as an error."""
        self.asked_for: list[str] = []
        """Addresses that the page asked for."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def is_dark(self, value: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if value else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path, fragment: str = "") -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (found := self.ask(expression)):
            assert time.monotonic() < end and not self.errors, (expression, self.errors)
            time.sleep(0.02)
        return found

    def click(self, x: float, y: float) -> None:
        self.drag((x, y), (x, y))

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        for kind, (x, y) in (
            ("mouseMoved", begin),
            ("mousePressed", begin),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser has gone"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A browser with one page; `folder` keeps its profile."""
    assert CHROMIUM is not None
    (their_in, write), (read, their_out) = os.pipe(), os.pipe()
    # the browser reads from 3 and writes to 4
    shell = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
    command = ["bash", "-c", shell, CHROMIUM, *_FLAGS, f"--user-data-dir={folder}"]
    browser = subprocess.Popen(
        command, pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Tab(read, write)
    finally:
        browser.terminate()
        try:
            browser.wait(30)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        os.close(read)
        os.close(write)
