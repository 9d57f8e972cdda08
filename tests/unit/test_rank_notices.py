"""What ranks under mpirun tell hvdliterun: that they wait in hvd.init(), or end after a failure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

import hvdlite.cli.rank_notices
import hvdlite.cli.starting
from hvdlite.cli.rank_notices import RankNotices
from hvdlite.config import Config
from hvdlite.links.wire import CREDENTIALS
from hvdlite.liveness.health import Health
from hvdlite.liveness.notice import RANK, Notice, say

PATIENCE_S = 4.0
SAY = """
import os, sys
from hvdlite.liveness.notice import Notice, say
os.setuid(int(sys.argv[1]))
for notice in sys.argv[2:]:
    say(Notice[notice])
print("said", flush=True)
sys.stdin.read()
"""


class Clock:
    """Of hvdliterun, whose time passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (hvdlite.cli.rank_notices, hvdlite.cli.starting):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(hvdlite.cli.rank_notices, "END_S", PATIENCE_S - 1.0)
    return clock


@pytest.fixture
def notices(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankNotices]:
    with closing(RankNotices(1.0)) as notices:
        for name, value in notices.environment.items():
            monkeypatch.setenv(name, value)
        yield notices


class Rank:
    """A process that says something, and ends when it is told to."""

    def __init__(self, user: int, *said: str, number: int = 0) -> None:
        told = {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SAY, str(user), *(said or ["ENDS"])],
            env={**os.environ, **told},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def end(self) -> None:
        self._process.communicate()


def test_ranks_are_late_some_time_after_those_that_said_so_have_ended(notices: RankNotices, clock: Clock) -> None:
    assert not notices.are_late
    ranks = [Rank(os.geteuid()) for _ in range(2)]
    assert not notices.are_late
    ranks[0].end()
    ranks[1].end()
    clock.now_s += PATIENCE_S
    assert not notices.are_late
    clock.now_s += 0.1
    assert notices.are_late


def test_nobody_is_late_while_one_that_said_so_goes_on(notices: RankNotices, clock: Clock) -> None:
    ended, goes_on = Rank(os.geteuid()), Rank(os.geteuid())
    assert not notices.are_late
    ended.end()
    for _ in range(3):
        assert not notices.are_late
        clock.now_s += PATIENCE_S
    goes_on.end()
    assert notices.are_late


def test_who_ends_long_after_it_said_so_has_another_reason(notices: RankNotices, clock: Clock) -> None:
    rank = Rank(os.geteuid())
    assert not notices.are_late
    clock.now_s += PATIENCE_S + 0.1
    assert not notices.are_late
    rank.end()
    clock.now_s += PATIENCE_S + 0.1
    assert not notices.are_late


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user needs root")
def test_another_user_is_not_heard(notices: RankNotices, clock: Clock) -> None:
    Rank(4242).end()
    assert not notices.are_late
    clock.now_s += PATIENCE_S + 0.1
    assert not notices.are_late
    Rank(os.geteuid()).end()
    assert not notices.are_late
    clock.now_s += PATIENCE_S + 0.1
    assert notices.are_late


def test_others_who_say_something_all_the_time_hold_nobody_up(
    notices: RankNotices, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datagrams of another user follow one another as fast as they are read; each look ends nevertheless."""
    stranger = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, CREDENTIALS.pack(1, os.geteuid() + 1, 0))]
    heard: list[int] = []

    def flood(data_bytes: int, ancillary_bytes: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        heard.append(data_bytes)
        assert len(heard) < 100_000, "whoever looks reads for ever"
        return bytes([Notice.ENDS]), stranger, 0, None

    with monkeypatch.context() as context:
        context.setattr(notices, "_socket", SimpleNamespace(recvmsg=flood))
        assert not notices.are_late
        assert not notices.lost
    Rank(os.geteuid()).end()
    assert not notices.are_late
    clock.now_s += PATIENCE_S + 0.1
    assert notices.are_late


def test_a_rank_whose_process_cannot_be_seen_from_here(notices: RankNotices, monkeypatch: pytest.MonkeyPatch) -> None:
    """hvdliterun is in a container, and the rank is not: the kernel calls its process 0."""
    unseen = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, CREDENTIALS.pack(0, os.geteuid(), 0))]
    said = [bytes([Notice.ENDS]) + RANK.pack(1)]

    def once(data_bytes: int, ancillary_bytes: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        if not said:
            raise BlockingIOError
        return said.pop(), unseen, 0, None

    with monkeypatch.context() as context:
        context.setattr(notices, "_socket", SimpleNamespace(recvmsg=once))
        assert not notices.are_late
        assert notices.failed == 1


def test_nobody_has_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RankNotices(1.0)) as notices:
        environment = notices.environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    say(Notice.ENDS)


def test_the_first_failure_that_ranks_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the last look at what they say."""
    with closing(RankNotices(1.0)) as notices:
        for name, value in notices.environment.items():
            monkeypatch.setenv(name, value)
        say(Notice.STARTED)
        say(Notice.ENDS, 3)
        say(Notice.ENDS, 2)
        assert notices.failed is None
    assert notices.failed == 3


def test_a_full_queue_holds_nobody_up(notices: RankNotices) -> None:
    for _ in range(1000):
        say(Notice.ENDS)
    assert not notices.are_late


def start_two(notices: RankNotices, *said_by_first: str) -> list[Rank]:
    """Ranks 0 and 1, of which the first has come to hvd.init(), and both have been seen."""
    ranks = [Rank(os.geteuid(), *said_by_first), Rank(os.geteuid(), "STARTING", number=1)]
    assert not notices.lost
    return ranks


def lost_at_last(notices: RankNotices, clock: Clock) -> str:
    """What is said some time after what has just happened."""
    assert not notices.lost
    clock.now_s += 2.1
    return notices.lost


def test_a_rank_that_ends_while_others_wait_for_it_in_init_is_named(notices: RankNotices, clock: Clock) -> None:
    first, second = start_two(notices, "STARTING")
    assert not lost_at_last(notices, clock)
    second.end()
    why = lost_at_last(notices, clock)
    assert why == "rank 1 has ended before it was through hvd.init() or init_process_group(), where others wait for it"
    first.end()


def test_ranks_that_are_through_init_may_end(notices: RankNotices, clock: Clock) -> None:
    first, second = start_two(notices, "STARTING", "STARTED")
    second.end()
    assert not lost_at_last(notices, clock)
    first.end()
    assert not lost_at_last(notices, clock)


@pytest.mark.parametrize(("started_as", "named"), [({}, 1), ({0: 2, 1: 3}, 3)])
def test_who_has_failed_is_named_as_the_launcher_calls_it(
    started_as: dict[int, int], named: int, notices: RankNotices
) -> None:
    health = Health(0, [], Config(failure_grace_s=60.0), started_as=started_as)
    health.rank_failed(1, "rank 1 died")
    health.close()
    assert not notices.are_late and notices.failed == named
