"""What is known of a host's addresses and of the way from one host to another."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import closing
from dataclasses import dataclass, field

_SIOCGIFMTU = 0x8921  # linux/sockios.h


@dataclass(frozen=True)
class Address:
    """Of an interface that ranks may use."""

    interface: str
    address: str
    mtu: int


@dataclass(frozen=True)
class Door:
    """Where a `Station` can be reached: its ports at each of the addresses, and what who comes must know.

    Attributes:
        udp_ports: 0 where there is none.
    """

    host: str
    addresses: list[Address]
    tcp_ports: list[int]
    udp_ports: list[int]
    key: bytes


NOBODY = "refused, as no rank has started there or a firewall rejects connections"
"""Why there is no door: the kernel of that host has answered that nobody listens."""


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
        others_gbit_per_s: of further interfaces of the target, by name, which MPI may use as well.
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
    others_gbit_per_s: dict[str, float] = field(default_factory=dict)


def mtu_of(interface: str) -> int:
    """The largest packet that it sends; 0 where it is gone."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as query:
        try:
            answer = fcntl.ioctl(query, _SIOCGIFMTU, struct.pack("16s16x", interface.encode()))
        except OSError:
            return 0
    return int(struct.unpack_from("i", answer, 16)[0])
