"""Links that become much slower or stuck while a job runs, by what the kernel says of this process's TCP connections.

Whatever sends over TCP, MPI above all, has sockets in this process, and the kernel knows how fast each has delivered
what it was given (tcp_info of linux/tcp.h). To ask it costs some microseconds every few seconds, and nothing travels.
Where MPI uses another network there is nothing to see. Each rank has connections of its own, so each looks; what
several of a node see, one of them says.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

_LOG = logging.getLogger("hvdlite")

_FIRST = 6  # looks at a busy link that say how fast it is at the start
_IN_A_ROW = 3  # looks at which it must be slow
_SLOWER = 4.0  # times
_BUSY_BYTES = 1 << 20  # since the last look
_STUCK = 5  # times that the same bytes were sent again, which takes 6 s at least, as each wait is twice the last
# Of struct tcp_info: how often the same bytes were sent again, a bit that says that the sender had nothing to send,
# bytes acknowledged, and bytes per second.
_RESENT_AT, _FLAGS_AT, _ACKED_AT, _RATE_AT = 2, 7, 120, 160
_LIMITED_BY_SENDER = 0x1
_TCP_INFO_BYTES = 168


class Delivery(NamedTuple):
    """Of one connection: to whom, which bytes have arrived so far, and how many a second lately.

    Attributes:
        bytes_per_s: None while the sender had too little to send to tell.
        resent: how often what it has sent was sent again, while nothing of it has arrived.
    """

    peer: str
    acked_bytes: int
    bytes_per_s: float | None
    resent: int = 0


@dataclass
class _Link:
    first: list[float] = field(default_factory=list)
    slow: int = 0  # looks in a row
    was_slow: bool = False
    was_stuck: bool = False


class LinkRates:
    """What is to be said of the links of ``rank``. No clocks, no sockets: facts come from `note`.

    Args:
        hosts: names by address; other peers are none of the job's.
    """

    def __init__(self, rank: int, hosts: Mapping[str, str]) -> None:
        self._rank = rank
        self._hosts = hosts
        self._acked: dict[int, int] = {}
        self._links: dict[str, _Link] = {}

    def note(self, deliveries: Mapping[int, Delivery]) -> dict[str, str]:
        """Take what the connections have delivered, by any number that stays; sentences on links to name, by topic."""
        rates: dict[str, float] = {}
        said: dict[str, str] = {}
        for number, (peer, acked_bytes, bytes_per_s, resent) in deliveries.items():
            news = acked_bytes - self._acked.get(number, acked_bytes)
            if peer in self._hosts and bytes_per_s is not None and news >= _BUSY_BYTES:
                rates[peer] = max(rates.get(peer, 0.0), bytes_per_s)
            if peer in self._hosts and resent >= _STUCK:
                said[f"{peer} stuck"] = self._name_stuck(peer, resent)
        self._acked = {number: delivery.acked_bytes for number, delivery in deliveries.items()}
        said |= {peer: self._judge(peer, rate) for peer, rate in rates.items()}
        return {topic: sentence for topic, sentence in said.items() if sentence}

    def _name_stuck(self, peer: str, resent: int) -> str:
        link = self._links.setdefault(peer, _Link())
        if link.was_stuck:
            return ""
        link.was_stuck = True
        return (
            f"what rank {self._rank} sends to {self._hosts[peer]} ({peer}) does not arrive, though it was sent again "
            f"{resent} times: the link is down, or full frames are lost on the way. Give interfaces and switches of "
            "all hosts the same MTU; `hvdliterun --doctor` tries every pair of hosts"
        )

    def _judge(self, peer: str, rate: float) -> str:
        link = self._links.setdefault(peer, _Link())
        if len(link.first) < _FIRST:
            link.first.append(rate)
            return ""
        usual = sorted(link.first)[_FIRST // 2]
        link.slow = link.slow + 1 if rate * _SLOWER < usual else 0
        if link.was_slow or link.slow < _IN_A_ROW:
            return ""
        link.was_slow = True
        return (
            f"what rank {self._rank} sends to {self._hosts[peer]} ({peer}) arrives at {rate * 8 / 1e9:.2g} Gbit/s, "
            f"{usual / rate:.1f} times slower than at the start, and all ranks wait for it: look for other traffic, "
            "and for errors that `ip -s link` counts; `hvdliterun --doctor` measures every pair of hosts"
        )


class Turns:
    """Which rank of a node speaks of a thing: the first that asks to, as long as it has not closed.

    A name of an abstract unix socket has one owner, and ranks of a node share these names.

    Args:
        node: the same on all its ranks, and another in each job.
    """

    def __init__(self, node: str) -> None:
        self._node = hashlib.sha256(node.encode()).hexdigest()[:32]
        self._held: list[socket.socket] = []

    def take(self, what: str) -> bool:
        """Whether this rank speaks of ``what``."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0hvdlite-says-{self._node}-{what}")
        except OSError as error:
            name.close()
            return error.errno != errno.EADDRINUSE  # rather twice than never
        self._held.append(name)
        return True

    def close(self) -> None:
        for name in self._held:
            name.close()


class LinkWatch:
    """A thread that looks every ``interval_s``, and warns.

    Args:
        turns: whether this rank speaks of a peer; closed with the watch.
        is_over: whether there is nothing to look at any more.

    Raises:
        RuntimeError: no thread is to be had.
    """

    def __init__(self, rates: LinkRates, turns: Turns, interval_s: float, is_over: Callable[[], bool]) -> None:
        self._rates = rates
        self._turns = turns
        self._interval_s = interval_s
        self._is_over = is_over
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hvdlite links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._turns.close()

    def _look(self) -> None:
        while not self._is_closed.wait(self._interval_s) and not self._is_over():
            for topic, sentence in self._rates.note(deliveries()).items():
                if self._turns.take(topic):
                    _LOG.warning("%s", sentence)


def watch(rates: LinkRates, turns: Turns, interval_s: float, is_over: Callable[[], bool]) -> LinkWatch | None:
    """A `LinkWatch`; None where no thread is to be had, which a job can do without."""
    try:
        return LinkWatch(rates, turns, interval_s, is_over)
    except RuntimeError as error:
        _LOG.warning("nobody looks at the links (HVDLITE_LINK_CHECK_SECONDS): %s", error)
        return None


def deliveries() -> dict[int, Delivery]:
    """Of every TCP connection of this process, by file descriptor."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or no connection
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as link:
                    if link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM:
                        found[int(entry)] = _delivery(link)
    return found


def _delivery(link: socket.socket) -> Delivery:
    peer = link.getpeername()[0].removeprefix("::ffff:")
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:  # a kernel before 4.9
        return Delivery(peer, 0, None, info[_RESENT_AT])
    (acked,), (rate,) = struct.unpack_from("=Q", info, _ACKED_AT), struct.unpack_from("=Q", info, _RATE_AT)
    bytes_per_s = None if info[_FLAGS_AT] & _LIMITED_BY_SENDER else float(rate)
    return Delivery(peer, acked, bytes_per_s, info[_RESENT_AT])
