"""Finding the ranks of a node, and the memory they share; the ranks are threads here."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import random
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

import hvdlite.node
from hvdlite.errors import CollectiveError, RankFailedError, StartupError
from hvdlite.links.proof import Caller, Secret, prove
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment
from hvdlite.node import _CLAIM as CLAIM, Door, Node, discover
from thread_comm import on_ranks

ELSEWHERE = Door("\0elsewhere", b"k" * 32)


def found(size: int) -> list[tuple[tuple[tuple[int, ...], ...], Node]]:
    return on_ranks(size, lambda comm: discover(comm, 10.0))


def shared(nodes: list[Node], nbytes: int) -> list[Segment]:
    return on_ranks(len(nodes), lambda comm: nodes[comm.rank].share(nbytes))


def close(nodes: list[Node]) -> None:
    for node in nodes:
        node.close()


def on_machines(monkeypatch: pytest.MonkeyPatch, machine_of: list[int]) -> None:
    """Make ranks reach only those that ``machine_of`` puts on their own machine."""
    connect = hvdlite.node._connect_to_leader

    def reach(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        own = {r: door for r, door in doors.items() if machine_of[r] == machine_of[rank]}
        return connect(own, rank, deadline_s)

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", reach)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped(name: str = "memfd:hvdlite") -> int:
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)


def test_a_process_alone_is_a_node() -> None:
    nodes, node = discover(None, 1.0)
    assert nodes == ((0,),)
    assert (node.local_rank, node.local_size, node.is_leader) == (0, 1, True)
    assert not node.share(10).memory.any()
    node.close()


@pytest.mark.parametrize("size", [1, 2])
def test_shared_memory_is_there_before_it_is_touched(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a node is told that it may come later."""
    nodes = [node for _, node in found(size)]
    files: list[int] = []

    def create(nbytes: int, *, reserved: bool = False) -> int:
        fd = create_memory_file(nbytes, reserved=reserved)
        files.append(os.dup(fd))
        return fd

    monkeypatch.setattr(hvdlite.node, "create_memory_file", create)
    shared(nodes, 1 << 20)
    on_ranks(size, lambda comm: nodes[comm.rank].share(1 << 20, reserved=False))
    assert [os.fstat(fd).st_blocks * 512 for fd in files] == [1 << 20, 0]
    for fd in files:
        os.close(fd)
    close(nodes)


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_that_reach_one_another_are_a_node(size: int) -> None:
    results = found(size)
    assert {nodes for nodes, _ in results} == {(tuple(range(size)),)}
    assert [node.local_rank for _, node in results] == list(range(size))
    close([node for _, node in results])


@pytest.mark.parametrize(
    ("machine_of", "expected"),
    [
        ([0, 0, 1, 1], ((0, 1), (2, 3))),
        ([0, 1, 0, 1, 0], ((0, 2, 4), (1, 3))),
        ([0, 1, 2], ((0,), (1,), (2,))),
        ([0, 1, 1], ((0,), (1, 2))),
    ],
)
def test_machines_are_told_apart_by_trying(
    monkeypatch: pytest.MonkeyPatch, machine_of: list[int], expected: tuple[tuple[int, ...], ...]
) -> None:
    on_machines(monkeypatch, machine_of)
    results = found(len(machine_of))
    assert {nodes for nodes, _ in results} == {expected}
    for rank, (_, node) in enumerate(results):
        assert node.ranks[node.local_rank] == rank
    close([node for _, node in results])


