"""What a call of a process group returns: torch's Work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from hvdlite import naps
from hvdlite.distributed.lane import Lane
from hvdlite.distributed.profiled import Profiled
from hvdlite.errors import CollectiveError
from hvdlite_untraced import untraced


class Waited(Protocol):
    """A group, as whoever waits for its calls asks it."""

    def waiting(self, title: str) -> AbstractContextManager[None]:
        """A wait for the call ``title``, for the timeline."""

    def is_waited_for_by_torch(self, title: str) -> None:
        """Its future was taken; the same for a wait that goes past `GroupWork.wait`."""

    def whom_it_waits_for(self) -> str:
        """The group, and its ranks that have not come for the call that is being done."""


class Doer(Protocol):
    """Whoever does calls."""

    def assist(self, work: GroupWork) -> None:
        """Do what there is to do for ``work``, which the caller waits for, unless another thread does."""

    def tell(self, callbacks: Callable[[], object]) -> None:
        """Call ``callbacks``, of who wants to know that a work is done; they may wait for other works."""


@untraced
class GroupWork(Work):
    """A call on its way, and its end.

    Args:
        run: does it; None where others call `finish`.
        result: what the future holds, once it is done.
        title: what profilers and errors call it; an attribute.
        group: whose call it is.

    Attributes:
        profiled: its range, if a profiler runs, which ends before anybody learns that the call is done: who does may
            end the profiler next.
        takes_processors: see `hvdlite.distributed.lane.Task`.
    """

    takes_processors = True

    def __init__(
        self, run: Callable[[], object] | None, result: list[torch.Tensor], title: str, group: Waited | None = None
    ) -> None:
        super().__init__()
        self._run = run
        self._result = result
        self.title = title
        self._group = group
        self._doer: Doer | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._was_asked = False  # whether it is done
        self._source = -1
        self._lock = threading.Lock()  # guards _is_done against who wants to be told
        self._end: threading.Event | None = None
        self._future: Future[Any] | None = None
        self._trigger: Future[None] | None = None
        self.profiled: Profiled | None = None

    # For whoever begins and does it.

    def begin(self, lane: Lane, *, is_awaited: bool) -> None:
        """Have it done by ``lane``.

        Args:
            is_awaited: the caller waits for it; raises what has gone wrong.
        """
        self.is_done_by(lane)
        if not is_awaited:
            lane.add(self)
        elif not lane.do(self):
            self.wait()
        elif self._error is not None:
            raise self._error

    def is_done_by(self, doer: Doer) -> None:
        """Whom the thread that waits for it assists."""
        self._doer = doer

    def assist(self) -> None:
        """Help whoever does it, which the caller waits for."""
        if self._doer is not None and not self._is_done:
            self._doer.assist(self)

    def perform(self) -> None:
        """Do it now."""
        assert self._run is not None
        error: BaseException | None = None
        try:
            self._run()
        except BaseException as raised:
            error = raised
        self.finish(error)

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """It is over.

        Args:
            source: the rank that has sent what was received.
        """
        profiled, self.profiled = self.profiled, None
        if profiled is not None:
            profiled.end()
        with self._lock:
            if self._is_done:
                return
            self._error, self._source = error, source
            self._run = None  # and with it what was kept alive
            self._is_done = True
            end, trigger = self._end, self._trigger
            self._trigger = None
        if end is not None:
            end.set()
        if trigger is not None:
            tell = partial(trigger.set_result, None)
            tell() if self._doer is None else self._doer.tell(tell)

    # torch's interface.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once it is done; raise what has gone wrong.

        Raises:
            CollectiveError: it is not done within ``timeout``, and goes on; names the ranks that have not come.
        """
        if not self._is_done:
            with nullcontext() if self._group is None else self._group.waiting(self.title):
                self._wait(timeout.total_seconds() if timeout else 0.0)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, seconds: float) -> None:
        if seconds <= 0:
            self.assist()
            if self._is_done:
                return
        if not self._ended().wait(seconds if seconds > 0 else None):
            self._raise_late(seconds)

    def _raise_late(self, seconds: float) -> NoReturn:
        whom = "" if self._group is None else f" {self._group.whom_it_waits_for()}"
        raise CollectiveError(f"{self.title}{whom} is not done after the timeout of {seconds:g} s of its wait()")

    def synchronize(self) -> None:
        self.wait()

    @property
    def is_over(self) -> bool:
        """Whether nobody has to do anything for it any more."""
        return self._is_done

    def is_completed(self) -> bool:
        if self._was_asked and not self._is_done:
            time.sleep(naps.WAY_S)
        self._was_asked = True
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Holds the tensors once it is done; callbacks run on the thread that does it, those of messages on another."""
        if self._group is not None:
            self._group.is_waited_for_by_torch(self.title)
        with self._lock:
            future = self._future
            if future is not None:
                return future
            trigger = self._new_trigger()
            # C++ sees the error of a callback as one; what Future.set_exception sets it takes for a result.
            future = self._future = trigger.then(self._outcome)
            self._trigger = trigger
            is_done = self._is_done
        if is_done:
            trigger.set_result(None)
        return future

    def _new_trigger(self) -> Future[None]:
        return Future()

    def _outcome(self, trigger: Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def _ended(self) -> threading.Event:
        with self._lock:
            if self._end is None:
                self._end = threading.Event()
                if self._is_done:
                    self._end.set()
            return self._end


class _Several:
    """The doers of several works, as one."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        self._works = works

    def assist(self, work: GroupWork) -> None:
        for each in self._works:
            each.assist()

    def tell(self, callbacks: Callable[[], object]) -> None:
        callbacks()


@untraced
class _Coalesced(GroupWork):
    """Done once all ``works`` are."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__(None, [], "coalesced")
        self._works = works
        self.is_done_by(_Several(works))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        super().wait(timeout)
        return all(work.wait() for work in self._works)  # which may concern the current stream

    def is_completed(self) -> bool:
        return super().is_completed() and all(work.is_completed() for work in self._works)


def all_of(works: Sequence[GroupWork]) -> GroupWork:
    """A work that is done once all ``works`` are, with the error of the first that has one."""
    together = _Coalesced(works)

    def finish(_: object) -> None:
        together.finish(next((error for error in (work.exception() for work in works) if error is not None), None))

    torch.futures.collect_all([work.get_future() for work in works]).add_done_callback(finish)
    return together
