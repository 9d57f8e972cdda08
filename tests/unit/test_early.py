"""Allreduces that ranks begin early: those of one node are threads here, and another node is a message."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlite import _native
from hvdlite.collectives.across_nodes import AcrossNodes
from hvdlite.collectives.base import PreparedCall
from hvdlite.collectives.early import MOST_BYTES, EarlyAllreduce
from hvdlite.collectives.polite import polite_look
from hvdlite.config import Config
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.early_operations import EarlyOperations
from hvdlite.memory.host import HostMemory
from hvdlite.memory.layout import Layout
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.packets import Packets, Rooms
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer, TensorView
from hvdlite.operations.allgather import Allgather
from hvdlite.operations.barrier import Barrier
from hvdlite.recorder import Recorder
from mpi_lab import Mpi
from thread_comm import ThreadComm, on_ranks

LINE = 64
ASSISTANTS_ASLEEP = 12  # of a doorbell, see csrc/waiting/signal.h
BEGUN, NOT_YET = _native.DirectCall.BEGUN, _native.DirectCall.NOT_YET
AVERAGE = Reduction(prescale=0.5, postscale=4.0)


class Node:
    """What threads share as if they were processes."""

    def __init__(self, comm: ThreadComm) -> None:
        self.local_rank, self.local_size = comm.rank, comm.size
        self._comm = comm

    def share(self, nbytes: int, *, reserved: bool = True) -> Segment:
        made: Segment = self._comm.allgather(self._made(nbytes) if self.local_rank == 0 else None)[0]
        return made

    @staticmethod
    def _made(nbytes: int) -> Segment:
        file = create_memory_file(nbytes)
        try:
            return Segment(file, nbytes)
        finally:
            os.close(file)


class Leaders:
    """This node's leader, and that of another node, which sends 100 times the number of the operation."""

    def __init__(self, mpi: Mpi, functions: bool) -> None:
        self.number = 0
        self._mpi = mpi
        self.endpoint: Any = SimpleNamespace(
            functions=mpi.functions if functions else None, polite_look=polite_look(), until=wait_until
        )

        self._schedules: dict[Reduction, Schedule] = {}

    def bound_allreduce(self, buf: Buffer, reduction: Reduction) -> Any:
        made = self._schedules.get(reduction)
        if made is None:
            made = self._schedules[reduction] = Schedule(self.endpoint, self._mpi, buf, reduction)
        made.receives(100.0 * self.number)
        return made

    def begin_allreduce(
        self,
        buf: Buffer,
        reduction: Reduction,
        label: str,
        by: Callable[[_native.BoundMessages], int] | None = None,
    ) -> Any:
        schedule = self.bound_allreduce(buf, reduction)
        schedule.start(by)
        return schedule

    def receives(self, number: int) -> None:
        """From now on, of the operation of this number."""
        self.number = number
        for schedule in self._schedules.values():
            schedule.receives(100.0 * number)

    def forget(self) -> None:
        """As settings that change make the ring forget."""
        for schedule in self._schedules.values():
            schedule.messages.close()
        self._schedules.clear()


class Schedule:
    """As `hvdlite.collectives.bound.BoundSchedule`."""

    peer = 1

    def __init__(self, endpoint: Any, mpi: Mpi, buf: Buffer, reduction: Reduction) -> None:
        self.endpoint = endpoint
        self.is_done = True
        self.times = 0
        self._prescale = reduction.prescale
        self._theirs = np.zeros(buf.numel, np.float32)
        addition = [buf.address], [buf.address, self._theirs.ctypes.data], buf.numel, buf.dtype, *reduction
        self.messages = mpi.messages(([1], [(1, 1)], [addition]))

    def receives(self, value: float) -> None:
        self._theirs[:] = value / self._prescale  # as if scaled already

    def start(self, by: Callable[[_native.BoundMessages], int] | None) -> None:
        self.is_done = (self.messages.start() if by is None else by(self.messages)) == self.messages.DONE

    def advance(self) -> bool:
        self.is_done = self.is_done or self.messages.advance() == self.messages.DONE
        return self.is_done

    def count_done(self, times: int) -> None:
        self.times += times


def wait_until(done: Callable[[], bool], peer: int) -> None:
    while not done():
        time.sleep(0)


class Sometimes:
    """As if a message had come, with a chance of ``chance``."""

    def __init__(self, chance: float, seed: int) -> None:
        self._chance = chance
        self._random = random.Random(seed)

    def __contains__(self, request: object) -> bool:
        return self._random.random() < self._chance


