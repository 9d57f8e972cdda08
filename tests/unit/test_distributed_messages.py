"""Messages of process groups: what goes over a link, whose memory is read, and which thread moves what."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hvdlite.distributed import pump, reach
from hvdlite.distributed.links import Incoming, Outgoing
from hvdlite.distributed.messages import ANY, Arrival, Offer, Parcel, Wish, memory_of
from hvdlite.distributed.pump import Pump
from hvdlite.distributed.sockets import READ, Sockets
from hvdlite.distributed.work import GroupWork
from hvdlite.links.proof import new_key

LARGE = 100_000


class Ends:
    """A link of this process to itself."""

    def __init__(self, *, may_read: bool) -> None:
        self.wishes: list[Wish] = []
        sends, receives = socket.socketpair()
        sends.setblocking(False)
        receives.setblocking(False)
        self.outgoing = Outgoing()
        self.outgoing.link = sends
        self.incoming = Incoming(3, receives, os.getpid() if may_read else None, self._expected)
        self.outgoing.hear()

    def _expected(self, source: int, tag: int, nbytes: int, offer: Offer | None) -> Arrival:
        return Arrival(source, tag, nbytes, self.wishes.pop(0) if self.wishes else None, offer)

    def send(self, tensor: torch.Tensor) -> list[Parcel]:
        self.outgoing.waiting.append(Parcel(0, tensor, memory_of(tensor), GroupWork(None, [], "send"), 0.0))
        return self.outgoing.write()

    def arrival(self) -> Arrival:
        while True:
            arrival = self.incoming.read()
            if arrival is not None:
                return arrival
            self.outgoing.write()

    def close(self) -> None:
        assert self.outgoing.link is not None
        self.outgoing.link.close()
        self.incoming.link.close()


@pytest.fixture(params=[True, False], ids=["memory", "stream"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(may_read=request.param)
    yield ends
    ends.close()


def wish_for(tensor: torch.Tensor) -> Wish:
    return Wish(ANY, 0, tensor, tensor, memory_of(tensor), GroupWork(None, [], "recv"), 0.0)


@pytest.mark.parametrize("numel", [0, 1, LARGE])
def test_a_message_arrives_in_the_tensor_that_waits_for_it(ends: Ends, numel: int) -> None:
    sent, received = torch.rand(numel), torch.empty(numel)
    ends.wishes.append(wish_for(received))
    ends.send(sent)
    arrival = ends.arrival()
    if arrival.offer is not None:
        ends.incoming.take(arrival)
    arrival.deliver([0, 1, 2, 3])
    assert torch.equal(sent, received)
    assert arrival.wish is not None and arrival.wish.work.source_rank() == 3


@pytest.mark.parametrize("numel", [0, 1])
def test_what_came_before_its_tensor_and_before_its_sender_left_arrives(numel: int) -> None:
    sends, receives = socket.socketpair()
    outgoing, sent, received = Outgoing(), torch.rand(numel), torch.empty(numel)
    outgoing.link = sends
    outgoing.waiting.append(Parcel(0, sent, memory_of(sent), GroupWork(None, [], "send"), 0.0))
    outgoing.write()
    sends.close()
    arrival = Incoming(
        3, receives, os.getpid(), lambda *facts: Arrival(facts[0], facts[1], facts[2], None, None)
    ).read()
    assert arrival is not None
    arrival.wish = wish_for(received)
    arrival.deliver([0, 1, 2, 3])
    assert arrival.wish.work.is_success() and torch.equal(sent, received)
    receives.close()


def test_large_messages_are_offers_where_memory_may_be_read() -> None:
    ends = Ends(may_read=True)
    assert len(ends.send(torch.ones(1))) == 1
    assert not ends.send(torch.zeros(LARGE)) and not ends.send(torch.ones(LARGE))
    assert ends.arrival().offer is None
    first, second = ends.arrival(), ends.arrival()
    ends.incoming.take(second)  # its tensor was there earlier
    assert [float(parcel.block[0]) for parcel in ends.outgoing.hear()] == [1.0]
    ends.incoming.take(first)
    assert [float(parcel.block[0]) for parcel in ends.outgoing.hear()] == [0.0]
    assert not ends.outgoing.offered
    ends.close()


def test_what_a_sender_has_given_up_is_never_delivered() -> None:
    ends = Ends(may_read=True)
    ends.send(torch.ones(LARGE))
    arrival = ends.arrival()
    assert len(ends.outgoing.drop()) == 1  # its memory may hold something else from here on
    with pytest.raises(ConnectionError):
        ends.incoming.take(arrival)
    ends.close()


def test_memory_is_read_only_of_who_proves_to_be_there() -> None:
    content = new_key()
    proof = reach.Proof(content)
    assert reach.reaches(os.getpid(), proof.address, content)
    assert not reach.reaches(os.getpid(), proof.address, new_key())
    assert not reach.reaches(os.getpid(), 0, content)


class Echo:
    """A client of a pump: one socket, whose bytes count."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.pump = Pump("test-pump", self, self.failures.append, 50)
        own, self.other = socket.socketpair()
        self.pump.sockets.add(own, READ, self.hear)
        self.heard = 0
        self.threads: set[int] = set()

    def hear(self, link: socket.socket) -> None:
        self.heard += len(link.recv(100))
        self.threads.add(threading.get_ident())

    def hears(self, count: int) -> bool:
        """Whether so many bytes come, in time."""
        deadline_s = time.monotonic() + 10
        while self.heard < count and time.monotonic() < deadline_s:
            time.sleep(1e-3)
        return self.heard == count

    def patience_s(self) -> float:
        return float("inf")

    def begin_new(self) -> None:
        pass

    def look_after(self, *, was_quiet: bool) -> None:
        pass

    def fail(self, reason: BaseException) -> None:
        self.failures.append(reason)


