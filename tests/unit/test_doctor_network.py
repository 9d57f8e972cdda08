"""Stations that measure one another on this machine's loopback, and what answers in their place."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import pytest

import hvdlite.doctor.station
from hvdlite.config import DOCTOR
from hvdlite.doctor import before_mpi
from hvdlite.doctor.links import NOBODY, Address, Door, Try, mtu_of
from hvdlite.doctor.network import ask_for_door, measure, try_addresses
from hvdlite.doctor.station import Station, answer_to, datagram, secret
from hvdlite.links import reception
from hvdlite.links.proof import Caller, new_key, prove

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


def test_a_clock_that_is_ahead_and_large_frames_that_are_lost(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + 100, monotonic=time.monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(hvdlite.doctor.station, "time", clock)
    monkeypatch.setattr(
        hvdlite.doctor.station,
        "answer_to",
        lambda key, nonce, nbytes: answer_to(key, nonce, nbytes if nbytes + 28 <= 1420 else 0),
    )
    link = measure(0, 1, station.door, station.door)
    assert link.clock_offset_s is not None and 99 < link.clock_offset_s < 101
    assert (link.mtu, link.frame_bytes, link.is_stalled) == (1500, 1400, False)


def test_each_interface_is_measured_once() -> None:
    addresses = [LOOPBACK, Address("other", "127.0.0.2", 1500), Address("other", "127.0.0.3", 1500)]
    with closing(Station("here", addresses)) as station:
        link = measure(0, 1, station.door, station.door)
    assert link.interfaces is not None and link.gbit_per_s is not None
    assert {link.interfaces[1], *link.others_gbit_per_s} == {"lo", "other"} and len(link.others_gbit_per_s) == 1
    assert all(rate > 0 for rate in link.others_gbit_per_s.values())


def test_every_address_gets_its_outcome(station: Station) -> None:
    with closing(socket.create_server(("127.0.0.2", 0))) as stranger:
        port = stranger.getsockname()[1]
        answers = threading.Thread(target=lambda: stranger.accept()[0].close(), daemon=True)
        answers.start()
        wrong = Door("here", [Address("dummy", "127.0.0.2", 1500)], [port], [0], station.door.key)
        assert try_addresses(0, 1, station.door, wrong).tries == [Try("dummy", "127.0.0.2", "another program answers")]
        answers.join()
    refused = Door("here", [LOOPBACK], [port], [0], station.door.key)
    link = measure(0, 1, station.door, refused)
    assert link.tries == [Try("lo", "127.0.0.1", "refused")] and link.interfaces is None


def connected(station: Station) -> socket.socket:
    return socket.create_connection(("127.0.0.1", station.door.tcp_ports[0]), timeout=5)


def is_hung_up(link: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while link.recv(64):
            pass
    return True


def test_who_does_not_know_the_key_hears_nothing_of_use(station: Station) -> None:
    """Neither who guesses, nor who has recorded a conversation; the key is in none."""
    with connected(station) as link:
        caller = Caller(secret(station.door.key), link, b"")
        link.sendall(caller.hello)
        challenge = link.recv(Caller.answer_bytes, socket.MSG_WAITALL)
        recorded = caller.hello, caller.answer(challenge)
    assert station.door.key not in b"".join((*recorded, challenge))
    for said in (bytes(16 + 32), b"".join(recorded)):
        with connected(station) as link:
            link.sendall(said + b"d")
            assert len(link.recv(Caller.answer_bytes, socket.MSG_WAITALL)) == Caller.answer_bytes
            assert is_hung_up(link)
    with connected(station) as link, pytest.raises(ConnectionError):
        prove(secret(new_key()), link, b"")


def test_strangers_who_say_nothing_cost_no_thread_and_hold_nobody_up(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MOST_UNPROVEN", 20)
    threads = threading.active_count()
    with ExitStack() as strangers:
        links = [strangers.enter_context(connected(station)) for _ in range(60)]
        assert measure(0, 1, station.door, station.door).latency_us is not None
        assert threading.active_count() <= threads + 1  # for the one that has measured
        assert all(map(is_hung_up, links[:30]))


def test_a_station_is_at_the_addresses_of_its_interfaces_only(station: Station) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", station.door.tcp_ports[0]), timeout=5)


def test_datagrams_without_proof_get_no_answer(station: Station) -> None:
    """None that is longer than they are, which would serve who names another one as their sender."""
    key, nonce = station.door.key, bytes(8)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.settimeout(5)
        link.connect(("127.0.0.1", station.door.udp_ports[0]))
        for wrong in (b"", bytes(36), datagram(new_key(), nonce, 36).ljust(36), datagram(key, nonce, 40).ljust(36)):
            link.send(wrong)
        link.send(datagram(key, nonce, 36).ljust(36, b"\0"))
        answer = link.recv(1 << 16)
        assert answer == answer_to(key, nonce, 36) and len(answer) < 36


def test_a_door_is_told_by_name() -> None:
    """By whichever address of this host the name leads to."""
    until_s = time.monotonic() + 5
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    with closing(Station("here", [LOOPBACK], port)) as station:
        door = station.door
        for name in ("localhost", "127.0.0.2"):
            assert ask_for_door(name, port, door.key, until_s) == door
        assert ask_for_door("localhost", port, new_key(), until_s) == "another program answers"
        unknown = ask_for_door("no-such-host.invalid", port, door.key, until_s)
    assert isinstance(unknown, str) and "its name is not known here" in unknown


def test_hosts_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that comes when those of other hosts have gone looks for nobody."""
    ((name, value),) = before_mpi.invitation(["localhost"]).items()
    assert name == DOCTOR
    monkeypatch.setenv(name, value)
    assert before_mpi.look_around([LOOPBACK]) == []
    monkeypatch.setenv(name, f"{value} no-such-host.invalid")
    assert before_mpi.look_around([LOOPBACK]) == []
    monkeypatch.delenv(name)
    assert before_mpi.look_around([LOOPBACK]) == []