class Rank:
    """One of a node.

    Args:
        native: whether it knows functions of MPI.
    """

    def __init__(self, comm: ThreadComm, chance: float = 1.0, native: bool = True, timeout_s: float = 10.0) -> None:
        self.rank, self.size = comm.rank, comm.size
        node = Node(comm)
        self.memory = memory = HostMemory(node)  # type: ignore[arg-type]
        self.mpi = mpi = Mpi()
        mpi.done = Sometimes(chance, seed=1)
        self.leaders = Leaders(mpi, native) if comm.rank == 0 else None
        self._page = page = node.share(2 * comm.size * LINE)
        self.bell = page.address + (comm.size + comm.rank) * LINE
        self.counts = _native.ReadyCounts(page.address, page.address + comm.size * LINE, comm.rank, comm.size)
        self.early = EarlyAllreduce(
            self.leaders,
            memory.allocate(MOST_BYTES),
            node.share(EarlyAllreduce.turns_bytes(comm.size)),
            self.counts,
            memory,
            nodes=[comm.size, 1],
            ranks=range(comm.size),
            spin_us=10,
            timeout_s=timeout_s,
            check=lambda: None,
            recorder=Recorder(),
        )
        self.early.configure(Config())
        self.layout = Layout.of([3], DType.FLOAT32, DType.FLOAT32)

    def prepare(self, reduction: Reduction = SUM, patience_s: float = 10.0) -> PreparedCall:
        backend: Any = SimpleNamespace(early=self.early)
        call = AcrossNodes.prepare_allreduce(backend, self.counts, self.layout, reduction, None, patience_s, "early")
        assert call is not None
        return call

    def input(self, number: int) -> np.ndarray:
        if self.leaders is not None:
            self.leaders.receives(number)
        return np.full(3, self.rank + number, np.float32)

    def expected(self, number: int, reduction: Reduction = SUM) -> list[float]:
        own = reduction.prescale * sum(rank + number for rank in range(self.size))
        return [reduction.postscale * (own + 100.0 * number)] * 3

    def step_by_step(self, value: np.ndarray, number: int, reduction: Reduction) -> None:
        """As the coordinator does it."""
        self.counts.set(1, number)
        self.finish(value, number, reduction)

    def await_counts(self, number: int) -> None:
        while self.counts.all(1) < number:
            time.sleep(0)

    def finish(self, value: np.ndarray, number: int, reduction: Reduction) -> None:
        self.await_counts(number)
        tensors = self.early.tensors([value.ctypes.data], self.layout)
        if not self.early.has_begun:
            self.early.begin(tensors, self.layout, reduction, "early")
        self.early.finish(tensors, self.layout)


