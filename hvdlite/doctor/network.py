"""The way from one host to another, measured over sockets of our own: who answers, how fast, how large frames may be.

Every host has a `Station`, which answers. Pairs of hosts measure one direction at a time, so that no two measurements
share a link. Nothing here uses MPI, whose messages may go another way, or nowhere.
"""

from __future__ import annotations

import errno
import fcntl
import json
import secrets
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field

_TOKEN_BYTES = 16
_CONNECT_S = 1.0  # until an address counts as silent
_ANSWER_S = 1.0
_RETRY_S = 0.1
_PINGS = 30
_STREAM_S = 0.15
_CHUNK = bytes(64 << 10)
_DRAIN_S = 1.0  # how much of a stream is waited for, on a slow link
_SILENCE_S = 2.0  # of the other end, until it counts as broken
_FRAME_S = 0.1
_FRAME_TRIES = 3
_FRAMES = (9000, 8000, 4000, 1500, 1450, 1400, 1280, 576)  # of Ethernet, tunnels, and what every host takes
_HEADERS = 28  # of IPv4 and UDP
_MOST_ROUNDS = 11  # beyond 12 hosts not every pair is measured
_SIOCGIFMTU = 0x8921  # linux/sockios.h
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: frames are never split, whatever the kernel has heard
_PING, _STREAM, _ASK, _FAREWELL = b"p", b"s", b"d", b"f"
_LENGTH = struct.Struct("<I")
_CLOCK = struct.Struct("<d")
_ARRIVED = struct.Struct("<Qd")


@dataclass(frozen=True)
class Address:
    """Of an interface that ranks may use."""

    interface: str
    address: str
    mtu: int


@dataclass(frozen=True)
class Door:
    """Where a `Station` can be reached."""

    host: str
    addresses: list[Address]
    tcp_port: int
    udp_port: int
    token: bytes


@dataclass(frozen=True)
class Try:
    """To reach one address of the other host."""

    interface: str
    address: str
    outcome: str  # "ok", or why not


@dataclass
class Link:
    """From one node to another; what could not be measured is None.

    Attributes:
        source, target: places of the nodes.
        interfaces: that connect them, of the source and of the target.
        clock_offset_s: of the target's clock.
        mtu: of the two interfaces, the smaller.
        frame_bytes: the largest frame that arrived, of those that were tried.
        is_stalled: a stream of full frames does not arrive, though single bytes do.
    """

    source: int
    target: int
    tries: list[Try] = field(default_factory=list)
    interfaces: tuple[str, str] | None = None
    latency_us: float | None = None
    gbit_per_s: float | None = None
    clock_offset_s: float | None = None
    mtu: int | None = None
    frame_bytes: int | None = None
    is_stalled: bool = False


