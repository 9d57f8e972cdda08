"""Stations that measure one another on this machine's loopback, and what answers in their place."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from hvdlite.config import DOCTOR
from hvdlite.doctor import before_mpi
from hvdlite.doctor.links import Address, Door, Try, mtu_of
from hvdlite.doctor.network import ask_for_door, measure, try_addresses
from hvdlite.doctor.station import Station, new_token

LOOPBACK = Address("lo", "127.0.0.1", 1500)  # the kernel's is larger than what a datagram takes


@pytest.fixture
def station() -> Iterator[Station]:
    with closing(Station("here", [LOOPBACK])) as opened:
        yield opened


def test_all_figures(station: Station) -> None:
    link = measure(0, 1, station.door, station.door)
    assert link.tries == [Try("lo", "127.0.0.1", "ok")] and link.interfaces == ("lo", "lo")
    assert link.latency_us is not None and link.latency_us > 0
    assert link.gbit_per_s is not None and link.gbit_per_s > 0
    assert link.clock_offset_s is not None and abs(link.clock_offset_s) < 1
    assert (link.mtu, link.frame_bytes, link.is_stalled) == (1500, 1500, False)


def test_every_address_gets_its_outcome(station: Station) -> None:
    with closing(socket.create_server(("127.0.0.2", 0))) as stranger:
        port = stranger.getsockname()[1]
        answers = threading.Thread(target=lambda: stranger.accept()[0].close(), daemon=True)
        answers.start()
        wrong = Door("here", [Address("dummy", "127.0.0.2", 1500)], port, station.door.udp_port, station.door.token)
        assert try_addresses(0, 1, station.door, wrong).tries == [Try("dummy", "127.0.0.2", "another program answers")]
        answers.join()
    refused = Door("here", [LOOPBACK], port, station.door.udp_port, station.door.token)
    link = measure(0, 1, station.door, refused)
    assert link.tries == [Try("lo", "127.0.0.1", "refused")] and link.interfaces is None


def test_who_does_not_know_the_token_hears_nothing(station: Station) -> None:
    with socket.create_connection(("127.0.0.1", station.door.tcp_port), timeout=5) as link:
        link.sendall(bytes(16))
        assert link.recv(1) == b""


def test_a_door_is_told_by_name(station: Station) -> None:
    until_s = time.monotonic() + 5
    door = station.door
    assert ask_for_door("localhost", door.tcp_port, door.token, until_s) == door
    assert ask_for_door("localhost", door.tcp_port, new_token(), until_s) == "another program answers"
    unknown = ask_for_door("no-such-host.invalid", door.tcp_port, door.token, until_s)
    assert isinstance(unknown, str) and "its name is not known here" in unknown


def test_hosts_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host that is two: each rank finds the station of the first, and only that one looks."""
    ((name, value),) = before_mpi.invitation(["localhost"]).items()
    assert name == DOCTOR
    monkeypatch.setenv(name, value)
    assert before_mpi.look_around([LOOPBACK]) == []
    monkeypatch.delenv(name)
    assert before_mpi.look_around([LOOPBACK]) == []


def test_mtu() -> None:
    assert mtu_of("lo") >= 1500
    assert mtu_of("none") == 0
