"""What ranks tell hvdliterun before they end after a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

import hvdlite.liveness.end_notice
from hvdlite.liveness.end_notice import EndNotices, say_end

PATIENCE_S = 4.0
SAY = """
import os, sys
from hvdlite.liveness.end_notice import say_end
os.setuid(int(sys.argv[1]))
say_end()
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
    monkeypatch.setattr(hvdlite.liveness.end_notice, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(hvdlite.liveness.end_notice, "END_S", PATIENCE_S - 1.0)
    return clock


@pytest.fixture
def notices(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndNotices]:
    with closing(EndNotices(1.0)) as notices:
        for name, value in notices.environment.items():
            monkeypatch.setenv(name, value)
        yield notices


class Rank:
    """A process that says it ends, and does so when it is told to."""

    def __init__(self, user: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SAY, str(user)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def end(self) -> None:
        self._process.communicate()


def test_ranks_are_late_some_time_after_those_that_said_so_have_ended(notices: EndNotices, clock: Clock) -> None:
    assert not notices.are_late
    ranks = [Rank(os.geteuid()) for _ in range(2)]
    assert not notices.are_late
    ranks[0].end()
    ranks[1].end()
    clock.now_s += PATIENCE_S
    assert not notices.are_late
    clock.now_s += 0.1
    assert notices.are_late


def test_nobody_is_late_while_one_that_said_so_goes_on(notices: EndNotices, clock: Clock) -> None:
    ended, goes_on = Rank(os.geteuid()), Rank(os.geteuid())
    assert not notices.are_late
    ended.end()
    for _ in range(3):
        assert not notices.are_late
        clock.now_s += PATIENCE_S
    goes_on.end()
    assert notices.are_late


def test_who_ends_long_after_it_said_so_has_another_reason(notices: EndNotices, clock: Clock) -> None:
    rank = Rank(os.geteuid())
    assert not notices.are_late
    clock.now_s += PATIENCE_S + 0.1
    assert not notices.are_late
    rank.end()
    clock.now_s += PATIENCE_S + 0.1
    assert not notices.are_late


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user needs root")
def test_another_user_is_not_heard(notices: EndNotices, clock: Clock) -> None:
    Rank(4242).end()
    assert not notices.are_late
    clock.now_s += PATIENCE_S + 0.1
    assert not notices.are_late
    Rank(os.geteuid()).end()
    assert not notices.are_late
    clock.now_s += PATIENCE_S + 0.1
    assert notices.are_late


def test_nobody_has_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(EndNotices(1.0)) as notices:
        environment = notices.environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    say_end()


def test_a_full_queue_holds_nobody_up(notices: EndNotices) -> None:
    for _ in range(1000):
        say_end()
    assert not notices.are_late
