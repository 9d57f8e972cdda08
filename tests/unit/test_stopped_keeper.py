"""Keepers that are stopped are ended, here by hvdliterun and elsewhere by ranks, and make room for others."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import keeper_lab
from hvdlite import cli
from hvdlite.cli.job import Host
from hvdlite.cli.keepers import Keepers
from hvdlite.config import KEEPER
from hvdlite.links.wire import process_of
from hvdlite.naps import RunClock
from hvdlite.processes import is_stopped
from hvdlite.recovery.keeper import TO_RANKS
from hvdlite.recovery.safekeeping import Safekeeping
from hvdlite.start import meeting_point
from hvdlite.start.meeting_point import connect
from keeper_lab import HERE, wait_for

elsewhere = keeper_lab.elsewhere


def test_a_keeper_that_is_stopped_makes_room_for_another(elsewhere: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where this process was stopped as well, as a whole job is: those that go on later than it do go on."""
    monkeypatch.setattr(cli.keepers, "_STOPPED_S", 0.3)
    monkeypatch.setattr(elsewhere, "_clock", RunClock(0.1))
    assert elsewhere.start([HERE]) == []
    elsewhere.kill_stopped()
    (stopped,) = elsewhere.processes
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: is_stopped(stopped))
    for _ in range(2):
        elsewhere.kill_stopped()
        time.sleep(0.5)
    assert elsewhere.processes == [stopped]
    wait_for(lambda: elsewhere.kill_stopped() or not elsewhere.kept)
    assert elsewhere.start([HERE]) == elsewhere.ask() == []


def stop_keeper(keepers: Keepers) -> int:
    with connect(keepers.environment[KEEPER], TO_RANKS) as link:
        pid = process_of(link)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid))
    return pid


def test_a_rank_ends_the_keeper_of_its_host_that_is_stopped(
    elsewhere: Keepers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one hears that training is through; else hvdliterun would take the end of the ranks for a failure."""
    assert elsewhere.start([Host("a", 1)]) == []
    with monkeypatch.context() as shorter:
        shorter.setattr(meeting_point, "PATIENCE_S", 0.2)
        rank = Safekeeping(elsewhere.environment[KEEPER])
        assert rank.news() == 0
    stopped = stop_keeper(elsewhere)
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(rank.say_at_work, False)
        wait_for(lambda: not elsewhere.kept or told.done())
        assert elsewhere.start([Host("a", 1)]) == []
        told.result()
    assert rank.news() == 0
    wait_for(lambda: not Path(f"/proc/{stopped}").exists())
    assert "the keeper of this host, a process of hvdliterun's, was stopped, and is replaced" in caplog.text
    rank.close()


def test_a_keeper_ends_the_one_before_it_that_is_stopped(elsewhere: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hvdliterun has given up, and whose ranks have ended before they could."""
    monkeypatch.setattr(cli.keepers, "_ANSWER_S", 0.2)
    assert elsewhere.start([Host("a", 1)]) == []
    stopped = stop_keeper(elsewhere)
    assert elsewhere.ask() == ["a"]
    monkeypatch.undo()
    assert elsewhere.start([Host("a", 1)]) == elsewhere.ask() == []
    wait_for(lambda: not Path(f"/proc/{stopped}").exists())
