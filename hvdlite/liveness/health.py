"""Whether a job lives, and why it does not: one failure, known on every rank, that ends every wait."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from hvdlite import _native
from hvdlite.config import Config
from hvdlite.errors import (
    CollectiveError,
    HorovodInternalError,
    RankFailedError,
    ShutDownError,
    StallError,
    is_known_everywhere,
)
from hvdlite.launched import LauncherProcess
from hvdlite.liveness import notice
from hvdlite.liveness.notice import Notice
from hvdlite.liveness.sentinel import Sentinel
from hvdlite.liveness.sentinel_messages import Failed
from hvdlite.node import Node
from hvdlite.tracebacks import described

_LOG = logging.getLogger("hvdlite")
_STALL = -1  # what the sentinel calls the rank that failed where none did: the ranks wait for one another
_REASON_S = 2.0  # how long a rank that finds its node aborted waits to hear why


class Mortal(Protocol):
    """What ends with the job."""

    def fail(self, reason: HorovodInternalError) -> None:
        """End every wait, and every operation now and later, with ``reason``; called on any thread."""


class Health:
    """This rank's knowledge of the job's failure, which it shares with all other ranks.

    Attributes:
        failure: the reason; None while the job lives.
        failed_rank: None where no rank has failed, or none alone.
        was_logged: the first line of ``failure`` has been written to the log, or is about to be.
        recovers: the program goes on after a failure, so this rank is not ended soon after one. It has to be known from
            the beginning, as a rank may fail while others are still in their start.
        is_said: whether another world of this process has logged that line, or is about to.

    Args:
        links: (rank, where it is, connected socket) of every neighbour, for the sentinel, which owns the sockets.
        launcher: with which this rank ends.
        started_as: what the launcher calls ranks that are called otherwise here.
    """

    def __init__(
        self,
        rank: int,
        links: list[tuple[int, str, socket.socket]],
        config: Config,
        launcher: LauncherProcess | None = None,
        started_as: Mapping[int, int] | None = None,
        *,
        recovers: bool = False,
    ) -> None:
        self.failure: HorovodInternalError | None = None
        self.failed_rank: int | None = None
        self.was_logged = False
        self.recovers = recovers
        self.is_said: Callable[[str], bool] = lambda line: False
        self._rank = rank
        self._started_as = started_as or {}
        self._config = config
        self._is_known = threading.Event()
        self._was_said = threading.Event()
        self._lock = threading.Lock()  # guards _mortals, what is told to them, and _last_words
        self._mortals: list[Mortal] = []
        self._last_words: _native.Deadline | None = None
        self._is_closing = self._has_time = False
        self._sentinel = Sentinel(rank, links, self._learn, config.heartbeat_timeout_s, launcher)

    def add(self, mortal: Mortal) -> None:
        """From here on ``mortal`` hears of a failure; of one that has happened already, at once."""
        with self._lock:
            self._mortals.append(mortal)
            failure = self.failure
        if failure is not None:
            mortal.fail(failure)

    def remove(self, mortal: Mortal) -> None:
        """It has ended in order, or never began."""
        with self._lock:
            if mortal in self._mortals:
                self._mortals.remove(mortal)

    def reason(self, node: Node) -> HorovodInternalError | None:
        """Of the job's failure, once there is one; ``node`` may know before this rank, which waits to hear it then."""
        if self.failure is None and node.aborted:
            self._is_known.wait(_REASON_S)
            return self.failure or CollectiveError("another rank of this node has failed; its output says why")
        return self.failure

    def check(self, node: Node) -> None:
        """Raise the reason once the job has failed."""
        reason = self.reason(node)
        if reason is not None:
            raise reason.with_traceback(None)  # several threads raise it, each from its own place

    def wait_until_said(self, patience_s: float) -> None:
        """Returns once the log has said what `was_logged` promises, or after ``patience_s``: stderr may be blocked."""
        if self.was_logged:
            self._was_said.wait(patience_s)

    def wait_for_failure(self, patience_s: float) -> HorovodInternalError | None:
        """`failure`, once there is one; None where there is none after ``patience_s``."""
        self._is_known.wait(patience_s)
        return self.failure

    def report(self, error: BaseException) -> None:
        """Tell every rank that ``error`` has ended this one; from any thread. The first report of all ranks counts."""
        if error is self.failure:
            return
        if isinstance(error, StallError):
            self._sentinel.report(Failed(_STALL, str(error)))
        elif isinstance(error, ShutDownError) and is_known_everywhere(error):
            self._sentinel.report(Failed(self._rank, str(error), for_lack=True, leaver=error.leaver))
        elif is_known_everywhere(error):
            self._sentinel.report(Failed(self._rank, str(error)))
        else:
            number = self._started_as.get(self._rank)
            started = "" if number is None else f" (started as rank {number})"
            self._sentinel.report(Failed(self._rank, f"rank {self._rank}{started} raised {described(error)}"))

    def rank_failed(self, rank: int, text: str) -> None:
        """Tell every rank that ``rank`` has failed, as another world that it belongs to has noticed."""
        self._sentinel.report(Failed(rank, text))

    @property
    def all_live(self) -> bool:
        """Whether nothing has failed but perhaps that ranks wait for one another."""
        return self.failure is None or isinstance(self.failure, StallError)

    def allow_time(self) -> None:
        """This rank sees to its own end, however long after the failure."""
        with self._lock:
            self._has_time = True
            if self._last_words is not None:
                self._last_words.cancel()

    def expect_end(self) -> None:
        """This rank is closing: a failure of others is no news any more."""
        self._is_closing = True

    def say_finished(self) -> None:
        """All ranks have done their work, and this one ends MPI."""
        self._sentinel.say_finished()

    def close(self) -> None:
        """This rank has ended in order: nobody takes its silence for its death."""
        with self._lock:
            self._is_closing = True
            self._mortals.clear()  # which go with their last user
            if self._last_words is not None:
                self._last_words.cancel()
        self._sentinel.close()

    def release(self) -> None:
        """Close what a forked child has inherited."""
        self._sentinel.release()

    def _learn(self, failed: Failed) -> None:
        """On the sentinel's thread, or that of who reported: end every wait with the reason.

        The log comes last, since stderr may be a pipe that nobody reads; nothing else here waits for anybody.
        """
        rank, text = failed.rank, failed.text
        is_news = rank != self._rank and not self._is_closing
        self.was_logged = is_news and _LOG.isEnabledFor(logging.ERROR)  # in a moment, and known before anybody asks
        failure = _failure(failed)
        ends = False
        with self._lock:
            self.failure = failure
            self.failed_rank = None if rank == _STALL else rank
            mortals = list(self._mortals)
            if not self._is_closing and rank != _STALL:  # all ranks live, and one that is late may still come
                ends = not self.recovers
                if not self._has_time:
                    self._last_words = self._deadline(text)
        self._is_known.set()
        for mortal in mortals:  # none yet when a rank dies during the start
            mortal.fail(failure)
        if ends:
            notice.say(Notice.ENDS, self._started_as.get(rank, rank))
        line = text.splitlines()[0]
        if is_news and not self.is_said(line):
            _LOG.error("%s", line)
        self._was_said.set()

    def _deadline(self, text: str) -> _native.Deadline:
        """Ends this process, if it neither ends nor comes back by itself after the failure ``text``."""
        grace_s, setting = self._config.failure_grace_s, "HVDLITE_FAILURE_GRACE_SECONDS"
        if self.recovers:
            grace_s, setting = self._config.elastic_timeout_s, "HVDLITE_ELASTIC_TIMEOUT"
        return _native.Deadline(
            grace_s,
            f"\nhvdlite: rank {self._rank} ends, since it did not {'come back' if self.recovers else 'end'} by "
            f"itself within {grace_s:g} s ({setting}) after this failure: {text}\n",
            1,
        )


def _failure(failed: Failed) -> HorovodInternalError:
    """What waits end with, on every rank."""
    if failed.rank == _STALL:
        return StallError(failed.text)
    if failed.for_lack:  # as where this rank had heard of it in the order of the log, of which it may be late to read
        return ShutDownError(failed.text, leaver=failed.leaver, is_final=True)
    return RankFailedError(failed.rank, failed.text)