def test_ranks_that_contradict_one_another_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 sees rank 1, which sees rank 0, which rank 2 does not see."""
    connect = hvdlite.node._connect_to_leader

    def reach(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        return connect(doors | {0: ELSEWHERE} if rank == 2 else doors, rank, deadline_s)

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", reach)
    with pytest.raises(StartupError, match="disagree about who shares a machine"):
        found(3)


def test_a_segment_is_the_same_memory_for_everybody() -> None:
    nodes = [node for _, node in found(3)]

    def work(comm: Any) -> list[Segment]:
        segments = [nodes[comm.rank].share(nbytes) for nbytes in (3, 100_000, 0, 4096)]
        assert not any(segment.memory[: segment.nbytes].any() for segment in segments)
        comm.allgather(None)
        for i, segment in enumerate(segments):
            segment.memory[comm.rank : comm.rank + 1] = 10 * i + comm.rank + 1
        comm.allgather(None)
        return segments

    results = on_ranks(3, work)
    for segments in results:
        assert [segment.nbytes for segment in segments] == [3, 100_000, 0, 4096]
        for i in (0, 1, 3):
            assert list(segments[i].memory[:3]) == [10 * i + 1, 10 * i + 2, 10 * i + 3]
    close(nodes)


def test_many_segments_in_a_row_keep_their_order() -> None:
    """The leader does not wait for the others between two segments."""
    nodes = [node for _, node in found(2)]
    generator = random.Random(1)
    sizes = [generator.randrange(1, 5000) for _ in range(200)]

    def work(comm: Any) -> list[Segment]:
        segments = []
        for i, nbytes in enumerate(sizes):
            segments.append(nodes[comm.rank].share(nbytes))
            if comm.rank == 0:
                segments[-1].memory[0] = i % 256
            elif i % 50 == 0:
                time.sleep(0.02)
        return segments

    _, others = on_ranks(2, work)
    assert [segment.nbytes for segment in others] == sizes
    assert [int(segment.memory[0]) for segment in others] == [i % 256 for i in range(len(sizes))]
    close(nodes)


def test_one_abort_is_seen_by_all() -> None:
    nodes = [node for _, node in found(3)]
    assert [node.aborted for node in nodes] == [False] * 3
    nodes[1].abort()
    assert [node.aborted for node in nodes] == [True] * 3
    close(nodes)


def test_waiting_for_a_segment_ends_when_the_leader_is_gone() -> None:
    nodes = [node for _, node in found(2)]
    nodes[0].close()
    with pytest.raises(CollectiveError, match="rank 0 is gone"):
        nodes[1].share(8)
    nodes[1].close()


def test_waiting_for_a_segment_ends_with_the_job() -> None:
    nodes = [node for _, node in found(2)]

    def check() -> None:
        raise RankFailedError(7, "rank 7 died")

    nodes[1].check = check
    with pytest.raises(RankFailedError, match="rank 7 died"):
        nodes[1].share(8)
    close(nodes)


def test_waiting_for_a_segment_has_a_limit() -> None:
    nodes = [node for _, node in found(2)]
    nodes[1].timeout_s = 0.3
    started = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 0 did not share 8 bytes of memory within"):
        nodes[1].share(8)
    assert time.monotonic() - started < 3
    close(nodes)


def test_a_leader_whose_rank_is_gone_says_so() -> None:
    nodes = [node for _, node in found(3)]
    nodes[2].close()
    with pytest.raises(CollectiveError, match="rank 2 is gone"):
        nodes[0].share(8)
    close(nodes)


def test_a_rank_that_does_not_connect_is_named_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = hvdlite.node._connect_to_leader

    def reach(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        if rank == 0:
            return connect(doors, rank, deadline_s)
        pairs = [socket.socketpair() for _ in range(2)]
        for _, other in pairs:
            other.close()
        return 0, [own for own, _ in pairs]  # to nobody

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", reach)

    def work(comm: Any) -> None:
        missing = r"ranks \[1\] did not connect to rank 0|rank 0 is gone"
        with pytest.raises((StartupError, CollectiveError), match=missing):
            discover(comm, 0.3)

    on_ranks(2, work)


def test_the_memory_of_a_node_reaches_no_stranger_of_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has found the names, comes first and claims to be rank 1, or a rank that there is not, or says nothing."""
    connect = hvdlite.node._connect_to_leader
    strangers: list[socket.socket] = []

    def come_first(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        if rank == 1:
            wrong = Secret(b"k" * 32, doors[0].secret.purpose, doors[0].secret.claim_bytes)
            for said in [b"", bytes(16) + CLAIM.pack(1, 0), b"", b"GET / HTTP/1.1\r\n\r\n" * 9]:
                strangers.append(socket.socket(socket.AF_UNIX))
                strangers[-1].connect(doors[0].name)
                strangers[-1].sendall(said)
            with pytest.raises(ConnectionError):
                prove(wrong, strangers[0], CLAIM.pack(4242, 0))
            not_there = socket.socket(socket.AF_UNIX)
            not_there.connect(doors[0].name)
            prove(doors[0].secret, not_there, CLAIM.pack(4242, 0))  # knows the key, and is no rank
            strangers.append(not_there)
        return connect(doors, rank, deadline_s)

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", come_first)
    nodes = [node for _, node in found(3)]
    assert [segment.memory.data.nbytes for segment in shared(nodes, 100)] == [100, 100, 100]
    for stranger in strangers:
        with stranger, suppress(ConnectionResetError):
            stranger.settimeout(20)
            heard, files, _, _ = socket.recv_fds(stranger, 1 << 16, 1)
            assert len(heard) in (0, Caller.answer_bytes) and not files  # a challenge at most
    close(nodes)


def test_a_passing_shortage_of_descriptors_puts_nobody_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 cannot have sockets, and then they can."""
    tried: dict[int, int] = {}
    make = socket.socket

    def short(family: int = socket.AF_INET, *rest: Any, **more: Any) -> socket.socket:
        me = threading.get_ident()
        if family == socket.AF_UNIX and getattr(here, "is_connecting", False):
            tried[me] = tried.get(me, 0) + 1
            if tried[me] <= 3:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make(family, *rest, **more)

    here = threading.local()
    connect = hvdlite.node._connect_to_leader

    def reach(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        here.is_connecting = True
        try:
            return connect(doors, rank, deadline_s)
        finally:
            here.is_connecting = False

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", reach)
    monkeypatch.setattr(hvdlite.node.socket, "socket", short)
    results = found(3)
    assert {nodes for nodes, _ in results} == {((0, 1, 2),)}
    assert list(tried.values()) == [5, 5]  # three in vain, and one for each connection
    close([node for _, node in results])


def test_a_lasting_shortage_is_an_error_and_not_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket
    here = threading.local()
    connect = hvdlite.node._connect_to_leader

    def short(*rest: Any, **more: Any) -> socket.socket:
        if getattr(here, "is_connecting", False):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make(*rest, **more)

    def reach(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        here.is_connecting = rank == 1
        return connect(doors, rank, deadline_s)

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", reach)
    monkeypatch.setattr(hvdlite.node.socket, "socket", short)

    def work(comm: Any) -> None:
        with pytest.raises(StartupError, match=r"rank 1 cannot connect to rank 0 on its own machine.*ulimit"):
            discover(comm, 0.3)

    on_ranks(2, work)


_SETRESUID = {"x86_64": 117, "aarch64": 147}.get(platform.machine())
NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0 or _SETRESUID is None, reason="needs to become somebody else")
def test_another_user_is_not_taken_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has found the name in /proc/net/unix, and is there before rank 1, though it even knows the key."""
    answers: list[bytes] = []
    connect = hvdlite.node._connect_to_leader

    def stranger(door: Door) -> None:
        # The system call itself, and not libc's function, is of this thread alone; the kernel asks who connects.
        assert ctypes.CDLL(None).syscall(_SETRESUID, NOBODY, NOBODY, NOBODY) == 0
        with open("/proc/net/unix") as listed:
            assert door.name[1:] in listed.read()
        links = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for which, link in enumerate(links):
            with suppress(BrokenPipeError):
                link.connect(door.name)
                link.sendall(Caller(door.secret, link, CLAIM.pack(1, which)).hello)
        for link in links:
            with link, suppress(ConnectionResetError):
                link.settimeout(20)
                answers.append(link.recv(1))

    strangers: list[threading.Thread] = []

    def come_first(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        if rank == 1:
            strangers.append(threading.Thread(target=stranger, args=(doors[0],)))
            strangers[0].start()
            strangers[0].join(20)
        return connect(doors, rank, deadline_s)

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", come_first)
    nodes = [node for _, node in found(3)]
    assert [segment.memory.data.nbytes for segment in shared(nodes, 100)] == [100, 100, 100]
    assert not any(answers)
    close(nodes)


@pytest.mark.skipif(os.geteuid() != 0 or _SETRESUID is None, reason="needs to become somebody else")
def test_another_user_cannot_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than the leader's socket keeps waiting; nobody is held up."""
    connect = hvdlite.node._connect_to_leader

    def flood(door: Door) -> None:
        assert ctypes.CDLL(None).syscall(_SETRESUID, NOBODY, NOBODY, NOBODY) == 0
        for _ in range(6000):
            with socket.socket(socket.AF_UNIX) as link, suppress(OSError):
                link.setblocking(False)
                link.connect(door.name)

    floods: list[threading.Thread] = []

    def come_first(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        if rank == 1:
            floods.append(threading.Thread(target=flood, args=(doors[0],)))
            floods[0].start()
        return connect(doors, rank, deadline_s)

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", come_first)
    results = found(3)
    assert {nodes for nodes, _ in results} == {((0, 1, 2),)}
    floods[0].join(60)
    close([node for _, node in results])


@pytest.mark.parametrize("step", ["_core_mask", "_connect_to_leader", "Node"])
def test_what_fails_on_one_rank_fails_on_all_at_once(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(hvdlite.node, step)
    culprit = threading.local()

    def fail(*args: Any) -> Any:
        if culprit.rank == 2:
            raise OSError("out of everything")
        return original(*args)

    monkeypatch.setattr(hvdlite.node, step, fail)
    started_s = time.monotonic()

    def work(comm: Any) -> None:
        culprit.rank = comm.rank
        with pytest.raises(OSError if comm.rank == 2 else StartupError, match="out of everything") as caught:
            discover(comm, 20.0)
        assert comm.rank == 2 or str(caught.value) == "rank 2: out of everything"

    on_ranks(3, work)
    assert time.monotonic() - started_s < 5


def test_nothing_is_left_of_nodes_and_segments() -> None:
    close([node for _, node in found(2)])  # whatever Python opens once
    gc.collect()
    files, mappings = open_files(), mapped()
    for _ in range(10):
        nodes = [node for _, node in found(2)]
        segments = shared(nodes, 1 << 16)
        close(nodes)
    assert mapped() > mappings
    del nodes, segments
    gc.collect()
    assert open_files() == files
    assert mapped() == mappings


def test_nothing_has_a_name_in_dev_shm() -> None:
    """Of this process: jobs of other tests come and go there."""
    before = mapped("/dev/shm/")
    nodes = [node for _, node in found(2)]
    segments = shared(nodes, 1 << 16)
    assert mapped("/dev/shm/") <= before
    assert segments[0].address != segments[1].address
    close(nodes)
