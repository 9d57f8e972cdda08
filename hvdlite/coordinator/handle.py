"""What a submission leaves in the user's hands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Handle:
    """The future of one submission: waited for by user threads, completed once by the coordinator.

    A lock that is held until completion is the cheapest sleep that Python has: no condition, no polling.
    """

    __slots__ = ("_done", "_error", "_lock", "_result", "assist")

    def __init__(self) -> None:
        self.assist: Callable[[Handle], None] | None = None  # what a thread can do for it while it waits
        self._lock = threading.Lock()
        self._lock.acquire()
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._done

    def wait(self) -> Any:
        """Sleep until the operation is complete; return its result or raise its error. May be called again."""
        if not self._done and self.assist is not None:
            self.assist(self)
        if not self._done:
            with self._lock:  # released by whoever completes; the next waiter takes it in turn
                pass
        if self._error is not None:
            raise self._error.with_traceback(None)  # several threads may raise it
        return self._result

    def succeed(self, result: Any = None) -> None:
        self._result = result
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Complete with an error, unless it is complete already."""
        if not self._done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._done = True
        self._lock.release()
