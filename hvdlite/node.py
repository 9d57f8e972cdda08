"""The ranks that share memory with this one, found by trying, and the shared segments they exchange.

Hostnames prove nothing: containers of different machines may share one, and MPI's own split by shared memory
hangs or lies then. Here every rank listens on a randomly named abstract unix socket, the names are exchanged,
and whom a rank can connect to is on its node: file descriptors, and so memory, can pass between them. All users of a
machine can read the names, so both ends are asked for their user, and to prove that they know a key that is no name.
"""

from __future__ import annotations

import errno
import functools
import operator
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from hvdlite import _native
from hvdlite.agreement import Ranks, exchange
from hvdlite.errors import CollectiveError, StartupError
from hvdlite.links.proof import Secret, new_key, prove
from hvdlite.links.reception import Reception
from hvdlite.links.wire import SHORTAGE_S, SHORTAGES, connect_unix, is_ours
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment

_CLAIM = struct.Struct("<IB")  # rank, which of its connections
_LINKS = 2  # of a rank: for memory, and for its sentinel
_SIZE = struct.Struct("<Q")
_ABORT_PAGE_BYTES = 4096
_MOST_TEXT_BYTES = 1 << 20
_SLICE_S = 0.1  # how long a wait sleeps before it looks whether the job has failed
# What says that a socket is on another machine: nobody listens there, or this process is kept from it.
_ELSEWHERE = frozenset({errno.ECONNREFUSED, errno.EACCES, errno.EPERM})


