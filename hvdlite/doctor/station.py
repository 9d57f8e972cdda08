"""Who answers measurements of other hosts, and what is said between both, over sockets of our own."""

from __future__ import annotations

import hmac
import ipaddress
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from hvdlite.doctor.links import Address, Door
from hvdlite.links.proof import Secret, new_key, prove
from hvdlite.links.reception import Reception, listen_at
from hvdlite.links.wire import read_exactly

CONNECT_S = 1.0  # until an address counts as silent
SILENCE_S = 2.0  # of the other end, until it counts as broken
PING, STREAM, ASK, FAREWELL = b"p", b"s", b"d", b"f"
LENGTH = struct.Struct("<I")
CLOCK = struct.Struct("<d")
ARRIVED = struct.Struct("<Qd")
NONCE_BYTES = 8  # of a datagram
_MOST_DOOR_BYTES = 1 << 16
_LEAST_MTU = 68  # of an interface that has addresses: RFC 791
_PROOF_BYTES = 16  # of a datagram, which may be a small one
_BACKLOG = 64
_DRAIN_S = 1.0  # how much of a stream is waited for, on a slow link


class Station:
    """Answers the measurements of other hosts, on threads of its own, until it is closed.

    Args:
        addresses: of this host.
        port: at which it can be reached at whichever address of this host its name leads others to; 0: it is found at
            ``addresses`` only, at ports that the system chooses.
        key: what others know; made up if empty.

    Raises:
        OSError: another program has the port.
        StartupError: none of the addresses can be listened at.
    """

    def __init__(self, host: str, addresses: Sequence[Address], port: int = 0, key: bytes = b"") -> None:
        key = key or new_key()
        self._farewells = threading.Semaphore(0)
        tcp = _everywhere(port) if port else listen_at([address.address for address in addresses], _BACKLOG)
        ports = {} if port else dict(listener.getsockname()[:2] for listener in tcp)
        known = [address for address in addresses if port or address.address in ports]
        self._udp = {address: found for address in known if (found := _datagrams(address.address))}
        self.door = Door(
            host,
            known,
            [ports.get(address.address, port) for address in known],
            [self._udp[address].getsockname()[1] if address in self._udp else 0 for address in known],
            key,
        )
        self._reception = Reception(tcp, secret(key), self._admit)
        self._is_closing = threading.Event()
        self._echoes = threading.Thread(target=self._echo, daemon=True)
        self._echoes.start()

    def close(self) -> None:
        self._reception.close()
        self._is_closing.set()
        for link in self._udp.values():
            with suppress(OSError):
                link.sendto(b"", link.getsockname())  # which ends the wait for others
        self._echoes.join()
        for link in self._udp.values():
            link.close()

    def say_farewell(self, names: Sequence[str], port: int) -> None:
        """Tell the stations of all hosts, this one's too, that this host has nothing more to ask."""
        for name in names:
            with suppress(OSError), socket.create_connection((name, port), timeout=CONNECT_S) as link:
                prove(secret(self.door.key), link, b"")
                link.sendall(FAREWELL)

    def wait_for_farewells(self, count: int, timeout_s: float) -> int:
        """Answer until ``count`` hosts have nothing more to ask; returns how many have in time."""
        until_s = time.monotonic() + timeout_s
        return sum(self._farewells.acquire(timeout=max(0.0, until_s - time.monotonic())) for _ in range(count))

    def _admit(self, link: socket.socket, claim: bytes, session: bytes) -> bool:
        threading.Thread(target=self._answer, args=(link,), daemon=True).start()
        return True

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            link.settimeout(SILENCE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (command := read_exactly(link, 1)) == PING:
                link.sendall(CLOCK.pack(time.time()))
            if command == FAREWELL:
                self._farewells.release()
            if command == ASK:
                told = {name: value for name, value in asdict(self.door).items() if name != "key"}
                text = json.dumps(told).encode()
                link.sendall(LENGTH.pack(len(text)) + text)
            if command == STREAM:
                link.sendall(ARRIVED.pack(*_drain(link)))

    def _echo(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self._udp.values():
                selector.register(link, selectors.EVENT_READ)
            while self._udp and not self._is_closing.is_set():
                for key, _ in selector.select():
                    self._answer_datagram(key.fileobj)  # type: ignore[arg-type]

    def _answer_datagram(self, link: socket.socket) -> None:
        with suppress(OSError):
            data, sender = link.recvfrom(1 << 16)
            nonce = data[:NONCE_BYTES]
            if hmac.compare_digest(data[: NONCE_BYTES + _PROOF_BYTES], datagram(self.door.key, nonce, len(data))):
                link.sendto(answer_to(self.door.key, nonce, len(data)), sender)


def receive_door(link: socket.socket, key: bytes) -> Door:
    """What a station answers to ASK.

    Raises:
        OSError: it does not, or what it says is no door.
    """
    (length,) = LENGTH.unpack(read_exactly(link, LENGTH.size))
    if length > _MOST_DOOR_BYTES:
        raise ConnectionError(f"{length} bytes are no door")
    try:
        told = json.loads(read_exactly(link, length))
        addresses = [Address(**address) for address in told.pop("addresses")]
        door = Door(addresses=addresses, key=key, **told)
        if _is_sound(door):
            return door
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConnectionError(f"no door: {error!r}") from error
    raise ConnectionError(f"no door: {door}")


def _is_sound(door: Door) -> bool:
    """Whether `hvdlite.doctor.network` can try it, and show it. Raises ValueError or TypeError, too, where not."""
    for address, tcp_port, udp_port in zip(door.addresses, door.tcp_ports, door.udp_ports, strict=True):
        version = ipaddress.ip_address(str(address.address)).version
        if not (0 < tcp_port < 1 << 16 and 0 <= udp_port < (1 << 16 if version == 4 else 1)):
            return False
        if address.mtu and address.mtu < _LEAST_MTU:
            return False
    numbers = [*door.tcp_ports, *door.udp_ports, *(address.mtu for address in door.addresses)]
    words = [door.host, *(word for address in door.addresses for word in (address.interface, address.address))]
    return all(type(n) is int for n in numbers) and all(isinstance(word, str) and word.isprintable() for word in words)


def secret(key: bytes) -> Secret:
    return Secret(key, b"doctor", 0)


def datagram(key: bytes, nonce: bytes, nbytes: int) -> bytes:
    """How one of ``nbytes`` begins."""
    return nonce + hmac.digest(key, b"datagram" + nonce + LENGTH.pack(nbytes), "sha256")[:_PROOF_BYTES]


def answer_to(key: bytes, nonce: bytes, nbytes: int) -> bytes:
    """What says that it has arrived: no longer than what it answers, as anybody may be named as its sender."""
    return hmac.digest(key, b"arrived" + nonce + LENGTH.pack(nbytes), "sha256")[:_PROOF_BYTES]


def _everywhere(port: int) -> list[socket.socket]:
    """Raises OSError: another program has it."""
    sockets = [socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)]
    with suppress(OSError):  # no IPv6 here
        sockets.append(socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG))
    return sockets


def _datagrams(address: str) -> socket.socket | None:
    """For frames of IPv4; those of IPv6 are never split on their way."""
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        link.bind((address, 0))
    except OSError:
        link.close()
        return None
    return link


def _drain(link: socket.socket) -> tuple[int, float]:
    """(bytes after the first ones, seconds from these on), to the end of the stream, or as far as it comes in time."""
    buffer = bytearray(1 << 20)
    link.recv_into(buffer)
    start_s, elapsed_s, total = time.perf_counter(), 0.0, 0
    while elapsed_s < _DRAIN_S and (count := link.recv_into(buffer)):
        total += count
        elapsed_s = time.perf_counter() - start_s
    return total, elapsed_s
