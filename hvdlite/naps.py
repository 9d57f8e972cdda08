"""Waits: naps that grow while nothing happens, and limits for which only time counts in which this process runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdlite.errors import CollectiveError

FIRST_NAP_S = 20e-6
WAY_S = 50e-6
"""How long who asks again and again leaves the interpreter to the thread that does what is asked for.

A loop of questions lets go of it every 5 ms only, and the thread needs it several times.
"""
LONGEST_NAP_S = 100e-6  # while data moves
_MOVING_S = 0.05  # a wait that lasts longer is for somebody who is late, not for data
_IDLE_NAP_S = 2e-3
_CHECK_S = 10e-3  # between two looks at whether the job has failed
_LOOK_S = 0.5  # at whether this process was stopped


class RunClock:
    """The monotonic clock, but for time in which this process did not run: stopped or suspended, perhaps with its job.

    Args:
        interval_s: the most between two calls of `now_s` while it runs.

    Attributes:
        slept_s: the last time that it did not run for long.
    """

    def __init__(self, interval_s: float) -> None:
        self.slept_s = 0.0
        self._interval_s = interval_s
        self._looked_s = time.monotonic()
        self._missed_s = 0.0

    def now_s(self) -> float:
        now_s = time.monotonic()
        slept_s = now_s - self._looked_s - self._interval_s
        if slept_s > self._interval_s:
            self.slept_s = slept_s
            self._missed_s += slept_s
        self._looked_s = now_s
        return now_s - self._missed_s


class Patience:
    """For one wait, or several: ``left_s`` in all, of which only time counts in which this process waits and runs."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    def wait_for(self, is_done: Callable[[float], object]) -> bool:
        """Whether ``is_done`` is true in time; it is called again and again with the most seconds that it may take."""
        clock = RunClock(_LOOK_S)
        until_s = clock.now_s() + self.left_s
        try:
            while True:
                left_s = max(0.0, until_s - clock.now_s())
                if is_done(min(left_s, _LOOK_S)):
                    return True
                if left_s == 0.0:
                    return False
        finally:
            self.left_s = max(0.0, until_s - clock.now_s())


def growing_pause_s(first_s: float, longest_s: float, times: int) -> float:
    """Before another try after ``times`` pauses: each is twice as long as the one before, up to ``longest_s``."""
    return min(longest_s, first_s * 2.0 ** min(times, 100))  # 2.0**1024 is an OverflowError


def wait_for_verdict(check: Callable[[], None], patience_s: float) -> None:
    """Something has failed here: let others say why, which ``check`` raises then; returns after ``patience_s``."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        check()
        time.sleep(_CHECK_S)


def nap_until(
    done: Callable[[], bool],
    late: str,
    *,
    timeout_s: float,
    check: Callable[[], None],
    since_s: float | None = None,
    nap_s: float = FIRST_NAP_S,
) -> None:
    """Return once ``done()`` is true.

    Args:
        late: what did not happen in time, for the error.
        check: raises once the job has failed.
        since_s: when the wait began, by the monotonic clock; by default now.
        nap_s: the first; each is twice as long as the one before, up to `LONGEST_NAP_S` while data moves.

    Raises:
        CollectiveError: ``late``; or what ``check`` raises.
    """
    start_s = time.monotonic() if since_s is None else since_s
    next_check_s = start_s + _CHECK_S
    longest_s = max(nap_s, LONGEST_NAP_S)
    while not done():
        now_s = time.monotonic()
        if now_s >= next_check_s:
            check()
            next_check_s = now_s + _CHECK_S
        if now_s - start_s > timeout_s:
            raise CollectiveError(
                f"{late} within {timeout_s:g} s; if it is only slow, raise HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"
            )
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, longest_s if now_s - start_s < _MOVING_S else _IDLE_NAP_S)
