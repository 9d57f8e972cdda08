"""Messages between two ranks of a process group: send, recv, and recv from whoever comes first.

One thread per group moves all of them, and sleeps when there is nothing to move. What arrives goes straight into the
tensor that waits for it; what nobody waits for yet is kept, so that a rank that sends never waits for one that does the
same. Messages from one rank with one tag arrive in order.
"""

from __future__ import annotations

import ctypes
import math
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hvdlite.distributed.blocks import block_of, put_back
from hvdlite.distributed.doors import Door, Entrance, connect
from hvdlite.distributed.work import GroupWork
from hvdlite.errors import CollectiveError
from hvdlite.health import Health

_HEADER = struct.Struct("<qQ")  # tag, bytes
_MOST_AT_ONCE = 1 << 20
_REASON_S = 1.0  # how long a lost connection waits to hear who died
ANY = -1


@dataclass(eq=False)
class _Parcel:
    """A message that is to be sent."""

    data: deque[memoryview]
    work: GroupWork
    keep: torch.Tensor
    deadline_s: float


@dataclass(eq=False)
class _Wish:
    """A tensor that waits for a message."""

    source: int
    tag: int
    tensor: torch.Tensor
    block: torch.Tensor
    work: GroupWork
    deadline_s: float

    def takes(self, source: int, tag: int) -> bool:
        return self.source in (ANY, source) and self.tag == tag


@dataclass(eq=False)
class _Arrival:
    """A message that arrives, or has arrived."""

    source: int
    tag: int
    nbytes: int
    wish: _Wish | None = None
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    received: int = 0
    is_complete: bool = False


@dataclass(eq=False)
class _Incoming:
    """A link from a rank that sends."""

    source: int
    link: socket.socket
    header: bytearray = field(default_factory=bytearray)
    arrival: _Arrival | None = None


