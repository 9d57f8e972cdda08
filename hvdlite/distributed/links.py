"""A link that carries messages from one rank to another: what goes over its socket, and when.

A message is a header and its bytes. Where the receiver may read the sender's memory, a large message is an offer: its
header has its address instead. The receiver copies it from there into the tensor that waits for it, which is the only
copy, and says which offer it has taken. A sender that gives offers up shuts the link down first, and a receiver looks
at the link after it has read: so what it has read was valid.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from hvdlite.distributed import reach
from hvdlite.distributed.messages import Arrival, NonsenseError, Offer, Parcel

_HEADER = struct.Struct("<qQQ")  # tag, bytes, where they are if they do not follow
_WORD = struct.Struct("<q")  # of a receiver that may read the sender's memory: which offer it has taken, or this:
_MAY_READ = -1
_OFFERED_BYTES = 32 << 10  # from here on


class Outgoing:
    """This rank's end of a link over which it sends.

    Attributes:
        waiting: not sent yet, or not as a whole.
        offered: not taken yet, by number; offers are numbered as they are sent.
        link: nonblocking; None before the first message.
        is_lost: the receiver has left, or was given up.
    """

    def __init__(self) -> None:
        self.waiting: deque[Parcel] = deque()
        self.offered: dict[int, Parcel] = {}
        self.link: socket.socket | None = None
        self.is_lost = False
        self._rest: list[memoryview] = []  # of waiting[0]
        self._is_offer = False
        self._offers = 0
        self._may_offer = False
        self._heard = b""

    def write(self) -> list[Parcel]:
        """Write what there is room for, and return what is done with that.

        Raises:
            OSError: the receiver has left.
        """
        assert self.link is not None
        done: list[Parcel] = []
        while self.waiting:
            if not self._rest:
                self._rest = self._begun(self.waiting[0])
            try:
                count = self.link.sendmsg(self._rest)
            except BlockingIOError:
                break
            self._rest = _after(self._rest, count)
            if not self._rest:
                parcel = self.waiting.popleft()
                if self._is_offer:
                    self.offered[self._offers] = parcel
                    self._offers += 1
                else:
                    done.append(parcel)
        return done

    def hear(self) -> list[Parcel]:
        """Read what the receiver says, and return what it has taken.

        Raises:
            OSError: the receiver has left.
            NonsenseError: it has taken what it was not offered.
        """
        assert self.link is not None
        try:
            said = self.link.recv(4096)
        except BlockingIOError:
            return []
        if not said:
            raise ConnectionError("the receiver has left")
        self._heard += said
        whole = len(self._heard) // _WORD.size * _WORD.size
        words = [word for (word,) in _WORD.iter_unpack(self._heard[:whole])]
        self._heard = self._heard[whole:]
        self._may_offer = self._may_offer or _MAY_READ in words
        taken = [word for word in words if word != _MAY_READ]
        if sorted(taken) != sorted(self.offered.keys() & set(taken)):
            raise NonsenseError(f"that it has taken the offers {taken}, of which some were not made")
        return [self.offered.pop(word) for word in taken]

    def drop(self) -> list[Parcel]:
        """No message goes over it any more; returns those that were to. The socket stays open."""
        self.is_lost = True
        if self.link is not None:
            with suppress(OSError):  # the other end was faster
                self.link.shutdown(socket.SHUT_RDWR)
        dropped = [*self.offered.values(), *self.waiting]
        self.offered.clear()
        self.waiting.clear()
        self._rest = []
        return dropped

    def _begun(self, parcel: Parcel) -> list[memoryview]:
        nbytes = len(parcel.memory)
        self._is_offer = self._may_offer and nbytes >= _OFFERED_BYTES
        header = _HEADER.pack(parcel.tag, nbytes, parcel.block.data_ptr() if self._is_offer else 0)
        return [memoryview(header)] + ([] if self._is_offer or not nbytes else [parcel.memory])


class Incoming:
    """This rank's end of a link from ``source``.

    Args:
        link: nonblocking.
        process: of the sender, whose memory this rank may read; None where it may not.
        expect: what is to hold a message, by source, tag, bytes, and how it is offered.
    """

    def __init__(
        self,
        source: int,
        link: socket.socket,
        process: int | None,
        expect: Callable[[int, int, int, Offer | None], Arrival],
    ) -> None:
        self.source = source
        self.link = link
        self.arrival: Arrival | None = None
        self._process = process
        self._expect = expect
        self._header = bytearray()
        self._offers = 0
        self._unsaid = b""
        if process is not None:
            self._say(_MAY_READ)

    @property
    def has_to_write(self) -> bool:
        """The sender has not heard all yet, for want of room."""
        return bool(self._unsaid)

    def read(self) -> Arrival | None:
        """The next message, once it is whole or offered; None if that takes more than has come.

        Raises:
            OSError: the sender has left.
            NonsenseError: what it has sent cannot be read.
        """
        self._write()
        try:
            while True:
                if self.arrival is None:
                    self._read_header()
                elif self.arrival.is_whole or self.arrival.offer is not None:
                    arrival, self.arrival = self.arrival, None
                    return arrival
                else:
                    count = self.link.recv_into(self.arrival.memory[self.arrival.received :])
                    if count == 0:
                        raise ConnectionError("the sender has left")
                    self.arrival.received += count
        except BlockingIOError:
            return None

    def take(self, arrival: Arrival) -> None:
        """What was offered.

        Raises:
            OSError: the sender has left.
            NonsenseError: there is no memory for it.
        """
        assert self._process is not None and arrival.offer is not None
        arrival.open()
        if not reach.read(self._process, arrival.offer.address, arrival.memory) or _is_shut(self.link):
            raise ConnectionError("the sender has left")
        arrival.received = arrival.nbytes
        self._say(arrival.offer.number)

    def _read_header(self) -> None:
        part = self.link.recv(_HEADER.size - len(self._header))
        if not part:
            raise ConnectionError("the sender has left")
        self._header += part
        if len(self._header) < _HEADER.size:
            return
        tag, nbytes, address = _HEADER.unpack(self._header)
        self._header.clear()
        offer = None
        if address:
            if self._process is None or nbytes < _OFFERED_BYTES:
                raise NonsenseError(f"an offer of {nbytes} bytes, which is none that this rank may take")
            offer = Offer(address, self._offers)
            self._offers += 1
        self.arrival = self._expect(self.source, tag, nbytes, offer)

    def _say(self, word: int) -> None:
        self._unsaid += _WORD.pack(word)
        self._write()

    def _write(self) -> None:
        if self._unsaid:
            try:
                self._unsaid = self._unsaid[self.link.send(self._unsaid) :]
            except BlockingIOError:
                pass
            except OSError:  # the sender has left; what it has sent before can still be read
                self._unsaid = b""


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``parts`` without the first ``count`` bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[number + 1 :]]
        count -= len(part)
    return []


def _is_shut(link: socket.socket) -> bool:
    """Whether the other end has shut it down; what it has sent before may still wait here."""
    look = select.poll()
    look.register(link, select.POLLRDHUP)
    return bool(look.poll(0))
