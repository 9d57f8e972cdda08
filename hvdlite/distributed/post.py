"""Messages between two ranks of a process group: send, recv, and recv from whoever comes first.

What arrives goes straight into the tensor that waits for it; what nobody waits for yet is kept, so that a rank that
sends never waits for one that does the same. Messages from one rank with one tag arrive in order.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvdlite.distributed.blocks import block_of
from hvdlite.distributed.doors import Door, Entrance, Guest, dial
from hvdlite.distributed.links import Incoming, Outgoing
from hvdlite.distributed.messages import ANY, Arrival, NonsenseError, Offer, Parcel, Wish, memory_of
from hvdlite.distributed.pump import Pump
from hvdlite.distributed.sockets import READ, WRITE
from hvdlite.distributed.work import GroupWork
from hvdlite.errors import CollectiveError
from hvdlite.links.dial import Dial
from hvdlite.links.wire import SHORTAGE_S
from hvdlite.liveness.health import Health

_HOLD_S = 2e-3  # how long what was offered waits for its tensor before it is copied elsewhere, and the sender goes on
_REASON_S = 1.0  # how long a lost connection waits to hear who died


class _Way(NamedTuple):
    """To the rank ``to``; over it messages go there, or else it only shows when that rank leaves."""

    to: int
    is_for_messages: bool


class Post:
    """Messages of this rank, number ``rank`` among those of ``doors``.

    Args:
        entrance: behind this rank's door.
        near: the ranks on this node.
        names: what errors call the ranks.
        group: what errors call the group.
        health: knows who has died.
        spin_us: how long who waits looks before it sleeps.
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
        spin_us: int,
    ) -> None:
        self._entrance = entrance
        self._doors = tuple(doors)
        self._rank = rank
        self._near = frozenset(near)
        self._names = tuple(names)
        self._group = group
        self._health = health
        self._pump = Pump(f"hvdlite-post-{group}", self, health.report, spin_us)
        self._hearing = entrance.hear(self._admit, len(self._doors))
        self._pump.sockets.add(self._hearing, READ, lambda hearing: hearing.serve())
        self._lock = threading.Lock()  # guards what follows
        self._outgoing: dict[int, Outgoing] = {}
        self._wishes: list[Wish] = []
        self._arrivals: list[Arrival] = []  # without a wish
        self._failure: BaseException | None = None
        self._receivers: set[int] = set()  # to which something new is to be sent
        self._sources: set[int] = set()  # from which something new is wanted, and which are not watched
        self._earliest_s = math.inf  # no wait ends before
        # For whoever serves the pump alone.
        self._dials: dict[_Way, Dial] = {}
        self._to_dial: dict[_Way, float] = {}  # once more, and when
        self._watched: dict[int, socket.socket] = {}
        self._left: set[int] = set()
        self._offers: list[tuple[Arrival, Incoming, float]] = []  # not taken, and by when at last
        if len(doors) > 1:
            self._pump.start()  # others may come before this rank has called anything

    def send(self, tensor: torch.Tensor, to: int, tag: int, work: GroupWork, timeout_s: float) -> None:
        """``work`` is done once the message is on its way, and the tensor may be changed."""
        block = block_of(tensor)
        parcel = Parcel(tag, block, memory_of(block), work, time.monotonic() + timeout_s)
        work.is_done_by(self)
        with self._lock:
            self._check()
            outgoing = self._outgoing.setdefault(to, Outgoing())
            if not outgoing.is_lost:
                outgoing.waiting.append(parcel)
                self._receivers.add(to)
                self._earliest_s = min(self._earliest_s, parcel.deadline_s)
        if outgoing.is_lost:
            work.finish(self._reason(to))
        else:
            self._pump.nudge()

    def receive(self, tensor: torch.Tensor, source: int, tag: int, work: GroupWork, timeout_s: float) -> None:
        """``work`` is done once ``tensor`` holds the message of ``source``, which may be `ANY`."""
        block = block_of(tensor)
        wish = Wish(source, tag, tensor, block, memory_of(block), work, time.monotonic() + timeout_s)
        work.is_done_by(self)
        with self._lock:
            self._check()
            arrival = next((each for each in self._arrivals if wish.takes(each.source, each.tag)), None)
            if arrival is None:
                self._wishes.append(wish)
                self._earliest_s = min(self._earliest_s, wish.deadline_s)
                if source not in self._watched and source not in (ANY, self._rank):
                    self._sources.add(source)
            else:
                self._arrivals.remove(arrival)
                arrival.wish = wish
            has_come = arrival is not None and arrival.is_complete
        if arrival is not None and has_come:
            arrival.deliver(self._names)
        else:
            self._pump.nudge()

    def assist(self, work: GroupWork) -> None:
        """Move messages until ``work`` is done, unless another thread of the program does."""
        self._pump.assist(lambda: work.is_over)

    def tell(self, callbacks: Callable[[], object]) -> None:
        """See `hvdlite.distributed.work.Doer`. On a thread of their own, as messages go on meanwhile."""
        threading.Thread(target=callbacks, name=f"hvdlite-told-{self._group}", daemon=True).start()

    def fail(self, reason: BaseException) -> None:
        """End every wait, now and later, with ``reason``; from any thread."""
        with self._lock:
            self._failure = self._failure or reason
            works = [wish.work for wish in self._wishes]
            works += [parcel.work for outgoing in self._outgoing.values() for parcel in outgoing.drop()]
            self._wishes.clear()
        for work in works:
            work.finish(reason)
        self._pump.ring()  # a thread that waits for one of them may look for sockets

    def close(self, timeout_s: float) -> None:
        """End, once what is to be sent is on its way, or ``timeout_s`` have passed."""
        deadline_s = time.monotonic() + timeout_s
        while self._has_parcels() and time.monotonic() < deadline_s:
            time.sleep(1e-3)
        self.fail(CollectiveError(f"process group {self._group} was destroyed on this rank"))
        self._pump.close()
        self._close_links()

    def release(self) -> None:
        """Close the sockets."""
        self._pump.release()
        self._close_links()

    def _close_links(self) -> None:
        self._hearing.close()
        self._entrance.close()
        for outgoing in self._outgoing.values():
            if outgoing.link is not None:
                outgoing.link.close()
        for link in self._watched.values():
            link.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _has_parcels(self) -> bool:
        with self._lock:
            return any(outgoing.waiting or outgoing.offered for outgoing in self._outgoing.values())

    # For the pump.

    def patience_s(self) -> float:
        """See `hvdlite.distributed.pump.Client`."""
        now = time.monotonic()
        if now >= self._earliest_s:
            self._expire(now)
            return 0.0  # the call that is waited for may be over
        if now >= self._hearing.due_s:
            self._hearing.serve()
        for way in [way for way, when_s in self._to_dial.items() if when_s <= now]:
            del self._to_dial[way]
            self._dial(way)
        if self._left:
            return 0.0
        until_s = min(self._earliest_s, self._hearing.due_s)
        if self._offers:
            until_s = min(until_s, self._offers[0][2])
        if self._to_dial:
            until_s = min(until_s, *self._to_dial.values())
        return max(0.0, until_s - now)

    def begin_new(self) -> None:
        """See `hvdlite.distributed.pump.Client`."""
        if not self._receivers and not self._sources:
            return
        with self._lock:
            receivers, self._receivers = self._receivers, set()
            sources, self._sources = self._sources, set()
        for source in sources - self._watched.keys():
            self._go(_Way(source, is_for_messages=False))
        for to in receivers:
            if self._outgoing[to].waiting:  # it may have been given up meanwhile
                self._write(to)

    def look_after(self, *, was_quiet: bool) -> None:
        """See `hvdlite.distributed.pump.Client`."""
        if self._offers:
            self._take_offers()
        if was_quiet and self._left:  # all that they have sent has arrived
            self._give_up_on(self._left)
            self._left = set()

    def _take_offers(self) -> None:
        """Those whose tensors are there by now, and those that have waited long enough."""
        now = time.monotonic()
        while due := next((each for each in self._offers if each[0].wish is not None or each[2] <= now), None):
            self._offers.remove(due)
            self._take(due[0], due[1])

    def _admit(self, guest: Guest) -> None:
        process = guest.process_with(self._doors[guest.rank].key)
        incoming = Incoming(guest.rank, guest.link, process, self._expected)
        self._pump.sockets.add(guest.link, READ, lambda _: self._read(incoming))

    def _go(self, way: _Way) -> None:
        """Connect, unless that is under way."""
        if way not in self._dials and way not in self._to_dial:
            self._dial(way)

    def _dial(self, way: _Way) -> None:
        """Call at all addresses, or once more at those where this rank was hung up on."""
        proof = self._entrance.proof if way.is_for_messages else None
        try:
            if way in self._dials:
                self._dials[way].call_again()
            else:
                dialled = dial(self._doors[way.to], self._rank, is_near=way.to in self._near, proof=proof)
                self._dials[way] = dialled
                self._pump.sockets.add(dialled, READ, lambda _: self._look(way))
        except OSError:  # this process is short of descriptors
            self._to_dial[way] = time.monotonic() + SHORTAGE_S
            return
        self._look(way)

    def _look(self, way: _Way) -> None:
        dialled = self._dials[way]
        link = dialled.look(0.0)
        if link is None and dialled.was_hung_up:
            self._to_dial.setdefault(way, time.monotonic() + SHORTAGE_S)
            return
        if link is None and not dialled.is_over:
            return
        del self._dials[way]
        self._to_dial.pop(way, None)
        self._pump.sockets.forget(dialled)
        dialled.close()
        if way.is_for_messages:
            self._lose(way.to) if link is None else self._begin_to_send(way.to, link)
        elif link is None:
            self._left.add(way.to)
        else:
            self._watch(way.to, link)

    def _begin_to_send(self, to: int, link: socket.socket) -> None:
        outgoing = self._outgoing[to]
        if outgoing.is_lost:  # given up meanwhile
            link.close()
            return
        outgoing.link = link
        self._pump.sockets.add(link, READ, lambda _: self._serve(to))
        self._write(to)

    def _watch(self, source: int, link: socket.socket) -> None:
        """``link`` shows when ``source`` leaves, even if it has sent nothing."""
        self._watched[source] = link

        def ended(_: object) -> None:
            self._pump.sockets.forget(link)
            self._watched.pop(source).close()  # who waits for it again learns the same
            self._left.add(source)

        self._pump.sockets.add(link, READ, ended)

    def _write(self, to: int) -> None:
        outgoing = self._outgoing[to]
        if outgoing.link is None:
            self._go(_Way(to, is_for_messages=True))
            return
        try:
            with self._lock:
                done = outgoing.write()
        except OSError:
            self._lose(to)
            return
        self._pump.sockets.watch(outgoing.link, READ | WRITE if outgoing.waiting else READ)
        for parcel in done:
            parcel.work.finish()

    def _serve(self, to: int) -> None:
        """The receiver says something, or there is room for more."""
        outgoing = self._outgoing[to]
        try:
            with self._lock:
                done = outgoing.hear()
        except OSError:
            self._lose(to)
            return
        except NonsenseError as error:
            raise self._refusal(to, error) from error
        for parcel in done:
            parcel.work.finish()
        if outgoing.waiting:
            self._write(to)

    def _read(self, incoming: Incoming) -> None:
        try:
            arrival = incoming.read()
        except OSError:
            self._end(incoming)
            return
        except NonsenseError as error:
            raise self._refusal(incoming.source, error) from error
        self._pump.sockets.watch(incoming.link, READ | WRITE if incoming.has_to_write else READ)
        if arrival is not None and arrival.offer is None:
            self._arrived(arrival)
        elif arrival is not None and arrival.wish is not None:
            self._take(arrival, incoming)
        elif arrival is not None:
            self._offers.append((arrival, incoming, time.monotonic() + _HOLD_S))

    def _take(self, arrival: Arrival, incoming: Incoming) -> None:
        try:
            incoming.take(arrival)
        except OSError:
            self._end(incoming, arrival)
            return
        except NonsenseError as error:
            refusal = self._refusal(incoming.source, error)
            if arrival.wish is not None:
                arrival.wish.work.finish(refusal)
            raise refusal from error
        self._pump.sockets.watch(incoming.link, READ | WRITE if incoming.has_to_write else READ)
        self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        with self._lock:
            arrival.is_complete = True
            is_wanted = arrival.wish is not None
        if is_wanted:
            arrival.deliver(self._names)

    def _end(self, incoming: Incoming, *lost: Arrival) -> None:
        """Nothing more will come over it; what was on its way is lost, ``lost`` too."""
        self._pump.sockets.forget(incoming.link)
        incoming.link.close()
        offered = [arrival for arrival, of, _ in self._offers if of is incoming]
        self._offers = [offer for offer in self._offers if offer[1] is not incoming]
        for arrival in (*lost, *offered, *([] if incoming.arrival is None else [incoming.arrival])):
            with self._lock:
                if arrival in self._arrivals:
                    self._arrivals.remove(arrival)
            if arrival.wish is not None:
                arrival.wish.work.finish(self._reason(incoming.source))
        self._left.add(incoming.source)

    def _expected(self, source: int, tag: int, nbytes: int, offer: Offer | None) -> Arrival:
        with self._lock:
            wish = next((wish for wish in self._wishes if wish.takes(source, tag)), None)
            arrival = Arrival(source, tag, nbytes, wish, offer)
            if wish is None:
                self._arrivals.append(arrival)
            else:
                self._wishes.remove(wish)
        return arrival

    def _expire(self, now: float) -> None:
        """End what has waited too long, and see when something else will have."""
        with self._lock:
            late = [wish for wish in self._wishes if wish.deadline_s <= now]
            self._wishes = [wish for wish in self._wishes if wish.deadline_s > now]
            oldest = {
                to: queue[0].deadline_s
                for to, outgoing in self._outgoing.items()
                for queue in ([*outgoing.waiting], [*outgoing.offered.values()])
                if queue
            }
            deadlines = [*(wish.deadline_s for wish in self._wishes), *oldest.values()]
            self._earliest_s = min((deadline_s for deadline_s in deadlines if deadline_s > now), default=math.inf)
        for wish in late:
            who = "any rank" if wish.source == ANY else f"rank {self._names[wish.source]}"
            wish.work.finish(
                CollectiveError(f"recv of process group {self._group}: {who} did not send within the timeout")
            )
        for to, deadline_s in oldest.items():
            if deadline_s <= now:
                self._lose(to, f"rank {self._names[to]} did not take a message within the timeout of process group")

    def _lose(self, to: int, why: str = "") -> None:
        """What was to be sent there will not be."""
        outgoing = self._outgoing[to]
        if outgoing.link is not None:
            self._pump.sockets.forget(outgoing.link)
        with self._lock:
            parcels = outgoing.drop()
        if parcels:
            error = CollectiveError(f"{why} {self._group}") if why else self._reason(to)
            for parcel in parcels:
                parcel.work.finish(error)

    def _give_up_on(self, sources: set[int]) -> None:
        with self._lock:
            lost = [wish for wish in self._wishes if wish.source in sources]
            self._wishes = [wish for wish in self._wishes if wish.source not in sources]
        for wish in lost:
            wish.work.finish(self._reason(wish.source))

    def _refusal(self, rank: int, error: NonsenseError) -> CollectiveError:
        """Ends the group, and with it the job: nobody knows what a rank that sends nonsense does next."""
        return CollectiveError(f"process group {self._group}: rank {self._names[rank]} has sent {error}")

    def _reason(self, rank: int) -> BaseException:
        """Why ``rank`` is not there any more."""
        failure = self._health.wait_for_failure(_REASON_S)
        return failure or CollectiveError(f"rank {self._names[rank]} has left process group {self._group}")
