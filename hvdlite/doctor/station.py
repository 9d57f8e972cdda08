"""Who answers measurements of other hosts, and what is said between both, over sockets of our own."""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from hvdlite.doctor.links import Address, Door

TOKEN_BYTES = 16
CONNECT_S = 1.0  # until an address counts as silent
SILENCE_S = 2.0  # of the other end, until it counts as broken
PING, STREAM, ASK, FAREWELL = b"p", b"s", b"d", b"f"
LENGTH = struct.Struct("<I")
CLOCK = struct.Struct("<d")
ARRIVED = struct.Struct("<Qd")
_DRAIN_S = 1.0  # how much of a stream is waited for, on a slow link


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
            with suppress(OSError), socket.create_connection((name, port), timeout=CONNECT_S) as link:
                link.sendall(self.door.token)
                received(link, TOKEN_BYTES)
                link.sendall(FAREWELL)

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
            link.settimeout(SILENCE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(received(link, TOKEN_BYTES), self.door.token):
                return
            link.sendall(self.door.token[::-1])
            while (command := received(link, 1)) == PING:
                link.sendall(CLOCK.pack(time.time()))
            if command == FAREWELL:
                self._farewells.release()
            if command == ASK:
                told = {name: value for name, value in asdict(self.door).items() if name != "token"}
                text = json.dumps(told).encode()
                link.sendall(LENGTH.pack(len(text)) + text)
            if command == STREAM:
                link.sendall(ARRIVED.pack(*_drain(link)))

    def _echo(self) -> None:
        while not self._is_closing.is_set():
            data, sender = self._udp.recvfrom(1 << 16)
            if data.startswith(self.door.token):
                with suppress(OSError):
                    self._udp.sendto(self.door.token + struct.pack("<I", len(data)), sender)


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


def _drain(link: socket.socket) -> tuple[int, float]:
    """(bytes after the first ones, seconds from these on), to the end of the stream, or as far as it comes in time."""
    buffer = bytearray(1 << 20)
    link.recv_into(buffer)
    start_s, elapsed_s, total = time.perf_counter(), 0.0, 0
    while elapsed_s < _DRAIN_S and (count := link.recv_into(buffer)):
        total += count
        elapsed_s = time.perf_counter() - start_s
    return total, elapsed_s


def received(link: socket.socket, nbytes: int) -> bytes:
    """Exactly ``nbytes``; raises OSError at the end of the stream."""
    data = b""
    while len(data) < nbytes:
        part = link.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return data
