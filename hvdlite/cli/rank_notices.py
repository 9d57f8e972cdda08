"""What ranks under mpirun say to hvdliterun by `hvdlite.liveness.notice`: an mpirun may not end when its ranks fail.

MPICH's and Intel's let ranks wait for ever for one that has ended without MPI, and all may not end before all of their
ranks have. A program may handle a failure and go on without hvdlite, so hvdliterun looks whether those that say that
they end do.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from hvdlite.cli.starting import Starting
from hvdlite.config import NOTICES
from hvdlite.links.wire import CREDENTIALS
from hvdlite.liveness.notice import END_S, NAME, RANK, Notice
from hvdlite.processes import has_ended
from hvdlite.start.start_watch import StartWatch

_MOST_AT_A_LOOK = 10_000
"""Datagrams; more than a queue holds (net.unix.max_dgram_qlen). Others can send them as fast as they are read."""


@dataclass
class _Ending:
    """A rank that has said that it ends.

    Attributes:
        until_s: when it has.
        end: a pidfd; None once it has ended.
    """

    until_s: float
    end: int | None


class RankNotices:
    """hvdliterun's end.

    Args:
        grace_s: who is still there so long after it has said that it ends, goes on.

    Attributes:
        environment: by which ranks find it.
        failed: the rank whose failure others have said that they end after; None where none has.
    """

    is_over = False
    """Ranks say nothing of an end in order."""

    def __init__(self, grace_s: float) -> None:
        name = secrets.token_hex(16)
        self.environment = {NOTICES: name}
        self.failed: int | None = None
        self._patience_s = grace_s + END_S
        self._starting = Starting()
        self._ends = selectors.DefaultSelector()
        self._watch = StartWatch(self.environment, 1, self._ends)
        self._ending: dict[int, _Ending] = {}  # by process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(NAME + name.encode())

    @property
    def lost(self) -> str:
        """Why ranks cannot come to an end: others wait in hvd.init() for one that has ended; empty where they can."""
        self._hear()
        for key, _ in self._ends.select(0):
            self._watch.rank_ended(key)
            self._starting.end(key.data)
        if (missed := self._watch.missed()) is not None:
            self._starting.end(missed)
        return self._starting.lost

    @property
    def have_started(self) -> bool:
        """Whether some are through their start."""
        return self._starting.are_through

    @property
    def are_starting(self) -> bool:
        """Whether some wait in their start for others."""
        return self._starting.is_under_way

    @property
    def are_late(self) -> bool:
        """Whether ranks that were to end have ended, and the others, who have said nothing, have had as long."""
        self._hear()
        now = time.monotonic()
        for process, rank in list(self._ending.items()):
            if rank.end is not None and has_ended(rank.end):
                self._close(rank)
                if now > rank.until_s:  # it has gone on, and ended for another reason
                    del self._ending[process]
        ranks = self._ending.values()
        return bool(ranks) and all(rank.end is None and now > rank.until_s for rank in ranks)

    def close(self) -> None:
        self._hear()  # what ranks have said since the last look
        self._watch.close()
        self._ends.close()
        for process in list(self._ending):
            self._drop(process)
        self._socket.close()

    def _hear(self) -> None:
        for said, process, user in islice(iter(self._next, None), _MOST_AT_A_LOOK):
            if user != os.geteuid():
                continue
            notice = said[0]
            if notice == Notice.STARTING:
                self._starting.come()
            elif notice == Notice.STARTED:
                self._starting.are_through = True
                self._watch.close()
            elif notice == Notice.ENDS:
                if self.failed is None and len(said) > RANK.size:
                    (self.failed,) = RANK.unpack_from(said, 1)
                if process == 0:  # it is outside of this PID namespace, so nobody here can see whether it has ended
                    continue
                self._drop(process)
                self._ending[process] = _Ending(time.monotonic() + self._patience_s, _pidfd(process))

    def _drop(self, process: int) -> None:
        rank = self._ending.pop(process, None)
        if rank is not None:
            self._close(rank)

    def _close(self, rank: _Ending) -> None:
        if rank.end is not None:
            os.close(rank.end)
            rank.end = None

    def _next(self) -> tuple[bytes, int, int] | None:
        """The next notice, with the process and the user that have sent it; None where there is none."""
        try:
            said, sent, _, _ = self._socket.recvmsg(1 + RANK.size, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return None
        if not said or not sent:
            return b"", 0, -1
        process, user, _ = CREDENTIALS.unpack(sent[0][2])
        return said, process, user


def _pidfd(process: int) -> int | None:
    """None where it has ended."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(process)
    return None
