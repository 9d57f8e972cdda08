"""Calls that begin in a backward, and are done at its end where every core of the only node computes it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import torch

from hvdlite.distributed.lane import Lane, Task
from hvdlite.distributed.steps import BackwardWaits, at_the_end_of_backward

_LEAST_SHARE = 1 / 16  # of a processor, that a thread has which computes among many
_MOST_S = 2.0  # to be put off: what seems to compute for longer may be looking, again and again, for a result
_MOST_BLOCKED = 3  # times one after the other that a backward is found to wait, after which none is held up any more


class LaneAfterBackward(Lane):
    """A lane that puts off what begins in a backward until that is over, where that has all cores of the node.

    What a thread of its own did beside it would be taken from it, and changes of threads and colder caches come on top
    (see `hvdlite.torch.bucketing.choose_bucket_bytes`). DistributedDataParallel waits for its buckets in a callback at
    the end of backward, before which there is one of this lane (see `BackwardWaits`): what was put off is done by the
    thread that waits for it, which nobody has to wake.

    A program that waits earlier, in a hook, and not by `GroupWork.wait`, which helps, computes no more: then the lane's
    thread does what there is.

    Args:
        ranks: of the group, all on one node.
        cores: of the node.
        waits: told of the wait at the end.
    """

    def __init__(self, name: str, ranks: int, cores: int, waits: BackwardWaits) -> None:
        super().__init__(name)
        self._ranks = ranks
        self._cores = cores
        self._waits = waits
        self._backward = -1  # torch's number of the one in which calls were put off last
        self._thread_of_backward = _Thread()
        self._blocked = 0

    def add(self, task: Task) -> None:
        """See `Lane.add`."""
        backward = torch._C._current_graph_task_id()
        if backward == -1 or not task.takes_processors or not self._is_better_late():
            super().add(task)
            return
        if backward != self._backward:
            self._backward = backward
            self._thread_of_backward = _Thread()
            self._waits.expect(task.title)
            at_the_end_of_backward(self._end_backward)
        self.put_off(task, self._may_wait)

    def _is_better_late(self) -> bool:
        threads = self._ranks * torch.get_num_threads()
        return threads >= self._cores and self._blocked < _MOST_BLOCKED

    def _end_backward(self) -> None:
        if self.has_tasks:
            self._blocked = 0
        self.catch_up()

    def _may_wait(self) -> bool:
        thread = self._thread_of_backward
        if thread.share_since_last() < _LEAST_SHARE:
            self._blocked += 1
            return False
        return thread.age_s() < _MOST_S


class _Thread:
    """The thread that makes this, as others see it."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._made_s = self._asked_s = time.monotonic()
        self._spent_s = time.clock_gettime(self._clock)

    def age_s(self) -> float:
        return time.monotonic() - self._made_s

    def share_since_last(self) -> float:
        """The part of a processor that it has had since this was asked the last time, or made; 0 if it has ended."""
        asked_s, self._asked_s = self._asked_s, time.monotonic()
        before_s = self._spent_s
        with suppress(OSError):
            self._spent_s = time.clock_gettime(self._clock)
        return (self._spent_s - before_s) / max(self._asked_s - asked_s, 1e-9)
