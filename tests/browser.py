"""A real browser for the pages: headless chromium, spoken to through its own pipe, without a driver or a library."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Seconds for one answer; a busy machine takes long to start a browser.
_PATIENCE = 120


def find_browser() -> str | None:
    """The browser's path, or None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Commands are those of the DevTools protocol: JSON, one message a NUL byte."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._rest = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command. Raises AssertionError where the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._events.append(answer)

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Load a file at a width in CSS pixels with a preferred colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def requests(self) -> list[str]:
        """Every address that the page asked for since it was opened."""
        found = [event["params"] for event in self._events if event.get("method") == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in found]

    def complaints(self) -> list[str]:
        """What the browser logged about the page: refused resources, broken style."""
        return [event["params"]["entry"]["text"] for event in self._events if event.get("method") == "Log.entryAdded"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select([self._read], [], [], _PATIENCE)[0], "the browser does not answer"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browsing(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own, closed at the end."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    # The browser reads commands on descriptor 3 and answers on 4; as root, as in most containers, it has no sandbox.
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        process = subprocess.Popen(
            ["bash", "-c", command, program, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(from_us, to_us)
        finally:
            os.close(from_us)
            os.close(to_us)
            process.terminate()
            process.wait(timeout=_PATIENCE)
