"""What speaks against an mpirun that has not started a rank, as far as this machine can tell."""

from __future__ import annotations

import selectors
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from hvdlite.cli import launcher_watch
from hvdlite.cli.job import Host
from hvdlite.cli.launcher_watch import OUTLIVES_S, Expected, LauncherWatch

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
