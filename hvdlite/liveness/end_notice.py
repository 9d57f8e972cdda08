"""A rank tells hvdliterun that it ends after a failure: an mpirun may not end before all of its ranks have.

It is a datagram to an abstract unix socket, so only ranks on hvdliterun's machine are heard, and only this user's. A
program may still handle the failure and go on without hvdlite, so hvdliterun looks whether those who say so do end.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from hvdlite.config import END_NOTICES, other_variable
from hvdlite.links.wire import CREDENTIALS
from hvdlite.processes import has_ended

_NAME = b"\0hvdlite-end-"
END_S = 3.0
"""For processes that have nothing left to do."""


@dataclass
class _Sender:
    """A rank that has said that it ends.

    Attributes:
        until_s: when it has.
        end: a pidfd; None once it has ended.
    """

    until_s: float
    end: int | None


class EndNotices:
    """hvdliterun's end.

    Args:
        grace_s: who is still there so long after it has said that it ends, goes on.

    Attributes:
        environment: by which ranks find it.
    """

    is_over = False
    """Ranks say nothing of an end in order."""
    lost = ""
    """Nor of what keeps them from an end."""

    def __init__(self, grace_s: float) -> None:
        name = secrets.token_hex(16)
        self.environment = {END_NOTICES: name}
        self._patience_s = grace_s + END_S
        self._senders: dict[int, _Sender] = {}  # by process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(_NAME + name.encode())

    @property
    def are_late(self) -> bool:
        """Whether ranks that were to end have ended, and the others, who have said nothing, have had as long."""
        now = time.monotonic()
        while (credentials := self._next_sender()) is not None:
            process, user = credentials
            if user == os.geteuid():
                self._drop(process)
                self._senders[process] = _Sender(now + self._patience_s, _pidfd(process))
        for process, sender in list(self._senders.items()):
            if sender.end is not None and has_ended(sender.end):
                self._close(sender)
                if now > sender.until_s:  # it has gone on, and ended for another reason
                    del self._senders[process]
        senders = self._senders.values()
        return bool(senders) and all(sender.end is None and now > sender.until_s for sender in senders)

    def close(self) -> None:
        for process in list(self._senders):
            self._drop(process)
        self._socket.close()

    def _drop(self, process: int) -> None:
        sender = self._senders.pop(process, None)
        if sender is not None:
            self._close(sender)

    def _close(self, sender: _Sender) -> None:
        if sender.end is not None:
            os.close(sender.end)
            sender.end = None

    def _next_sender(self) -> tuple[int, int] | None:
        """Process and user of the next notice; None where there is none."""
        try:
            _, sent, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return None
        if not sent:
            return 0, -1
        process, user, _ = CREDENTIALS.unpack(sent[0][2])
        return process, user


def _pidfd(process: int) -> int | None:
    """None where it has ended."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(process)
    return None


def say_end() -> None:
    """Tell hvdliterun, if it is on this machine and has started this rank by mpirun; never waits."""
    name = other_variable(END_NOTICES)
    if name:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notice, suppress(OSError):
            notice.setblocking(False)
            notice.sendto(b"", _NAME + name.encode())
