"""Before MPI starts, which may hang where the network is not as it should be: whether hosts reach one another.

hvdliterun tells all ranks a port and the names of the hosts. The first rank of each host opens a station there, and
tries those of the others, and all their addresses. Whoever finds an obstacle says so and ends, and so the job.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from hvdlite.config import DOCTOR, other_variable
from hvdlite.doctor.findings import Finding, Severity, of_links
from hvdlite.doctor.links import Address, Door, Link, Try
from hvdlite.doctor.network import ask_for_door, try_addresses
from hvdlite.doctor.station import Station
from hvdlite.links.proof import new_key

_FIRST_PORT, _PORTS = 32768, 28232  # of those that programs get from the kernel
_START_S = 20.0  # for the ranks of other hosts, which may be busy
_WAIT_S = 8.0  # for what they have to say, once there are some
_AFTER_YOU_S = 2.0  # the first host speaks for all, and ends the job, if it has found something
_ENOUGH = 3  # findings


def invitation(hosts: Sequence[str]) -> dict[str, str]:
    """The variable that tells ranks of it."""
    port = _FIRST_PORT + secrets.randbelow(_PORTS)
    return {DOCTOR: f"{port} {new_key().hex()} {' '.join(hosts)}"}


def look_around(addresses: Sequence[Address]) -> list[Finding]:
    """What stands in the way of MPI, as the first rank of a host finds it; nothing on others.

    Args:
        addresses: of this host.
    """
    told = other_variable(DOCTOR).split()
    if not told:
        return []
    port, key, names = int(told[0]), bytes.fromhex(told[1]), told[2:]
    if not _is_first(key):
        return []
    try:
        station = Station(socket.gethostname(), addresses, port, key)
    except OSError as error:
        return [_of_port(port, error)]
    with closing(station):
        deadline_s = time.monotonic() + _START_S
        doors = _doors_of(names, port, key, deadline_s)
        names = list(doors)
        own, links = _try_all(station, doors, port, deadline_s)
        found = [finding for finding in of_links(names, links) if finding.is_problem][:_ENOUGH]
        if found:
            time.sleep(_AFTER_YOU_S if own else 0.0)
        else:
            # In MPI_Init this process would not answer those that have more to try.
            station.say_farewell(names, port)
            came = station.wait_for_farewells(len(names), _WAIT_S)
            if came < len(names):  # MPI would wait for those that have found something, and end, or are stuck
                found = [_of_silence(station.door.host, len(names) - came, len(names))]
        return found


def _is_first(key: bytes) -> bool:
    """Whether no other rank of this host has come before, not even one that has closed its station since."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0hvdlite-doctor-{hashlib.sha256(key).hexdigest()}")
    except OSError:
        mark.close()
        return False
    mark.detach()  # it stays until this process ends
    return True


def _doors_of(names: Sequence[str], port: int, key: bytes, deadline_s: float) -> dict[str, Door | str]:
    """That of the station on each host, or why there is none; by the first of the names that lead to a station."""
    doors: dict[str, Door | str] = {}
    for name in names:
        door = ask_for_door(name, port, key, deadline_s)
        if isinstance(door, str) or door not in doors.values():
            doors[name] = door
    return doors


def _try_all(station: Station, doors: Mapping[str, Door | str], port: int, deadline_s: float) -> tuple[int, list[Link]]:
    """(place of this host, its links to the others)."""
    links: list[Link] = []
    own = next((place for place, door in enumerate(doors.values()) if door == station.door), 0)
    for place, (name, door) in enumerate(doors.items()):
        if isinstance(door, str):
            links.append(Link(own, place, [Try(f"port {port}", name, door)]))
        elif place != own and time.monotonic() < deadline_s:
            links.append(try_addresses(own, place, station.door, door))
    return own, links


def _of_port(port: int, error: OSError) -> Finding:
    return Finding(
        f"{socket.gethostname()} cannot listen at port {port}, which was chosen by chance ({error.strerror}): another "
        "program has it. Try again",
        Severity.OBSTACLE,
    )


def _of_silence(host: str, missing: int, hosts: int) -> Finding:
    return Finding(
        f"{host} reaches all hosts, and {missing} of {hosts} did not say so of themselves within {_WAIT_S:.0f} s: they "
        "say what they have found; else a firewall drops what they send (`nft list ruleset`, `iptables -S`)",
        Severity.OBSTACLE,
    )
