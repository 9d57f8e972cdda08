"""What speaks against an mpirun that has not started a rank, as far as this machine can tell."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvdlite.cli import launcher_watch, rank_words
from hvdlite.cli.job import Host
from hvdlite.cli.launcher_watch import OUTLIVES_S, Expected, LauncherWatch
from hvdlite.cli.rank_words import RankWords
from hvdlite.links.connections import Connection
from hvdlite.processes import is_stopped
from hvdlite.recovery.keeper import Word
from keeper_lab import wait_for

UNKNOWN = "\n  typo: this name is not known here; check it, /etc/hosts and DNS"


@pytest.fixture
def launcher() -> Iterator[int]:
    """The process of one that starts nothing."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def resolve(name: str, *_: Any, **__: Any) -> list[Any]:
    """Knows all names but one, whatever DNS says of it where the test runs; and none with a user."""
    if name == "typo" or "@" in name:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    address = "127.0.1.1" if name == "here" else "192.0.2.1"
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]


@pytest.mark.parametrize(
    "names", [("localhost", "typo"), ("typo", "known"), ("me@localhost", "me@typo"), ("127.0.0.2", "here", "typo")]
)
def test_a_name_that_is_not_known_here(names: tuple[str, ...], launcher: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_watch.socket, "getaddrinfo", resolve)
    began_s = time.monotonic()
    monkeypatch.setattr(launcher_watch.time, "monotonic", lambda: began_s)  # a look may take long on a busy machine
    with selectors.DefaultSelector() as selector:
        watch = LauncherWatch(launcher, Expected(tuple(Host(name, 1) for name in names), False, 20.0), selector)
        assert watch.look() is None and watch.suspicion == ""  # it is early
        watch._began_s -= OUTLIVES_S
        assert watch.look() is None  # it may still give up by itself
        assert watch.suspicion.startswith("no rank has started here within 3 s ") and UNKNOWN in watch.suspicion
        watch._began_s -= 20.0
        why = watch.look()
        assert why is not None and why.startswith("no rank has started here within 23 s "), why
        assert why.count(UNKNOWN) == 1 and why.count("\n") == 1 + ("known" in names), why
        watch.close()


@pytest.mark.parametrize(("status", "is_said"), [(255, True), (3, False)])
def test_a_launcher_that_ends_at_once_as_a_name_is_not_known(
    status: int, is_said: bool, launcher: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_watch.socket, "getaddrinfo", resolve)
    with selectors.DefaultSelector() as selector:
        watch = LauncherWatch(launcher, Expected((Host("known", 1), Host("typo", 1)), False, 20.0), selector)
        why = watch.explain_end(status)
        assert why == ("no rank has started; what is wrong, as seen from here:" + UNKNOWN if is_said else "")
        watch.close()


def test_a_name_that_only_ssh_knows_is_no_evidence_once_its_daemon_has_called(
    launcher: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from ~/.ssh/config: all ranks work there, and this machine hears nothing of them."""
    monkeypatch.setattr(launcher_watch.socket, "getaddrinfo", resolve)
    links: list[Connection] = []
    monkeypatch.setattr(LauncherWatch, "_links", lambda self: links)
    with selectors.DefaultSelector() as selector:
        watch = LauncherWatch(launcher, Expected((Host("typo", 2),), False, 20.0), selector)
        watch._began_s -= 100.0
        links.append(Connection("192.0.2.7", 22, 1, 0, 0))  # the ssh itself
        assert "typo: this name is not known" in (watch.look() or "")
        links.append(Connection("192.0.2.7", 40_000, 1, 0, 0))
        assert watch.look() is None and watch.suspicion == "" and watch.explain_end(255) == ""
        watch._ended_s = watch._began_s  # there was one here, too
        assert watch.look() is None and watch.look() is None
        watch.close()


def test_hosts_are_asked_once_where_ranks_become_late_meanwhile(launcher: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer takes seconds to ask, and a job that begins anew waits for it."""
    words = RankWords(1, 0.0, 0.0)
    asked: list[str] = []

    def be_silent(name: str, port: int) -> bool:
        asked.append(name)
        words.hear(Word.FAILED, 1)
        monkeypatch.setattr(rank_words.time, "monotonic", lambda: math.inf)
        return False

    monkeypatch.setattr(launcher_watch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(launcher_watch, "_answers", be_silent)
    with selectors.DefaultSelector() as selector:
        watch = LauncherWatch(launcher, Expected((Host("known", 1),), False, 20.0, words=words), selector)
        watch._have_called.add("known")
        watch._ended_s = watch._began_s - OUTLIVES_S
        why = watch.look() or ""
        assert "have not ended, though all were to; " in why and "known does not answer at port 22 any more" in why
        assert asked == ["known"]
        watch.close()


RANKS = """
import os, subprocess, sys
marks = {"MPI_LOCALNRANKS": "3", "PMI_SIZE": "5"}  # two are on another host
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
ranks = [subprocess.Popen("cat", env={**marks, "PMI_RANK": str(rank)}, **pipes) for rank in range(int(sys.argv[1]))]
for rank in ranks:  # whose environment is to be seen, which it is not yet when Popen returns
    rank.stdin.write(b"\\n")
    rank.stdout.readline()
print("started", flush=True)
for line in sys.stdin:
    for rank in map(int, line.split()):
        ranks[rank].kill()
    print("killed", flush=True)
"""


@pytest.mark.parametrize(
    ("seen", "ends", "first"),
    [(3, ["2", "0 1"], 2), (3, ["0 2", "1"], None), (2, ["1", "0"], None)],
    ids=["one after the other", "several at one time", "not all are here"],
)
def test_the_rank_that_ends_first(seen: int, ends: list[str], first: int | None) -> None:
    """Of all here, if it is seen alone."""
    command = [sys.executable, "-c", RANKS, str(seen)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None
        assert launcher.stdout.readline() == "started\n"
        with selectors.DefaultSelector() as selector:
            watch = LauncherWatch(launcher.pid, Expected((), True, 20.0), selector)
            assert watch.look() is None and watch.first_end is None
            for ranks in ends:
                launcher.stdin.write(f"{ranks}\n")
                launcher.stdin.flush()
                assert launcher.stdout.readline() == "killed\n"
                while len(keys := selector.select()) < len(ranks.split()):
                    pass
                watch.ranks_ended([key for key, _ in keys])
            assert watch.first_end == first
            watch.close()
        launcher.stdin.close()


def test_ranks_that_are_late_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they do: who has still to save something needs more time, not SIGCONT."""
    words = RankWords(1, 0.0, 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", RANKS, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None
        assert launcher.stdout.readline() == "started\n"
        with selectors.DefaultSelector() as selector:
            watch = LauncherWatch(launcher.pid, Expected((), True, 20.0, words=words), selector)
            assert watch.look() is None
            pids = {rank.rank: pid for pid, rank in watch._running.items() if rank is not None}
            os.kill(pids[1], signal.SIGSTOP)
            wait_for(lambda: is_stopped(pids[1]))
            words.hear(Word.FAILED, 1)
            monkeypatch.setattr(rank_words.time, "monotonic", lambda: math.inf)
            said = watch.look()
            assert said is not None and said.startswith("some ranks have not ended, though all were to: "), said
            ranks = {f"rank 0 (pid {pids[0]}) still runs", f"rank 1 (pid {pids[1]}) is stopped"}
            assert set(said.partition(": ")[2].split(", ")) == ranks
            watch.close()
        print("0 1", file=launcher.stdin, flush=True)
        assert launcher.stdout.readline() == "killed\n"
        launcher.stdin.close()
