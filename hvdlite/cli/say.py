"""How hvdliterun speaks, and passes output on: by the descriptor, so that no rest stays in a buffer and fails later."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def say(text: str) -> None:
    """A line. Where nobody can take it, as on a full disk or a terminal that was closed, the job goes on."""
    if sys.stderr is not None:
        with suppress(OSError):
            put(sys.stderr.fileno(), f"{text}\n".encode(errors="backslashreplace"))


def put(descriptor: int, data: bytes) -> None:
    """Write all of ``data``. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]
