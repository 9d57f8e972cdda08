"""Counters in shared memory that start near their limits, and go on beyond them.

Those of barriers and doorbells: test_native_signal.py; of plans: test_control_page.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda_lab import simulated
from hvdlite import _native
from hvdlite.coordinator.control_page import ByteStream
from hvdlite.coordinator.messages import Claim, Decoder, Encoder, PlanMessage, Verb
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment
from hvdlite.operations.barrier import Barrier

LONG_S = 60.0
LINE_BYTES = 64
TURNS = 7


def lines(nbytes: int, ranks: int, first: int) -> NDArray[np.uint8]:
    """So many zeroed bytes, which begin with a line for each rank, whose count is ``first``."""
    memory = np.zeros(nbytes + LINE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % LINE_BYTES :]
    for rank in range(ranks):
        _native.store32(memory.ctypes.data + LINE_BYTES * rank, first)
    return memory


def on_threads(ranks: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_S)


@pytest.mark.parametrize("first", [0xFFFFFFFC, 0x7FFFFFFD, 0])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_small_allreduces(first: int, ranks: int) -> None:
    memory = lines(_native.PlacesInTurn.bytes_needed(ranks), ranks, first)
    abort = np.zeros(1, np.uint32)
    results = [np.zeros((TURNS, 5), np.float32) for _ in range(ranks)]

    def work(rank: int) -> None:
        places = _native.PlacesInTurn(memory.ctypes.data, rank, ranks, abort.ctypes.data, 50)
        small = _native.SmallAllreduce(places)
        for turn in range(TURNS):
            result = results[rank][turn]
            result[:] = np.arange(5) + rank + 10 * turn
            tensors = _native.TensorList([result.ctypes.data], [5], [0])
            float32 = DType.FLOAT32
            assert small.run(tensors, tensors, 5, (0, 5), float32, float32, ReduceOp.SUM, 1.0, 1.0, LONG_S) == 0

    on_threads(ranks, work)
    expected = [[sum(i + rank + 10 * turn for rank in range(ranks)) for i in range(5)] for turn in range(TURNS)]
    for result in results:
        assert result.tolist() == expected
    assert _native.load32(memory.ctypes.data) == (first + TURNS) % (1 << 32)


@pytest.mark.parametrize("first", [0xFFFFFFFC, 0xFFFFFFFD, 0x7FFFFFFD, 0])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exchanges_in_order(first: int, ranks: int) -> None:
    """Of two pieces each, so that one ends, and one begins, where the count wraps."""
    window, numel = LINE_BYTES * ranks, 12
    memory = lines(_native.OrderedExchange.bytes_needed(ranks, window), ranks, first)
    abort = np.zeros(1, np.uint32)
    results = [np.zeros((TURNS, ranks, numel * ranks), np.int64) for _ in range(ranks)]

    def work(rank: int) -> None:
        exchange = _native.OrderedExchange(memory.ctypes.data, rank, ranks, abort.ctypes.data, 50, window, 1 << 20)
        own = np.zeros(numel * ranks, np.int64)
        for turn in range(TURNS):
            own[:] = 100 * turn + rank
            arrivals = [(results[rank][turn, other].ctypes.data, own.nbytes) for other in range(ranks)]
            assert exchange.spread(turn, (own.ctypes.data, own.nbytes), arrivals, LONG_S) == 0

    on_threads(ranks, work)
    for result in results:
        assert result[:, :, 0].tolist() == [[100 * turn + rank for rank in range(ranks)] for turn in range(TURNS)]
        assert (result == result[:, :, :1]).all()
    assert _native.load32(memory.ctypes.data) == (first + 2 * TURNS) % (1 << 32)


@pytest.mark.parametrize("first", [0xFFFFFFFC, 0x7FFFFFFD])
def test_meetings_of_streams(first: int) -> None:
    simulated()
    nbytes = _native.StreamBarrier.bytes_needed(2)
    fd = create_memory_file(nbytes)
    pages = [Segment(fd, nbytes) for _ in range(2)]  # each has the driver register it
    os.close(fd)
    for rank in range(2):
        _native.store32(pages[0].address + LINE_BYTES * rank, first)
    streams = [_native.DeviceStream(0) for _ in range(2)]
    barriers = [_native.StreamBarrier(streams[rank], pages[rank].memory, rank, 2) for rank in range(2)]
    for turn in range(TURNS):
        barriers[turn % 2].meet()
        barriers[1 - turn % 2].meet()
    for stream in streams:
        _native.Moment(0, stream.handle).wait()
    assert [barrier.late() for barrier in barriers] == [[], []]
    assert _native.load32(pages[0].address) == (first + TURNS) % (1 << 32)


@pytest.mark.parametrize("first", [(1 << 32) - 20, (1 << 53) - 20, (1 << 63) - 20])
def test_bytes_of_a_stream(first: int) -> None:
    """A byte stream counts all bytes that it has ever carried."""
    capacity = 48
    memory = np.zeros(ByteStream.bytes_needed(1, capacity), np.uint8)
    for line in range(2):
        _native.store64(memory.ctypes.data + LINE_BYTES * line, first)
    writer, reader = (ByteStream(memory.data, memory.ctypes.data, 1, capacity) for _ in range(2))
    writer.bytes_written, writer._room_until = first, first
    sent = bytes(range(200))
    outbox, read = bytearray(sent), b""
    while outbox or len(read) < len(sent):
        writer.write(outbox)
        read += reader.read(0)
    assert read == sent
    assert _native.load64(memory.ctypes.data) == first + len(sent)


@pytest.mark.parametrize("number", [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 44, (1 << 63) - 2])
def test_numbers_of_operations(number: int) -> None:
    """Unnamed operations, and those of a plan, are counted for as long as a job lives."""
    encoder, decoder = Encoder(2), Decoder()
    sent = [Claim(Barrier("barrier"), number), Claim(Barrier("barrier"), number + 1), PlanMessage(Verb.READY, number)]
    for message in sent:
        encoder.send(message)
    assert list(decoder.feed(bytes(encoder.outbox))) == sent
