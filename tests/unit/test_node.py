"""Finding the ranks of a node, and the memory they share; the ranks are threads here."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import hvdlite.node
from hvdlite.errors import CollectiveError, RankFailedError, StartupError
from hvdlite.memory.segment import Segment, create_memory_file
from hvdlite.node import Node, discover
from thread_comm import on_ranks


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

    def reach(names: dict[int, str], rank: int) -> Any:
        own = machine_of[rank]
        return connect({r: n if machine_of[r] == own else "\0elsewhere" for r, n in names.items()}, rank)

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

    def reach(names: dict[int, str], rank: int) -> Any:
        return connect(names | {0: "\0elsewhere"} if rank == 2 else names, rank)

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

    def reach(names: dict[int, str], rank: int) -> Any:
        leader, links = connect(names, rank)
        if rank == 0:
            return leader, links
        pairs = [socket.socketpair() for _ in links]
        for link in (*links, *(other for _, other in pairs)):
            link.close()
        return leader, [own for own, _ in pairs]  # to nobody

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", reach)

    def work(comm: Any) -> None:
        with pytest.raises(StartupError, match=r"ranks \[1\] did not connect to rank 0.*HVDLITE_START_TIMEOUT"):
            discover(comm, 0.3)

    on_ranks(2, work)


_SETRESUID = {"x86_64": 117, "aarch64": 147}.get(platform.machine())
NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0 or _SETRESUID is None, reason="needs to become somebody else")
def test_another_user_is_not_taken_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has found the name in /proc/net/unix, and is there before rank 1."""
    answers: list[bytes] = []
    connect = hvdlite.node._connect_to_leader

    def stranger(name: str) -> None:
        # The system call itself, and not libc's function, is of this thread alone; the kernel asks who connects.
        assert ctypes.CDLL(None).syscall(_SETRESUID, NOBODY, NOBODY, NOBODY) == 0
        links = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for link in links:
            link.connect(name)
            link.sendall(hvdlite.node._HELLO.pack(1))
        for link in links:
            with link, suppress(ConnectionResetError):
                link.settimeout(20)
                answers.append(link.recv(1))

    strangers: list[threading.Thread] = []

    def come_first(names: dict[int, str], rank: int) -> Any:
        if rank == 1:
            strangers.append(threading.Thread(target=stranger, args=(names[0],)))
            strangers[0].start()
            time.sleep(0.5)
        return connect(names, rank)

    monkeypatch.setattr(hvdlite.node, "_connect_to_leader", come_first)
    nodes = [node for _, node in found(3)]
    assert [segment.memory.data.nbytes for segment in shared(nodes, 100)] == [100, 100, 100]
    strangers[0].join(20)
    assert not any(answers)
    close(nodes)


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


def test_memory_lives_as_long_as_an_array_in_it() -> None:
    fd = create_memory_file(8192)
    segment = Segment(fd, 8192)
    os.close(fd)
    array = segment.memory[4096:4128].view(np.float32)
    del segment
    gc.collect()
    array[:] = 3.0
    assert array.sum() == 24.0


def test_memory_that_the_machine_refuses_is_an_error_with_its_size() -> None:
    with pytest.raises(StartupError, match=f"cannot create {1 << 62} bytes of shared memory"):
        Segment(create_memory_file(1 << 62), 1 << 62)


def test_nothing_has_a_name_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    nodes = [node for _, node in found(2)]
    segments = shared(nodes, 1 << 16)
    assert set(os.listdir("/dev/shm")) <= before
    assert segments[0].address != segments[1].address
    close(nodes)
