"""Which processes of this machine are ranks that start, and which of them have ended."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdlite.start import start_watch
from hvdlite.start.start_watch import UNSEEN, StartWatch


class Host:
    """Processes with the environment of ranks, and who watches them.

    Attributes:
        ended: ranks, as far as the watch knows.
        missed: those that have never come, likewise.
    """

    def __init__(self) -> None:
        self.marks = {"HVDLITE_TEST_WATCH": secrets.token_hex(8)}
        self.selector = selectors.DefaultSelector()
        self.watch = StartWatch(self.marks, 4, self.selector)
        self.ended: list[int] = []
        self.missed: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, *command: str, size: int = 1, local_size: int | None = None) -> subprocess.Popen[bytes]:
        told = {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_SIZE": local_size or size,
        }
        environ = {**os.environ, **self.marks, **{name: str(value) for name, value in told.items()}}
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, start_new_session=True)
        self._processes.append(process)
        return process

    def watch_until(self, what: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not what():
            assert time.monotonic() < deadline_s
            self.turn()

    def turn(self) -> None:
        for key, _ in self.selector.select(0.01):
            self.watch.rank_ended(key)
            self.ended.append(key.data)
        if (missed := self.watch.missed()) is not None:
            self.missed.append(missed)

    def close(self) -> None:
        self.watch.close()
        assert not self.selector.get_map()
        self.selector.close()
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(start_watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(start_watch, "_LATEST_S", 0.1)
    host = Host()
    yield host
    host.close()


def lines_of(process: subprocess.Popen[bytes]) -> Callable[[], bytes]:
    assert process.stdout is not None
    return process.stdout.readline


def test_ranks_are_named_that_end(host: Host) -> None:
    ranks = [host.start(rank, "sleep", "1000", size=2) for rank in (4, 5)]
    host.watch_until(lambda: host.watch.sleep_s is None)
    assert len(host.selector.get_map()) == 2
    ranks[1].kill()
    host.watch_until(lambda: host.ended == [5])
    assert host.missed == []


def test_a_shell_and_what_takes_its_place_are_one_rank(host: Host) -> None:
    rank = host.start(0, "sh", "-c", "echo shell; sleep 0.2; exec sleep 1000")
    host.watch_until(lambda: host.watch.sleep_s is None)
    assert lines_of(rank)() == b"shell\n"
    host.watch_until(lambda: Path(f"/proc/{rank.pid}/comm").read_text() == "sleep\n")
    for _ in range(20):
        host.turn()
    assert host.ended == []
    rank.kill()
    host.watch_until(lambda: host.ended == [0])


def test_what_a_rank_starts_is_no_rank(host: Host) -> None:
    """Neither its children nor a job of its own, whose ranks have other numbers."""
    own_job = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=7 sh -c 'echo inner; sleep 0.1'"
    rank = host.start(0, "sh", "-c", f"{own_job}; echo over; sleep 1000")
    next_line = lines_of(rank)
    assert next_line() == b"inner\n"
    host.watch_until(lambda: host.watch.sleep_s is None)
    assert [key.data for key in host.selector.get_map().values()] == [0]
    assert next_line() == b"over\n"
    host.turn()
    assert host.ended == []


@pytest.mark.parametrize(("size", "missed"), [(2, 0), (3, UNSEEN)], ids=["of one host", "of several"])
def test_one_that_is_never_seen_is_missed_after_a_while(size: int, missed: int, host: Host) -> None:
    host.start(1, "sleep", "1000", size=size, local_size=2)
    host.watch_until(lambda: bool(host.missed))
    assert host.missed == [missed] and host.watch.sleep_s is None and host.ended == []


def test_processes_of_other_starts_are_none(host: Host) -> None:
    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "HVDLITE_TEST_WATCH": "another"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environ, stdin=subprocess.PIPE) as other:
        for _ in range(5):
            host.turn()
        assert not host.selector.get_map() and host.watch.sleep_s is not None
        other.communicate(b"\n")


def test_without_marks_nobody_is_looked_for() -> None:
    with selectors.DefaultSelector() as selector:
        watch = StartWatch({}, 0, selector)
        assert watch.sleep_s is None and watch.missed() is None
