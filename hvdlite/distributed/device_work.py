"""What a call on tensors of a GPU returns: done, for the host, is what is enqueued."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.futures import Future

from hvdlite.distributed import streams
from hvdlite.distributed.device_watch import Enqueued, Fallible
from hvdlite.distributed.work import GroupWork, Waited
from hvdlite.memory.views import OnDevice
from hvdlite_untraced import untraced

_NAP_S = 1e-3


class WaitedOnDevice(Waited, Fallible, Protocol):
    """A group whose ranks have GPUs."""

    @property
    def failure(self) -> BaseException | None:
        """Why the group failed, if it did."""

    def check(self) -> None:
        """Raise the reason once the group is of no use any more."""


@untraced
class DeviceWork(GroupWork):
    """A call whose result is there in the order of streams.

    `wait` returns when the call is enqueued, which it is once all ranks have made it, and has the current stream wait
    for the result. With a timeout the host waits for the result too.

    Args:
        where: the tensors are.

    Attributes:
        enqueued: set by ``run``.
    """

    takes_processors = False

    def __init__(
        self,
        run: Callable[[], object] | None,
        result: list[torch.Tensor],
        title: str,
        group: WaitedOnDevice,
        where: OnDevice,
    ) -> None:
        super().__init__(run, result, title, group)
        self.enqueued: Enqueued | None = None
        self._of = group
        self._where = where
        self._stream = where.current_stream()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        super().wait(timeout)
        if timeout:
            self._await_device(timeout.total_seconds())
        self._precede_current_stream()
        return True

    def is_completed(self) -> bool:
        return super().is_completed() and (self._error is not None or self._is_on_device())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._error or (None if self.enqueued is None or self._is_good() else self._of.failure)

    def _is_on_device(self) -> bool:
        return self.enqueued is not None and self.enqueued.moment.is_reached

    def _is_good(self) -> bool:
        return self.enqueued is not None and self.enqueued.is_done(self._of)

    def _await_device(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while not self._is_on_device():
            self._of.check()
            if time.monotonic() > deadline_s:
                self._raise_late(seconds)
            time.sleep(_NAP_S)

    def _precede_current_stream(self) -> None:
        """Raise what has ended the group where it had not done this call yet."""
        assert self.enqueued is not None
        if not self._is_good():
            self._of.check()
        stream = self._where.current_stream()
        self.enqueued.moment.precede(stream)
        if stream == self._stream:  # which is the one that may use the tensors' memory again
            self.enqueued.let_go()

    def _new_trigger(self) -> Future[None]:
        return streams.streams.future(self._where.ordinal)

    def _outcome(self, trigger: Future[None]) -> Any:
        if self._error is None:
            self._precede_current_stream()
        return super()._outcome(trigger)
