"""Operations across nodes that ranks begin before all are ready: what a coordinator asks of an engine."""

from __future__ import annotations

from typing import Any

from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission
from hvdlite.engine import Engine


class EarlyOperations:
    """Those that ``engine`` does; see `hvdlite.coordinator.readiness.Early`."""

    def __init__(self, engine: Engine) -> None:
        assert engine.early is not None
        self._engine = engine
        self._early = engine.early

    def takes(self, request: Request) -> bool:
        """Up to the bytes that the backend takes at once."""
        return request.early_bytes is not None and self._early.takes(request.early_bytes)

    def begin(self, submission: Submission) -> None:
        """By its operation."""
        operation: Any = submission.request
        operation.begin_early(self._engine, submission)

    @property
    def has_begun(self) -> bool:
        """Also by a prepared operation."""
        return self._early.has_begun

    def has_come(self) -> bool:
        """What has begun."""
        return self._early.has_come()

    def drop(self, request: Request) -> None:
        """By its operation."""
        operation: Any = request
        operation.drop_early(self._engine)