def mtu_of(interface: str) -> int:
    """The largest packet that it sends; 0 where it is gone."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as query:
        try:
            answer = fcntl.ioctl(query, _SIOCGIFMTU, struct.pack("16s16x", interface.encode()))
        except OSError:
            return 0
    return int(struct.unpack_from("i", answer, 16)[0])


class Station:
    """Answers the measurements of other hosts, on threads of its own, until it is closed.

    Args:
        addresses: of this host.
        port: at which it can be reached; 0: any.
        token: by which others prove that they know it; made up if empty.

    Raises:
        OSError: another program has the port.
    """

    def __init__(self, host: str, addresses: Sequence[Address], port: int = 0, token: bytes = b"") -> None:
        self._tcp = socket.create_server(("0.0.0.0", port), backlog=64)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("0.0.0.0", 0))
        ports = self._tcp.getsockname()[1], self._udp.getsockname()[1]
        self.door = Door(host, list(addresses), *ports, token or new_token())
        self._is_closing = threading.Event()
        self._farewells = threading.Semaphore(0)
        self._threads = [threading.Thread(target=serve, daemon=True) for serve in (self._accept, self._echo)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_closing.set()
        with suppress(OSError):
            self._tcp.shutdown(socket.SHUT_RDWR)  # which ends accept()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own, suppress(OSError):
            own.sendto(b"", ("127.0.0.1", self.door.udp_port))
        for thread in self._threads:
            thread.join()
        self._tcp.close()
        self._udp.close()

    def say_farewell(self, names: Sequence[str], port: int) -> None:
        """Tell the stations of all hosts, this one's too, that this host has nothing more to ask."""
        for name in names:
            with suppress(OSError), socket.create_connection((name, port), timeout=_CONNECT_S) as link:
                link.sendall(self.door.token)
                _received(link, _TOKEN_BYTES)
                link.sendall(_FAREWELL)

    def wait_for_farewells(self, count: int, timeout_s: float) -> None:
        """Answer until ``count`` hosts have nothing more to ask."""
        until_s = time.monotonic() + timeout_s
        for _ in range(count):
            self._farewells.acquire(timeout=max(0.0, until_s - time.monotonic()))

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                link, _ = self._tcp.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            link.settimeout(_SILENCE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(_received(link, _TOKEN_BYTES), self.door.token):
                return
            link.sendall(self.door.token[::-1])
            while (command := _received(link, 1)) == _PING:
                link.sendall(_CLOCK.pack(time.time()))
            if command == _FAREWELL:
                self._farewells.release()
            if command == _ASK:
                told = {name: value for name, value in asdict(self.door).items() if name != "token"}
                text = json.dumps(told).encode()
                link.sendall(_LENGTH.pack(len(text)) + text)
            if command == _STREAM:
                link.sendall(_ARRIVED.pack(*_drain(link)))

    def _echo(self) -> None:
        while not self._is_closing.is_set():
            data, sender = self._udp.recvfrom(1 << 16)
            if data.startswith(self.door.token):
                with suppress(OSError):
                    self._udp.sendto(self.door.token + struct.pack("<I", len(data)), sender)


def new_token() -> bytes:
    return secrets.token_bytes(_TOKEN_BYTES)


def ask_for_door(name: str, port: int, token: bytes, deadline_s: float) -> Door | str:
    """That of the station on host ``name``, for which is waited; else why there is none."""
    outcome = "no answer"
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((name, port), timeout=_CONNECT_S) as link:
                link.sendall(token)
                if _received(link, _TOKEN_BYTES) != token[::-1]:
                    return "another program answers"
                link.sendall(_ASK)
                (length,) = _LENGTH.unpack(_received(link, _LENGTH.size))
                told = json.loads(_received(link, length))
            addresses = [Address(**address) for address in told.pop("addresses")]
            door = Door(addresses=addresses, token=token, **told)
        except TimeoutError:
            return "no answer"
        except socket.gaierror as error:
            return f"its name is not known here ({error.strerror})"
        except ConnectionRefusedError:
            outcome = "refused"
        except ConnectionError:
            return "another program answers"
        except OSError as error:
            return _reason(error.errno or 0)
        else:
            return door
        time.sleep(_RETRY_S)  # its ranks may not have started yet
    return outcome


def try_addresses(source: int, target: int, own: Door, door: Door) -> Link:
    """`measure` without figures: which addresses answer, and how large frames may be."""
    link = Link(source, target)
    connection, link.tries = _connect(door)
    if connection is not None:
        with connection:
            _look_at_frames(link, connection, own, door)
    return link


def measure(source: int, target: int, own: Door, door: Door) -> Link:
    """The way from this host, ``source``, to the station behind ``door``: half a second, or some where it is broken."""
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


def _look_at_frames(link: Link, connection: socket.socket, own: Door, door: Door) -> None:
    near = _interface_with(own.addresses, connection.getsockname()[0])
    far = _interface_with(door.addresses, connection.getpeername()[0])
    link.interfaces = near.interface, far.interface
    if near.mtu and far.mtu:
        link.mtu = min(near.mtu, far.mtu)
        link.frame_bytes = _largest_frame(far.address, door, link.mtu)


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


def _connect(door: Door) -> tuple[socket.socket | None, list[Try]]:
    """The first connection behind which the station is, and what came of each of its addresses."""
    outcomes: dict[Address, str] = {}
    kept: socket.socket | None = None
    deadline_s = time.monotonic() + _CONNECT_S
    with selectors.DefaultSelector() as selector:
        for address in door.addresses:
            link = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            error = link.connect_ex((address.address, door.tcp_port))
            if error in (0, errno.EINPROGRESS):
                selector.register(link, selectors.EVENT_WRITE, address)
            else:
                outcomes[address] = _reason(error)
                link.close()
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                link = key.fileobj  # type: ignore[assignment]
                selector.unregister(link)
                outcomes[key.data] = _proven(link, door.token)
                if outcomes[key.data] == "ok" and kept is None:
                    kept = link
                else:
                    link.close()
        for key in list(selector.get_map().values()):
            outcomes[key.data] = "no answer"
            key.fileobj.close()  # type: ignore[union-attr]
    return kept, [Try(a.interface, a.address, outcomes[a]) for a in door.addresses]


def _proven(link: socket.socket, token: bytes) -> str:
    """ "ok" if the station is behind ``link``, which then waits for answers; else why not."""
    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        return _reason(error)
    link.settimeout(_ANSWER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        link.sendall(token)
        return "ok" if _received(link, _TOKEN_BYTES) == token[::-1] else "another program answers"
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
        link.sendall(_PING)
        (theirs,) = _CLOCK.unpack(_received(link, _CLOCK.size))
        trip_s = time.perf_counter() - start
        trips.append((trip_s, theirs - wall - trip_s / 2))
    return statistics.median(trip for trip, _ in trips) / 2 * 1e6, min(trips)[1]


def _streamed(link: socket.socket) -> float:
    """Gbit per second, as they arrive."""
    link.sendall(_STREAM)
    until_s = time.perf_counter() + _STREAM_S
    while time.perf_counter() < until_s:
        link.sendall(_CHUNK)
    link.shutdown(socket.SHUT_WR)
    link.settimeout(_SILENCE_S)
    nbytes, seconds = _ARRIVED.unpack(_received(link, _ARRIVED.size))
    return float(nbytes * 8 / max(seconds, 1e-9) / 1e9)


def _drain(link: socket.socket) -> tuple[int, float]:
    """(bytes after the first ones, seconds from these on), to the end of the stream, or as far as it comes in time."""
    buffer = bytearray(1 << 20)
    link.recv_into(buffer)
    start_s, elapsed_s, total = time.perf_counter(), 0.0, 0
    while elapsed_s < _DRAIN_S and (count := link.recv_into(buffer)):
        total += count
        elapsed_s = time.perf_counter() - start_s
    return total, elapsed_s


def _largest_frame(address: str, door: Door, mtu: int) -> int | None:
    """The largest frame up to ``mtu`` that arrives; None where not even small datagrams do."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        probe.settimeout(_FRAME_S)
        probe.connect((address, door.udp_port))
        if not _arrives(probe, door.token, 64):
            return None
        sizes = [min(mtu, 65_535), *(size for size in _FRAMES if size < mtu)]
        return next((size for size in sizes if _arrives(probe, door.token, size)), 64)


def _arrives(probe: socket.socket, token: bytes, frame_bytes: int) -> bool:
    payload = token.ljust(frame_bytes - _HEADERS, b"\0")
    for _ in range(_FRAME_TRIES):
        try:
            probe.send(payload)
            while (answer := probe.recv(64)) != token + struct.pack("<I", len(payload)):
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


def _received(link: socket.socket, nbytes: int) -> bytes:
    """Exactly ``nbytes``; raises OSError at the end of the stream."""
    data = b""
    while len(data) < nbytes:
        part = link.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return data
