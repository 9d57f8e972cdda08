"""Packets of all ranks are a sum: numbers, and bytes where there is room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite import _native
from hvdlite._native import PacketRoom
from hvdlite.dtypes import DType
from hvdlite.memory.packets import Packets, Rooms


class Host:
    """As much of a memory as packets need."""

    tensors = staticmethod(_native.TensorList)
    copy = staticmethod(_native.copy)


def packets_of(size: int, width: int, room: int) -> list[Packets]:
    memory: Any = Host()
    return [Packets(memory, rank, size, width, room) for rank in range(size)]


def add(packets: list[Packets]) -> np.ndarray:
    """What an allreduce does with them; where the sum lies."""
    layout, byte = packets[0].layout, DType.UINT8
    total = np.zeros(layout.end, np.uint8)
    for each in packets:
        part = np.empty(layout.end, np.uint8)
        each.sources.pack(part.ctypes.data, 0, layout.end, byte, byte)
        total += part
    for each in packets:
        each.targets.unpack(total.ctypes.data, 0, layout.end, byte, byte)
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64])
def test_all_read_what_each_has_written(size: int, nbytes: int) -> None:
    packets = packets_of(size, 2, 64)
    for turn in range(3):  # nothing of an earlier turn stays
        data = [np.full(max(nbytes - turn, 0), 10 * rank + turn, np.uint8) for rank in range(size)]
        for rank, each in enumerate(packets):
            half = data[rank].nbytes // 2
            address = data[rank].ctypes.data
            each.write(
                [data[rank].nbytes, (rank + turn) << 40], [(address, half), (address + half, len(data[rank]) - half)]
            )
        add(packets)
        expected = np.concatenate(data)
        for each in packets:
            assert each.numbers == [[data[rank].nbytes, (rank + turn) << 40] for rank in range(size)]
            result = np.empty(expected.nbytes, np.uint8)
            each.read(result.ctypes.data, [(0, part.nbytes) for part in data])
            assert (result == expected).all()


def test_a_piece_begins_anywhere() -> None:
    packets = packets_of(2, 1, 64)
    data = [np.arange(10, dtype=np.uint8), np.arange(20, 30, dtype=np.uint8)]
    for each, part in zip(packets, data, strict=True):
        each.write([0], [(part.ctypes.data, part.nbytes)])
    add(packets)
    result = np.empty(5, np.uint8)
    packets[0].read(result.ctypes.data, [(3, 2), (7, 3)])
    assert result.tolist() == [3, 4, 27, 28, 29]


def test_without_room_the_numbers_are_told() -> None:
    packets = packets_of(3, 1, 64)
    data = np.zeros(65, np.uint8)
    for rank, each in enumerate(packets):
        each.write([rank], [(data.ctypes.data, data.nbytes)])
    add(packets)
    assert packets[1].numbers == [[0], [1], [2]]
    assert packets[1].room == 64


@pytest.mark.parametrize("dropped", [[], [0], [1, 2], [0, 1, 2]])
def test_a_sum_shows_whether_all_have_told(dropped: list[int]) -> None:
    packets = packets_of(3, 2, 64)
    for rank, each in enumerate(packets):
        each.write([0, rank], [])
        if rank in dropped:
            each.write_dropped()
    assert packets[1].are_all_at(add(packets).ctypes.data) is not bool(dropped)


def test_room_grows_at_once_and_shrinks_late() -> None:
    room = PacketRoom()
    sizes = [0, 64, 65, 1, 1, 129] + 7 * [1] + [200] + 7 * [64] + [65, 1, 1000, 100_000, 0]
    rooms = [64, 64, 128, 128, 128, 256] + 8 * [256] + 7 * [256] + [128, 128, 1024, 131072, 131072]
    seen = []
    for nbytes in sizes:
        room.note(nbytes)
        seen.append(room.now)
    assert seen == rooms
    assert [PacketRoom.enough_for(nbytes) for nbytes in (0, 1, 64, 65, 4097)] == [64, 64, 64, 128, 8192]


def test_rooms_are_forgotten_alike_whoever_looks_at_them() -> None:
    looked_at, other = Rooms(), Rooms()
    for number in range(1500):
        for rooms in (looked_at, other):
            rooms.note(number, 64)
            rooms.note(number // 2, 128)
        if number == 10:
            first = looked_at.of(0)
        looked_at.of(number // 3)
    assert first is not None and not first.now  # who has it sees that it is no longer so
    known = [[rooms.of(number) is not None for number in range(1500)] for rooms in (looked_at, other)]
    assert known[0] == known[1] and known[0].count(True) == 1024
