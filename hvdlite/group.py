"""A process set, as its ranks use it: what they call becomes a submission to its coordinator.

Operations are the functions of operations/, whose first argument is a `Group`. What they return is waited for, and ends
in a result or in an error. They raise `HorovodInternalError` where hvdlite was shut down or has failed,
`DuplicateNameError` where their ``name`` is in flight, and ValueError on a rank that has joined.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from hvdlite._native import Count
from hvdlite.config import Config
from hvdlite.coordinator.prepared import Prepared
from hvdlite.coordinator.remembered import Remembered
from hvdlite.coordinator.request import NAMED, Request, title_of
from hvdlite.coordinator.submission import Submission
from hvdlite.memory.base import Memory
from hvdlite.memory.views import TensorView
from hvdlite.recorder import NO_SPAN, Lane, Recorder
from hvdlite.world import World

T = TypeVar("T")

_SHAPE_BITS = 32  # of a checksum of what has a number; those above are of its kind


class Group:
    """The ranks of ``world``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ranks = world.topology.ranks
        self.size = len(self.ranks)
        self.rank = self.ranks.index(world.topology.rank)
        """This process's place among `ranks`."""
        self.memory = world.engine.memory
        self.made_ns = time.monotonic_ns()
        """When; it tells this group from those of other worlds, and what refers to it can be copied and pickled."""
        self._lock = threading.Lock()  # guards what follows
        self._numbered: list[int] = []  # what has a number, here or on other ranks, as a checksum
        self._missed: list[tuple[int, int]] = []  # by this rank, and before which join
        self._unnamed: defaultdict[str, Count] = defaultdict(Count)
        self._joins = world.joins
        self.requests: Remembered[Request] = Remembered()
        """Of operations that are collected, by whatever tells one from another."""
        self.shortcuts: Any = None
        """Of the functions for tensors, which make them; see hvdlite/torch/shortcuts.py."""

    @property
    def device_memory(self) -> Memory | None:
        """That of GPUs, where these ranks share some."""
        return self.world.device_memory

    @property
    def config(self) -> Config:
        return self.world.config

    @property
    def recorder(self) -> Recorder:
        return self.world.recorder

    @property
    def joins(self) -> int:
        """How often all ranks have joined."""
        return self.world.joins

    def next_number(self, made_after: int, kind: str, shape: str = "") -> int:
        """0, 1, 2, ... of each ``kind``: for names of what every rank uses in the same order.

        Args:
            made_after: `joins` when that was made. A rank that had joined has not used what the others have, and gives
                it the numbers that it has missed.
            shape: tells it from others of its kind, and is the same on all ranks.
        """
        checksum = zlib.crc32(kind.encode()) >> 1 << _SHAPE_BITS | zlib.crc32(shape.encode())  # not negative, as int64
        with self._lock:
            place = self._missed_place(made_after, checksum)
            if place is None:
                place = len(self._numbered)
                self._numbered.append(checksum)
            return sum(not (other ^ checksum) >> _SHAPE_BITS for other in self._numbered[:place])

    def _missed_place(self, made_after: int, checksum: int) -> int | None:
        for missed in self._missed:
            before, place = missed
            if made_after < before and self._numbered[place] == checksum:
                self._missed.remove(missed)
                return place
        return None

    @property
    def numbered(self) -> tuple[int, ...]:
        """A checksum of all that has a number, as it came."""
        with self._lock:
            return tuple(self._numbered)

    def have_joined(self, numbered: Sequence[int]) -> None:
        """All ranks have, of which one has used what is ``numbered``, and others the first of it."""
        with self._lock:
            first = len(self._numbered)
            self._missed += [(self.joins, place) for place in range(first, len(numbered))]
            self._numbered += numbered[first:]

    def statistics(self) -> dict[str, int]:
        """What this rank has done here so far; see `hvdlite.statistics`."""
        return self.world.own_statistics()

    def count(self, label: str) -> int:
        """The sequence number of an unnamed operation of kind ``label``, which is about to be submitted.

        They count per kind, so that ranks that ran others meanwhile still agree. Once all ranks have joined, they begin
        anew: ranks that went on alone have counted more.
        """
        return self.unnamed(label).take()

    def unnamed(self, label: str) -> Count:
        """What gives unnamed operations of kind ``label`` their sequence numbers; always the same one."""
        with self._lock:
            if self._joins != self.world.joins:
                self._joins = self.world.joins
                for count in self._unnamed.values():
                    count.restart()
            return self._unnamed[label]

    def perform(self, prepared: Prepared[T], tensors: T, name: str | None) -> None:
        """Do a prepared operation, and return when it is complete.

        Args:
            name: the user's, if there is one.
        """
        unnamed = self.unnamed(prepared.request.label) if name is None else None
        sequence = NAMED if unnamed is None else unnamed.take()
        coordinator = self.world.coordinator
        with self._wait(prepared.request, name):
            done = coordinator.at_once.run(prepared, sequence, tensors, unnamed)
            if done is True:
                return
            if isinstance(done, Submission):
                submission = done
            else:
                submission = prepared.submission(sequence, tensors)
                coordinator.submit(submission, background=False)
            submission.wait()

    def opens_for(self, prepared: Prepared[T], name: str | None) -> bool:
        """Whether native code can start a prepared operation, so that nobody has to wait for it at once."""
        native = prepared.native
        if native is None or native.direct is None or not native.direct.has_two_phases or self.recorder.enabled:
            return False
        unnamed = self.unnamed(prepared.request.label) if name is None else None
        sequence = NAMED if unnamed is None else unnamed.next
        return self.world.coordinator.at_once.opens_for(native, sequence, unnamed)

    def submit(
        self,
        request: Request,
        name: str | None,
        inputs: Sequence[TensorView] = (),
        outputs: Sequence[TensorView] = (),
        *,
        background: bool = True,
        **beside: Any,
    ) -> Submission:
        """Hand an operation to the coordinator.

        Args:
            name: the user's, if there is one.
            background: False where the caller waits for it at once, and does the work.
            beside: see `Submission`.
        """
        sequence = self.count(request.label) if name is None else NAMED
        submission = Submission(request, sequence, inputs, outputs, **beside)
        coordinator = self.world.coordinator
        if background or not (coordinator.runs_free and self._do_at_once(submission, name)):
            coordinator.submit(submission, background=background)
        return submission

    def _do_at_once(self, submission: Submission, name: str | None) -> bool:
        """See `Coordinator.do_at_once`, which waits for other ranks before anybody waits for what this returns."""
        with self._wait(submission.request, name):
            return self.world.coordinator.do_at_once(submission)

    def _wait(self, request: Request, name: str | None) -> AbstractContextManager[None]:
        """For the timeline, that this thread waits for ``request``, which the user calls ``name``."""
        if not self.recorder.enabled:
            return NO_SPAN
        return self.recorder.span(Lane.WAIT, title_of(request.label, name))