@pytest.mark.parametrize("chance", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("ways", ["PP", "NP", "PN", "NN", "NNN", "PNPN", "N", "-N"])
def test_ranks_in_native_code_and_in_python_do_the_same(ways: str, chance: float) -> None:
    """P: step by step; N: by a prepared call; -: by one that finds no function of MPI. Some operations are dropped."""

    def work(comm: ThreadComm) -> list[str]:
        way = ways[comm.rank]
        rank = Rank(comm, chance, native=way != "-")
        problems = []
        calls = {reduction: rank.prepare(reduction) for reduction in (SUM, AVERAGE)}
        for number in range(1, 60):
            reduction = AVERAGE if number % 3 == 0 else SUM
            value = rank.input(number)
            if number % 7 == 0:  # some have begun
                if comm.rank % 2 == 1:
                    tensors = rank.early.tensors([value.ctypes.data], rank.layout)
                    rank.early.begin(tensors, rank.layout, reduction, "dropped")
                rank.early.drop(None, rank.layout, reduction, "dropped")
                rank.counts.set(1, number)
                continue
            if way == "P":
                rank.step_by_step(value, number, reduction)
            else:
                address = [value.ctypes.data]
                heard = _native.load32(rank.bell)
                result = calls[reduction].run(address, address, 1, number, heard)
                if result == BEGUN:
                    result = calls[reduction].resume(result)
                assert calls[reduction].last() == (1, number, result)
                if result == NOT_YET:
                    rank.finish(value, number, reduction)
            if number % 10 == 0 and rank.leaders is not None:
                rank.leaders.forget()
            if value.tolist() != rank.expected(number, reduction):
                problems.append(f"{number}: {value}")
        return problems

    assert [problem for problems in on_ranks(len(ways), work) for problem in problems] == []


@pytest.mark.parametrize("chance", [0.01, 1.0])
@pytest.mark.parametrize("ways", ["b", "m", "d", "bb", "bm", "mb", "mm", "bd", "db", "dd", "bbd", "mbm", "dbb"])
def test_who_has_begun_a_meeting_sees_whether_somebody_drops_it(ways: str, chance: float) -> None:
    """b: step by step; m: by a prepared call; d: drops it without having begun."""

    def work(comm: ThreadComm) -> list[bool]:
        rank, way = Rank(comm, chance), ways[comm.rank]
        engine: Any = SimpleNamespace(early=rank.early, memory=rank.memory)
        operations, request = EarlyOperations(engine), Barrier.of(None)
        meeting = operations.meeting(rank.counts, 10.0)
        met = []
        for number in range(1, 30):
            outcome = Outcome.NOT_YET
            if way == "m":
                outcome = meeting.run(Submission(request, number), 1, number, _native.load32(rank.bell))
                assert meeting.outcome(1, number) is outcome
                assert meeting.outcome(1, number + 1) is None
                met.append(True)
            if outcome is Outcome.NOT_YET:  # or rung
                rank.counts.set(1, number)
                rank.await_counts(number)
                if way == "d":
                    operations.drop(request)
                    continue
                if not operations.has_begun:
                    operations.begin(Submission(request, number))
                while not operations.has_come():
                    time.sleep(0)
                met[number - 1 :] = [operations.is_met(request)]
                (operations.enter if met[-1] else operations.drop)(request)
            assert not operations.has_begun
        return met

    for way, met in zip(ways, on_ranks(len(ways), work), strict=True):
        assert met == ([] if way == "d" else ["d" not in ways] * 29)


@pytest.mark.parametrize("ways", ["b", "d", "bb", "bd", "db", "dd", "bbd", "dbb"])
def test_who_has_begun_packets_sees_whether_somebody_drops_them(ways: str) -> None:
    """Likewise, as rows may have to follow."""

    def work(comm: ThreadComm) -> list[bool]:
        rank, way = Rank(comm), ways[comm.rank]
        packets = Packets(rank.memory, comm.rank, comm.size, 1, 64)
        engine: Any = SimpleNamespace(
            early=rank.early, memory=rank.memory, rooms=Rooms(), size=comm.size, packets=lambda width, room: packets
        )
        given = TensorView(0, (0, 3), DType.FLOAT32, None)
        operations, request = EarlyOperations(engine), Allgather.of(None, [given], False)
        met = []
        for number in range(1, 30):
            rank.counts.set(1, number)
            rank.await_counts(number)
            if way == "d":
                operations.drop(request)
                continue
            operations.begin(Submission(request, number, [given]))
            while not operations.has_come():
                time.sleep(0)
            met.append(operations.is_met(request))
            if met[-1]:
                operations.enter(request)
                rank.early.finish(packets.targets, packets.layout)
                assert packets.numbers == [[0]] * comm.size
            else:
                operations.drop(request)
            assert not operations.has_begun
        return met

    for way, met in zip(ways, on_ranks(len(ways), work), strict=True):
        assert met == ([] if way == "d" else ["d" not in ways] * 29)


@pytest.mark.parametrize("way", ["native", "step by step", "meeting"])
@pytest.mark.parametrize("is_rung_again", [False, True])
def test_who_slept_until_its_node_was_ready_waits_for_other_nodes(way: str, is_rung_again: bool) -> None:
    """The ring that has ended the sleep is no news; else whoever is first in its node would leave all to Python.

    Another one ends a wait whose time is not over for as long as the test may take.
    """
    patience_s = 1000.0

    def work(comm: ThreadComm) -> bool:
        rank = Rank(comm, 0.0 if is_rung_again else 0.01, native=way == "native", timeout_s=2 * patience_s)
        value = rank.input(1)
        tensors, address = rank.early.tensors([value.ctypes.data], rank.layout), [value.ctypes.data]
        bell = comm.allgather(rank.bell)[0]
        if comm.rank == 1:
            while not _native.load32(bell + ASSISTANTS_ASLEEP):
                time.sleep(0)
            rank.counts.set(1, 1)
            rank.early.begin(tensors, rank.layout, SUM, "early")
            if is_rung_again:
                _native.doorbell_ring(bell)
            rank.early.finish(tensors, rank.layout)
            return value.tolist() == rank.expected(1)
        if way == "meeting":
            engine: Any = SimpleNamespace(early=rank.early, memory=rank.memory)
            request: Any = SimpleNamespace(begin_early=lambda *_: rank.early.begin(tensors, rank.layout, SUM, "early"))
            meeting: Any = EarlyOperations(engine).meeting(rank.counts, patience_s)
            outcome = meeting._begin(SimpleNamespace(request=request), 1, 1, 0)
            assert (outcome is Outcome.NOT_YET) == is_rung_again
        else:
            call = rank.prepare(patience_s=patience_s)
            result = call.run(address, address, 1, 1, 0)
            if result == BEGUN:
                result = call.resume(result)
            assert result == (NOT_YET if is_rung_again else _native.DirectCall.DONE)
        rank.mpi.done = Sometimes(1.0, seed=1)
        if rank.early.has_begun:
            rank.early.finish(tensors, rank.layout)
        return value.tolist() == rank.expected(1)

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("native", [True, False])
def test_who_waits_for_other_nodes_loses_patience(native: bool) -> None:
    """Then it is left to the coordinator, which has other work."""

    def work(comm: ThreadComm) -> bool:
        rank = Rank(comm, chance=0.0, native=native)
        value = rank.input(1)
        call, address = rank.prepare(patience_s=0.0), [value.ctypes.data]
        result = call.run(address, address, 1, 1, 0)
        if result == BEGUN:
            result = call.resume(result)
        assert result == NOT_YET and rank.early.has_begun
        rank.mpi.done = Sometimes(1.0, seed=1)
        rank.finish(value, 1, SUM)
        return value.tolist() == rank.expected(1)

    assert on_ranks(1, work) == [True]


@pytest.fixture
def taken_signal() -> Iterator[signal.Signals]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("comes", ["others", "ring", "signal"])
@pytest.mark.parametrize("sleeper", [0, 1])
def test_who_sleeps_in_a_native_call_is_woken(sleeper: int, comes: str, taken_signal: signal.Signals) -> None:
    """The leader sleeps until the others have begun, these until it has brought the result; no Python is left to."""
    has_left = threading.Event()

    def work(comm: ThreadComm) -> bool:
        rank = Rank(comm)
        value = rank.input(1)
        thread, bell = comm.allgather((threading.get_ident(), rank.bell))[sleeper]
        if comm.rank == sleeper:
            call, address = rank.prepare(), [value.ctypes.data]
            result = call.run(address, address, 1, 1, 0)
            has_left.set()
            assert result == (_native.DirectCall.DONE if comes == "others" else BEGUN)
            if result == BEGUN and call.resume(result) == NOT_YET:
                rank.finish(value, 1, SUM)
            return value.tolist() == rank.expected(1)
        rank.counts.set(1, 1)
        has_begun = rank.early._segment.address + sleeper * LINE
        while not has_left.is_set() and not (_native.load64(has_begun) and _native.load32(bell + ASSISTANTS_ASLEEP)):
            time.sleep(0)
        if comes == "ring":
            _native.doorbell_ring(bell)
        while comes != "others" and not has_left.wait(0.001):
            if comes == "signal":  # again, as it may have come just before the sleep
                signal.pthread_kill(thread, taken_signal)
        rank.finish(value, 1, SUM)
        return value.tolist() == rank.expected(1)

    assert on_ranks(2, work) == [True, True]


def test_who_is_at_work_is_not_rung_for_every_count() -> None:
    """The coordinator wants a ring for it; whoever does the operation himself sees it anyway."""

    def work(comm: ThreadComm) -> int:
        rank = Rank(comm)
        rank.counts.want_ring(True)
        value = rank.input(1)
        tensors = rank.early.tensors([value.ctypes.data], rank.layout)
        if comm.rank == 1:
            rank.counts.set(1, 1)
            rank.early.begin(tensors, rank.layout, SUM, "early")
        comm.allgather(None)
        if comm.rank == 0:
            address = [value.ctypes.data]
            assert rank.prepare().run(address, address, 1, 1, 0) == _native.DirectCall.DONE
            rank.counts.set(1, 2)
        comm.allgather(None)
        if comm.rank == 1:
            rank.counts.set(1, 2)
        comm.allgather(None)
        return _native.load32(rank.bell)

    assert on_ranks(2, work)[0] == 0
