"""A headless Chromium, in which a test clicks and reads.

The test speaks Chromium's DevTools protocol over two pipes, which needs no library.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Browser:
    """A browser with one page.

    Attributes:
        said: the messages that the page's scripts logged, and the errors that they did not catch.

    Args:
        profile: an empty directory.
    """

    def __init__(
        self, url: str, profile: Path, size: tuple[int, int] = (1000, 900), patience: float = 60.0
    ) -> None:
        assert CHROMIUM is not None
        self.said: list[str] = []
        self._patience, self._numbers, self._rest = patience, itertools.count(1), b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads file descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                shell,
                CHROMIUM,
                *flags,
                f"--window-size={size[0]},{size[1]}",
                "about:blank",
            ],
            pass_fds=[theirs_in, theirs_out],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        (target, *_) = [
            t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        ]
        self._session = self._call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=url)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def run(self, script: str) -> Any:
        """Return the value of an expression; if it is a promise, the value of the promise."""
        found = self._evaluated(script)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def _evaluated(self, script: str) -> Any:
        return self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )

    def sees(self, script: str, what: Callable[[Any], bool] = bool) -> Any:
        """Return the value of an expression, once `what` is true of the value.

        Until then, the expression may also fail, because the page may not be there yet.
        """
        deadline = time.monotonic() + self._patience
        while True:
            found = self._evaluated(script)
            if "exceptionDetails" not in found and what(value := found["result"].get("value")):
                return value
            assert time.monotonic() < deadline, f"{script} gives {found}"
            time.sleep(0.05)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                assert "error" not in heard, heard["error"]
                return heard["result"]
            self._note(heard)

    def _note(self, heard: dict[str, Any]) -> None:
        match heard.get("method"):
            case "Runtime.consoleAPICalled":
                self.said.append(
                    " ".join(str(one.get("value", one)) for one in heard["params"]["args"])
                )
            case "Runtime.exceptionThrown":
                self.said.append(str(heard["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.said.append(str(heard["params"]["entry"]["text"]))

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, *_ = select.select([self._in], [], [], self._patience)
            assert ready, "the browser says nothing"
            new = os.read(self._in, 1 << 20)
            assert new, "the browser has ended"
            self._rest += new
        said, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(said)
        return heard
