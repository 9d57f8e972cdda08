"""Allgathers and alltoalls whose rows go with their numbers, or after them where a rank has no room for its own.

So it is between nodes; in a node they are tried as well.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hvdlite.torch as hvd
import machines_lab
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
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each result that was read from packets."""
    found: list[int] = []
    read = Packets.read

    def seen(self: Packets, target: int, pieces: object) -> None:
        found.append(target)
        read(self, target, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(Packets, "read", seen)
    return found


def gathered(rows: Callable[[int], int], number: int, name: str | None, dtype: torch.dtype = torch.uint8) -> None:
    own = torch.full((rows(hvd.rank()), 1), hvd.rank() + number).to(dtype)
    expected = torch.cat([torch.full((rows(rank), 1), rank + number).to(dtype) for rank in range(hvd.size())])
    assert torch.equal(hvd.allgather(own, name=name), expected), (number, expected.shape)


@pytest.mark.parametrize("nbytes", [0, 1, ROOM - 1, ROOM, ROOM + 1, 3000, 100_000])
@pytest.mark.parametrize("of", ["all", "one"])
def test_allgathers_around_every_threshold(nbytes: int, of: str, reads: list[int], machine_of: Machines) -> None:
    """Of all ranks, or of the last one, where others have one row."""
    last = hvd.size() - 1
    for number in range(REPEATS):
        gathered(lambda rank: nbytes if of == "all" or rank == last else 1, number, f"{nbytes} of {of}")
    assert len(reads) == (REPEATS if nbytes <= ROOM and machine_of != ONE_MACHINE else 0)


@pytest.mark.parametrize("row_numel", [16, 17, 500, 5000])
def test_there_is_room_for_a_row(row_numel: int, reads: list[int], machine_of: Machines) -> None:
    """As of SyncBatchNorm, unless that of all ranks is more than passes at once."""
    for number in range(REPEATS):
        own = torch.arange(row_numel, dtype=torch.float32)[None] + hvd.rank() + number
        result = hvd.allgather(own, name=f"row of {row_numel}")
        assert torch.equal(result, torch.cat([own - hvd.rank() + rank for rank in range(hvd.size())]))
    assert len(reads) == (REPEATS if row_numel <= 500 and machine_of != ONE_MACHINE else 0)


def test_sizes_that_change_and_names_that_do_not(reads: list[int], machine_of: Machines) -> None:
    for number in range(40):
        gathered(lambda rank, number=number: (7 * rank + 31 * number) % 100, number, "changing")  # type: ignore[misc]
        gathered(lambda rank: rank % 2, number, None, torch.int64)
    assert len(reads) >= 40 or machine_of == ONE_MACHINE


def test_groups(reads: list[int], machine_of: Machines) -> None:
    for number in range(REPEATS):
        own = [torch.full((2, 3), float(hvd.rank() + number)), torch.tensor([hvd.rank()]), torch.zeros(hvd.rank(), 2)]
        first, second, third = hvd.grouped_allgather(own, name="group")
        assert first.shape == (2 * hvd.size(), 3) and (first[2 * hvd.size() - 1] == hvd.size() - 1 + number).all()
        assert second.tolist() == list(range(hvd.size()))
        assert third.shape == (sum(range(hvd.size())), 2)
    assert len(reads) == (0 if machine_of == ONE_MACHINE else 3 * REPEATS)


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 1000])
def test_alltoalls(rows: int, reads: list[int], machine_of: Machines) -> None:
    """Of int64: 8 bytes, of which a packet has room for one to each rank, or for 64 bytes."""
    size, me = hvd.size(), hvd.rank()
    for number in range(REPEATS):
        splits = [rows + (sender + number) % 2 for sender in range(size)]  # of each sender, to each rank
        given = torch.cat([torch.full((splits[me] + 0,), 10 * me + to) for to in range(size)])
        beyond = torch.full((3,), -1)  # rows that go nowhere
        output, received = hvd.alltoall(torch.cat([given, beyond]), torch.tensor([splits[me]] * size), name=f"{rows}")
        assert received.tolist() == splits
        assert output.tolist() == [10 * sender + me for sender in range(size) for _ in range(splits[sender])]
    assert bool(reads) == (machine_of != ONE_MACHINE and 8 * size * rows <= 64)


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
