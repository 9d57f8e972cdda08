"""What the ranks of an elastic job by mpirun say to hvdliterun, through the keepers of their hosts."""

from __future__ import annotations

import math
import threading
import time

from hvdlite.cli.starting import Starting
from hvdlite.liveness.notice import END_S
from hvdlite.naps import growing_pause_s
from hvdlite.recovery.keeper import Word, pair_in

_FIRST_S, _LONGEST_S = 10.0, 600.0  # how long ranks that go on without others are left alone


class RankWords:
    """Those of one mpirun after the other. Any thread may call.

    Args:
        least: fewer ranks do not go on.
        silence_s: after it ranks have noticed who is silent.
        grace_s: after it ranks that know of a failure have ended.

    Attributes:
        anew: all ranks end in order, to be started on other hosts.
        is_at_work: they train, and have not come to the end.
        left: how many go on, after others have died; None: no rank has died.
        are_unlike: they run different versions, and end.
        have_failed: ranks end after a failure, and their program may save the last commit before.
        start: how many times ranks have been started.
    """

    def __init__(self, least: int, silence_s: float, grace_s: float) -> None:
        self._least = least
        self._silence_s = silence_s
        self._grace_s = grace_s
        self._lock = threading.Lock()  # guards what follows
        self._times = 0  # that ranks have gone on
        self.start = 0
        self._forget()

    def begin(self) -> None:
        """Ranks are started."""
        self.start += 1
        self._forget()

    def _forget(self) -> None:
        self.anew = self.is_at_work = self._was_at_work = self.have_failed = self.are_unlike = False
        self.left: int | None = None
        self._ended = 0  # of them
        self._lost = ""
        self._starting = Starting()
        self._generation = 1  # the last that has begun
        self._alone_until_s = 0.0
        self._end_s = math.inf  # when all have ended

    @property
    def is_over(self) -> bool:
        """Whether the ranks have trained to the end."""
        return self._was_at_work and not self.is_at_work

    @property
    def miss_some(self) -> bool:
        """Whether some of those that have gone on without others have not come to their end."""
        return self.left is not None and self._ended < self.left

    @property
    def are_late(self) -> bool:
        """Whether ranks are still there that have said that they end: one is stopped, or its host is lost."""
        return time.monotonic() > self._end_s

    @property
    def lost(self) -> str:
        """Why these ranks cannot come to an end; empty where they can."""
        return self._starting.lost or self._lost

    @property
    def have_started(self) -> bool:
        """Whether some are through hvd.init()."""
        return self._starting.are_through

    @property
    def are_starting(self) -> bool:
        """Whether some wait in hvd.init() for the others."""
        return self._starting.is_under_way

    @property
    def may_be_joined(self) -> bool:
        """Whether ranks that go on without others have done so for long enough."""
        return self.left is not None and time.monotonic() >= self._alone_until_s

    def lose(self, why: str) -> None:
        """These ranks cannot come to an end."""
        self._lost = why

    def hear(self, word: Word, number: int) -> int:
        """Something that a rank says; returns the answer to a CLAIM, which is granted once for each generation."""
        with self._lock:
            if word == Word.ANEW:
                self.anew = True
                self._expect_end(self._silence_s + self._grace_s)
            elif word == Word.FAILED and number >= self._generation:
                self.have_failed = True
                self._expect_end(self._grace_s)
            elif word == Word.ENDED:
                self._ended += number == self._generation
            elif word == Word.AT_WORK:
                self.is_at_work = bool(number)
                self._was_at_work = True
            elif word == Word.CLAIM:
                return self._grant(*pair_in(number))
            elif pair_in(number)[0] == self.start:
                self._note_start(word, pair_in(number)[1])
        return 0

    def _note_start(self, word: Word, rank: int) -> None:
        if word == Word.STARTING:
            self._starting.come()
        elif word == Word.STARTED:
            self._starting.are_through = True
        elif word == Word.UNLIKE:
            self.are_unlike = True
        elif word == Word.GONE:
            self._starting.end(rank)

    def _grant(self, generation: int, count: int) -> int:
        if generation <= self._generation or count < self._least:
            return 0
        self._generation, self.left, self._ended = generation, count, 0
        self._end_s, self.have_failed, self._starting.are_through = math.inf, False, True
        self._alone_until_s = time.monotonic() + growing_pause_s(_FIRST_S, _LONGEST_S, self._times)
        self._times += 1
        return 1

    def _expect_end(self, within_s: float) -> None:
        self._end_s = min(self._end_s, time.monotonic() + within_s + END_S)
