"""_native's barrier, doorbell and atomics; the barrier between real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvdlite import _native
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment

LONG_S = 60.0  # never reached unless a test fails
ABORT = 0  # byte offsets in the shared memory of a test
BARRIER = 64
DATA = 4096
BELL_BYTES = 32
COPY_BYTES = 64 << 10
Job = Callable[..., Any]


class World:
    """Shared memory, and ``size`` ranks in it: processes of a pool that outlives the test."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        nbytes = DATA + 4 * COPY_BYTES
        self._fd = create_memory_file(nbytes)
        self.segment = Segment(self._fd, nbytes)

    def run(self, size: int, job: Job, *arguments: object) -> list[Any]:
        """What ``job(segment, rank, size, *arguments)`` returns in each of ``size`` processes at once."""
        self.segment.memory[:] = 0
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        ranks = [self._pool.submit(_in_segment, path, job, rank, size, *arguments) for rank in range(size)]
        return [rank.result(timeout=2 * LONG_S) for rank in ranks]

    def close(self) -> None:
        os.close(self._fd)


def _in_segment(path: str, job: Job, rank: int, size: int, *arguments: object) -> object:
    fd = os.open(path, os.O_RDWR)
    try:
        segment = Segment(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    return job(segment, rank, size, *arguments)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        world = World(pool)
        yield world
        world.close()


def barrier_in(segment: Segment, rank: int, size: int, spin_us: int = 0) -> _native.Barrier:
    return _native.Barrier(segment.address + BARRIER, rank, size, segment.address + ABORT, spin_us)


def _meet_often(segment: Segment, rank: int, size: int, spin_us: int, rounds: int) -> int:
    """How often a rank left the barrier before the others had arrived."""
    barrier = barrier_in(segment, rank, size, spin_us)
    counters = segment.memory[DATA : DATA + 8 * size].view(np.int64)
    early = 0
    for turn in range(1, rounds + 1):
        counters[rank] = turn
        assert barrier.wait(LONG_S) == barrier.OK
        early += int((counters != turn).any())
        assert barrier.wait(LONG_S) == barrier.OK
    assert barrier.late() == []
    return early


@pytest.mark.parametrize("spin_us", [0, 20])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nobody_leaves_a_barrier_early(world: World, size: int, spin_us: int) -> None:
    assert world.run(size, _meet_often, spin_us, 300) == [0] * size


def _seconds_of_meetings(segment: Segment, rank: int, size: int, rounds: int) -> float:
    barrier = barrier_in(segment, rank, size)
    start = time.monotonic()
    for _ in range(rounds):
        assert barrier.wait(LONG_S) == barrier.OK
    return time.monotonic() - start


def test_sleepers_are_woken(world: World) -> None:
    # Without a wake-up a sleeper would look again after its slice of 0.1 s, hence 20 s in all.
    assert max(world.run(2, _seconds_of_meetings, 200)) < 10


def _come_or_not(segment: Segment, rank: int, size: int, comers: list[int]) -> tuple[int, list[int]] | None:
    barrier = barrier_in(segment, rank, size)
    assert barrier.wait(LONG_S) == barrier.OK
    if rank not in comers:
        return None
    status = barrier.wait(0.05)
    here = segment.memory[DATA : DATA + size]
    here[rank] = 1
    while not here[comers].all():
        time.sleep(0.001)
    return status, barrier.late()


def test_timeout_names_the_late(world: World) -> None:
    timed_out = (_native.Barrier.TIMEOUT, [1, 3])
    assert world.run(4, _come_or_not, [0, 2]) == [timed_out, None, timed_out, None]


def test_a_timeout_of_zero_or_less_does_not_wait(world: World) -> None:
    barrier = barrier_in(world.segment, 0, 2)
    for nothing in (0.0, -1.0, float("nan")):
        assert barrier.wait(nothing) == barrier.TIMEOUT
        world.segment.memory[:] = 0


def _wait_for_abort(segment: Segment, rank: int, size: int, wake: bool) -> int:
    """Rank 0 never comes: it aborts once the others have arrived, and wakes them or leaves that to their next look."""
    barrier = barrier_in(segment, rank, size)
    if rank > 0:
        return barrier.wait(LONG_S)
    arrived = segment.address + BARRIER + 64
    while _native.load32(arrived) != size - 1:
        time.sleep(0.001)
    time.sleep(0.02)  # most likely they sleep by now; whether they do changes nothing in the result
    _native.store32(segment.address + ABORT, 1)
    if wake:
        _native.wake_all(segment.address + BARRIER)
    return barrier.wait(LONG_S)


@pytest.mark.parametrize("wake", [False, True])
def test_abort_ends_waits(world: World, wake: bool) -> None:
    assert world.run(3, _wait_for_abort, wake) == [_native.Barrier.ABORTED] * 3


def _wait_for_who_leaves(segment: Segment, rank: int, size: int, last: int) -> tuple[int, list[int]] | None:
    """All meet once; then rank ``last`` leaves, before or while the others wait."""
    barrier = barrier_in(segment, rank, size)
    assert barrier.wait(LONG_S) == barrier.OK
    if rank == last:
        barrier.leave()
        return None
    return barrier.wait(LONG_S), barrier.late()


def test_nobody_waits_for_a_rank_that_has_left(world: World) -> None:
    for last in range(3):
        world.segment.memory[:] = 0
        told = [result for result in world.run(3, _wait_for_who_leaves, last) if result is not None]
        assert [status for status, _ in told] == [_native.Barrier.LEFT] * 2
        assert all(last in late for _, late in told)


def values_of(rank: int, numel: int) -> np.ndarray:
    return (np.arange(numel) * (rank + 1)) % 7


def _allreduce(segment: Segment, rank: int, size: int, dtype: DType, numels: list[int]) -> list[bool]:
    barrier = barrier_in(segment, rank, size)
    starts = [DATA + COPY_BYTES * r for r in range(size)]
    results = []
    for numel in numels:
        mine = segment.memory[starts[rank] : starts[rank] + numel * dtype.itemsize].view(dtype.label)
        mine[:] = values_of(rank, numel)
        copies = [segment.address + start for start in starts]
        status = barrier.allreduce(copies, numel, dtype, ReduceOp.SUM, 1.0, 2.0, LONG_S)
        assert status == barrier.OK
        expected = 2 * sum(values_of(r, numel) for r in range(size))
        results.append(bool((mine == expected).all()))
        assert barrier.wait(LONG_S) == barrier.OK
    return results


@pytest.mark.parametrize("dtype", [DType.INT8, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_allreduce(world: World, size: int, dtype: DType) -> None:
    per_line = 64 // dtype.itemsize
    numels = [0, 1, 2, 3, per_line - 1, per_line, per_line + 1, 5 * per_line + 3, COPY_BYTES // dtype.itemsize]
    assert world.run(size, _allreduce, dtype, numels) == [[True] * len(numels)] * size


def test_allreduce_that_cannot_be_is_refused_before_it_arrives(world: World) -> None:
    world.segment.memory[:] = 0
    barrier = barrier_in(world.segment, 0, 2)
    copy = world.segment.address + DATA
    with pytest.raises(ValueError, match="one copy per rank"):
        barrier.allreduce([copy], 1, DType.FLOAT32, ReduceOp.SUM, 1.0, 1.0, LONG_S)
    with pytest.raises(ValueError, match="does not reduce"):
        barrier.allreduce([copy, copy], 1, DType.BOOL, ReduceOp.SUM, 1.0, 1.0, LONG_S)
    assert not world.segment.memory.any()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_barrier_stays_in_its_memory(size: int) -> None:
    needed = _native.Barrier.bytes_needed(size)
    raw = np.zeros(needed + 256, np.uint8)
    start = -raw.ctypes.data % 64 + 64
    address = raw.ctypes.data + start
    abort = np.zeros(1, np.uint32)
    for rank in range(size):
        status = _native.Barrier(address, rank, size, abort.ctypes.data, 0).wait(0.0)
        assert status == (_native.Barrier.OK if rank == size - 1 else _native.Barrier.TIMEOUT)
    assert raw[start : start + needed].any()
    assert not raw[:start].any()
    assert not raw[start + needed :].any()


def test_barrier_arguments() -> None:
    with pytest.raises(ValueError, match="rank must be in"):
        _native.Barrier(64, 2, 2, 64, 0)
    with pytest.raises(ValueError, match="multiple of 64"):
        _native.Barrier(72, 0, 2, 64, 0)
    with pytest.raises(ValueError, match="multiple of 4"):
        _native.Barrier(64, 0, 2, 66, 0)
    with pytest.raises(ValueError, match="at least 1"):
        _native.Barrier.bytes_needed(0)


def test_waits_release_the_gil(world: World) -> None:
    world.segment.memory[:] = 0
    results: list[int] = []

    def meet(rank: int) -> None:
        barrier = barrier_in(world.segment, rank, 2)
        results.extend(barrier.wait(LONG_S) for _ in range(50))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_S)
    assert results == [_native.Barrier.OK] * 100


def test_generations_wrap(world: World) -> None:
    world.segment.memory[:] = 0

    def meet(rank: int) -> None:
        barrier = barrier_in(world.segment, rank, 3)
        statuses[rank] = [barrier.wait(LONG_S) for _ in range(5)]

    _native.store32(world.segment.address + BARRIER, 0xFFFFFFFE)
    statuses: dict[int, list[int]] = {}
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_S)
    assert statuses == dict.fromkeys(range(3), [_native.Barrier.OK] * 5)
    assert _native.load32(world.segment.address + BARRIER) == 3


def test_epochs_wrap(world: World) -> None:
    world.segment.memory[:] = 0
    barrier = barrier_in(world.segment, 0, 2)
    epochs = [world.segment.address + BARRIER + 128 + 64 * rank for rank in range(2)]
    for epoch in epochs:
        _native.store32(epoch, 0xFFFFFFFF)
    assert barrier.wait(0.0) == barrier.TIMEOUT
    assert _native.load32(epochs[0]) == 0
    assert barrier.late() == [1]


def test_atomics_store_what_they_load() -> None:
    words = np.zeros(4, np.uint64)
    address = words.ctypes.data
    _native.store64(address + 8, 0xFEDCBA9876543210)
    assert _native.load64(address + 8) == 0xFEDCBA9876543210
    _native.store32(address + 16, 0xFFFFFFFF)
    assert _native.load32(address + 16) == 0xFFFFFFFF
    assert words.tolist() == [0, 0xFEDCBA9876543210, 0xFFFFFFFF, 0]


def test_doorbell_counts_and_times_out() -> None:
    bell = np.zeros(BELL_BYTES, np.uint8)
    address = bell.ctypes.data
    assert _native.doorbell_wait(address, 0, 0.05) == 0
    for _ in range(3):
        _native.doorbell_ring(address)
    assert _native.load32(address) == 3
    assert _native.doorbell_wait(address, 0, LONG_S) == 3  # rings that came before the wait are not missed
    assert _native.load32(address + 4) == 0  # nobody sleeps any more
    _native.store32(address, 0xFFFFFFFF)
    _native.doorbell_ring(address)
    assert _native.doorbell_wait(address, 0xFFFFFFFF, LONG_S) == 0  # the count wraps


def test_doorbell_wakes_every_sleeper() -> None:
    bell = np.zeros(BELL_BYTES, np.uint8)
    address = bell.ctypes.data
    woken: list[int] = []
    threads = [
        threading.Thread(target=lambda: woken.append(_native.doorbell_wait(address, 0, LONG_S))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while _native.load32(address + 4) != 3:
        time.sleep(0.001)
    _native.wake_all(address)  # no ring: they go back to sleep
    _native.doorbell_ring(address)
    for thread in threads:
        thread.join(LONG_S)
    assert woken == [1, 1, 1]


def _answer_rings(segment: Segment, rank: int, size: int, rounds: int, assisted: bool) -> int:
    """Ping-pong over two doorbells; a ring that got lost would end it by time.

    With assistants that come and go where that is wanted: one that leaves takes care that no ring is lost.
    """
    bells = [segment.address + DATA, segment.address + DATA + 64]
    for turn in range(rounds):
        if rank == 0:
            _native.doorbell_ring(bells[1])
        if assisted:
            _native.doorbell_begin_assistance(bells[rank])
            if turn % 3:
                _native.doorbell_assist(bells[rank], turn, LONG_S if turn % 3 == 1 else 1e-5, turn % 7)
            _native.doorbell_end_assistance(bells[rank], turn)
        if _native.doorbell_wait(bells[rank], turn, LONG_S) != turn + 1:
            return turn
        if rank == 1:
            _native.doorbell_ring(bells[0])
    return rounds


@pytest.mark.parametrize("assisted", [False, True], ids=["alone", "with assistants"])
def test_doorbells_between_processes_lose_no_ring(world: World, assisted: bool) -> None:
    assert world.run(2, _answer_rings, 1000, assisted) == [1000, 1000]


@pytest.mark.parametrize("spin_us", [0, 1000])
def test_rings_wake_the_assistant_and_let_the_owner_sleep(spin_us: int) -> None:
    bell = np.zeros(BELL_BYTES, np.uint8)
    address = bell.ctypes.data
    woken: list[str] = []

    def own() -> None:
        _native.doorbell_wait(address, 0, LONG_S)
        woken.append("owner")

    def assist() -> None:
        assert _native.doorbell_assist(address, 0, LONG_S, spin_us) == 1
        woken.append("assistant")

    owner, assistant = threading.Thread(target=own), threading.Thread(target=assist)
    _native.doorbell_begin_assistance(address)
    owner.start()
    assistant.start()
    while (_native.load32(address + 4), _native.load32(address + 12)) != (1, 1):  # both sleep
        time.sleep(0.001)
    _native.doorbell_ring(address)
    assistant.join(LONG_S)
    time.sleep(0.05)
    assert woken == ["assistant"]
    assert _native.doorbell_end_assistance(address, 0) == 1
    _native.doorbell_ring(address)
    owner.join(LONG_S)
    assert woken == ["assistant", "owner"]
    assert bell.view(np.uint32)[:4].tolist() == [2, 0, 0, 0]


class OftenAssisted:
    """A doorbell whose rings are followed by an assistant a moment later, again and again; its owner is a thread."""

    def __init__(self, times: int) -> None:
        self._bell = np.zeros(BELL_BYTES, np.uint8)
        self.address = self._bell.ctypes.data
        self.returned: list[int] = []
        self._owner = threading.Thread(target=self._own)
        for rings in range(1, times + 1):
            _native.doorbell_ring(self.address)
            self.assist(rings)
            assert _native.doorbell_wait(self.address, rings, 1e-4) == rings  # what its owner has looked at in vain
        self.seen = times
        self._owner.start()

    def _own(self) -> None:
        self.returned.append(_native.doorbell_wait(self.address, self.seen, LONG_S))

    def assist(self, heard: int) -> None:
        """Come, follow ``heard`` rings, and leave."""
        _native.doorbell_begin_assistance(self.address)
        _native.doorbell_end_assistance(self.address, heard)

    @property
    def sleeps(self) -> bool:
        """Whether a ring has to wake the owner."""
        return bool(_native.load32(self.address + 4))

    def wait_for_sleep(self) -> None:
        end_s = time.monotonic() + LONG_S
        while not self.sleeps:
            assert time.monotonic() < end_s
            time.sleep(0.001)

    def end(self) -> int:
        """What the owner returns."""
        self._owner.join(LONG_S)
        (returned,) = self.returned
        return returned


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_owner_that_is_often_spared_follows_what_nobody_else_does(sleeps: bool) -> None:
    bell = OftenAssisted(10)
    if sleeps:
        bell.wait_for_sleep()
    _native.doorbell_ring(bell.address)
    assert bell.end() == 11


@pytest.mark.parametrize("sleeps", [False, True])
def test_rings_that_an_assistant_follows_are_not_the_owners(sleeps: bool) -> None:
    bell = OftenAssisted(10)
    if sleeps:
        bell.wait_for_sleep()
    _native.doorbell_begin_assistance(bell.address)
    _native.doorbell_ring(bell.address)
    time.sleep(0.02)  # several naps
    _native.doorbell_end_assistance(bell.address, 11)
    time.sleep(0.02)
    assert not bell.returned
    _native.doorbell_begin_assistance(bell.address)
    _native.doorbell_ring(bell.address)
    assert _native.doorbell_end_assistance(bell.address, 11) == 12
    _native.doorbell_ring(bell.address)  # as one that has not followed all of them does
    assert bell.end() == 13


def test_what_was_followed_long_ago_is_not_taken_for_what_is_rung_now() -> None:
    """The count wraps."""
    bell = np.zeros(BELL_BYTES, np.uint8)
    address = bell.ctypes.data
    _native.doorbell_ring(address)
    _native.doorbell_begin_assistance(address)
    _native.doorbell_end_assistance(address, 1)
    _native.doorbell_ring(address)
    assert _native.doorbell_wait(address, 1, LONG_S) == 2
    _native.store32(address, 0)
    _native.doorbell_ring(address)
    owner = threading.Thread(target=_native.doorbell_wait, args=(address, 0, LONG_S), daemon=True)
    owner.start()
    owner.join(LONG_S / 2)
    assert not owner.is_alive()


def test_an_assistant_that_is_not_rung_comes_back_in_time() -> None:
    bell = np.zeros(BELL_BYTES, np.uint8)
    _native.doorbell_begin_assistance(bell.ctypes.data)
    assert _native.doorbell_assist(bell.ctypes.data, 0, 0.05, 50) == 0
    assert _native.doorbell_end_assistance(bell.ctypes.data, 0) == 0


class Interrupted(Exception):
    pass


def test_a_signal_ends_a_doorbell_wait_of_the_main_thread() -> None:
    def raise_interrupted(_number: int, _frame: object) -> None:
        raise Interrupted

    bell = np.zeros(BELL_BYTES, np.uint8)
    before = signal.signal(signal.SIGALRM, raise_interrupted)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Interrupted):
            _native.doorbell_wait(bell.ctypes.data, 0, LONG_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert _native.load32(bell.ctypes.data + 4) == 0
