"""Schedules on real memory, piece by piece and bound, between ranks as threads; messages leave as late as may be."""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from hvdlite import _native
from hvdlite.collectives import algorithms
from hvdlite.collectives.adder import HostAdder
from hvdlite.collectives.algorithms import Algorithm
from hvdlite.collectives.bound import BoundSchedule, BoundSchedules
from hvdlite.collectives.bound_requests import complete
from hvdlite.collectives.pipeline import Pipeline
from hvdlite.collectives.schedule import WINDOW, ReduceCall, Schedule
from hvdlite.counters import Traffic
from hvdlite.dtypes import DType, Reduction
from hvdlite.memory.layout import ALIGNMENT
from hvdlite.memory.views import Buffer
from mpi_lab import Mpi
from thread_comm import ThreadComm, on_ranks

SEGMENT = 2 * ALIGNMENT


Network = defaultdict[tuple[int, int], deque[bytes]]
"""Messages on their way, by (source, target)."""


class Request:
    """A persistent request. As in MPI, a test of any of them moves all of the same rank."""

    def __init__(self, endpoint: FakeEndpoint, address: int, nbytes: int, peer: int, sends: bool) -> None:
        self._endpoint = endpoint
        self.address, self.nbytes, self.peer, self.sends = address, nbytes, peer, sends
        self.is_active = False

    def Start(self) -> None:
        assert not self.is_active
        self.is_active = True
        self._endpoint.start(self)

    def Test(self) -> bool:
        self._endpoint.progress()
        return not self.is_active

    def Free(self) -> None:
        assert not self.is_active
        self._endpoint.held -= 1


