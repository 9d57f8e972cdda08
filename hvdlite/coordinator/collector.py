"""Collects what is submitted into bursts, as far as it comes as a frozen plan says.

A submission that does is an address in a list, and no more, appended by native code (csrc/calls/collecting.h) where it
comes as it came before; the last of a burst hands it to the coordinator, which does all of it by one call. A burst of
few bytes that was done before is one of native code alone (csrc/calls/started_burst.h) while it comes true. What a plan
says is a guess. What does not come true is taken apart into submissions as any other: where another operation comes
first, where somebody waits for a burst that is not complete, where its rest takes too long, and where the coordinator
finds that the plan has ended.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hvdlite._native import Collecting, Instant, Shortcut, Signature, StartedBurst
from hvdlite.coordinator.burst import BURST_S, Burst, KnownBurst
from hvdlite.coordinator.in_flight import InFlight
from hvdlite.coordinator.remembered import Remembered
from hvdlite.coordinator.request import NAMED, Request
from hvdlite.coordinator.submission import Future, Pace, Submission


class Recipient(Protocol):
    """Is asked with the lock of what is in flight, but where it says so."""

    @property
    def position(self) -> int:
        """In the period of the plan, of what is submitted next; -1 where that is not known."""

    def settle_started(self) -> None:
        """What comes before it is done, or waits in the plan. Without that lock."""

    def take_over(self, made: Sequence[Burst | Submission], /, *, background: bool = True) -> None:
        """A burst which is complete, and `begin` follows; or submissions, in the background."""

    def begin(self, burst: Burst) -> None:
        """Begin what was taken over. Without that lock."""

    def look_within(self, seconds: float) -> None:
        """Have `Collector.look` called by then."""


class Collector:
    """What a rank submits.

    Args:
        assist: of all futures.
        pace: likewise.
        recipient: of what was collected.
        shortcut: starts bursts of few bytes.
        next_look: by then the coordinator thread calls `look`.
        clock: in seconds.
    """

    def __init__(
        self,
        in_flight: InFlight,
        assist: Callable[[Future], None],
        pace: Pace,
        recipient: Recipient,
        shortcut: Shortcut,
        next_look: Instant,
        clock: Callable[[], float],
    ) -> None:
        self._in_flight = in_flight
        self._assist = assist
        self._pace = pace
        self._recipient = recipient
        self._clock = clock
        self._known: Mapping[int, KnownBurst] = {}
        self._signatures: Remembered[Signature] = Remembered()  # by the requests that they make
        own = weakref.proxy(self)
        self.native = Collecting(
            in_flight.lock,
            shortcut,
            next_look,
            BURST_S,
            lambda known: own._opens(known),
            lambda: own._complete(),
            lambda: own.take_apart(),
        )
        """What `take` would do as well, where all of it came before."""
        self.expects_bursts = False
        """Whether `take` may do something."""

    @property
    def is_open(self) -> bool:
        """Whether a burst is, so that more of it is to come."""
        return self.native.is_open

    # From user threads.

    def take(
        self, request: Request, source: int, target: int, owner: object, count: Callable[[str], int] | None
    ) -> tuple[Burst, int] | None:
        """Submit an operation if it is what comes next; None: it must be submitted as any other.

        Args:
            source: address of its only tensor, contiguous and on the host.
            target: where the result goes; may be the same.
            owner: of that memory, as it is now.
            count: gives the sequence number of an operation that has no name.

        Returns:
            The burst, and which of its operations this is.
        """
        self._recipient.settle_started()
        with self._in_flight.lock:
            burst = self._opened() or self._begin(request)
            if burst is None:
                return None
            expected, number = burst.known.requests, len(burst.parts)
            if number == len(expected):  # it was interrupted before it could be handed over
                return None
            if expected[number] is not request:
                if expected[number] != request:
                    return None
                expected[number] = request  # an equal one has come over the wire
            burst.parts.append((source, target, NAMED if count is None else count(request.label), owner))
        if number + 1 == len(expected):
            self._complete()
        return burst, number

    def _complete(self) -> None:
        """Perhaps all of it is there; another thread may have taken it apart."""
        with self._in_flight.lock:
            burst = self._opened()
            if burst is None or len(burst.parts) < len(burst.known.requests):
                return
            self.native.stop()
            self._recipient.take_over((burst,), background=False)
            self.native.end()
            burst.is_open = False
        self._recipient.begin(burst)

    def _opened(self) -> Burst | None:
        """With the lock of what is in flight: the burst that is open, which is no longer one of native code then."""
        self.native.adopt(self.adopted)
        burst: Burst | None = self.native.burst
        return burst

    def adopted(self, started: StartedBurst) -> Burst:
        """What native code has of a burst, as one of this collector."""
        has_waited = self._pace.has_waited
        is_set, has_waited.is_set = has_waited.is_set, started.was_waited_before
        burst = self._made(started.planned.known, started.since_ns)
        has_waited.is_set = is_set  # as of what came after its first operation
        burst.parts = started.parts
        return burst

    def _made(self, known: KnownBurst, since_ns: int) -> Burst:
        burst = Burst(known, since_ns, self._pace.step(since_ns), self.take_apart)
        burst.assist, burst.pace = self._assist, self._pace
        return burst

    def _opens(self, known: KnownBurst) -> bool:
        """Begin a burst, if ``known`` comes next; whether it has."""
        self._recipient.settle_started()
        with self._in_flight.lock:
            return not self.is_open and self._begin(known.requests[0]) is not None

    def _begin(self, request: Request) -> Burst | None:
        known = self._known.get(self._recipient.position)
        if known is None or known.requests[0] != request or not self._in_flight.has_none_of(known.names):
            return None
        burst = self._made(known, time.monotonic_ns())
        self.expect_more()
        self.native.begin(burst, burst.parts, known.signatures)
        return burst

    def expect_more(self) -> None:
        """With the lock of what is in flight: something has come, and more does so soon, or `look` in `BURST_S`."""
        self.native.since_s = self._clock()
        self._recipient.look_within(BURST_S)

    def learn(self, burst: Burst, number: int, signature: Callable[[], Signature]) -> bool:
        """What a caller has passed for operation ``number`` of ``burst``, unless it is known; whether it is new."""
        known = burst.known.signatures
        if known.knows(number):
            return False
        known.learn(number, self._signatures.remember(burst.known.requests[number], signature()))
        return True

    def interrupt(self) -> None:
        """With the lock of what is in flight: something else is submitted next."""
        burst = self._opened()
        if burst is not None:
            self.native.stop()
            made = burst.apart()
            if made:
                self._recipient.take_over(made)
            self.native.end()

    def handed_over(self) -> None:
        """With the lock of what is in flight: what is open is about to be queued, and nothing of it a second time.

        Until then Ctrl-C leaves it to the next `interrupt`.
        """
        self.native.end()

    def take_apart(self) -> None:
        """Somebody waits, so that no more may come before what is there is done."""
        with self._in_flight.lock:
            self.interrupt()

    # By who is at work.

    def end(self) -> None:
        """Nothing is known of what comes next."""
        self.follow({})

    def follow(self, known: Mapping[int, KnownBurst]) -> None:
        """From here on these bursts come, by the places of their first operations in the period."""
        self._known, self.expects_bursts = known, bool(known)
        for burst in known.values():
            for number, request in enumerate(burst.requests):
                signature = self._signatures.get(request)
                if signature is not None:
                    burst.signatures.learn(number, signature)
        self.native.follow([(burst, burst.signatures) for burst in known.values()])
        self.take_apart()

    def patience_s(self) -> float:
        """When to `look` again. Where a burst has just come more may, so that the thread need not be rung for each."""
        left_s = self._left_s
        return max(0.0, left_s) if self.is_open or left_s > 0 else math.inf

    @property
    def _left_s(self) -> float:
        return self.native.since_s + BURST_S - self._clock()

    def look(self) -> None:
        """Take apart what takes too long."""
        if self.is_open and self._left_s <= 0:
            self.take_apart()
