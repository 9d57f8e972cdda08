"""A world or a timeline that ends while operations are under way: all ranks have done the same by then, since what they
do blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest

from coordinator_lab import Lab, submission
from hvdlite.coordinator.submission import Submission
from hvdlite.errors import ShutDownError
from job_lab import NODES, STEP, InBurst, Job

OTHER = [("c", 4), ("d", 4), ("|", 0)]
STEPS = 3


class Rank:
    """Goes through steps, and ends the world somewhere in the middle of one."""

    def __init__(self, job: Job, rank: int) -> None:
        lab = job.lab
        self._job = job
        self._coordinator = lab.ranks[rank]
        self._todo = [item for item in STEP if item[0] != "?"] * STEPS
        self._todo[lab.random.randrange(len(self._todo)) :] = [("end", 0)]
        self._rank = rank
        self.made: list[Submission | InBurst] = []

    def go_on(self) -> bool:
        """Whether it has ended the world, or has seen that another rank did."""
        name, numel = self._todo[0]
        is_late = name == "|" and not all(made.is_done for made in self.made)
        if is_late or self._job.lab.is_inside(self._rank):
            return False
        del self._todo[0]
        if name == "end":
            texts = {"text": f"rank {self._rank} ended", "own_text": "ended"}
            with suppress(ShutDownError):  # another was the first
                self._coordinator.announce(
                    {"kind": "shutdown", "rank": self._rank, "is_final": False, "leaver": None, **texts}
                )
        elif name != "|":
            try:
                self.made += self._job.begin(self._rank, submission(name, numel), self._todo[0][0] == "|")
            except ShutDownError:
                return True
        return not self._todo


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("state", ["about to be frozen", "frozen", "another order"])
@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_have_done_the_same(nodes: Sequence[tuple[int, ...]], state: str, seed: int) -> None:
    lab = Lab(nodes, seed, small_pages=True)
    job = Job(lab, at_once=seed % 2 > 0, collected=seed % 3 / 2)
    step = [item for item in STEP if item[0] != "?"]
    if state == "about to be frozen":
        for _ in range(lab.random.randrange(2, 5)):
            job.step([step] * len(lab.ranks))
    else:
        job.freeze(step)
    if state == "another order":  # so that either may be taken up again
        job.freeze(OTHER)
    ranks = [Rank(job, rank) for rank in range(len(lab.ranks))]
    under_way = list(ranks)
    for _ in range(20_000):
        for _ in range(lab.random.randrange(2 * len(ranks))):
            lab.turn()
        if all(coordinator.has_ended for coordinator in lab.ranks):
            break
        if under_way:
            rank = lab.random.choice(under_way)
            if rank.go_on():
                under_way.remove(rank)
    assert all(coordinator.has_ended for coordinator in lab.ranks)
    job.check_order()
    for rank in ranks:
        for made in rank.made:
            assert made.is_done
            with suppress(ShutDownError):
                made.wait()


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_timeline_starts_and_stops_between_the_same_operations(nodes: Sequence[tuple[int, ...]], seed: int) -> None:
    """Rank 0 says so wherever it is; the others may be at something that it has not begun."""
    lab = Lab(nodes, seed, small_pages=True)
    seen: list[list[tuple[str, int]]] = [[] for _ in lab.ranks]
    for owner, own in zip(lab.owners, seen, strict=True):
        owner.take_notice = lambda content, owner=owner, own=own: own.append(  # type: ignore[method-assign]
            (content["kind"], sum(map(len, owner.buckets)))
        )
    job = Job(lab, at_once=seed % 2 > 0, collected=seed % 3 / 2)
    step = [item for item in STEP if item[0] != "?"]
    kinds = ["timeline_start", "timeline_stop"] * 3
    job.freeze(step)
    begin = job.begin

    def announcing(rank: int, made: Submission, waits: bool) -> list[Submission | InBurst]:
        if rank == 0 and kinds and lab.random.random() < 0.05:
            lab.ranks[0].announce({"kind": kinds.pop(0)})
        return begin(rank, made, waits)

    job.begin = announcing  # type: ignore[method-assign]
    while kinds:
        job.step([step] * len(lab.ranks))
    job.step([step] * len(lab.ranks))
    for _ in range(20_000):
        if all(len(own) == 6 for own in seen):
            break
        lab.turn()
    assert seen == [seen[0]] * len(lab.ranks)
    assert [kind for kind, _ in seen[0]] == ["timeline_start", "timeline_stop"] * 3
    job.check_order()
    job.freeze(step)  # and plans go on afterwards
