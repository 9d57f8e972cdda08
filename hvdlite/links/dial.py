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
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdlite.links.proof import Caller, Secret
from hvdlite.links.wire import SHORTAGE_S, SHORTAGES, is_ours

Address = tuple[str, int]


@dataclass
class _Call:
    """One that is under way; it has a caller from the moment at which it is connected."""

    address: Address | str
    caller: Caller | None = None
    inbox: bytearray = field(default_factory=bytearray)


class Proven(NamedTuple):
    """A connection, nonblocking, and its key."""

    link: socket.socket
    session: bytes


class Dial:
    """The caller's end of `hvdlite.links.reception`.

    It is ready to be read, as an open file, when there is something to do.

    Args:
        addresses: of TCP (IPv4, IPv6), or names of unix sockets.
        claim: see `hvdlite.links.proof`.

    Attributes:
        session: a key of the connection that `look` has returned.

    Raises:
        OSError: this process cannot have sockets now.
    """

    def __init__(self, addresses: Sequence[Address | str], secret: Secret, claim: bytes) -> None:
        self.session = b""
        self._hung_up: list[Address | str] = []
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

    @property
    def was_hung_up(self) -> bool:
        """Whether a connection has ended before a proof: who listens may have many to hear, or be about to leave."""
        return bool(self._hung_up)

    def call_again(self) -> None:
        """Call those that have hung up once more.

        Raises:
            OSError: this process cannot have sockets now; those that were not called stay to be called.
        """
        for address in tuple(self._hung_up):
            self._call(address)
            self._hung_up.remove(address)

    def fileno(self) -> int:
        return self._selector.fileno()

    def look(self, most_s: float) -> socket.socket | None:
        """The connection, nonblocking, once one has proven itself; what else there is to do within ``most_s`` is done.

        Who listens takes the last word of a proof for this: that the caller keeps the connection.
        """
        for key, _ in self._selector.select(most_s):
            link: socket.socket = key.fileobj  # type: ignore[assignment]
            try:
                call: _Call = key.data
                if call.caller is None:
                    self._greet(link, call)
                elif self._hear(link, call.caller, call):
                    self._selector.unregister(link)
                    self.session = call.caller.session
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
            self._selector.register(link, selectors.EVENT_WRITE, _Call(address))
        else:
            if outcome == errno.EAGAIN:  # the queue of that unix socket is full
                self._hung_up.append(address)
            link.close()

    def _greet(self, link: socket.socket, call: _Call) -> None:
        link.getpeername()  # raises if the connection was refused
        if link.family == socket.AF_UNIX and not is_ours(link):
            raise ConnectionError("it belongs to another user")
        call.caller = Caller(self._secret, link, self._claim)
        link.send(call.caller.hello)
        self._selector.modify(link, selectors.EVENT_READ, call)

    def _hear(self, link: socket.socket, caller: Caller, call: _Call) -> bool:
        """Whether both ends are known to one another now."""
        try:
            data = link.recv(caller.answer_bytes - len(call.inbox))
        except ConnectionError:
            data = b""
        if not data:
            self._hung_up.append(call.address)
            raise ConnectionError("the other end has closed the connection")
        call.inbox += data
        if len(call.inbox) < caller.answer_bytes:
            return False
        link.send(caller.answer(bytes(call.inbox)))
        return True

    def _drop(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        link.close()


def first_that_proves_itself(
    addresses: Sequence[Address | str], secret: Secret, claim: bytes, until_s: float
) -> Proven | None:
    """None: nobody has until then, by the monotonic clock. Who hangs up is called again.

    Raises:
        OSError: this process cannot have sockets now.
    """
    with closing(Dial(addresses, secret, claim)) as dial:
        while (left_s := until_s - time.monotonic()) > 0:
            if dial.was_hung_up:
                time.sleep(SHORTAGE_S)
                dial.call_again()
            elif dial.is_over:
                return None
            elif link := dial.look(left_s):
                return Proven(link, dial.session)
    return None


def listed(addresses: Sequence[Address]) -> str:
    """For errors."""
    return ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)


def _family(address: Address | str) -> int:
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
