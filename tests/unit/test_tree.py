"""The links of the tree: messages whole and in order, however the kernel cuts them; none is lost at the end."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvdlite.coordinator import tree
from hvdlite.coordinator.tree import Tree
from hvdlite.counters import Traffic
from hvdlite.errors import CollectiveError

LARGE = 3 << 20  # far more than the kernel takes at once


def going_on() -> None:
    """No rank has failed."""


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far


@contextmanager
def parent_and_child() -> Iterator[tuple[Tree, Tree]]:
    with connection() as (near, far):
        yield Tree({1: near}, None, (1,), going_on), Tree({0: far}, 0, (), going_on)


def close(*trees: Tree) -> None:
    """All at once, as nodes do."""
    threads = [threading.Thread(target=each.close) for each in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_what_the_kernel_has_not_taken_counts_as_unsent() -> None:
    with parent_and_child() as (parent, child):
        parent.send(1, b"small")
        assert parent.unsent(1) == 0
        parent.send(1, bytes(10 * LARGE))
        parent.send(1, b"small")
        assert parent.unsent(1) == 2
        heard = []
        while len(heard) < 3:
            heard += [len(message) for _, message in child.receive()]
            assert list(parent.receive()) == []
        assert heard == [5, 10 * LARGE, 5]
        assert parent.unsent(1) == 0
        close(parent, child)


def test_one_look_takes_all_that_is_there() -> None:
    """The bell rings for what arrives, and never again for what was left."""
    with parent_and_child() as (parent, child):
        parent.send(1, bytes(300_000))
        while parent.unsent(1):
            list(parent.receive())
        assert [len(message) for _, message in child.receive()] == [300_000]
        close(parent, child)


def test_messages_arrive_whole_and_in_order() -> None:
    generator = random.Random(0)
    sizes = [0, 1, 17, 34, 1000, LARGE, 5, 70_000, 3]
    messages = [generator.randbytes(size) for size in sizes]
    with parent_and_child() as (parent, child):
        for message in messages:
            parent.send(1, message)
            child.send(0, message[::-1])
        heard: dict[int, list[bytes]] = {0: [], 1: []}
        while min(map(len, heard.values())) < len(messages):
            for end in (parent, child):
                for node_index, message in end.receive():
                    heard[node_index].append(message)
        assert heard[0] == messages
        assert heard[1] == [message[::-1] for message in messages]
        assert parent.traffic == child.traffic == Traffic(len(sizes), sum(sizes), len(sizes), sum(sizes))
        close(parent, child)


def test_a_message_may_come_in_pieces() -> None:
    with connection() as (near, far):
        child = Tree({0: near}, 0, (), going_on)
        frame = struct.pack("<I", 3) + b"abc" + struct.pack("<I", 2) + b"de"
        heard: list[tuple[int, bytes]] = []
        for at in range(len(frame)):
            far.send(frame[at : at + 1])
            while len(heard) < (at >= 6) + (at >= 12):
                heard += child.receive()
        assert heard == [(0, b"abc"), (0, b"de")]
        assert list(child.receive()) == []


def test_nothing_is_lost_at_the_end() -> None:
    """Neither what still waits for room, nor what the other end sends while this one closes."""
    with parent_and_child() as (parent, child):
        parent.send(1, bytes(LARGE))
        child.send(0, bytes(LARGE))
        close(parent, child)
        assert parent.traffic == child.traffic == Traffic(1, LARGE, 1, LARGE)


def test_a_neighbour_that_has_closed_is_no_failure() -> None:
    with parent_and_child() as (parent, child):
        closing = threading.Thread(target=child.close)
        closing.start()
        while not parent._links[1].at_end:
            assert list(parent.receive()) == []
        parent.send(1, b"the last word")
        parent.close()
        closing.join(60)
        assert child.traffic.messages_received == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_lost_connection_ends_the_job(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """With the reason of the job's failure, where somebody has found one."""
    monkeypatch.setattr(tree, "_REASON_S", 0.01)
    failure = CollectiveError("rank 3 died")

    def check() -> None:
        if known:
            raise failure

    with connection() as (near, far):
        parent = Tree({2: near}, None, (2,), check)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()  # without a word, as where a host is reset
        with pytest.raises(CollectiveError, match="rank 3 died" if known else "leader of node 2 is lost"):
            while True:
                list(parent.receive())


def test_a_failing_job_ends_a_close() -> None:
    with connection() as (near, _):
        parent = Tree({1: near}, None, (1,), lambda: (_ for _ in ()).throw(CollectiveError("rank 3 died")))
        with pytest.raises(CollectiveError, match="rank 3 died"):
            parent.close()


def test_a_node_without_links() -> None:
    alone = Tree({}, None, (), going_on)
    assert list(alone.receive()) == []
    alone.close()
    assert alone.traffic == Traffic()
