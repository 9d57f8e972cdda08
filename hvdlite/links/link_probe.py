"""The links between node leaders, tried once at the start: whether full frames pass, and which link is slow.

Leaders have just connected to their neighbours in the tree. On even levels they try the links to their children while
those on odd levels answer, and then the other way round, so that the time does not grow with the depth of the tree.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hvdlite.errors import StartupError
from hvdlite.links.wire import read_exactly
from hvdlite.topology import Topology

_LENGTH = struct.Struct("<I")
_ARRIVED = struct.Struct("<Qd")
_PIECE = bytes(64 << 10)
_PIECES = 8
_TRIES = 3  # of which the fastest counts: a rank may have to wait for a core
_STALLED_S = 10.0  # without an answer
_SLOW = 4.0  # times slower than the upper quartile, and
_SLOW_GBIT_PER_S = 1.0
_FEW_LINKS = 3  # which say nothing about one another


@dataclass(frozen=True)
class Tried:
    """A link to a child in the tree, by the places of both nodes."""

    parent: int
    child: int
    gbit_per_s: float


def try_links(
    links: Mapping[int, socket.socket],
    topology: Topology,
    fanout: int,
    hostnames: Sequence[str],
    deadline_s: float,
) -> list[Tried]:
    """Try the links from this leader to its children, and answer its parent. Every leader calls it.

    Args:
        links: to the parent and the children, by place of the node; nothing else is read from them meanwhile.
        hostnames: of the nodes.
        deadline_s: until when the parent has tried its link to this leader.

    Raises:
        StartupError: a few bytes pass, and full frames do not; or a neighbour sends what makes no sense.
    """
    own, parent = topology.node_index, topology.parent(fanout)
    tried: list[Tried] = []
    try:
        for is_even in (True, False):
            if (_level(own, fanout) % 2 == 0) is is_even:
                for child in topology.children(fanout):
                    tried.append(Tried(own, child, _send(links[child], hostnames[own], hostnames[child])))
            elif parent is not None:
                _answer(links[parent], hostnames[own], hostnames[parent], deadline_s)
    except StartupError:
        for link in links.values():  # nobody waits for this leader
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        raise
    return tried


def slow_link(tried: Sequence[Tried], hostnames: Sequence[str]) -> str | None:
    """A sentence on the slowest link, if it is much slower than the others."""
    if len(tried) < _FEW_LINKS:
        return None
    usual = float(np.quantile([link.gbit_per_s for link in tried], 0.75))
    slowest = min(tried, key=lambda link: link.gbit_per_s)
    if slowest.gbit_per_s > min(usual / _SLOW, _SLOW_GBIT_PER_S):
        return None
    return (
        f"the link from {hostnames[slowest.parent]} to {hostnames[slowest.child]} carries {slowest.gbit_per_s:.2g} "
        f"Gbit/s, others {usual / slowest.gbit_per_s:.1f} times as much, and all ranks wait for it. `hvdliterun "
        "--doctor` measures every pair of hosts."
    )


def _level(node: int, fanout: int) -> int:
    level = 0
    while node:
        node, level = (node - 1) // fanout, level + 1
    return level


def _send(link: socket.socket, here: str, there: str) -> float:
    """Gbit per second."""
    rates: list[float] = []
    try:
        link.settimeout(_STALLED_S)
        for _ in range(_TRIES):
            for _ in range(_PIECES):
                link.sendall(_LENGTH.pack(len(_PIECE)) + _PIECE)
            link.sendall(_LENGTH.pack(0))
            nbytes, seconds = _ARRIVED.unpack(read_exactly(link, _ARRIVED.size))
            if nbytes != (_PIECES - 1) * len(_PIECE) or not 0 <= seconds < math.inf:
                raise _nonsense(there, f"that {nbytes} bytes came in {seconds:g} s")
            rates.append(nbytes * 8 / max(seconds, 1e-9) / 1e9)
    except OSError as error:
        raise _stalled(here, there) from error
    return max(rates)


def _answer(link: socket.socket, here: str, there: str, deadline_s: float) -> None:
    try:
        # The parent tries its other children first.
        link.settimeout(max(_STALLED_S, deadline_s - time.monotonic()))
        link.recv(1, socket.MSG_PEEK)
        link.settimeout(_STALLED_S)
        for _ in range(_TRIES):
            nbytes, start_s, pieces = 0, 0.0, 0
            while length := _LENGTH.unpack(read_exactly(link, _LENGTH.size))[0]:
                pieces += 1
                if length != len(_PIECE) or pieces > _PIECES:
                    raise _nonsense(there, f"piece {pieces}, of {length} bytes")
                read_exactly(link, length)
                nbytes += length if start_s else 0  # the first piece starts the clock
                start_s = start_s or time.perf_counter()
            link.sendall(_ARRIVED.pack(nbytes, time.perf_counter() - start_s))
    except OSError as error:
        raise _stalled(here, there) from error


def _stalled(here: str, there: str) -> StartupError:
    return StartupError(
        f"between {here} and {there} a few bytes pass, and {len(_PIECE) * _PIECES >> 10} KiB did not within "
        f"{_STALLED_S:.0f} s: full frames are lost on the way. Give interfaces and switches of all hosts the same MTU; "
        "`hvdliterun --doctor` finds out which frames pass."
    )


def _nonsense(there: str, what: str) -> StartupError:
    return StartupError(
        f"the leader on {there} has sent what makes no sense while links are tried ({what}). Install the same version "
        "of hvdlite on all hosts."
    )
