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

SAY = "import os, sys; from hvdlite.end_notice import say_end; os.setuid(int(sys.argv[1])); say_end()"


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[EndNotices]:
    monkeypatch.setattr(hvdlite.end_notice, "_END_S", 0.05)
    with closing(EndNotices(0.05)) as notices:
        for name, value in notices.environment.items():
            monkeypatch.setenv(name, value)
        yield notices


def say_as(user: int) -> None:
    subprocess.run([sys.executable, "-c", SAY, str(user)], check=True)


def test_ranks_are_late_some_time_after_the_first_has_said_that_it_ends(notices: EndNotices) -> None:
    assert not notices.are_late
    say_end()
    assert not notices.are_late
    time.sleep(0.06)
    say_end()
    assert not notices.are_late
    time.sleep(0.06)
    assert notices.are_late


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user needs root")
def test_another_user_is_not_heard(notices: EndNotices) -> None:
    say_as(4242)
    notices.are_late  # noqa: B018 (takes what has come)
    time.sleep(0.15)
    assert not notices.are_late
    say_as(os.geteuid())
    notices.are_late  # noqa: B018
    time.sleep(0.15)
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
