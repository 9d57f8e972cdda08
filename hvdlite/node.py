"""The ranks that share memory with this one, found by trying, and the shared segments they exchange.

Hostnames prove nothing: containers of different machines may share one, and MPI's own split by shared memory
hangs or lies then. Here every rank listens on a randomly named abstract unix socket, the names are exchanged,
and whom a rank can connect to is on its node: file descriptors, and so memory, can pass between them.
"""

from __future__ import annotations

import functools
import operator
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from hvdlite import _native
from hvdlite.agreement import Ranks, exchange
from hvdlite.errors import CollectiveError, StartupError
from hvdlite.memory.segment import Segment, create_memory_file
from hvdlite.wire import is_ours

_HELLO = struct.Struct("<I")
_SIZE = struct.Struct("<Q")
_ABORT_PAGE_BYTES = 4096
_SLICE_S = 0.1  # how long a wait sleeps before it looks whether the job has failed


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

    def share(self, nbytes: int) -> Segment:
        """A zeroed segment mapped by every local rank; all of them call it in the same order.

        Raises:
            CollectiveError: a local rank did not answer.
            StartupError: no memory.
        """
        if not self.is_leader:
            return self._receive_segment(nbytes)
        fd = create_memory_file(nbytes)
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
        assert fd is not None
        try:
            (offered,) = _SIZE.unpack(message)
            assert offered == nbytes, (offered, nbytes)
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
        message, _ = self._receive(local_rank, _SIZE.unpack(size)[0], "tell how it is")
        return message.decode(), file

    def _receive(self, local_rank: int, nbytes: int, what: str) -> tuple[bytes, int | None]:
        """``nbytes`` of a local rank, and the open file that came with them; sleeps until they are there."""
        link = self._links[local_rank]
        link.settimeout(_SLICE_S)
        deadline = time.monotonic() + self.timeout_s
        message, files = b"", []
        while len(message) < nbytes:
            try:
                part, came, _, _ = socket.recv_fds(link, nbytes - len(message), 1)
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
    with ExitStack() as on_failure:
        listener = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))

        def listen() -> tuple[str, int]:
            name = f"\0hvdlite-{secrets.token_hex(16)}"
            listener.bind(name)
            listener.listen(4096)
            return name, _core_mask()

        cards = dict(zip(known, exchange(comm, listen), strict=True))
        names = {rank: name for rank, (name, _) in cards.items()}
        links: list[socket.socket] = []

        def find_leader() -> int:
            leader, found = _connect_to_leader(names, own_rank)
            for link in found:
                links.append(on_failure.enter_context(link))
            return leader

        leaders: dict[int, int] = dict(zip(known, exchange(comm, find_leader), strict=True))
        nodes = _by_leader(leaders)
        local = next(node for node in nodes if own_rank in node)
        cores = functools.reduce(operator.or_, (cards[rank][1] for rank in local)).bit_count()
        made: list[Node] = []

        def join_node() -> None:
            if leaders[own_rank] == own_rank:
                made.append(_accept(listener, local, cores, timeout_s))
                return
            for link in links:
                link.sendall(_HELLO.pack(own_rank))
            made.append(Node(local, local.index(own_rank), {0: links[0]}, {0: links[1]}, cores))

        try:
            exchange(comm, join_node)
        except BaseException:
            for node in made:
                node.close()
            raise
        on_failure.pop_all()
    listener.close()
    return nodes, made[0]


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


def _connect_to_leader(names: Mapping[int, str], rank: int) -> tuple[int, list[socket.socket]]:
    """The lowest rank that can be reached, and two connections to it; this rank, and none, if it is the lowest."""
    for other in (known for known in names if known < rank):
        links: list[socket.socket] = []
        try:
            for _ in range(2):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                links.append(link)
                link.connect(names[other])
                if not is_ours(link):
                    raise ConnectionError("it belongs to another user")
        except OSError:
            for link in links:
                link.close()
            continue
        return other, links
    return rank, []


def _accept(listener: socket.socket, ranks: tuple[int, ...], cores: int, timeout_s: float) -> Node:
    """The leader's node: takes two connections from every other local rank, in whatever order they come."""
    found: dict[int, list[socket.socket]] = {rank: [] for rank in ranks[1:]}
    listener.settimeout(timeout_s)
    with ExitStack() as on_failure:
        while any(len(links) < 2 for links in found.values()):
            try:
                link = on_failure.enter_context(listener.accept()[0])
                if not is_ours(link):  # any user can list the names of abstract sockets
                    link.close()
                    continue
                link.settimeout(timeout_s)
                (rank,) = _HELLO.unpack(link.recv(_HELLO.size, socket.MSG_WAITALL))
            except (TimeoutError, struct.error) as error:
                missing = [rank for rank, links in found.items() if len(links) < 2]
                raise StartupError(
                    f"ranks {missing} did not connect to rank {ranks[0]} on their own machine within {timeout_s:.0f} "
                    "s; if the machine is overloaded, raise HVDLITE_START_TIMEOUT"
                ) from error
            found[rank].append(link)
        # Both connections of a rank come in the order it made them, because it says hello in that order.
        by_local = {ranks.index(rank): pair for rank, pair in found.items()}
        links = {i: pair[0] for i, pair in by_local.items()}
        watch_links = {i: pair[1] for i, pair in by_local.items()}
        node = Node(ranks, 0, links, watch_links, cores)
        on_failure.pop_all()
        return node