class Node:
    """The ``local_size`` ranks of one machine, of which this one is ``local_rank``; rank 0 of them leads.

    Args:
        ranks: ranks in the communicator, in the order of local ranks.
        links: one socket per other local rank (of the leader), or the one to the leader; keyed by local rank.
        watch_links: the same once more, for a sentinel, see `take_watch_links`.
        cores: that at least one of these ranks may run on.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        local_rank: int,
        links: dict[int, socket.socket],
        watch_links: dict[int, socket.socket],
        cores: int,
    ) -> None:
        self.cores = cores
        self.ranks = tuple(ranks)
        self.local_rank = local_rank
        self.local_size = len(ranks)
        self._watch_links = watch_links
        self._links = links
        self.check: Callable[[], None] = lambda: None  # raises once the job has failed; set by the runtime
        self.timeout_s = 60.0
        self._page = self.share(_ABORT_PAGE_BYTES)
        self.abort_address = self._page.address

    @property
    def is_leader(self) -> bool:
        return self.local_rank == 0

    @property
    def aborted(self) -> bool:
        return _native.load32(self.abort_address) != 0

    def abort(self) -> None:
        """End every wait in the shared memory of this node, in all its processes, for good."""
        _native.store32(self.abort_address, 1)

    def share(self, nbytes: int, *, reserved: bool = True) -> Segment:
        """A zeroed segment mapped by every local rank; all of them call it in the same order.

        Args:
            reserved: have all of its memory at once, see `create_memory_file`.

        Raises:
            CollectiveError: a local rank did not answer.
            StartupError: no memory.
        """
        if not self.is_leader:
            return self._receive_segment(nbytes)
        fd = create_memory_file(nbytes, reserved=reserved)
        try:
            for local_rank, link in self._links.items():
                try:
                    socket.send_fds(link, [_SIZE.pack(nbytes)], [fd])
                except OSError as error:
                    self.check()
                    raise CollectiveError(f"rank {self.ranks[local_rank]} is gone: {error}") from error
            return Segment(fd, nbytes)
        finally:
            os.close(fd)

    def _receive_segment(self, nbytes: int) -> Segment:
        message, fd = self._receive(0, _SIZE.size, f"share {nbytes} bytes of memory")
        (offered,) = _SIZE.unpack(message)
        if fd is None:
            raise CollectiveError(f"rank {self.ranks[0]} was to share {nbytes} bytes of memory, and has sent no file")
        try:
            if offered != nbytes:
                raise CollectiveError(
                    f"rank {self.ranks[0]} shares {offered} bytes of memory, and was to share {nbytes}"
                )
            return Segment(fd, nbytes)
        finally:
            os.close(fd)

    def exchange(self, text: str, file: int | None = None) -> list[tuple[str, int | None]]:
        """What every local rank gave, by local rank; the caller closes the files. Collective.

        Raises:
            CollectiveError: a local rank did not answer.
        """
        told: dict[int, tuple[str, int | None]] = {
            self.local_rank: (text, None if file is None else os.dup(file)),
        }
        try:
            if self.is_leader:
                for local_rank in self._links:
                    told[local_rank] = self._hear(local_rank)
                for local_rank in self._links:
                    for other in sorted(told.keys() - {local_rank}):
                        self._tell(local_rank, *told[other])
            else:
                self._tell(0, text, file)
                for other in sorted(set(range(self.local_size)) - {self.local_rank}):
                    told[other] = self._hear(0)
        except BaseException:
            for _, open_file in told.values():
                if open_file is not None:
                    os.close(open_file)
            raise
        return [told[local_rank] for local_rank in range(self.local_size)]

    def _tell(self, local_rank: int, text: str, file: int | None) -> None:
        message = text.encode()
        try:
            link = self._links[local_rank]
            socket.send_fds(link, [_SIZE.pack(len(message))], [] if file is None else [file])
            link.sendall(message)
        except OSError as error:
            self.check()
            raise CollectiveError(f"rank {self.ranks[local_rank]} is gone: {error}") from error

    def _hear(self, local_rank: int) -> tuple[str, int | None]:
        size, file = self._receive(local_rank, _SIZE.size, "tell how it is")
        with ExitStack() as on_failure:
            if file is not None:
                on_failure.callback(os.close, file)
            (nbytes,) = _SIZE.unpack(size)
            if nbytes > _MOST_TEXT_BYTES:
                raise CollectiveError(f"rank {self.ranks[local_rank]} was to tell how it is, in {nbytes} bytes")
            message, _ = self._receive(local_rank, nbytes, "tell how it is")
            try:
                text = message.decode()
            except UnicodeDecodeError as error:
                raise CollectiveError(f"rank {self.ranks[local_rank]} was to tell how it is: {error}") from error
            on_failure.pop_all()
        return text, file

    def _receive(self, local_rank: int, nbytes: int, what: str) -> tuple[bytes, int | None]:
        """``nbytes`` of a local rank, and the open file that came with them; sleeps until they are there."""
        link = self._links[local_rank]
        link.settimeout(_SLICE_S)
        deadline = time.monotonic() + self.timeout_s
        message, files = b"", []
        while len(message) < nbytes:
            try:
                part, came, _, _ = socket.recv_fds(link, nbytes - len(message), 1, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                self.check()
                if time.monotonic() > deadline:
                    raise CollectiveError(
                        f"rank {self.ranks[local_rank]} did not {what} within {self.timeout_s:.0f} s"
                    ) from None
                continue
            except OSError:
                part, came = b"", []
            if not part:
                self.check()
                raise CollectiveError(f"rank {self.ranks[local_rank]} is gone while it was to {what}")
            message += part
            files += came
        return message, files[0] if files else None

    def take_watch_links(self) -> dict[int, socket.socket]:
        """Sockets to the other local ranks (of the leader), or to the leader, by rank; the caller closes them."""
        links = {self.ranks[local_rank]: link for local_rank, link in self._watch_links.items()}
        self._watch_links = {}
        return links

    def close(self) -> None:
        """Close the sockets; segments live on with their users."""
        self.check = lambda: None  # it may refer to this node
        for link in (*self._links.values(), *self._watch_links.values()):
            link.close()


def discover(
    comm: Ranks | None, timeout_s: float, ranks: Sequence[int] | None = None
) -> tuple[tuple[tuple[int, ...], ...], Node]:
    """The nodes of ``comm`` (ranks of each in ascending order, nodes by their lowest rank), and this rank's own.

    Collective. ``comm`` None stands for this process alone; ``ranks`` are what its ranks are called, ascending.

    Raises:
        StartupError: on every rank: the ranks of a machine contradict one another, one did not connect in time, or a
            machine refused memory.
    """
    if comm is None or comm.size == 1:
        alone = (0,) if ranks is None else tuple(ranks)
        return (alone,), Node(alone, 0, {}, {}, len(os.sched_getaffinity(0)))
    known = tuple(range(comm.size)) if ranks is None else tuple(ranks)
    own_rank = known[comm.rank]
    deadline_s = time.monotonic() + timeout_s
    porch: _Porch | None = None
    links: list[socket.socket] = []
    with ExitStack() as on_failure:

        def open_door() -> tuple[Door, int]:
            nonlocal porch
            porch = on_failure.enter_context(closing(_Porch(frozenset(known))))
            return porch.door, _core_mask()

        def find_leader() -> int:
            leader, found = _connect_to_leader(doors, own_rank, deadline_s)
            for link in found:
                links.append(on_failure.enter_context(link))
            return leader

        def join_node() -> Node:
            if leaders[own_rank] == own_rank:
                assert porch is not None
                return _lead(porch, local, cores, deadline_s, timeout_s)
            return Node(local, local.index(own_rank), {0: links[0]}, {0: links[1]}, cores)

        cards = dict(zip(known, exchange(comm, open_door), strict=True))
        doors = {rank: door for rank, (door, _) in cards.items()}
        leaders: dict[int, int] = dict(zip(known, exchange(comm, find_leader), strict=True))
        nodes = _by_leader(leaders)
        local = next(node for node in nodes if own_rank in node)
        cores = functools.reduce(operator.or_, (cards[rank][1] for rank in local)).bit_count()
        made: list[Node] = []
        try:
            exchange(comm, lambda: made.append(join_node()))
        except BaseException:
            for node in made:
                node.close()
            raise
        on_failure.pop_all()
    assert porch is not None
    porch.close()
    return nodes, made[0]


@dataclass(frozen=True)
class Door:
    """Where a rank listens, and the key that who comes there must know."""

    name: str
    key: bytes

    @property
    def secret(self) -> Secret:
        return Secret(self.key, b"node", _CLAIM.size)


class _Porch:
    """Where a rank hears those above it, until it is known who leads.

    From the start, and on a thread of its own: strangers who come in numbers would fill the socket's queue, and whoever
    connects then waits.
    """

    def __init__(self, ranks: frozenset[int]) -> None:
        self.door = Door(f"\0hvdlite-{secrets.token_hex(16)}", new_key())
        self._ranks = ranks
        self._changed = threading.Condition()  # guards the links
        self._links: dict[tuple[int, int], socket.socket] = {}  # of (rank, which of its connections)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.door.name)
            listener.listen(4096)
            self._reception = Reception([listener], self.door.secret, self._admit)
        except BaseException:
            listener.close()
            raise

    def take(self, ranks: Sequence[int], deadline_s: float) -> dict[int, list[socket.socket]]:
        """The connections of each of ``ranks`` that has come in time; the caller closes them."""
        wanted = {(rank, which) for rank in ranks for which in range(_LINKS)}
        with self._changed:
            self._changed.wait_for(lambda: wanted <= self._links.keys(), max(0.0, deadline_s - time.monotonic()))
            came = [rank for rank in ranks if all((rank, which) in self._links for which in range(_LINKS))]
            return {rank: [self._links.pop((rank, which)) for which in range(_LINKS)] for rank in came}

    def close(self) -> None:
        """Hang up on all that were not taken."""
        self._reception.close()
        for link in self._links.values():
            link.close()

    def _admit(self, link: socket.socket, claim: bytes, session: bytes) -> bool:
        rank, which = place = _CLAIM.unpack(claim)
        with self._changed:
            if rank not in self._ranks or which >= _LINKS or place in self._links:
                return False
            self._links[place] = link
            self._changed.notify()
        return True


def _by_leader(leaders: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, of every rank's leader."""
    led: dict[int, list[int]] = {}
    for rank, leader in leaders.items():
        led.setdefault(leader, []).append(rank)
    nodes = tuple(tuple(led[leader]) for leader in sorted(led))
    if any(leaders[node[0]] != node[0] for node in nodes):
        raise StartupError(f"ranks disagree about who shares a machine: the leaders seen are {dict(leaders)}")
    return nodes