def test_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, value),) = before_mpi.invitation(["localhost", "elsewhere"]).items()
    monkeypatch.setenv(name, value)
    port = int(value.split()[0])
    with socket.create_server(("", port)):
        (finding,) = before_mpi.look_around([LOOPBACK])
    assert f"cannot listen at port {port}" in finding.text and "another program has it" in finding.text, finding.text


def test_a_host_where_no_rank_has_started_is_named_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(name: str, port: int, key: bytes, deadline_s: float) -> Door | str:
        if name == "localhost":
            return ask_for_door(name, port, key, deadline_s)
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        return NOBODY

    monkeypatch.setattr(before_mpi, "ask_for_door", ask)
    monkeypatch.setattr(before_mpi, "_START_S", 0.3)
    monkeypatch.setattr(before_mpi, "_AFTER_YOU_S", 0.0)
    ((name, value),) = before_mpi.invitation(["localhost", "elsewhere"]).items()
    monkeypatch.setenv(name, value)
    (finding,) = before_mpi.look_around([LOOPBACK])
    assert finding.text.startswith("localhost cannot reach elsewhere: elsewhere (port "), finding.text
    assert "no rank has started there" in finding.text and "allow all TCP ports between them" in finding.text


def test_mpi_does_not_start_where_another_host_is_not_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has found what this one cannot see, as a firewall of this host's, and waits in no MPI_Init."""
    monkeypatch.setattr(Station, "say_farewell", lambda self, names, port: None)
    monkeypatch.setattr(before_mpi, "_WAIT_S", 1.0)
    ((name, value),) = before_mpi.invitation(["localhost"]).items()
    monkeypatch.setenv(name, value)
    (finding,) = before_mpi.look_around([LOOPBACK])
    assert "reaches all hosts, and 1 of 1 did not say so of themselves within 1 s" in finding.text, finding.text


def test_a_host_with_two_names_says_farewell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sequence[str]] = []
    say = Station.say_farewell

    def note(station: Station, names: Sequence[str], port: int) -> None:
        told.append(names)
        say(station, names, port)

    monkeypatch.setattr(Station, "say_farewell", note)
    ((name, value),) = before_mpi.invitation(["localhost", "127.0.0.2"]).items()
    monkeypatch.setenv(name, value)
    assert before_mpi.look_around([LOOPBACK]) == []
    assert told == [["localhost"]]


def test_mtu() -> None:
    assert mtu_of("lo") >= 1500
    assert mtu_of("none") == 0