def test_who_waits_serves_and_otherwise_the_thread_does_and_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Echo()
    with monkeypatch.context() as patch:
        patch.setattr(pump, "_LULL_S", 0.5)  # a busy machine may hold up this thread before it waits
        client.pump.nudge()
        client.other.send(b"1")
        client.pump.assist(lambda: client.heard == 1)
        assert client.threads == {threading.get_ident()}
    client.other.send(b"2")
    assert client.hears(2) and len(client.threads) == 2
    waits = threading.Thread(target=client.pump.assist, args=(lambda: client.heard == 3,))
    waits.start()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    client.other.send(b"3")
    waits.join(10)
    assert client.hears(3) and not client.failures  # on a busy machine the pump's thread may have been faster
    client.pump.close()
    client.other.close()


@pytest.mark.parametrize("most_s", [30 * 86400.0, math.inf])
def test_sockets_are_waited_for_longer_than_the_system_counts(most_s: float) -> None:
    one, other = socket.socketpair()
    with closing(Sockets()) as sockets, other:
        sockets.add(one, READ, lambda link: link.recv(1))
        other.send(b"x")
        assert [watched.link for watched in sockets.ready(most_s)] == [one]


class WatchedLock:
    """A lock that says when somebody is about to take it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.is_wanted = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.is_wanted.set()
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()


def test_a_pump_ends_whose_thread_takes_turns_with_one_that_has_heard_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Echo()
    served = client.pump
    turn = WatchedLock(served._turn)
    monkeypatch.setattr(served, "_turn", turn)
    turn.acquire()  # as of a thread of the program that waits for a message
    turn.is_wanted.clear()
    served.start()
    assert turn.is_wanted.wait(10)
    ends = threading.Thread(target=served.close, daemon=True)
    ends.start()
    served.sockets.serve(served.sockets.ready(10.0))  # what tells of the end, long before the turn is given back
    turn.release()
    ends.join(10)
    is_stuck = ends.is_alive()
    served.ring()  # which would help
    assert not is_stuck
    client.other.close()