class OfRequests(Mpi):
    """MPI's functions of requests."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: list[Request] = []

    def number_of(self, request: Request) -> int:
        self._requests.append(request)
        return len(self._requests)

    def start(self, request: int) -> None:
        self._requests[request - 1].Start()

    def test(self, request: int) -> bool:
        return self._requests[request - 1].Test()


class FakeEndpoint:
    """What schedules need of `hvdlite.collectives.requests.Endpoint`; native code gets requests by number.

    Attributes:
        held: persistent requests that were not given back.
    """

    def __init__(self, network: Network, rank: int, *, has_functions: bool = False) -> None:
        self.traffic = Traffic()
        self.polite_look = _native.PoliteLook(1, 1000, 0)
        self._mpi = OfRequests()
        self.functions = self._mpi.functions if has_functions else None
        self.held = 0
        self._network, self._rank = network, rank
        self._leaving: deque[Request] = deque()
        self._waiting: defaultdict[int, deque[Request]] = defaultdict(deque)  # by source, in the order of messages
        self._chance = random.Random(rank)

    def start(self, request: Request) -> None:
        (self._leaving if request.sends else self._waiting[request.peer]).append(request)

    def progress(self) -> None:
        while self._leaving and self._chance.random() < 0.5:
            request = self._leaving.popleft()
            content = ctypes.string_at(request.address, request.nbytes)
            self._network[self._rank, request.peer].append(content)
            request.is_active = False
        for source, waiting in self._waiting.items():
            messages = self._network[source, self._rank]
            while messages and waiting:
                request, content = waiting.popleft(), messages.popleft()
                assert len(content) == request.nbytes
                ctypes.memmove(request.address, content, request.nbytes)
                request.is_active = False

    def bind_send(self, address: int, nbytes: int, to: int) -> Request:
        self.held += 1
        return Request(self, address, nbytes, to, sends=True)

    def bind_receive(self, address: int, nbytes: int, source: int) -> Request:
        self.held += 1
        return Request(self, address, nbytes, source, sends=False)

    def address_of(self, request: Request) -> int:
        return self._mpi.number_of(request)

    def send(self, address: int, nbytes: int, to: int) -> Request:
        self.traffic.sent(nbytes)
        request = Request(self, address, nbytes, to, sends=True)
        request.Start()
        return request

    def receive(self, address: int, nbytes: int, source: int) -> Request:
        self.traffic.received(nbytes)
        request = Request(self, address, nbytes, source, sends=False)
        request.Start()
        return request

    def until(self, done: Callable[[], bool], peer: int, nap_s: float = 0.0) -> None:
        while not done():
            time.sleep(0)

    def doze(self, done: Callable[[], bool], late: str) -> None:
        while not done():
            time.sleep(0)

    def begin(self, name: str, label: str) -> None:
        pass

    def fail(self, error: BaseException, *kept: object) -> None:
        raise error


def contribution(rank: int, numel: int, salt: int) -> np.ndarray:
    return (np.arange(numel) * 7 + rank * 3 + salt) % 5 + 1


def execute(
    schedule: Schedule, buf: Buffer, endpoint: FakeEndpoint, bound: BoundSchedules, scratch: int, call: Hashable
) -> None:
    """As a ring does: by what is bound, if anything is."""
    short, long = bound.get(call), bound.pipeline(call)
    if short is not None:
        short.run("operation", "")
        return
    pipeline = long or Pipeline(schedule, buf, endpoint, HostAdder(), scratch, SEGMENT)  # type: ignore[arg-type]
    pipeline.start()
    pipeline.finish()
    if long is None:
        bound.called(call, schedule, buf)


@pytest.mark.parametrize("algorithm", Algorithm, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("has_functions", [False, True], ids=["python", "native"])
def test_allreduces_of_every_size(algorithm: Algorithm, size: int, has_functions: bool) -> None:
    """Each three times, of which the third is bound where that may be; scales of their own tell what was scaled."""
    network: Network = defaultdict(deque)
    dtype = DType.INT64
    per_line = ALIGNMENT // dtype.itemsize

    def work(comm: ThreadComm) -> list[str]:
        endpoint = FakeEndpoint(network, comm.rank, has_functions=has_functions)
        memory = np.zeros(20 * size * per_line, np.int64)
        scratch = np.zeros(WINDOW * SEGMENT, np.uint8)
        bound = BoundSchedules(endpoint, scratch.ctypes.data, SEGMENT)  # type: ignore[arg-type]
        problems = []
        for numel, salt in itertools.product([0, 1, per_line * size - 1, len(memory)], range(3)):
            memory[:numel] = contribution(comm.rank, numel, salt)
            buf = Buffer.of_numpy(memory[:numel])
            reduction = Reduction(prescale=3.0, postscale=5.0)
            schedule = algorithms.allreduce(algorithm, numel, dtype.itemsize, comm.rank, size, SEGMENT, reduction)
            before = Traffic(*counts(endpoint.traffic))
            again, pipeline = bound.get(numel), bound.pipeline(numel)
            execute(schedule, buf, endpoint, bound, scratch.ctypes.data, numel)
            expected = 15 * sum(contribution(rank, numel, salt) for rank in range(size))
            if not np.array_equal(memory[:numel], expected):
                problems.append(f"wrong sum of {numel}, time {salt}")
            fits = BoundSchedule.fits(schedule)
            if (again is not None, pipeline is not None) != (
                salt == 2 and fits,
                salt == 2 and not fits and has_functions,
            ):
                problems.append(f"{numel}, time {salt}: bound are {again} and {pipeline}")
            moved = [now - then for now, then in zip(counts(endpoint.traffic), counts(before), strict=True)]
            if moved != scheduled(schedule, dtype.itemsize):
                problems.append(f"{numel}, time {salt}: counted {moved}")
        bound.close()
        return problems

    assert [problem for problems in on_ranks(size, work) for problem in problems] == []


@pytest.mark.parametrize("has_functions", [False, True], ids=["python", "native"])
@pytest.mark.parametrize("per_rank", [1, 50], ids=["short", "long"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_what_else_comes_again(size: int, per_rank: int, has_functions: bool) -> None:
    """Reductions to one rank each, gathers and broadcasts, as they are and bound."""
    network: Network = defaultdict(deque)
    block = per_rank * SEGMENT // 8
    blocks = [[(rank * block, (rank + 1) * block)] for rank in range(size)]

    def work(comm: ThreadComm) -> list[str]:
        endpoint = FakeEndpoint(network, comm.rank, has_functions=has_functions)
        memory = np.zeros(size * block, np.int64)
        scratch = np.zeros(WINDOW * SEGMENT, np.uint8)
        bound = BoundSchedules(endpoint, scratch.ctypes.data, SEGMENT)  # type: ignore[arg-type]
        buf = Buffer.of_numpy(memory)
        own = slice(comm.rank * block, (comm.rank + 1) * block)
        ring, piece = Algorithm.RING, SEGMENT // 8
        schedules = {
            "reduce_scatter": algorithms.reduce_scatter(ring, blocks, comm.rank, piece),
            "allgather": algorithms.allgather(ring, blocks, comm.rank, piece),
            "halving": algorithms.reduce_scatter(Algorithm.HALVING, blocks, comm.rank, piece),
            "doubling": algorithms.allgather(Algorithm.DOUBLING, blocks, comm.rank, piece),
            "chain": algorithms.chain_broadcast(size * block, 1, comm.rank, size, piece),
            "tree": algorithms.tree_broadcast(size * block, 1, comm.rank, size, piece),
        }
        problems = []
        for salt, (name, schedule) in itertools.product(range(4), schedules.items()):
            of_all = [contribution(rank, size * block, salt) for rank in range(size)]
            memory[:] = of_all[comm.rank]
            execute(schedule, buf, endpoint, bound, scratch.ctypes.data, name)
            if name in ("reduce_scatter", "halving"):
                is_right = np.array_equal(memory[own], np.sum(of_all, axis=0)[own])
            elif name in ("chain", "tree"):
                is_right = np.array_equal(memory, of_all[1])
            else:
                parts = [values[start:stop] for values, ((start, stop),) in zip(of_all, blocks, strict=True)]
                is_right = np.array_equal(memory, np.concatenate(parts))
            if not is_right:
                problems.append(f"{name}, time {salt}")
        if has_functions and not all(bound.get(name) or bound.pipeline(name) for name in schedules):
            problems.append("not all is bound")
        bound.close()
        if endpoint.held:
            problems.append(f"{endpoint.held} requests are left")
        return problems

    assert [problem for problems in on_ranks(size, work) for problem in problems] == []


class OfTwo:
    """What rank 0 of two remembers of calls of short and of long schedules, of which none is executed."""

    def __init__(self) -> None:
        self.endpoint = FakeEndpoint(defaultdict(deque), 0, has_functions=True)
        self._memory = np.zeros(100 * SEGMENT // 8, np.int64)
        self._scratch = np.zeros(WINDOW * SEGMENT, np.uint8)
        self.bound = BoundSchedules(self.endpoint, self._scratch.ctypes.data, SEGMENT)  # type: ignore[arg-type]

    def call(self, call: str, *, times: int = 2, segments: int = 1) -> None:
        """It is called, and would take as many messages."""
        numel = segments * SEGMENT // 8
        schedule = algorithms.tree_broadcast(numel, 0, 0, 2, SEGMENT // 8)
        for _ in range(times):
            self.bound.called(call, schedule, Buffer.of_numpy(self._memory[:numel]))

    def are_bound(self, *calls: str) -> list[bool]:
        return [bool(self.bound.get(call) or self.bound.pipeline(call)) for call in calls]


def test_calls_that_do_not_come_again_throw_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.collectives.bound._MOST", 3)
    two = OfTwo()
    two.call("short")
    two.call("long", segments=50)
    for call in ["first", "second", "third", "fourth"]:
        two.call(call, times=1)
    assert two.are_bound("short", "long") == [True, True]
    two.call("first", times=1)  # which has been forgotten meanwhile
    assert two.are_bound("first") == [False]


def test_what_is_bound_goes_where_there_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives its requests back."""
    monkeypatch.setattr("hvdlite.collectives.bound._MOST", 3)
    two = OfTwo()
    for call, segments in {"short": 1, "other": 1, "long": 50}.items():
        two.call(call, segments=segments)
    assert two.endpoint.held == 52
    two.call("new")
    assert two.are_bound("short", "other", "long", "new") == [False, False, False, True]
    assert two.endpoint.held == 1


