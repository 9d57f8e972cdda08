"""What ranks tell hvdliterun before they end after a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

import hvdlite.end_notice
from hvdlite.end_notice import EndNotices, say_end

SAY = """
import os, sys, time
from hvdlite.end_notice import say_end
os.setuid(int(sys.argv[1]))
say_end()
print("said", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[EndNotices]:
    monkeypatch.setattr(hvdlite.end_notice, "_END_S", 0.1)
    with closing(EndNotices(0.1)) as notices:
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


def test_ranks_are_late_some_time_after_those_that_said_so_have_ended(notices: EndNotices) -> None:
    assert not notices.are_late
    ranks = [Rank(os.geteuid()) for _ in range(2)]
    assert not notices.are_late
    ranks[0].end()
    ranks[1].end()
    assert not notices.are_late  # they had less than the grace
    time.sleep(0.25)
    assert notices.are_late


def test_nobody_is_late_while_one_that_said_so_goes_on(notices: EndNotices) -> None:
    ended, goes_on = Rank(os.geteuid()), Rank(os.geteuid())
    assert not notices.are_late
    ended.end()
    for _ in range(5):
        assert not notices.are_late
        time.sleep(0.05)
    goes_on.end()
    assert notices.are_late


def test_who_ends_long_after_it_said_so_has_another_reason(notices: EndNotices) -> None:
    rank = Rank(os.geteuid())
    assert not notices.are_late
    time.sleep(0.25)
    assert not notices.are_late
    rank.end()
    time.sleep(0.25)
    assert not notices.are_late


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user needs root")
def test_another_user_is_not_heard(notices: EndNotices) -> None:
    Rank(4242).end()
    assert not notices.are_late
    time.sleep(0.25)
    assert not notices.are_late
    Rank(os.geteuid()).end()
    assert not notices.are_late
    time.sleep(0.25)
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
