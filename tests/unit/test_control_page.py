"""Byte streams and doorbells of a node's page; the ranks are threads here."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from hvdlite.coordinator.control_page import ByteStream, ControlPage
from hvdlite.node import Node, discover
from thread_comm import on_ranks


def stream(readers: int, capacity: int) -> ByteStream:
    memory = np.zeros(ByteStream.bytes_needed(readers, capacity) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    view = memory[start:]
    return ByteStream(view.data, view.ctypes.data, readers, capacity)


def message(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def test_a_stream_takes_what_fits_and_gives_what_is_there() -> None:
    pipe = stream(1, 10)
    outbox = bytearray(b"abcdefghijklmno")
    assert pipe.read(0) == b""
    assert pipe.write(outbox)
    assert outbox == b"klmno"
    assert not pipe.write(outbox)
    assert pipe.read(0) == b"abcdefghij"
    assert pipe.read(0) == b""
    assert pipe.write(outbox)
    assert not pipe.write(outbox)
    assert pipe.read(0) == b"klmno"
    assert (pipe.bytes_written, pipe.bytes_read) == (15, 15)


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000])
@pytest.mark.parametrize("readers", [1, 3])
def test_streams_keep_bytes_and_order_across_the_wrap(readers: int, capacity: int) -> None:
    pipe = stream(readers, capacity)
    generator = random.Random(capacity)
    sent = message(1, 20 * capacity + 3)
    outbox, position = bytearray(), 0
    got = [bytearray() for _ in range(readers)]
    while min(map(len, got)) < len(sent):
        if generator.random() < 0.5 and position < len(sent):
            size = generator.randrange(1, 2 * capacity + 2)
            outbox += sent[position : position + size]
            position += size
        pipe.write(outbox)
        reader = generator.randrange(readers)
        got[reader] += pipe.read(reader)
    assert [bytes(data) for data in got] == [sent] * readers


def test_the_slowest_reader_holds_the_writer() -> None:
    pipe = stream(2, 8)
    outbox = bytearray(b"12345678")
    pipe.write(outbox)
    assert pipe.read(0) == b"12345678"
    outbox += b"9"
    assert not pipe.write(outbox)
    assert pipe.read(1) == b"12345678"
    assert pipe.write(outbox)


def pages(size: int) -> tuple[list[Node], list[ControlPage]]:
    nodes = [node for _, node in on_ranks(size, lambda comm: discover(comm, 10.0))]
    return nodes, on_ranks(size, lambda comm: ControlPage(nodes[comm.rank]))


def test_ranks_and_their_leader_talk_without_mixing_streams() -> None:
    """Everybody sends the leader 200 kB, far more than a mailbox holds, and reads 300 kB of log, at their own speed."""
    nodes, page_of = pages(3)
    log = message(99, 300_000)

    def leader() -> list[bytes]:
        page, outbox = page_of[0], bytearray(log)
        heard = [bytearray() for _ in range(3)]
        while outbox or min(len(h) for h in heard[1:]) < 200_000:
            rings = page.rings()
            before = sum(map(len, heard)) - len(outbox)
            page.publish(outbox)
            for rank in (1, 2):
                heard[rank] += page.receive(rank)
            if sum(map(len, heard)) - len(outbox) == before:
                page.sleep(rings, 0.001)
        return [bytes(h) for h in heard[1:]]

    def follower(rank: int) -> list[bytes]:
        page, outbox, got = page_of[rank], bytearray(message(rank, 200_000)), bytearray()
        while outbox or len(got) < len(log):
            rings = page.rings()
            page.send_to_leader(outbox)
            piece = page.read_log()
            got += piece
            if not piece:
                page.sleep(rings, 0.001)
        return [bytes(got)]

    results: list[list[bytes]] = on_ranks(3, lambda comm: leader() if comm.rank == 0 else follower(comm.rank))
    assert results == [[message(1, 200_000), message(2, 200_000)], [log], [log]]
    for node in nodes:
        node.close()


def test_a_ring_wakes_a_sleeper_and_is_never_missed() -> None:
    """Two ranks ring each other in turn; a missed ring would cost the whole patience of 20 s."""
    nodes, page_of = pages(2)
    turns = 2000

    def work(comm: Any) -> float:
        page, other, started = page_of[comm.rank], 1 - comm.rank, time.monotonic()
        for turn in range(turns):
            if comm.rank == 0:
                page.ring(other)
            while page.rings() == turn:
                page.sleep(turn, 20.0)
            if comm.rank == 1:
                page.ring(other)
        return time.monotonic() - started

    assert max(on_ranks(2, work)) < 15
    for node in nodes:
        node.close()


def test_sleep_lasts_as_long_as_it_should() -> None:
    nodes, (page,) = pages(1)
    started = time.monotonic()
    page.sleep(page.rings(), 0.15)
    assert 0.14 < time.monotonic() - started < 2

    seen = page.rings()
    page.ring_self()
    started = time.monotonic()
    page.sleep(seen, 20.0)  # rung already
    threading.Timer(0.1, page.ring_self).start()
    page.sleep(page.rings(), 20.0)  # rung meanwhile
    assert time.monotonic() - started < 10
    nodes[0].close()


def test_a_leader_alone_has_no_readers() -> None:
    nodes, (page,) = pages(1)
    outbox = bytearray(1_000_000)
    page.publish(outbox)
    assert not outbox and page.bytes_written == 0
    nodes[0].close()


@pytest.mark.parametrize("first", [1, (1 << 20) - 2, (1 << 40) - 2])
def test_how_much_of_a_plan_is_ready_whatever_its_number(first: int) -> None:
    """Numbers are compared modulo 2^20: a program that alternates two orders gets there in an hour."""
    nodes, page_of = pages(3)
    for plan in range(first, first + 5):
        for page in page_of:
            page.set_ready(plan, 0)  # as at the start of every plan
        assert page_of[0].ready(plan) == 0 and page_of[0].ready(plan + 1) == 0
        for count in (1, 7):
            rings = page_of[0].rings()
            for rank, page in enumerate(page_of):
                assert page_of[0].ready(plan) < count, rank
                page.set_ready(plan, count)
            assert page_of[0].ready(plan) == count and page_of[0].ready(plan - 1) == 0
            assert page_of[0].rings() == rings + 1  # the last one wakes the leader
    for node in nodes:
        node.close()
