"""What the kernel knows of the TCP connections of a process: evidence for why nothing is heard of a host.

It needs the standard library only, since it is a program as well: `python connections.py PID` says what is wrong with
the connections of a process that cannot run Python itself, as MPI has not come back.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED, _SYN_SENT = 1, 2  # include/net/tcp_states.h
_LOST = 2  # retransmissions; a single one happens on busy networks
_SMALL = 500  # bytes that pass every network in one packet


@dataclass(frozen=True)
class Connection:
    """A TCP connection, by /proc/net/tcp.

    Attributes:
        unacknowledged: bytes that were sent, and that the peer has not confirmed.
        retries: how often what was sent last has been sent again.
    """

    peer: str
    port: int
    state: int
    unacknowledged: int
    retries: int

    @property
    def is_open(self) -> bool:
        return self.state == _ESTABLISHED

    @property
    def is_unanswered(self) -> bool:
        return self.state == _SYN_SENT and self.retries > 0

    @property
    def is_stuck(self) -> bool:
        return self.is_open and self.unacknowledged > 0 and self.retries >= _LOST

    def complaint(self) -> str:
        """What is wrong with it, and what to check; empty where nothing is."""
        where = f"{self.peer} port {self.port}"
        if self.is_unanswered:
            return (
                f"{where} does not answer: check that the host is up, that no firewall drops connections between the "
                "hosts on any port, and that this address is of an interface that connects them"
            )
        if self.is_stuck and self.unacknowledged > _SMALL:
            return (
                f"{where} has answered, but {self.unacknowledged} bytes sent to it are lost, again and again: check "
                "that the MTU is the same on all hosts and on the way (for jumbo frames: ping -M do -s 8972), and the "
                "link"
            )
        if self.is_stuck:
            return f"{where} has answered, and does no longer: check that the host is up, and the link"
        return ""


def of_processes(pids: Iterable[int]) -> list[Connection]:
    """The connections of ``pids``, which share this process's network; those that have ended have none."""
    own = {link[len("socket:[") : -1] for pid in pids for link in _open_files(pid) if link.startswith("socket:[")}
    lines = [line for name in ("tcp", "tcp6") for line in _lines(Path("/proc/net", name))]
    return [_parse(words) for words in map(str.split, lines) if words[9] in own]


def complaints(connections: Iterable[Connection]) -> list[str]:
    """What is wrong with ``connections``, each thing once."""
    return list(dict.fromkeys(text for connection in connections if (text := connection.complaint())))


def _open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):  # it has ended, or is another user's
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:  # a machine without IPv6
        return []


def _parse(words: list[str]) -> Connection:
    address, port = words[2].split(":")
    return Connection(
        _address(address), int(port, 16), int(words[3], 16), int(words[4].split(":")[0], 16), int(words[6], 16)
    )


def _address(text: str) -> str:
    """Of words in the order of this machine's bytes, as the kernel prints them."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return socket.inet_ntop(socket.AF_INET, data)
    is_mapped = data[:12] == bytes(10) + b"\xff\xff"  # IPv4 over a socket of IPv6
    return socket.inet_ntop(socket.AF_INET, data[12:]) if is_mapped else socket.inet_ntop(socket.AF_INET6, data)


if __name__ == "__main__":
    found = complaints(of_processes([int(sys.argv[1])]))
    found = found or ["no connection of this rank is stuck: another rank has not started, or waits elsewhere"]
    print("\n".join(f"hvdlite: {text}." for text in found), file=sys.stderr)
