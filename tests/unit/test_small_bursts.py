"""Bursts of few bytes that are interrupted where they begin, and where they are completed."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest

from coordinator_lab import Lab, Owner, SmallBurst, submission
from hvdlite.coordinator.burst import KnownBurst
from hvdlite.coordinator.collector import Collector
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.coordinator.small_bursts import SmallBursts
from hvdlite.coordinator.worker import Worker
from interrupts_lab import interrupted
from job_lab import InBurst, Job

STEP = [("a", 4), ("b", 4), ("c", 4), ("|", 0)]
BEGINNING = [Coordinator.begin, SmallBursts.start, Worker.attempt, SmallBursts._start, Collector._complete]
COMPLETING = [SmallBursts._complete, Worker.attempt, SmallBursts._go_on, SmallBursts._do_second, SmallBursts._outcome]
"""Where interrupts come."""


class Undisturbed(SmallBurst):
    @classmethod
    def of(cls, owner: Owner, known: KnownBurst) -> Undisturbed:
        return cls(owner, random.Random(0))

    def _interrupt(self) -> None:
        pass


def frozen(ranks: int) -> Job:
    """A job of ranks on one node that repeats `STEP` as one burst; pauses of this machine divide it."""
    for seed in range(1000):
        lab = Lab([tuple(range(ranks))], seed)
        for owner in lab.owners:
            owner.prepare_burst = partial(Undisturbed.of, owner)  # type: ignore[method-assign]
        job = Job(lab, collected=1.0)
        job.freeze(STEP)
        job.step([STEP] * ranks)
        known = [coordinator.collector._known.get(coordinator.position) for coordinator in lab.ranks]
        if all(burst is not None and len(burst.requests) == len(STEP) - 1 for burst in known):
            return job
    raise AssertionError("it was always divided")


def collect(job: Job, rank: int, place: int = -1) -> tuple[bool, list[Any]]:
    """Submit the burst; an interrupt comes as the last operation of it is."""
    coordinator = job.lab.ranks[rank]
    handles = []
    for name, numel in STEP[:2]:
        handles += job.begin(rank, submission(name, numel), waits=False)
    last = partial(job.begin, rank, submission("c", 4), waits=False)
    has_come, made = interrupted(place, BEGINNING, last)
    burst = coordinator.collector.native.burst or handles[0]._burst
    if made is None and len(burst.parts) < 3 and not burst.is_done:  # it was not submitted
        made = job.begin(rank, submission("c", 4), waits=False)
    return has_come, [*handles, *(made or [])]


def check(job: Job, handles: list[Any]) -> None:
    job.lab.settle(handles)
    for handle in handles:
        handle.wait()
    job.step([STEP] * len(job.lab.ranks))
    job.check_order()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_where_one_begins(ranks: int) -> None:
    for place in itertools.count():
        job = frozen(ranks)
        has_come, handles = collect(job, 0, place)
        for rank in range(1, ranks):
            handles += collect(job, rank)[1]
        check(job, handles)
        if not has_come:
            assert place > 10
            return


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("others_first", [True, False])
def test_an_interrupt_where_one_is_completed(ranks: int, others_first: bool) -> None:
    for place in itertools.count():
        job = frozen(ranks)
        order = [*range(1, ranks), 0] if others_first else [*range(ranks)]
        handles = {rank: collect(job, rank)[1] for rank in order}
        own: InBurst = handles[0][0]
        has_come, _ = interrupted(place, COMPLETING, own.poll)
        check(job, list(itertools.chain.from_iterable(handles.values())))
        if not has_come:
            assert place > 4
            return
