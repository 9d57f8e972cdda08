"""The way from one host to another, measured over sockets of our own: who answers, how fast, how large frames may be.

Every host has a `Station`, which answers. Pairs of hosts measure one direction at a time, so that no two measurements
share a link. Nothing here uses MPI, whose messages may go another way, or nowhere.
"""

from __future__ import annotations

import errno
import math
import secrets
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hvdlite.doctor.links import NOBODY, Address, Door, Link, Try
from hvdlite.doctor.station import (
    ARRIVED,
    ASK,
    CLOCK,
    CONNECT_S,
    NONCE_BYTES,
    PING,
    SILENCE_S,
    STREAM,
    answer_to,
    datagram,
    receive_door,
    secret,
)
from hvdlite.links.proof import prove
from hvdlite.links.wire import read_exactly

_ANSWER_S = 4.0  # of a program, on a host whose kernel has answered: it may be busy
_RETRY_S = 0.1
_PINGS = 30
_STREAM_S = 0.15
_CHUNK = bytes(64 << 10)
_FRAME_S = 0.1
_FRAME_TRIES = 3
_FRAMES = (9000, 8000, 4000, 1500, 1450, 1400, 1280, 576)  # of Ethernet, tunnels, and what every host takes
_HEADERS = 28  # of IPv4 and UDP
_MOST_ROUNDS = 11  # beyond 12 hosts not every pair is measured
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: frames are never split, whatever the kernel has heard


def ask_for_door(name: str, port: int, key: bytes, deadline_s: float) -> Door | str:
    """That of the station on host ``name``, for which is waited; else why there is none."""
    while True:  # once at least, whatever others have taken
        try:
            with socket.create_connection((name, port), timeout=CONNECT_S) as link:
                prove(secret(key), link, b"")
                link.sendall(ASK)
                return receive_door(link, key)
        except TimeoutError:
            return "no answer"
        except socket.gaierror as error:
            return f"its name is not known here ({error.strerror})"
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                return NOBODY
        except ConnectionError:
            return "another program answers"
        except OSError as error:
            return _reason(error.errno or 0)
        time.sleep(_RETRY_S)  # its ranks may not have started yet


def try_addresses(source: int, target: int, own: Door, door: Door) -> Link:
    """`measure` without figures: which addresses answer, and how large frames may be."""
    link = Link(source, target)
    connection, link.tries = _connect(door)
    if connection is not None:
        with connection:
            _look_at_frames(link, connection, own, door)
    return link


