"""What this rank has submitted and is not complete: who may add to it, and who ends what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.request import Key
from hvdlite.coordinator.submission import Future, Submission
from hvdlite.errors import DuplicateNameError, HorovodInternalError

_KEPT_S = 5.0  # for a lock that nobody holds who waits for anything


class InFlight:
    """Submissions by their keys; a burst stands under the key of each of its operations.

    A submission is completed once, by whoever takes it out; one that is being executed, by who executes it, so that
    nobody is told of an end while its memory is still written to.

    Args:
        begun: the keys of what was submitted as well, but is not here yet.

    Attributes:
        lock: whoever calls a method that says so holds it; others take it themselves.
        closed: why nothing may be submitted any more.
        has_joined: this rank has called join(), which has not returned.
    """

    def __init__(self, begun: Callable[[], Collection[Key]] = tuple) -> None:
        self._begun = begun
        self.lock = threading.Lock()
        self.closed: HorovodInternalError | None = None
        self.has_joined = False
        self._futures: dict[Key, Future] = {}
        self._executing: Collection[Key] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in flight, and something may be."""
        return not self._futures and self.closed is None and not self.has_joined

    def is_kept(self) -> bool:
        """Whether `lock` is not let go, as by a frame that the caller, a signal handler, has interrupted."""
        is_free = self.lock.acquire(timeout=_KEPT_S)
        if is_free:
            self.lock.release()
        return not is_free

    def keys(self) -> list[Key]:
        """Of what is in flight, in the order in which it was submitted."""
        with self.lock:
            return list(self._futures)

    def has(self, prefix: str) -> bool:
        """Whether there is something whose name begins with ``prefix``."""
        with self.lock:
            return any(name.startswith(prefix) for name, _ in self._futures)

    def check_open(self) -> None:
        """With `lock`. Raises why nothing may be submitted."""
        if self.closed is not None:
            raise self.closed.with_traceback(None)  # several threads may raise it

    def admit(self, submission: Submission) -> None:
        """With `lock`: add what a user submits.

        Raises:
            DuplicateNameError: an operation of this name is in flight.
            HorovodInternalError: hvdlite was shut down, or failed.
            ValueError: this rank has joined.
        """
        self.check_open()
        if self.has_joined:
            raise ValueError(
                f"{submission.request.label} '{submission.label}': this rank has called join(), which has not returned "
                "yet"
            )
        self.has_joined = submission.request.departs
        if submission.key in self._futures or submission.key in self._begun():
            raise DuplicateNameError(
                f"{submission.request.label} '{submission.label}' was submitted while an operation of that name is "
                "still in flight; wait for its handle first, or give each operation its own name"
            )
        self._futures[submission.key] = submission

    def has_none_of(self, keys: frozenset[Key]) -> bool:
        """With `lock`: whether none of them is in flight, and others may be."""
        is_open = self.closed is None and not self.has_joined
        return is_open and keys.isdisjoint(self._futures) and keys.isdisjoint(self._begun())

    def put(self, keys: Iterable[Key], future: Future) -> None:
        """With `lock`: ``future`` is what stands for ``keys``."""
        self._futures.update(dict.fromkeys(keys, future))

    def take_apart(self, burst: Burst) -> Sequence[Submission]:
        """Have a submission for each operation of ``burst`` in its place; none if it has failed."""
        with self.lock:
            if not self._has(burst):
                return ()
            submissions = burst.apart()
            for submission in submissions:
                self._futures[submission.key] = submission
        return submissions

    def _has(self, burst: Burst) -> bool:
        return self._futures.get(next(iter(burst.keys))) is burst

    def resume(self, future: Submission | Burst) -> None:
        """What other ranks were told already; it fails if all that was in flight has."""
        with self.lock:
            if self.closed is None:
                self.put(future.keys, future)
                return
        future.fail(self.closed)

    def fail(self, key: Key, error: BaseException) -> None:
        """End one that is not being executed."""
        with self.lock:
            future = self._futures.pop(key, None)
        if future is not None:
            future.fail(error)

    def close(self, error: HorovodInternalError) -> None:
        """Fail everything, and every later submission, with ``error``; the first error stays.

        What is being executed is failed when nobody touches its memory any more.
        """
        with self.lock:
            if self.closed is not None:
                return
            self.closed = error
            failed = [self._futures.pop(key) for key in list(self._futures) if key not in self._executing]
        for future in failed:
            future.fail(error)

    def refuse(self, error: HorovodInternalError) -> None:
        """`close`, where nobody is at work any more; in a forked child the lock may be held for ever."""
        self.lock = threading.Lock()
        self.closed = error
        for future in list(self._futures.values()):
            future.fail(error)

    # By who is at work.

    def pause_s(self, key: Key) -> float:
        """Before this rank submitted it, see `hvdlite.coordinator.submission.Pace.step`; 0 if it has not."""
        with self.lock:
            found = self._futures.get(key)
        return found.pause_s if isinstance(found, Submission) else 0.0

    def begin(self, keys: Sequence[Key]) -> list[Submission | None] | None:
        """What is submitted as ``keys``, and is executed from here on until `finish`; None: all has failed meanwhile.

        Of a rank that has joined, some are None.
        """
        with self.lock:
            found = [cast("Submission | None", self._futures.get(key)) for key in keys]
            if None in found and not self.has_joined:
                return None
            self._executing = keys
        return found

    def begin_burst(self, burst: Burst) -> bool:
        """The same of all that is in ``burst``: whether it may be executed."""
        with self.lock:
            is_there = self._has(burst)
            if is_there:
                self._executing = burst.keys
        return is_there

    def remove(self, burst: Burst) -> None:
        """All that is in ``burst`` is no longer in flight, if it was."""
        with self.lock:
            for key in burst.keys:
                if self._futures.get(key) is burst:
                    del self._futures[key]

    def finish(self) -> None:
        """What was being executed is no longer in flight."""
        with self.lock:
            keys, self._executing = self._executing, ()
            for key in keys:
                self._futures.pop(key, None)

    def give_up(self, error: BaseException) -> None:
        """Fail what was being executed."""
        with self.lock:
            failed = [self._futures.pop(key) for key in self._executing if key in self._futures]
            self._executing = ()
            reason = self.closed
        for future in failed:
            future.fail(reason or error)
