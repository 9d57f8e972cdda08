"""Chromium by the W3C's WebDriver protocol, as far as these tests need it: chromedriver speaks it over HTTP."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from types import TracebackType
from typing import Any

_PATIENCE_S = 60


def missing() -> str | None:
    """What is not installed, as a reason to skip; None where all is there."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"no {program} (apt-get install chromium chromium-driver; tests/run.py does so as root)"
    return None


class Browser:
    """A headless Chromium without network, which ends with the ``with`` block."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(prefix="hvdlite-browser-")
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert self._driver.stdout is not None
            line = next(line for line in self._driver.stdout if "started successfully on port" in line)
            port = re.findall(r"\d+", line)[-1]
            self._session = f"http://127.0.0.1:{port}/session"
            arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            options = {"args": [*arguments, f"--user-data-dir={self._profile.name}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
            self._session += f"/{answer['sessionId']}"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._end()

    def _end(self) -> None:
        self._driver.terminate()
        self._driver.communicate(timeout=_PATIENCE_S)
        self._profile.cleanup()

    def _call(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            self._session + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)["value"]

    def open(self, url: str, *, width: int, dark: bool) -> None:
        """Load ``url`` in a window of ``width`` pixels, for somebody who prefers light or dark pages."""
        self._devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])
        self._call("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """What the body of a function, ``script``, returns in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        """What the console has had since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def _devtools(self, command: str, **params: Any) -> None:
        self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})
