"""A process of the job, called at all its addresses at once: the first that proves itself counts.

Addresses may lead nowhere, or to strangers.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import closing

from hvdlite.links.proof import Caller, Secret
from hvdlite.links.wire import SHORTAGES, is_ours

Address = tuple[str, int]


class Dial:
    """The caller's end of `hvdlite.links.reception`.

    It is ready to be read, as an open file, when there is something to do.

    Args:
        addresses: of TCP (IPv4, IPv6), or names of unix sockets.
        claim: see `hvdlite.links.proof`.

    Attributes:
        was_hung_up: a connection has ended before a proof; who listens may have many to hear, or be about to leave.

    Raises:
        OSError: this process cannot have sockets now.
    """

    def __init__(self, addresses: Sequence[Address | str], secret: Secret, claim: bytes) -> None:
        self.was_hung_up = False
        self._secret = secret
        self._claim = claim
        self._selector = selectors.EpollSelector()
        try:
            for address in addresses:
                self._call(address)
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Nobody is left who may answer."""
        return not self._selector.get_map()

    def fileno(self) -> int:
        return self._selector.fileno()

    def look(self, most_s: float) -> socket.socket | None:
        """The connection, nonblocking, once one has proven itself; what else there is to do within ``most_s`` is done.

        Who listens takes the last word of a proof for this: that the caller keeps the connection.
        """
        for key, _ in self._selector.select(most_s):
            link: socket.socket = key.fileobj  # type: ignore[assignment]
            try:
                if key.data is None:
                    self._greet(link)
                elif self._hear(link, *key.data):
                    self._selector.unregister(link)
                    return link
            except OSError:
                self._drop(link)
        return None

    def close(self) -> None:
        """Hang up on all but the link that `look` has returned; in a forked child nobody hears of it."""
        for key in self._selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _call(self, address: Address | str) -> None:
        try:
            link = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            return  # no IPv6 here
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outcome = link.connect_ex(address)
        if outcome in (0, errno.EINPROGRESS):
            self._selector.register(link, selectors.EVENT_WRITE)
        else:
            self.was_hung_up = self.was_hung_up or outcome == errno.EAGAIN  # the queue of that unix socket is full
            link.close()

    def _greet(self, link: socket.socket) -> None:
        link.getpeername()  # raises if the connection was refused
        if link.family == socket.AF_UNIX and not is_ours(link):
            raise ConnectionError("it belongs to another user")
        caller = Caller(self._secret, link, self._claim)
        link.send(caller.hello)
        self._selector.modify(link, selectors.EVENT_READ, (caller, bytearray()))

    def _hear(self, link: socket.socket, caller: Caller, inbox: bytearray) -> bool:
        """Whether both ends are known to one another now."""
        try:
            data = link.recv(caller.answer_bytes - len(inbox))
        except ConnectionError:
            data = b""
        if not data:
            self.was_hung_up = True
            raise ConnectionError("the other end has closed the connection")
        inbox += data
        if len(inbox) < caller.answer_bytes:
            return False
        link.send(caller.answer(bytes(inbox)))
        return True

    def _drop(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        link.close()


def first_that_proves_itself(
    addresses: Sequence[Address | str], secret: Secret, claim: bytes, until_s: float
) -> socket.socket | None:
    """The connection, nonblocking; None: nobody has until then, by the monotonic clock.

    Raises:
        OSError: this process cannot have sockets now.
    """
    with closing(Dial(addresses, secret, claim)) as dial:
        while not dial.is_over and (left_s := until_s - time.monotonic()) > 0:
            if link := dial.look(left_s):
                return link
    return None


def listed(addresses: Sequence[Address]) -> str:
    """For errors."""
    return ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)


def _family(address: Address | str) -> int:
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
