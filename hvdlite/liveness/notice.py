"""A rank under mpirun tells hvdliterun that it waits for the others in its start, is through, or ends after a failure.

It is a datagram to an abstract unix socket, so only ranks on hvdliterun's machine are heard, and only this user's
(`hvdlite.cli.rank_notices`). Nobody has to listen.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from enum import IntEnum

from hvdlite.config import NOTICES, other_variable

NAME = b"\0hvdlite-notices-"
"""How that of the socket begins."""
RANK = struct.Struct("!I")
END_S = 3.0
"""For processes that have nothing left to do."""


class Notice(IntEnum):
    """What is said, in one byte; with ENDS the rank that has failed follows."""

    STARTING = 1
    STARTED = 2
    ENDS = 3


def say(notice: Notice, failed: int | None = None) -> bool:
    """Tell hvdliterun, if it is on this machine and has started this rank by mpirun; never waits.

    Returns whether it listens.
    """
    name = other_variable(NOTICES)
    if name:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link, suppress(OSError):
            link.setblocking(False)
            said = b"" if failed is None else RANK.pack(failed)
            link.sendto(bytes([notice]) + said, NAME + name.encode())
            return True
    return False