def measure(source: int, target: int, own: Door, door: Door) -> Link:
    """The way from this host, ``source``, to the station behind ``door``: half a second, or some where it is broken.

    Where the hosts have several interfaces each takes 0.15 s more.
    """
    link = Link(source, target)
    connection, link.tries = _connect(door)
    if connection is None:
        return link
    with connection:
        try:
            link.latency_us, link.clock_offset_s = _pinged(connection)
            _look_at_frames(link, connection, own, door)
            link.gbit_per_s = _streamed(connection)
        except OSError:
            link.is_stalled = link.latency_us is not None
    link.others_gbit_per_s = _others_streamed(link, door)
    return link


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of nodes, each node once in a round, by the circle method: all pairs, or, of many nodes, some of each."""
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    found = []
    for _ in range(min(len(seats) - 1, _MOST_ROUNDS)):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def in_both_directions(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """``pairs``, of which no two have a node in common, and the same reversed."""
    return [list(pairs), [(b, a) for a, b in pairs]]


def measure_round(
    pairs: Sequence[tuple[int, int]],
    node: int | None,
    doors: Sequence[Door],
    allgather: Callable[[Link | None], list[Link | None]],
) -> list[Link]:
    """The links of ``pairs``, of which no two have a node in common. Collective: who leads no node measures nothing.

    Args:
        node: that this rank leads; None: none.
        allgather: over all ranks.
    """
    target = next((target for source, target in pairs if source == node), None)
    link = None if node is None or target is None else measure(node, target, doors[node], doors[target])
    return [found for found in allgather(link) if found is not None]


def _look_at_frames(link: Link, connection: socket.socket, own: Door, door: Door) -> None:
    near = _interface_with(own.addresses, connection.getsockname()[0])
    far = _interface_with(door.addresses, connection.getpeername()[0])
    link.interfaces = near.interface, far.interface
    if near.mtu and far.mtu:
        link.mtu = min(near.mtu, far.mtu)
        link.frame_bytes = _largest_frame(far, door, link.mtu)


def _connect(door: Door) -> tuple[socket.socket | None, list[Try]]:
    """The first connection behind which the station is, and what came of each of its addresses."""
    outcomes: dict[Address, str] = {}
    kept: socket.socket | None = None
    deadline_s = time.monotonic() + CONNECT_S
    with selectors.DefaultSelector() as selector:
        for address, port in zip(door.addresses, door.tcp_ports, strict=True):
            family = socket.AF_INET6 if ":" in address.address else socket.AF_INET
            link = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            error = link.connect_ex((address.address, port))
            if error in (0, errno.EINPROGRESS):
                selector.register(link, selectors.EVENT_WRITE, address)
            else:
                outcomes[address] = _reason(error)
                link.close()
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                link = key.fileobj  # type: ignore[assignment]
                selector.unregister(link)
                outcomes[key.data] = _proven(link, door.key)
                if outcomes[key.data] == "ok" and kept is None:
                    kept = link
                else:
                    link.close()
        for key in list(selector.get_map().values()):
            outcomes[key.data] = "no answer"
            key.fileobj.close()  # type: ignore[union-attr]
    return kept, [Try(a.interface, a.address, outcomes[a]) for a in door.addresses]


def _proven(link: socket.socket, key: bytes) -> str:
    """ "ok" if the station is behind ``link``, which then waits for answers; else why not."""
    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        return _reason(error)
    link.settimeout(_ANSWER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        prove(secret(key), link, b"")
        return "ok"
    except TimeoutError:
        return "no answer"
    except OSError:
        return "another program answers"


def _reason(error: int) -> str:
    reasons = {
        errno.ECONNREFUSED: "refused",
        errno.EHOSTUNREACH: "no route",
        errno.ENETUNREACH: "no route",
        errno.EINVAL: "no route",  # what a blackhole is
        errno.ETIMEDOUT: "no answer",
    }
    return reasons.get(error, errno.errorcode.get(error, str(error)))


def _pinged(link: socket.socket) -> tuple[float, float]:
    """(half of a round trip in us, how far the other clock is ahead in s)."""
    trips = []
    for _ in range(_PINGS):
        start, wall = time.perf_counter(), time.time()
        link.sendall(PING)
        (theirs,) = CLOCK.unpack(read_exactly(link, CLOCK.size))
        trip_s = time.perf_counter() - start
        if not math.isfinite(theirs):
            raise ConnectionError(f"{theirs} is no time")
        trips.append((trip_s, theirs - wall - trip_s / 2))
    return statistics.median(trip for trip, _ in trips) / 2 * 1e6, min(trips)[1]


def _streamed(link: socket.socket) -> float:
    """Gbit per second, as they arrive."""
    link.sendall(STREAM)
    sent, until_s = 0, time.perf_counter() + _STREAM_S
    while time.perf_counter() < until_s:
        link.sendall(_CHUNK)
        sent += len(_CHUNK)
    link.shutdown(socket.SHUT_WR)
    link.settimeout(SILENCE_S)
    nbytes, seconds = ARRIVED.unpack(read_exactly(link, ARRIVED.size))
    if nbytes > sent or not 0 <= seconds < math.inf:
        raise ConnectionError(f"{nbytes} bytes of {sent} in {seconds} s")
    return float(nbytes * 8 / max(seconds, 1e-9) / 1e9)


def _others_streamed(link: Link, door: Door) -> dict[str, float]:
    """`Link.others_gbit_per_s`, one address of each interface; those that lead nowhere are among `Link.tries`."""
    rates: dict[str, float] = {}
    for address, port, tried in zip(door.addresses, door.tcp_ports, link.tries, strict=True):
        if tried.outcome != "ok" or address.interface in rates or address.interface in (link.interfaces or ()):
            continue
        connection, _ = _connect(replace(door, addresses=[address], tcp_ports=[port]))
        if connection is not None:
            with connection, suppress(OSError):
                rates[address.interface] = _streamed(connection)
    return rates


def _largest_frame(address: Address, door: Door, mtu: int) -> int | None:
    """The largest frame up to ``mtu`` that arrives; None where not even small datagrams do, or there are none."""
    port = door.udp_ports[door.addresses.index(address)]
    if not port:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        probe.settimeout(_FRAME_S)
        probe.connect((address.address, port))
        if not _arrives(probe, door.key, 64):
            return None
        sizes = [min(mtu, 65_535), *(size for size in _FRAMES if size < mtu)]
        return next((size for size in sizes if _arrives(probe, door.key, size)), 64)


def _arrives(probe: socket.socket, key: bytes, frame_bytes: int) -> bool:
    nbytes = frame_bytes - _HEADERS
    for _ in range(_FRAME_TRIES):
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            probe.send(datagram(key, nonce, nbytes).ljust(nbytes, b"\0"))
            while (answer := probe.recv(64)) != answer_to(key, nonce, nbytes):
                if not answer:
                    return False
            return True
        except TimeoutError:
            continue
        except OSError:  # longer than the interface takes, or refused
            return False
    return False


def _interface_with(addresses: Sequence[Address], address: str) -> Address:
    return next((known for known in addresses if known.address == address), Address(address, address, 0))