def test_what_is_bound_goes_where_there_would_be_too_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.collectives.bound._MOST_MESSAGES", 100)
    two = OfTwo()
    two.call("longest", segments=99)
    two.call("short")
    assert two.are_bound("longest", "short") == [True, True]
    two.call("long", segments=50)
    two.call("as long", segments=50)
    two.call("short", times=1)  # has to come twice again
    assert two.are_bound("longest", "short", "long", "as long") == [False, False, True, True]
    monkeypatch.setattr("hvdlite.collectives.bound._MOST_MESSAGES", 40)
    two.call("too long", segments=41)
    assert two.are_bound("too long", "as long") == [False, True]


def test_what_is_under_way_keeps_its_requests() -> None:
    """As after a failure: MPI may still write."""
    two = OfTwo()
    two.call("long", segments=50)
    two.bound.pipeline("long").start()  # type: ignore[union-attr]
    two.bound.close()
    assert two.are_bound("long") == [False] and two.endpoint.held == 50


class Steps:
    """Native messages: what each call of them returns, and how many have moved then, to whom the next one is."""

    error = 15

    def __init__(self, *steps: tuple[int, int, int]) -> None:
        self._steps = list(steps)
        self.moved = self.peer = 0

    def work(self, look: object, limit_us: int, longest_nap_us: int) -> int:
        progress, self.moved, self.peer = self._steps.pop(0)
        return progress


