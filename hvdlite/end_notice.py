"""A rank tells hvdliterun that it ends after a failure: an mpirun may not end before all of its ranks have.

It is a datagram to an abstract unix socket, so only ranks on hvdliterun's machine are heard, and only this user's.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from contextlib import suppress

from hvdlite.config import END_NOTICES, other_variable
from hvdlite.wire import CREDENTIALS

_NAME = b"\0hvdlite-end-"
_END_S = 3.0  # for processes that have nothing left to do


class EndNotices:
    """hvdliterun's end.

    Args:
        grace_s: so long after a rank has said so none is there any more.

    Attributes:
        environment: by which ranks find it.
    """

    is_over = False
    """Ranks say nothing of an end in order."""

    def __init__(self, grace_s: float) -> None:
        name = secrets.token_hex(16)
        self.environment = {END_NOTICES: name}
        self._grace_s = grace_s
        self._end_s = math.inf
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(_NAME + name.encode())

    @property
    def are_late(self) -> bool:
        """Whether ranks are still there though one has said that all end."""
        while (sender := self._next_sender()) is not None:
            if sender == os.geteuid() and self._end_s == math.inf:
                self._end_s = time.monotonic() + self._grace_s + _END_S
        return time.monotonic() > self._end_s

    def close(self) -> None:
        self._socket.close()

    def _next_sender(self) -> int | None:
        """The user of the next notice; None where there is none."""
        try:
            _, sent, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return None
        return CREDENTIALS.unpack(sent[0][2])[1] if sent else -1


def say_end() -> None:
    """Tell hvdliterun, if it is on this machine and has started this rank by mpirun; never waits."""
    name = other_variable(END_NOTICES)
    if name:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notice, suppress(OSError):
            notice.setblocking(False)
            notice.sendto(b"", _NAME + name.encode())
