"""Where ranks meet that hvdliterun has started itself: hvdliterun, on an abstract unix socket. Ray's: rank 0's process.

A rank connects, leaves its bytes under a key, and gets those of all when the last rank has come; a connection for each
time, so that nothing is held between two. Since hvdliterun is the ranks' parent, it knows which have ended, and says so
to those that wait. Only processes of the same user are heard, and only those that know a key, which ranks have in their
environment.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdlite import plain
from hvdlite.config import MEETING_POINT
from hvdlite.errors import StartupError
from hvdlite.links.proof import Secret, new_key, prove
from hvdlite.links.reception import PATIENCE_S, Reception
from hvdlite.links.wire import SHORTAGES, connect_unix, is_ours, read_exactly
from hvdlite.naps import Patience
from hvdlite.recovery.roster import Join
from hvdlite.start.rendezvous import START_LIMIT, MissingError
from hvdlite.thread_shortage import NO_THREAD
from hvdlite.version import __version__

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 30  # of a message
_ANSWER_S = 5.0  # how much longer than it may wait a rank listens for the answer that not all have come
_NO_THREAD = f"where ranks meet {NO_THREAD}"


class _OtherUserError(ConnectionError):
    """Who listens is none of this process's user."""


class Visit(NamedTuple):
    """What a rank says: ``data`` for all ``ranks``, under ``key``; ``limit`` is what ``timeout_s`` comes from."""

    key: str
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float
    data: bytes
    limit: str = START_LIMIT


@dataclass
class _Gathering:
    """What ranks have left under a key."""

    ranks: tuple[int, ...]
    left: dict[int, bytes] = field(default_factory=dict)
    readers: int = 0  # who wait, or have not looked yet
    is_over: bool = False  # all have been here and left

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.left]


class MeetingPoint:
    """hvdliterun's end. `open` it once the ranks have been started: a process with threads should not fork.

    Args:
        on_join: takes what workers of an elastic job say, with the connection to answer on; called on a thread for
            each.

    Attributes:
        environment: by which ranks find it.
    """

    def __init__(self, on_join: Callable[[Join, socket.socket], None] | None = None) -> None:
        self._on_join = on_join
        name, key = f"hvdlite-start-{secrets.token_hex(16)}", new_key()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + name)
        self._listener.listen(1024)
        self._secret = Secret(key, b"start", 0)
        self._reception: Reception | None = None
        self.environment = {MEETING_POINT: f"{name}:{key.hex()}"}
        self._changed = threading.Condition()  # guards what follows
        self._gatherings: dict[str, _Gathering] = {}
        self._ended: dict[int, str] = {}

    def open(self) -> None:
        """Raises StartupError where no thread can be started."""
        try:
            self._reception = Reception([self._listener], self._secret, self._admit)
        except StartupError as error:
            raise StartupError(_NO_THREAD) from error

    def rank_ended(self, rank: int, how: str) -> None:
        """Nobody shall wait for ``rank`` any more; ``how`` goes on with the sentence: "was killed by signal 9"."""
        with self._changed:
            self._ended[rank] = how
            self._changed.notify_all()

    def close(self) -> None:
        if self._reception is not None:
            self._reception.close()
        self._listener.close()

    def _admit(self, link: socket.socket, claim: bytes, session: bytes) -> bool:
        # A thread each: they mostly wait, and one that says nothing holds nobody up.
        try:
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()
        except RuntimeError:  # no thread can be started
            self._turn_away(link)
        return True

    def _turn_away(self, link: socket.socket) -> None:
        """Tell who has come why nobody listens to it; it would take this for an end of this process."""
        with link, suppress(OSError):
            link.settimeout(PATIENCE_S)
            request = _request(receive(link))
            send(link, plain.dumps(_NO_THREAD if isinstance(request, Join) else ([], _NO_THREAD)))

    def _serve(self, link: socket.socket) -> None:
        with ExitStack() as closing, suppress(OSError):
            closing.enter_context(link)
            link.settimeout(PATIENCE_S)
            request = _request(receive(link))
            if isinstance(request, Join):
                if self._on_join is not None:
                    closing.pop_all()  # the connection stays
                    link.settimeout(None)
                    self._on_join(request, link)
                return
            try:
                answer = self._gather(*request), ""
            except MissingError as error:
                answer = [], str(error)
            send(link, plain.dumps(answer))

    def _gather(
        self, key: str, ranks: tuple[int, ...], rank: int, timeout_s: float, data: bytes, limit: str
    ) -> list[bytes]:
        """What ``ranks`` have left. Raises MissingError."""
        with self._changed:
            gathering = self._gatherings.setdefault(key, _Gathering(ranks))
            if ranks != gathering.ranks:
                raise MissingError.of([rank], f"has come to meet {ranks}, where {gathering.ranks} meet")
            if rank in gathering.left or gathering.is_over:
                raise MissingError.of(
                    [rank],
                    "has come twice: a program that it has started calls hvd.init() as well. Start that without "
                    f"{MEETING_POINT} in its environment",
                )
            gathering.left[rank] = data
            gathering.readers += 1
            self._changed.notify_all()
            Patience(timeout_s).wait_for(
                lambda most_s: self._changed.wait_for(lambda: self._gone(gathering) or not gathering.missing, most_s)
            )
            gathering.readers -= 1
            if gone := self._gone(gathering):
                raise MissingError.of([gone[0]], self._ended[gone[0]])
            if gathering.missing:
                raise MissingError.late(gathering.missing, timeout_s, limit)
            values = [gathering.left[other] for other in ranks]
            if gathering.readers == 0:
                gathering.left.clear()
                gathering.is_over = True
            return values

    def _gone(self, gathering: _Gathering) -> list[int]:
        """The ranks that will never come."""
        return [rank for rank in gathering.missing if rank in self._ended]