def _core_mask() -> int:
    """The cores that this process may run on, a bit for each."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def _connect_to_leader(doors: Mapping[int, Door], rank: int, deadline_s: float) -> tuple[int, list[socket.socket]]:
    """The lowest rank that can be reached, and two connections to it; this rank, and none, if it is the lowest.

    Raises:
        StartupError: there is a socket of that name here, but no rank answers in time; or this process cannot have
            sockets. Only who is refused may believe that a rank is on another machine.
    """
    for other in (known for known in doors if known < rank):
        links = []
        try:
            for which in range(_LINKS):
                link = _connect(doors[other], _CLAIM.pack(rank, which), deadline_s)
                if link is None:
                    break
                links.append(link)
        except OSError as error:
            for link in links:
                link.close()
            raise StartupError(
                f"rank {rank} cannot connect to rank {other} on its own machine: {error}. If the machine is "
                "overloaded, raise HVDLITE_START_TIMEOUT; if files are short, the limit on open files (ulimit -n)"
            ) from error
        if len(links) == _LINKS:
            return other, links
        for link in links:
            link.close()
    return rank, []


def _connect(door: Door, claim: bytes, deadline_s: float) -> socket.socket | None:
    """A connection that both ends have proven; None where no process of this user listens there.

    Raises:
        OSError: see `_connect_to_leader`.
    """
    while True:
        try:
            link = connect_unix(door.name[1:], deadline_s - time.monotonic())
        except OSError as error:
            if error.errno in _ELSEWHERE:
                return None
            _wait_out(error, deadline_s)
            continue
        try:
            if not is_ours(link):
                link.close()
                return None
            prove(door.secret, link, claim)
            link.settimeout(None)
            return link
        except OSError as error:
            link.close()
            if error.errno in _ELSEWHERE:
                return None
            _wait_out(error, deadline_s)
        except BaseException:
            link.close()
            raise


def _wait_out(error: OSError, deadline_s: float) -> None:
    """Sleep a little where ``error`` is one of those that pass."""
    if error.errno not in SHORTAGES or time.monotonic() > deadline_s:
        raise error
    time.sleep(SHORTAGE_S)


def _lead(porch: _Porch, ranks: tuple[int, ...], cores: int, deadline_s: float, timeout_s: float) -> Node:
    """The leader's node: with two connections from every other local rank."""
    with ExitStack() as on_failure:
        found = porch.take(ranks[1:], deadline_s)
        for links in found.values():
            for link in links:
                on_failure.enter_context(link)
        if missing := [rank for rank in ranks[1:] if rank not in found]:
            raise StartupError(
                f"ranks {missing} did not connect to rank {ranks[0]} on their own machine within {timeout_s:.0f} s; if "
                "the machine is overloaded, raise HVDLITE_START_TIMEOUT"
            )
        own = {ranks.index(rank): links for rank, links in found.items()}
        node = Node(ranks, 0, {i: pair[0] for i, pair in own.items()}, {i: pair[1] for i, pair in own.items()}, cores)
        on_failure.pop_all()
        return node
