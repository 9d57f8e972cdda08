"""What the function of a process of multiprocessing has raised, for what ends with the process."""

from __future__ import annotations

import sys
from multiprocessing.process import BaseProcess
from types import CodeType

_CATCHES = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
_TOOLS = (3, 4)  # of sys.monitoring, those that are meant for nobody in particular


class WorkerError:
    """Made within the function. Until Python 3.12 finalizers run while an error is on its way; later ones after it."""

    def __init__(self) -> None:
        self._caught: BaseException | None = None
        if sys.version_info >= (3, 13):
            monitoring = sys.monitoring
            for tool in _TOOLS:
                if monitoring.get_tool(tool) is None:
                    monitoring.use_tool_id(tool, "hvdlite")
                    monitoring.register_callback(tool, monitoring.events.EXCEPTION_HANDLED, self._handled)
                    monitoring.set_events(tool, monitoring.events.EXCEPTION_HANDLED)
                    break

    def get(self) -> BaseException | None:
        """The error, at the end of the process; None where there was none, or it was asked to end with status 0."""
        error = self._caught or sys.exc_info()[1]
        if isinstance(error, SystemExit):
            return error.__context__ if error.code else None  # torch.multiprocessing.spawn catches, and exits
        return error

    def _handled(self, code: CodeType, _offset: int, error: BaseException) -> None:
        if code is _CATCHES:
            self._caught = error
