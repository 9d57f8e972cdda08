"""Links that are tried at the start, over pairs of sockets, and what is said of slow ones."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdlite.errors import StartupError
from hvdlite.links import link_probe, link_watch
from hvdlite.links.link_probe import Tried, slow_link, try_links
from hvdlite.links.link_watch import Delivery, LinkRates, LinkWatch, Turns, deliveries
from hvdlite.topology import Topology

HOSTS = {"10.0.0.2": "node1", "10.0.0.3": "node2"}
MB = 1 << 20
SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; bytes per second


def tree(nodes: int, fanout: int) -> list[dict[int, socket.socket]]:
    """The links of every leader, by place of the other."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(nodes)]
    for child in range(1, nodes):
        parent = (child - 1) // fanout
        links[parent][child], links[child][parent] = socket.socketpair()
    return links


@pytest.mark.parametrize(("nodes", "fanout"), [(1, 4), (2, 4), (5, 4), (7, 2), (9, 1)])
def test_every_link_is_tried_once(nodes: int, fanout: int) -> None:
    links = tree(nodes, fanout)
    names = [f"node{i}" for i in range(nodes)]
    each = tuple((i,) for i in range(nodes))
    until_s = time.monotonic() + 20
    with ThreadPoolExecutor(nodes) as pool:
        tried = list(pool.map(lambda i: try_links(links[i], Topology(i, each), fanout, names, until_s), range(nodes)))
    found = [link for some in tried for link in some]
    assert sorted((link.parent, link.child) for link in found) == [((i - 1) // fanout, i) for i in range(1, nodes)]
    assert all(link.gbit_per_s > 0 for link in found)
    ends = [link for own in links for link in own.values()]
    try:
        for end in ends:
            end.setblocking(False)
            with pytest.raises(BlockingIOError):  # nothing is left for whoever reads next
                end.recv(1)
    finally:
        for end in ends:
            end.close()


def test_a_stream_that_does_not_arrive_is_said_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_STALLED_S", 0.2)
    near, far = socket.socketpair()
    with far, near, pytest.raises(StartupError, match="between here and there a few bytes pass, and 512 KiB did not"):
        try_links({1: near}, Topology(0, ((0,), (1,))), 4, ["here", "there"], 0.0)
    near, far = socket.socketpair()
    with far, near, pytest.raises(StartupError, match="between there and here a few bytes pass"):
        try_links({0: near}, Topology(1, ((0,), (1,))), 4, ["here", "there"], 0.0)


def test_only_what_is_much_slower_is_said() -> None:
    names = [f"node{i}" for i in range(5)]

    def said(*rates: float) -> str | None:
        return slow_link([Tried(0, child, rate) for child, rate in enumerate(rates, 1)], names)

    assert said(1.0, 0.9, 0.8, 0.3) is None
    assert said(40.0, 30.0, 20.0, 2.0) is None  # a core that was busy
    assert said(1.0, 0.01) is None  # two links say nothing about one another
    sentence = said(1.0, 0.1, 0.9, 1.0)
    assert sentence is not None and sentence.startswith("the link from node0 to node2 carries 0.1 Gbit/s, others 10.0 ")


def look(rates: LinkRates, acked: list[int], rate: float | None, peer: str = "10.0.0.2") -> list[str]:
    acked[0] += 8 * MB
    return [*rates.note({7: Delivery(peer, acked[0], rate)}).values()]


def test_a_link_that_becomes_slow_is_named_once() -> None:
    rates, acked = LinkRates(3, HOSTS), [0]
    assert not any(look(rates, acked, 100e6) for _ in range(8))
    assert not any(look(rates, acked, 30e6) for _ in range(8))  # not slow enough
    assert not any([*look(rates, acked, 10e6), *look(rates, acked, 10e6), *look(rates, acked, 90e6)])  # not for long
    said = [sentence for _ in range(9) for sentence in look(rates, acked, 10e6)]
    assert len(said) == 1
    assert said[0].startswith("what rank 3 sends to node1 (10.0.0.2) arrives at 0.08 Gbit/s, 10.0 times slower than at")


def test_what_says_nothing_about_a_link() -> None:
    rates, acked = LinkRates(0, HOSTS), [0]
    for _ in range(8):
        look(rates, acked, 100e6)
    for _ in range(8):
        assert look(rates, acked, None) == []  # the sender had nothing to send
        assert rates.note({7: Delivery("10.0.0.2", acked[0], 1e6)}) == {}  # nothing was sent
        assert look(rates, acked, 1e6, "192.168.0.1") == []  # to another program


def test_a_link_on_which_nothing_arrives_is_named_once_also_after_it_was_slow() -> None:
    rates, acked = LinkRates(3, HOSTS), [0]
    for rate in (100e6, 10e6):
        for _ in range(6):
            look(rates, acked, rate)
    said = [
        sentence
        for resent in (0, 4, 5, 6, 0, 7)  # 4 happens where much is lost
        for peer in ("10.0.0.2", "192.168.0.1")
        for sentence in rates.note({7: Delivery(peer, acked[0], None, resent)}).values()
    ]
    assert len(said) == 1
    assert said[0].startswith("what rank 3 sends to node1 (10.0.0.2) does not arrive, though it was sent again 5 times")


@pytest.mark.parametrize(("nodes", "times"), [("aaa", 1), ("aab", 2)])
def test_one_rank_of_a_node_names_a_link(
    nodes: str, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: Counter[int] = Counter()  # by thread

    def become_slow() -> dict[int, Delivery]:
        looks[threading.get_ident()] += 1
        count = looks[threading.get_ident()]
        return {7: Delivery("10.0.0.2", count * 8 * MB, 100e6 if count < 10 else 10e6)}

    monkeypatch.setattr(link_watch, "deliveries", become_slow)
    watches = [
        LinkWatch(LinkRates(rank, HOSTS), Turns(f"test {os.getpid()} {node}"), 0.001, lambda: False)
        for rank, node in enumerate(nodes)
    ]
    until_s = time.monotonic() + 20
    while min(looks[watch._thread.ident or 0] for watch in watches) < 15 and time.monotonic() < until_s:
        time.sleep(0.01)
    for watch in watches:
        watch.close()
    assert sum("times slower than at the start" in record.message for record in caplog.records) == times


def test_a_turn_ends_with_its_owner() -> None:
    first, second = (Turns(f"test {os.getpid()}") for _ in range(2))
    assert (first.take("x"), second.take("x"), second.take("y"), first.take("y")) == (True, False, True, False)
    first.close()
    assert second.take("x")
    second.close()


def test_the_connections_of_this_process() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as link,
        server.accept()[0] as other,
    ):
        link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 50_000_000)
        link.sendall(b"x")
        assert other.recv(1) == b"x"
        before = deliveries()[link.fileno()]
        received = threading.Thread(target=lambda: other.recv(MB, socket.MSG_WAITALL))
        received.start()
        link.sendall(bytes(MB))
        received.join()
        after = deliveries()[link.fileno()]
    assert before.peer == after.peer == "127.0.0.1"
    assert before.acked_bytes < 1024 and after.acked_bytes > 0
    assert before.bytes_per_s is None  # one byte says nothing
    assert after.bytes_per_s is None or 0 < after.bytes_per_s < 2e10  # which no counter of the kernel's is


def test_the_thread_ends_when_it_is_closed_or_all_is_over() -> None:
    watch = LinkWatch(LinkRates(0, HOSTS), Turns("a"), 0.01, lambda: False)
    watch.close()
    over = threading.Event()
    watch = LinkWatch(LinkRates(0, HOSTS), Turns("a"), 0.01, over.is_set)
    assert watch._thread.is_alive()
    over.set()
    watch._thread.join(10)
    assert not watch._thread.is_alive()
