"""Process sets: who is in, what they compute, several at a time, and their end."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import hvdlite
import hvdlite.torch as hvd
from hvdlite import mpi
from hvdlite.errors import HorovodInternalError, MismatchError, ShutDownError
from hvdlite.garbage import uncollected
from runtime_lab import LAYOUTS, machines

WORLD = MPI.COMM_WORLD


@pytest.fixture(scope="module", params=LAYOUTS, ids=str, autouse=True)
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[int, ...]]:
    with machines(request.param):
        hvd.init()
        yield request.param
        hvd.shutdown()


def subsets() -> list[list[int]]:
    """Every set of ranks but all of them."""
    ranks = range(hvd.size())
    return [list(members) for count in range(1, hvd.size()) for members in combinations(ranks, count)]


def total(process_set: hvd.ProcessSet, name: str | None = None, numel: int = 3) -> None:
    tensor = torch.full((numel,), 1 + hvd.rank())
    result = hvd.allreduce(tensor, op=hvd.Sum, name=name, process_set=process_set)
    assert result.tolist() == [sum(1 + rank for rank in process_set.ranks)] * numel


def test_every_operation_on_every_set() -> None:
    for ranks in subsets():
        made = hvd.add_process_set(ranks)
        assert (made.ranks, made.size(), made.included()) == (ranks, len(ranks), hvd.rank() in ranks)
        if made.included():
            me = made.rank()
            assert ranks[me] == hvd.rank()
            total(made)
            total(made, numel=100_001)
            average = hvd.allreduce(torch.tensor([float(hvd.rank())]), process_set=made)
            assert average.item() == pytest.approx(sum(ranks) / len(ranks))
            assert hvd.allgather(torch.full((me + 1,), hvd.rank()), process_set=made).tolist() == [
                rank for place, rank in enumerate(ranks) for _ in range(place + 1)
            ]
            root = ranks[-1]
            assert hvd.broadcast(torch.tensor([hvd.rank()]), root, process_set=made).item() == root
            assert hvd.broadcast_object({"from": hvd.rank()}, root, process_set=made) == {"from": root}
            assert hvd.alltoall(torch.arange(len(ranks)) + 10 * hvd.rank(), process_set=made).tolist() == [
                10 * rank + me for rank in ranks
            ]
            scattered = hvd.reducescatter(torch.full((len(ranks),), hvd.rank()), op=hvd.Sum, process_set=made)
            assert scattered.tolist() == [sum(ranks)]
            hvd.barrier(process_set=made)
        assert hvd.remove_process_set(made)
        assert not hvd.remove_process_set(made)
        with pytest.raises(ValueError, match="is not registered"):
            hvd.allreduce(torch.zeros(1), process_set=made)
    assert not hvd.remove_process_set(hvd.global_process_set)


def test_numbers_and_duplicates() -> None:
    before = hvd.add_process_set([0]) if hvd.size() > 1 else None
    with pytest.raises(ValueError, match="are process set 0 already"):
        hvd.add_process_set(range(hvd.size()))
    for bad in ([], [0, 0], [-1], [hvd.size()]):
        with pytest.raises(ValueError, match="a process set of ranks"):
            hvd.add_process_set(bad)
    with pytest.raises(ValueError, match=r"a process set of 0: pass a list of ranks, \[0\]"):
        hvd.add_process_set(0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a process set of None: pass a list of ranks"):
        hvd.add_process_set(None)  # type: ignore[arg-type]
    for call in (hvd.remove_process_set, lambda listed: hvd.init(process_sets=[listed])):
        with pytest.raises(ValueError, match=r"process_set is \[0\]; pass .* an hvd.ProcessSet"):
            call([0])
    if before is None:
        return
    with pytest.raises(ValueError, match="are process set"):
        hvd.add_process_set(hvd.ProcessSet([0]))
    after = hvd.add_process_set(hvd.ProcessSet([hvd.size() - 1]))
    assert after.process_set_id == (before.process_set_id or 0) + 1
    assert hvd.remove_process_set(before)
    assert hvd.remove_process_set(after)


def test_who_is_no_member_is_told() -> None:
    if hvd.size() == 1:
        pytest.skip("the one rank is in every set")
    made = hvd.add_process_set([0])
    if hvd.rank():
        with pytest.raises(ValueError, match=r"is not a member of ProcessSet\(process_set_id=\d+, ranks=\[0\]\)"):
            hvd.allreduce(torch.zeros(1), process_set=made)
        with pytest.raises(ValueError, match="is not a member"):
            made.rank()
    else:
        with pytest.raises(ValueError, match=r"root_rank is 1, but the ranks of this process set are \[0\]"):
            hvd.broadcast(torch.zeros(1), 1, process_set=made)
    hvd.remove_process_set(made)


def test_from_a_communicator() -> None:
    half = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    members = half.allgather(WORLD.rank)
    everybody = WORLD.allgather(members)
    even = hvd.ProcessSet(half) if WORLD.rank % 2 == 0 else hvd.ProcessSet(everybody[0])
    if len(everybody[0]) < hvd.size():
        made = hvd.add_process_set(even)
        assert made.ranks == everybody[0]
        if made.included():
            total(made)
            assert made.mpi_comm is half
        hvd.remove_process_set(made)
    half.Free()


def test_ranks_of_a_communicator_leave_no_group_behind() -> None:
    kept: list[MPI.Group] = []

    class Noted(MPI.Group):
        def Free(self) -> None:
            kept.remove(self)
            super().Free()

    class Comm:
        def Get_group(self) -> MPI.Group:
            kept.append(Noted(MPI.COMM_SELF.Get_group()))
            return kept[-1]

    assert mpi.world_ranks_of(Comm()) == (WORLD.rank,)  # type: ignore[arg-type]
    assert not kept
    runtime = hvdlite.runtime()
    assert runtime.ranks_of(range(WORLD.size)) == runtime.topology.ranks
    with pytest.raises(ValueError, match="did not call"):
        runtime.ranks_of([WORLD.size])


def test_ranks_that_name_different_sets() -> None:
    if hvd.size() < 2:
        pytest.skip("one rank contradicts nobody")
    with pytest.raises(MismatchError, match=r"ranks of the process set is \(0,\) on rank 0 but \(1,\) on"):
        hvd.add_process_set([min(hvd.rank(), 1)])


def test_overlapping_sets_in_any_order() -> None:
    """Every rank submits to its sets in an order of its own, and waits in another."""
    made = [hvd.add_process_set(ranks) for ranks in subsets()]
    rng = random.Random(hvd.rank())
    for step in range(10):
        mine = [process_set for process_set in [*made, hvd.global_process_set] if process_set.included()]
        rng.shuffle(mine)
        handles = []
        for process_set in mine:
            tensor = torch.full((1 + 500 * step,), 1 + hvd.rank())
            handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="same name", process_set=process_set)
            handles.append((process_set, handle))
        rng.shuffle(handles)
        for process_set, handle in handles:
            assert hvd.synchronize(handle)[0].item() == sum(1 + rank for rank in process_set.ranks)
    for process_set in made:
        hvd.remove_process_set(process_set)


def test_a_slow_set_holds_up_no_other() -> None:
    if hvd.size() < 3:
        pytest.skip("needs two sets that share a rank")
    slow, quick = hvd.add_process_set([0, 1]), hvd.add_process_set([0, 2])
    if hvd.rank() == 0:
        waiting = hvd.allreduce_async(torch.ones(1), name="slow", process_set=slow)
    if quick.included():
        for _ in range(20):
            total(quick)
    if hvd.rank() == 0:
        assert not hvd.poll(waiting)
    hvd.barrier()  # rank 1 goes on only now
    if hvd.rank() == 1:
        waiting = hvd.allreduce_async(torch.ones(1), name="slow", process_set=slow)
    if slow.included():
        assert hvd.synchronize(waiting).item() == 1.0
    hvd.remove_process_set(slow)
    hvd.remove_process_set(quick)


def test_contradictions_are_named_by_global_rank() -> None:
    if hvd.size() < 3:
        pytest.skip("needs a set whose ranks are not those of the job")
    made = hvd.add_process_set([1, 2])
    if made.included():
        shape = (2,) if hvd.rank() == 1 else (3,)
        with pytest.raises(MismatchError, match=r"'t': shape is \(2,\) on rank 1 but \(3,\) on rank 2"):
            hvd.allreduce(torch.zeros(shape), name="t", process_set=made)
        total(made, name="t")
    hvd.remove_process_set(made)


def test_removal_fails_what_is_in_flight() -> None:
    if hvd.size() < 2:
        pytest.skip("nothing is in flight with one rank")
    made = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.add_process_set([0])
    handle = None
    if hvd.rank() == 0 and hvd.size() > 2:
        handle = hvd.allreduce_async(torch.ones(1), name="never", process_set=made)
    time.sleep(0.05)
    hvd.remove_process_set(made)
    if handle is not None:
        with pytest.raises(ShutDownError, match="was removed, so this operation cannot"):
            hvd.synchronize(handle)


def test_a_removal_that_was_contradicted_can_be_tried_again() -> None:
    if hvd.size() < 2:
        pytest.skip("one rank contradicts nobody")
    made = [hvd.add_process_set([rank]) for rank in (0, 1)]
    mine = made[min(hvd.rank(), 1)]
    for _ in range(2):
        with pytest.raises(MismatchError, match="ranks of the process set"):
            hvd.remove_process_set(mine)
        if mine.included():
            total(mine)
    assert [hvd.remove_process_set(process_set) for process_set in made] == [True, True]


def test_sets_need_an_mpi_that_serves_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if hvd.size() < 3:
        pytest.skip("needs a set of several ranks")
    monkeypatch.setattr(mpi, "allows_threads", lambda: False)
    with pytest.raises(hvdlite.ConfigError, match="HVDLITE_MPI_THREADS_DISABLE"):
        hvd.add_process_set([0, 1])
    alone = hvd.add_process_set([0])  # calls no MPI
    if alone.included():
        total(alone)
    hvd.remove_process_set(alone)


def test_an_optimizer_per_set() -> None:
    """Model parallelism over two parts: each part averages over its own ranks, at the same time."""
    if hvd.size() < 4:
        pytest.skip("two sets of two ranks")
    pairs = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    mine = pairs[hvd.rank() % 2]
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=mine)
    for _ in range(4):
        optimizer.zero_grad()
        (parameter * hvd.rank()).sum().backward()
        optimizer.step()
    assert parameter.tolist() == [-4.0 * sum(mine.ranks) / 2] * 10
    for process_set in pairs:
        hvd.remove_process_set(process_set)


def test_shutdown_and_start_again(layout: tuple[int, ...]) -> None:
    if hvd.size() < 2:
        pytest.skip("no set but that of all ranks")
    made = [hvd.add_process_set(ranks) for ranks in subsets()]
    for process_set in made:
        if process_set.included():
            total(process_set)
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.zeros(1), process_set=made[0])
    again = [hvd.ProcessSet(process_set.ranks) for process_set in made]
    hvd.init(process_sets=again)
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(torch.zeros(1), process_set=made[0])
    assert [process_set.process_set_id for process_set in again] == [i + 1 for i in range(len(again))]
    for process_set in again:
        if process_set.included():
            total(process_set)
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")


@pytest.mark.not_with_three_ranks
def test_nothing_is_left_of_removed_sets() -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    if hvd.size() < 2:
        pytest.skip("no set but that of all ranks")
    before = None
    for _ in range(3):
        made = [hvd.add_process_set(ranks) for ranks in subsets()]
        for process_set in made:
            if process_set.included():
                total(process_set)
        for process_set in made:
            hvd.remove_process_set(process_set)
        before = before or count()  # what others have left may go meanwhile
    assert all(now <= then for now, then in zip(count(), before, strict=True)), (count(), before)
    assert hvdlite.runtime().size == hvd.size()


@pytest.mark.not_with_three_ranks
def test_removed_sets_keep_no_descriptor_until_garbage_is_collected() -> None:
    def add_and_remove() -> None:
        made = hvd.add_process_set([0, 1] if hvd.size() > 2 else [0])
        if made.included():
            total(made)
            total(made, numel=100_001)
        hvd.remove_process_set(made)

    if hvd.size() < 2:
        pytest.skip("no set but that of all ranks")
    add_and_remove()
    gc.collect()
    with uncollected():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            add_and_remove()
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # 5 of each set before; others' garbage may come and go


def test_sets_given_to_init() -> None:
    """As parts of a communicator that was split; with duplicates; and again, to a job that has them already."""
    size, me = hvd.size(), hvd.rank()
    if size == 1:
        pytest.skip("there is nothing to split")
    hvd.shutdown()
    parts = [list(range(0, size, 2)), list(range(1, size, 2))]
    part = WORLD.Split(me % 2, me)
    with pytest.raises(ValueError, match=r"ranks=\[0.*has the ranks of another process set"):
        hvd.init(WORLD, process_sets=[hvd.ProcessSet(part), hvd.ProcessSet(reversed(range(size)))])
    assert hvd.global_process_set.mpi_comm is WORLD
    assert hvdlite.runtime().process_sets() == {0: list(range(size)), 1: parts[0], 2: parts[1]}
    mine, even = hvd.ProcessSet(part), hvd.ProcessSet(parts[0])
    for process_sets in [[mine], [even]]:
        hvd.init(process_sets=process_sets)
    assert (mine.process_set_id, mine.ranks, even.process_set_id) == (1 + me % 2, parts[me % 2], 1)
    total(mine)
    with pytest.raises(MismatchError, match=r"set 0 has ranks \[0\] on rank 0 but \[1\] on rank 1"):
        hvd.init(process_sets=[hvd.ProcessSet([me])])
    part.Free()
    hvd.shutdown()
    hvd.init()  # without these sets


def test_an_optimizer_on_ranks_outside_its_set() -> None:
    """They step with their own gradients."""
    me = hvd.rank()
    for ranks in subsets():
        made = hvd.add_process_set(ranks)
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum, process_set=made)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter * (1 + me)).sum().backward()
            optimizer.step()
        step = sum(1 + rank for rank in ranks) if me in ranks else 1 + me
        assert parameter.tolist() == [-3.0 * step] * 3
        assert hvd.remove_process_set(made)
