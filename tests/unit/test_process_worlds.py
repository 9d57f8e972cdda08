"""What worlds of one process tell one another: who has died, by the number that each has for it; and what was done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hvdlite.config import Config
from hvdlite.errors import RankFailedError, StallError
from hvdlite.liveness.health import Health
from hvdlite.process_worlds import ProcessWorlds


@pytest.fixture
def healths() -> Iterator[list[Health]]:
    with ExitStack() as stack:
        made = [Health(0, [], Config(failure_grace_s=60.0)) for _ in range(3)]
        for health in made:
            stack.callback(health.close)
        yield made


def test_a_death_is_known_wherever_the_process_was_a_rank(healths: list[Health]) -> None:
    worlds = ProcessWorlds()
    job, group, others = healths
    worlds.add(job, ["a", "b", "c"], [0, 1, 2])
    worlds.add(group, ["a", "c"], [5, 7])
    worlds.add(others, ["a", "b"], [0, 1])
    group.rank_failed(7, "rank 7 died")
    assert isinstance(job.failure, RankFailedError)
    assert (job.failed_rank, str(job.failure)) == (2, "rank 7 died")
    assert others.failure is None


def test_who_comes_later_hears_of_it_and_who_has_left_does_not(healths: list[Health]) -> None:
    worlds = ProcessWorlds()
    job, group, late = healths
    worlds.add(job, ["a", "b"], [0, 1])
    worlds.add(group, ["a", "b"], [0, 1])
    worlds.remove(group)
    job.rank_failed(1, "rank 1 died")
    assert group.failure is None
    worlds.add(late, ["b", "a"], [0, 1])
    assert late.failed_rank == 0


def test_a_death_is_logged_once_and_once_more_where_those_that_knew_of_it_are_gone(
    healths: list[Health], caplog: pytest.LogCaptureFixture
) -> None:
    worlds = ProcessWorlds()
    for health in healths[:2]:
        worlds.add(health, ["a", "b"], [0, 1])
    healths[0].rank_failed(1, "rank 1 died")
    assert all(health.was_logged for health in healths[:2])
    assert [record.message for record in caplog.records] == ["rank 1 died"]
    for health in healths[:2]:
        worlds.remove(health)
    worlds.add(healths[2], ["a", "b"], [0, 1])
    healths[2].rank_failed(1, "rank 1 died")
    assert [record.message for record in caplog.records] == ["rank 1 died"] * 2


def test_a_stall_stays_where_it_is(healths: list[Health]) -> None:
    worlds = ProcessWorlds()
    for health in healths:
        worlds.add(health, ["a", "b"], [0, 1])
    healths[0].report(StallError("rank 1 is late"))
    assert [health.failure is None for health in healths] == [False, True, True]


def test_counts_outlive_their_world(healths: list[Health]) -> None:
    worlds = ProcessWorlds()
    worlds.add(healths[0], ["a"], [0])
    worlds.add(healths[1], ["a"], [0], lambda: {"buckets": 2})
    worlds.add(healths[2], ["a"], [0], lambda: {"buckets": 3})
    worlds.remove(healths[1])
    worlds.remove(healths[1])
    assert worlds.statistics() == {"buckets": 5}