class Post:
    """Messages of this rank, number ``rank`` among those of ``doors``.

    Args:
        entrance: behind this rank's door.
        near: the ranks on this node.
        names: what errors call the ranks.
        group: what errors call the group.
        health: knows who has died.
    """

    def __init__(
        self,
        entrance: Entrance,
        doors: Sequence[Door],
        rank: int,
        near: Sequence[int],
        names: Sequence[int],
        group: str,
        health: Health,
    ) -> None:
        self._entrance = entrance
        self._doors = tuple(doors)
        self._rank = rank
        self._near = frozenset(near)
        self._names = tuple(names)
        self._group = group
        self._health = health
        self._lock = threading.Lock()  # guards all that follows, but for links, which the thread has for itself
        self._parcels: dict[int, deque[_Parcel]] = {}
        self._wishes: list[_Wish] = []
        self._arrivals: list[_Arrival] = []  # without a wish
        self._failure: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._outgoing: dict[int, socket.socket] = {}
        self._watched: dict[int, socket.socket] = {}
        self._heard: set[int] = set()  # ranks that have a link to us
        self._left: set[int] = set()

    def send(self, tensor: torch.Tensor, to: int, tag: int, work: GroupWork, timeout_s: float) -> None:
        """``work`` is done once the message is on its way, and the tensor may be changed."""
        block = block_of(tensor)
        memory = _memory_of(block)
        data = deque([memoryview(_HEADER.pack(tag, len(memory))), memory])
        with self._lock:
            self._check()
            parcel = _Parcel(data, work, block, time.monotonic() + timeout_s)
            self._parcels.setdefault(to, deque()).append(parcel)
        self._notify()

    def receive(self, tensor: torch.Tensor, source: int, tag: int, work: GroupWork, timeout_s: float) -> None:
        """``work`` is done once ``tensor`` holds the message of ``source``, which may be `ANY`."""
        wish = _Wish(source, tag, tensor, block_of(tensor), work, time.monotonic() + timeout_s)
        with self._lock:
            self._check()
            arrival = next((each for each in self._arrivals if wish.takes(each.source, each.tag)), None)
            if arrival is None:
                self._wishes.append(wish)
            else:
                self._arrivals.remove(arrival)
                arrival.wish = wish
            has_come = arrival is not None and arrival.is_complete
        if arrival is not None and has_come:
            _deliver(arrival, self._names)
        else:
            self._notify()

    def fail(self, reason: BaseException) -> None:
        """End every wait, now and later, with ``reason``; from any thread."""
        with self._lock:
            self._failure = self._failure or reason
            works = [wish.work for wish in self._wishes]
            works += [parcel.work for parcels in self._parcels.values() for parcel in parcels]
            self._wishes.clear()
            self._parcels.clear()
        for work in works:
            work.finish(reason)

    def close(self, timeout_s: float) -> None:
        """End, once what is to be sent is on its way, or ``timeout_s`` have passed."""
        deadline_s = time.monotonic() + timeout_s
        while self._parcels and time.monotonic() < deadline_s and self._failure is None:
            time.sleep(1e-3)
        self.fail(CollectiveError(f"process group {self._group} was destroyed on this rank"))
        if self._thread is not None:
            self._is_closing = True
            self._waker.send(b"\0")
            self._thread.join()
        self.release()

    def release(self) -> None:
        """Close the sockets."""
        self._entrance.close()
        for end in (*self._outgoing.values(), *self._watched.values(), self._wake, self._waker):
            end.close()
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _notify(self) -> None:
        """Have the thread look at what is new."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"hvdlite-post-{self._group}", daemon=True)
                self._thread.start()
        self._waker.send(b"\0")

    # On the thread.

    def _run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, self._hear_waker)
        for listener in self._entrance.sockets[:]:
            self._selector.register(listener, selectors.EVENT_READ, self._admit)
        try:
            while not self._is_closing:
                patience_s = 0.0 if self._left else self._expire()
                events = self._selector.select(None if math.isinf(patience_s) else patience_s)
                for key, _ in events:
                    key.data(key.fileobj)
                self._begin_new()
                if not events and self._left:  # all that they have sent has arrived
                    self._give_up_on(self._left)
                    self._left = set()
        except BaseException as error:
            self._health.report(error)
            self.fail(error)

    def _hear_waker(self, wake: socket.socket) -> None:
        wake.recv(4096)

    def _admit(self, listener: socket.socket) -> None:
        admitted = self._entrance.admit(listener)
        if admitted is not None:
            source, link = admitted
            link.setblocking(False)
            self._heard.add(source)
            incoming = _Incoming(source, link)
            self._selector.register(link, selectors.EVENT_READ, lambda _: self._read(incoming))

    def _begin_new(self) -> None:
        """Links for what has been asked for since."""
        with self._lock:
            receivers = [to for to in self._parcels if to not in self._outgoing]
            sources = {wish.source for wish in self._wishes} - {ANY, self._rank} - self._watched.keys()
        for source in sources:
            self._watch(source)
        for to in receivers:
            self._open(to)
        for to, link in self._outgoing.items():
            if to in self._parcels and link not in self._selector.get_map():
                self._selector.register(link, selectors.EVENT_WRITE, lambda _, to=to: self._write(to))

    def _watch(self, source: int) -> None:
        """A link that shows when ``source`` leaves, even if it has sent nothing."""
        try:
            link = connect(self._doors[source], self._rank, is_near=source in self._near, sends=False)
        except OSError:
            self._left.add(source)
            return
        self._watched[source] = link

        def ended(_: object) -> None:
            self._selector.unregister(link)
            self._left.add(source)

        self._selector.register(link, selectors.EVENT_READ, ended)

    def _open(self, to: int) -> None:
        try:
            self._outgoing[to] = connect(self._doors[to], self._rank, is_near=to in self._near, sends=True)
        except OSError:
            self._lose(to)

    def _write(self, to: int) -> None:
        link = self._outgoing[to]
        parcels = self._parcels.get(to)
        if not parcels:
            self._selector.unregister(link)
            return
        data = parcels[0].data
        try:
            sent = link.send(data[0][:_MOST_AT_ONCE])
        except BlockingIOError:
            return
        except OSError:
            self._selector.unregister(link)
            self._lose(to)
            return
        data[0] = data[0][sent:]
        while data and not data[0]:
            data.popleft()
        if not data:
            with self._lock:
                parcel = parcels.popleft()
                if not parcels:
                    self._parcels.pop(to, None)
            parcel.work.finish()

    def _read(self, incoming: _Incoming) -> None:
        try:
            if incoming.arrival is None:
                part = incoming.link.recv(_HEADER.size - len(incoming.header))
                incoming.header += part
                count = len(part)
                if len(incoming.header) == _HEADER.size:
                    tag, nbytes = _HEADER.unpack(incoming.header)
                    incoming.header.clear()
                    incoming.arrival = self._expected(incoming.source, tag, nbytes)
                    if nbytes > 0:
                        return
            else:
                arrival = incoming.arrival
                count = incoming.link.recv_into(arrival.memory[arrival.received :][:_MOST_AT_ONCE])
                arrival.received += count
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count == 0:
            self._selector.unregister(incoming.link)
            incoming.link.close()
            if incoming.arrival is not None and incoming.arrival.wish is not None:
                incoming.arrival.wish.work.finish(self._reason(incoming.source))
            self._left.add(incoming.source)
        elif incoming.arrival is not None and incoming.arrival.received == incoming.arrival.nbytes:
            self._arrived(incoming.arrival)
            incoming.arrival = None

    def _expected(self, source: int, tag: int, nbytes: int) -> _Arrival:
        """What begins to arrive: in the tensor that waits for it, if there is one that it fits."""
        arrival = _Arrival(source, tag, nbytes)
        with self._lock:
            arrival.wish = next((wish for wish in self._wishes if wish.takes(source, tag)), None)
            if arrival.wish is None:
                self._arrivals.append(arrival)
            else:
                self._wishes.remove(arrival.wish)
        memory = None if arrival.wish is None else _memory_of(arrival.wish.block)
        arrival.memory = memoryview(bytearray(nbytes)) if memory is None or len(memory) != nbytes else memory
        return arrival

    def _arrived(self, arrival: _Arrival) -> None:
        with self._lock:
            arrival.is_complete = True
            is_wanted = arrival.wish is not None
        if is_wanted:
            _deliver(arrival, self._names)

    def _expire(self) -> float:
        """End what has waited too long; how long nothing else will have."""
        now = time.monotonic()
        with self._lock:
            late = [wish for wish in self._wishes if wish.deadline_s <= now]
            self._wishes = [wish for wish in self._wishes if wish.deadline_s > now]
            deadlines = [wish.deadline_s for wish in self._wishes]
            stuck = [to for to, parcels in self._parcels.items() if parcels[0].deadline_s <= now]
            deadlines += [parcels[0].deadline_s for to, parcels in self._parcels.items() if to not in stuck]
        for wish in late:
            who = "any rank" if wish.source == ANY else f"rank {self._names[wish.source]}"
            wish.work.finish(
                CollectiveError(f"recv of process group {self._group}: {who} did not send within the timeout")
            )
        for to in stuck:
            self._lose(to, f"rank {self._names[to]} did not take a message within the timeout of process group")
        return max(0.0, min(deadlines, default=math.inf) - now)

    def _lose(self, to: int, why: str = "") -> None:
        """What was to be sent there will not be."""
        with self._lock:
            parcels = self._parcels.pop(to, deque())
        error = CollectiveError(f"{why} {self._group}") if why else self._reason(to)
        for parcel in parcels:
            parcel.work.finish(error)

    def _give_up_on(self, sources: set[int]) -> None:
        with self._lock:
            lost = [wish for wish in self._wishes if wish.source in sources]
            self._wishes = [wish for wish in self._wishes if wish.source not in sources]
        for wish in lost:
            wish.work.finish(self._reason(wish.source))

    def _reason(self, rank: int) -> BaseException:
        """Why ``rank`` is not there any more."""
        failure = self._health.wait_for_failure(_REASON_S)
        return failure or CollectiveError(f"rank {self._names[rank]} has left process group {self._group}")


def _deliver(arrival: _Arrival, names: Sequence[int]) -> None:
    wish = arrival.wish
    assert wish is not None
    own = _memory_of(wish.block)
    if len(own) != arrival.nbytes:
        wish.work.finish(
            ValueError(
                f"recv: rank {names[arrival.source]} has sent {arrival.nbytes} bytes, and the tensor for them has "
                f"{len(own)}; pass one of the same shape and dtype as the sender's"
            )
        )
        return
    if own and _address(own) != _address(arrival.memory):
        own[:] = arrival.memory
    put_back([wish.tensor], [wish.block])
    wish.work.finish(source=arrival.source)


def _memory_of(block: torch.Tensor) -> memoryview:
    nbytes = block.numel() * block.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(block.data_ptr())).cast("B") if nbytes else memoryview(b"")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