def test_who_is_waited_for_is_asked_anew_with_every_message() -> None:
    """As it is named where it does not come, and the limit is that of one message."""
    waiting, done = _native.BoundMessages.WAITING, _native.BoundMessages.DONE
    endpoint = FakeEndpoint(defaultdict(deque), 0)
    peers = []

    def until(done: Callable[[], bool], peer: int, nap_s: float = 0.0) -> None:
        peers.append(peer)
        while not done():
            pass

    endpoint.until = until  # type: ignore[method-assign]
    steps = Steps((waiting, 0, 5), (waiting, 0, 5), (waiting, 1, 6), (waiting, 1, 6), (waiting, 2, 7), (done, 3, 7))
    complete(steps, endpoint)  # type: ignore[arg-type]
    assert peers == [5, 6]


def test_a_failure_of_native_messages_is_an_error_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    class MpiError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(Exception=MpiError)))
    steps = Steps((_native.BoundMessages.FAILED, 0, 5))
    with pytest.raises(MpiError, match="15"):
        complete(steps, FakeEndpoint(defaultdict(deque), 0))  # type: ignore[arg-type]


class Late:
    """An addition that is done when somebody waits for it, or perhaps when somebody looks; those before it first."""

    def __init__(self, line: deque[Late], work: Callable[[], None], chance: Callable[[], bool]) -> None:
        self._line, self._work, self._chance = line, work, chance
        line.append(self)

    def wait(self) -> None:
        while self in self._line:
            self._line.popleft()._work()

    @property
    def is_reached(self) -> bool:
        if self._chance():
            self.wait()
        return self not in self._line


class LateAdder(HostAdder):
    """The host as if it were a GPU: a schedule begins with what its memory is still written by, ``before``.

    On every other rank additions are done by those who wait, and never by those who look.
    """

    is_immediate = False

    def __init__(self, rank: int) -> None:
        self.before: Callable[[], None] = lambda: None
        self._line: deque[Late] = deque()
        self._random = random.Random(rank)
        self._chance = 0.2 * (rank % 2)

    def begin(self, calls: Sequence[ReduceCall]) -> Late:  # type: ignore[override]
        self._later(self.before, 0.0)
        return self._later(lambda: super(LateAdder, self).add(calls), 0.2)

    def add(self, calls: Sequence[ReduceCall]) -> Late | None:  # type: ignore[override]
        return self._later(lambda: super(LateAdder, self).add(calls), self._chance) if calls else None

    def settle(self) -> None:
        self._later(lambda: None, 0.0).wait()

    def _later(self, work: Callable[[], None], chance: float) -> Late:
        return Late(self._line, work, lambda: self._random.random() < chance)


@pytest.mark.parametrize("algorithm", Algorithm, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", range(2, 7))
def test_additions_that_are_done_late(algorithm: Algorithm, size: int) -> None:
    """Nothing is sent that is not added, nor received where something is not; the next schedule comes at once."""
    network: Network = defaultdict(deque)
    numel = 30 * size * ALIGNMENT // 8

    def work(comm: ThreadComm) -> list[str]:
        endpoint, adder = FakeEndpoint(network, comm.rank), LateAdder(comm.rank)
        scratch = np.zeros(WINDOW * SEGMENT, np.uint8)
        memories = [np.full(numel, -1, np.int64) for _ in range(4)]
        for salt, memory in enumerate(memories):
            values = contribution(comm.rank, numel, salt)
            adder.before = lambda memory=memory, values=values: np.copyto(memory, values)  # type: ignore[misc]
            reduction, buf = Reduction(prescale=3.0, postscale=5.0), Buffer.of_numpy(memory)
            schedule = algorithms.allreduce(algorithm, numel, 8, comm.rank, size, SEGMENT, reduction)
            address = scratch.ctypes.data
            execution = Pipeline(schedule, buf, endpoint, adder, address, SEGMENT)  # type: ignore[arg-type]
            execution.start()
            execution.finish()
        adder.settle()
        sums = [15 * sum(contribution(rank, numel, salt) for rank in range(size)) for salt in range(len(memories))]
        return [f"time {i}" for i, memory in enumerate(memories) if not np.array_equal(memory, sums[i])]

    assert [problem for problems in on_ranks(size, work) for problem in problems] == []


def counts(traffic: Traffic) -> tuple[int, int, int, int]:
    return traffic.messages_sent, traffic.bytes_sent, traffic.messages_received, traffic.bytes_received


def scheduled(schedule: Schedule, itemsize: int) -> list[int]:
    outgoing = [piece.stop - piece.start for piece in schedule.outgoing]
    arriving = [piece.stop - piece.start for piece in schedule.arriving]
    return [len(outgoing), itemsize * sum(outgoing), len(arriving), itemsize * sum(arriving)]