class AtMeetingPoint:
    """A rank's end, a `hvdlite.start.rendezvous.Place`.

    Args:
        where: what `MeetingPoint.environment` says.
        whose: who has opened it, for errors.
        limit: what sets the time that ranks have to come, for errors.
    """

    def __init__(self, where: str, whose: str, limit: str = START_LIMIT) -> None:
        self._where = where
        self._whose = whose
        self._limit = limit

    def gather(self, key: str, ranks: Sequence[int], rank: int, data: bytes, patience: Patience) -> list[bytes]:
        """See `hvdlite.start.rendezvous.Place`."""
        try:
            with connect(self._where) as link:
                send(link, plain.dumps(Visit(key, tuple(ranks), rank, patience.left_s, data, self._limit)))
                patience.wait_for(lambda most_s: _is_readable(link, most_s))
                link.settimeout(_ANSWER_S)
                values, complaint = _answer(receive(link))
        except OSError as error:
            raise StartupError(unreachable(error, f"rank {rank}", self._whose)) from error
        if complaint:
            raise MissingError(complaint)
        return values


def unreachable(error: OSError, who: str, whose: str) -> str:
    """That ``who`` cannot reach the meeting point that ``whose`` is, why, and the way out."""
    if error.errno in SHORTAGES:
        cause = "raise the limits on open files (ulimit -n) and memory"
    elif isinstance(error, ConnectionRefusedError):
        cause = (
            "it has ended, or this process runs in a network namespace of its own, where `hvdliterun --mpi` may work"
        )
    elif isinstance(error, _OtherUserError):
        cause = (
            f"this process is user {os.geteuid()}'s; call hvd.init() before it becomes that (os.setuid), or start the "
            f"{whose} as that user"
        )
    else:
        cause = (
            f"it has ended, or is of another version of hvdlite than this process ({__version__}): start ranks by "
            "`python -m hvdlite run` with their own python"
        )
    return f"{who} cannot reach the {whose} that has started it ({error}): {cause}"


def connect(where: str, purpose: bytes = b"start") -> socket.socket:
    """A connection to a `MeetingPoint`, of whose ``environment`` it is; both ends have proven to know its key.

    Args:
        purpose: of the connection: others than meeting points listen in this way as well.

    Raises:
        OSError: there is none, it is another user's, or it does not know the key.
    """
    name, _, key = where.partition(":")
    link = connect_unix(name, PATIENCE_S)
    try:
        if not is_ours(link):
            raise _OtherUserError("it belongs to another user")
        prove(Secret(bytes.fromhex(key), purpose, 0), link, b"")
    except BaseException:
        link.close()
        raise
    return link


def _request(data: bytes) -> Join | Visit:
    """What a rank has said. Raises ConnectionError where no rank says it."""
    with suppress(ValueError):
        match plain.loads(data):
            case Join(worker=int(), failed=failed) as join if failed is None or (
                isinstance(failed, int) and failed >= 0
            ):
                return join
            case Visit(str(), tuple() as ranks, int() as rank, limit_s, bytes(), str()) as visit:
                if (
                    rank in ranks
                    and all(isinstance(other, int) for other in ranks)
                    and isinstance(limit_s, int | float)
                    and 0 <= limit_s <= threading.TIMEOUT_MAX
                ):
                    return visit
    raise ConnectionError("no rank says that")


def _is_readable(link: socket.socket, most_s: float) -> bool:
    """Once it is, or after ``most_s``."""
    looked = select.poll()
    looked.register(link, select.POLLIN)
    return bool(looked.poll(1000 * most_s))


def _answer(data: bytes) -> tuple[list[bytes], str]:
    """What ranks have left, or why some did not come. Raises ConnectionError where no meeting point says it."""
    with suppress(ValueError):
        match plain.loads(data):
            case (list() as values, str() as complaint) if all(isinstance(value, bytes) for value in values):
                return values, complaint
    raise ConnectionError("its answer makes no sense")


def send(link: socket.socket, data: bytes) -> None:
    """One message."""
    link.sendall(_LENGTH.pack(len(data)) + data)


def receive(link: socket.socket) -> bytes:
    """The next message.

    Raises:
        OSError: the other end is gone, does not answer in time, or sends no message.
    """
    (length,) = _LENGTH.unpack(read_exactly(link, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return read_exactly(link, length)
