"""A real Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "" if CHROMIUM else "there is no chromium on this machine (apt install chromium)"
DEADLINE = 60.0
"""Seconds for anything the browser is waited for."""


class Headless:
    """One page of a browser of its own."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        from websockets.sync.client import connect

        assert CHROMIUM
        self._home = tempfile.mkdtemp(prefix="headless-")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command = [CHROMIUM, *flags, "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={self._home}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        port = self._port()
        pages = json.loads(urlopen(f"http://127.0.0.1:{port}/json").read())
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(connect(address, max_size=1 << 28, open_timeout=DEADLINE))
        self._number = 0
        self.errors: list[str] = []
        """What the page complained about: exceptions, refused scripts."""
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.size(width, height)

    def _port(self) -> str:
        file = Path(self._home) / "DevToolsActivePort"
        end = time.monotonic() + DEADLINE
        while not file.exists() or "\n" not in file.read_text():
            assert time.monotonic() < end and self._process.poll() is None, "chromium did not start"
            time.sleep(0.05)
        return file.read_text().splitlines()[0]

    @property
    def group(self) -> int:
        """The process group of the browser."""
        return self._process.pid

    def call(self, method: str, **given: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": given}))
        while True:
            said = json.loads(self._socket.recv(timeout=DEADLINE))
            if said.get("method") == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefers(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + DEADLINE
        while not self.evaluate(f"!!({script})"):
            assert time.monotonic() < end, f"never true: {script}; errors: {self.errors}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", start)
        self.mouse("mousePressed", start)
        self.mouse("mouseMoved", end)
        self.mouse("mouseReleased", end)

    def mouse(self, kind: str, at: tuple[float, float]) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", buttons=1, clickCount=1)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._stack.close()
        os.killpg(self._process.pid, 9)
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)
