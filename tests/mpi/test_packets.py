"""Allgathers and alltoalls whose rows go with their numbers, or after them where a rank has no room for its own.

So it is between nodes; in a node they are tried as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
import machines_lab
from hvdlite._native import PacketRoom
from hvdlite.memory.packets import Packets
from machines_lab import ONE_MACHINE, WORLD, Machines

REPEATS = 12
ROOM = 64  # bytes of rows of up to as many

machine_of = machines_lab.machine_of

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that tell one another"),
]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with each exchange of rows that did not go with their numbers."""
    found: list[object] = []
    engine = hvdlite.runtime().group.world.engine

    def watch(owner: Any, method: str) -> None:
        do = getattr(owner, method)

        def seen(*args: Any, **options: Any) -> object:
            found.append(args)
            return do(*args, **options)

        monkeypatch.setattr(owner, method, seen)

    watch(engine.backend, "allgather_tensors")
    watch(engine.exchange, "exchange")
    return found


def times_apart(first_room: int, nbytes: int, width: int = 1) -> int:
    """How many of `REPEATS` operations have no room, of ``nbytes`` each: the first may not know what it takes."""
    engine, rooms = hvdlite.runtime().group.world.engine, [PacketRoom.enough_for(n) for n in (first_room, nbytes)]
    fits = [engine.packets(width, room) is not None for room in rooms]
    if rooms[1] <= rooms[0] and fits[0]:
        return 0
    return 1 if fits[1] else REPEATS


def gathered(rows: Callable[[int], int], number: int, name: str | None, dtype: torch.dtype = torch.uint8) -> None:
    own = torch.full((rows(hvd.rank()), 1), hvd.rank() + number).to(dtype)
    expected = torch.cat([torch.full((rows(rank), 1), rank + number).to(dtype) for rank in range(hvd.size())])
    assert torch.equal(hvd.allgather(own, name=name), expected), (number, expected.shape)


@pytest.mark.parametrize("nbytes", [0, 1, ROOM - 1, ROOM, ROOM + 1, 3000, 100_000])
@pytest.mark.parametrize("of", ["all", "one"])
def test_allgathers_around_every_threshold(nbytes: int, of: str, apart: list[object], machine_of: Machines) -> None:
    """Of all ranks, or of the last one, where others have one row."""
    last = hvd.size() - 1
    for number in range(REPEATS):
        gathered(lambda rank: nbytes if of == "all" or rank == last else 1, number, f"{nbytes} of {of}")
    assert machine_of == ONE_MACHINE or len(apart) == times_apart(ROOM, nbytes)


@pytest.mark.parametrize("row_numel", [16, 17, 500, 5000])
def test_there_is_room_for_a_row(row_numel: int, apart: list[object], machine_of: Machines) -> None:
    """As of SyncBatchNorm, unless that of all ranks is more than passes at once."""
    for number in range(REPEATS):
        own = torch.arange(row_numel, dtype=torch.float32)[None] + hvd.rank() + number
        result = hvd.allgather(own, name=f"row of {row_numel}")
        assert torch.equal(result, torch.cat([own - hvd.rank() + rank for rank in range(hvd.size())]))
    assert machine_of == ONE_MACHINE or len(apart) == times_apart(4 * row_numel, 4 * row_numel)


def test_sizes_that_change_and_names_that_do_not(apart: list[object], machine_of: Machines) -> None:
    for number in range(40):
        gathered(lambda rank, number=number: (7 * rank + 31 * number) % 100, number, "changing")  # type: ignore[misc]
        gathered(lambda rank: rank % 2, number, None, torch.int64)
    assert len(apart) <= 1 or machine_of == ONE_MACHINE


def test_room_that_changes_while_a_call_is_prepared(monkeypatch: pytest.MonkeyPatch, machine_of: Machines) -> None:
    """By what was submitted before: one rank alone prepares it meanwhile, and sends what the others do."""
    engine = hvdlite.runtime().group.world.engine
    make = engine.packets
    handles: list[Any] = []

    def packets(width: int, room: int) -> Packets | None:
        made = make(width, room)
        if handles and threading.current_thread() is threading.main_thread():
            assert hvd.synchronize(handles.pop()).shape == (300 * hvd.size(), 1)
        return made

    for number in range(60):
        gathered(lambda _: 8, number, None)  # until that is prepared, and in a plan that runs free
    gathered(lambda _: 9, 0, None)
    if hvd.rank() == 0:
        monkeypatch.setattr(engine, "packets", packets)
    own = hvd.allgather_async(torch.ones(300, 1, dtype=torch.uint8))
    if hvd.rank() == 0:
        handles.append(own)
    for number in range(REPEATS):
        gathered(lambda _: 9, number, None)
    assert machine_of == ONE_MACHINE or not handles
    hvd.synchronize(own)


def test_groups(apart: list[object], machine_of: Machines) -> None:
    for number in range(REPEATS):
        own = [torch.full((2, 3), float(hvd.rank() + number)), torch.tensor([hvd.rank()]), torch.zeros(hvd.rank(), 2)]
        first, second, third = hvd.grouped_allgather(own, name="group")
        assert first.shape == (2 * hvd.size(), 3) and (first[2 * hvd.size() - 1] == hvd.size() - 1 + number).all()
        assert second.tolist() == list(range(hvd.size()))
        assert third.shape == (sum(range(hvd.size())), 2)
    assert not apart or machine_of == ONE_MACHINE


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 1000])
def test_alltoalls(rows: int, apart: list[object], machine_of: Machines) -> None:
    """Of int64: 8 bytes, of which the first packets have room for one to each rank, or for 64 bytes."""
    size, me = hvd.size(), hvd.rank()
    for number in range(REPEATS):
        splits = [rows + (sender + number) % 2 for sender in range(size)]  # of each sender, to each rank
        given = torch.cat([torch.full((splits[me] + 0,), 10 * me + to) for to in range(size)])
        beyond = torch.full((3,), -1)  # rows that go nowhere
        output, received = hvd.alltoall(torch.cat([given, beyond]), torch.tensor([splits[me]] * size), name=f"{rows}")
        assert received.tolist() == splits
        assert output.tolist() == [10 * sender + me for sender in range(size) for _ in range(splits[sender])]
    assert machine_of == ONE_MACHINE or len(apart) == times_apart(8 * size, 8 * size * (rows + 1), size)


def test_reducescatters_of_few_bytes() -> None:
    """And of more than pass at once: the same sums, of every part."""
    for rows in (0, 1, hvd.size(), 5 * hvd.size() + 1, 4000):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            own = (torch.arange(2 * rows) % 5 + hvd.rank()).to(dtype).reshape(rows, 2)
            whole = hvd.allreduce(own, op=hvd.Sum, name=f"whole {rows} {dtype}")
            bounds = [rank * (rows // hvd.size()) + min(rank, rows % hvd.size()) for rank in range(hvd.size() + 1)]
            wanted = whole[bounds[hvd.rank()] : bounds[hvd.rank() + 1]]
            for _ in range(REPEATS):
                assert torch.equal(hvd.reducescatter(own, op=hvd.Sum, name=f"parts {rows} {dtype}"), wanted)
