"""The tree of node leaders over TCP: messages to and from the parent and the children, without blocking.

Not over MPI, which cannot wake a sleeper: who waits there must look again and again, which takes a core, or look rarely
and be late at every hop.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from hvdlite.counters import Traffic
from hvdlite.errors import CollectiveError

_LENGTH = struct.Struct("<I")
_NEVER_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MOST_AT_ONCE = 1 << 16
_NAP_S = 1e-3
_REASON_S = 1.0  # how long a leader that has lost a connection waits to hear who died


@dataclass(slots=True)
class _Link:
    node_index: int
    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)  # what the kernel's buffer did not take yet
    unsent: deque[int] = field(default_factory=deque)  # bytes in the outbox of each message that is there, in part too
    at_end: bool = False

    def took(self, count: int) -> None:
        """The kernel has taken ``count`` bytes of the outbox."""
        del self.outbox[:count]
        while self.unsent and count >= self.unsent[0]:
            count -= self.unsent.popleft()
        if self.unsent:
            self.unsent[0] -= count


class Tree:
    """This node's links in the tree.

    Args:
        sockets: connected to the parent and to each child, by node index; none where there is one node, or where this
            rank does not lead its node.
        check: raises once the job has failed.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        parent: int | None,
        children: tuple[int, ...],
        check: Callable[[], None],
    ) -> None:
        self.parent = parent
        self.children = children
        self.traffic = Traffic()
        self._check = check
        self._links = {node_index: _Link(node_index, end) for node_index, end in sockets.items()}
        self._by_descriptor = {link.socket.fileno(): link for link in self._links.values()}
        self._readable = select.poll()
        for descriptor in self._by_descriptor:
            self._readable.register(descriptor, select.POLLIN)

    def send(self, node_index: int, data: bytes) -> None:
        """Send to a neighbour; messages keep their order."""
        link = self._links[node_index]
        link.outbox += _LENGTH.pack(len(data)) + data
        link.unsent.append(_LENGTH.size + len(data))
        self.traffic.sent(len(data))
        self._flush(link)

    def unsent(self, node_index: int) -> int:
        """How many messages to a neighbour, the last ones, would not arrive if this rank did nothing more."""
        return len(self._links[node_index].unsent)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """(node index, bytes) of the messages that have arrived; moves on what waits to be sent.

        Raises:
            CollectiveError: a connection is lost; or what ``check`` raises.
        """
        if not self._links:
            return
        for link in self._links.values():
            if link.outbox:
                self._flush(link)
        for descriptor, _ in self._readable.poll(0):
            yield from self._take(self._by_descriptor[descriptor])

    def close(self) -> None:
        """Close the connections; all nodes do, and what was sent arrives first.

        A connection that is closed while something in it is unread takes along what the other end has not read.
        """
        for link in self._links.values():
            while link.outbox:
                self._nap()
                self._flush(link)
            try:
                link.socket.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._lose(link, error)
        while not all(link.at_end for link in self._links.values()):
            self._nap()
            for _ in self.receive():
                pass
        self.abandon()

    def abandon(self) -> None:
        """Close the connections without a word: after a failure, and in a forked child."""
        for link in self._links.values():
            link.socket.close()
        self._links.clear()

    def _flush(self, link: _Link) -> None:
        try:
            link.took(link.socket.send(link.outbox, _NEVER_WAIT))
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(link, error)

    def _take(self, link: _Link) -> Iterator[tuple[int, bytes]]:
        self._read(link)
        start = 0
        while len(link.inbox) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(link.inbox, start)
            end = start + _LENGTH.size + length
            if end > len(link.inbox):
                break
            self.traffic.received(length)
            yield link.node_index, bytes(link.inbox[start + _LENGTH.size : end])
            start = end
        del link.inbox[:start]

    def _read(self, link: _Link) -> None:
        """Everything that is there: nobody rings again for what is left."""
        while True:
            try:
                data = link.socket.recv(_MOST_AT_ONCE, _NEVER_WAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(link, error)
            link.inbox += data
            if not data:  # the other node has closed in order, or its leader is dead, which the sentinel finds
                link.at_end = True
                self._readable.unregister(link.socket)
                return

    def _lose(self, link: _Link, error: OSError) -> NoReturn:
        """Raise the reason why the job failed, where there is one: the connection to a dead process breaks too."""
        deadline_s = time.monotonic() + _REASON_S
        while time.monotonic() < deadline_s:
            self._nap()
        raise CollectiveError(f"the connection to the leader of node {link.node_index} is lost: {error}") from error

    def _nap(self) -> None:
        self._check()
        time.sleep(_NAP_S)
