"""_native's PoliteLook, BoundMessages, BoundPipeline and EarlyAllreduce, with an MPI whose functions are Python's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hvdlite import _native
from hvdlite.dtypes import DType, ReduceOp
from mpi_lab import Mpi

DONE, WAITING, FAILED = _native.BoundMessages.DONE, _native.BoundMessages.WAITING, _native.BoundMessages.FAILED
Call = _native.EarlyAllreduce
LINE = 64
LONG_US = 60_000_000  # never reached unless a test fails


@pytest.fixture
def mpi() -> Mpi:
    return Mpi()


def addition(into: np.ndarray, of: np.ndarray) -> tuple[Any, ...]:
    return [into.ctypes.data], [into.ctypes.data, of.ctypes.data], into.size, DType.FLOAT32, ReduceOp.SUM, 1.0, 1.0


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_phases_in_their_order_as_far_as_messages_have_come(mpi: Mpi) -> None:
    sums, first, second = floats(1, 2), floats(10, 20), floats(100, 200)
    messages = mpi.messages(
        ([1, 2], [(1, 7), (2, 8)], [addition(sums, first)]),
        ([3], [(3, 9)], [addition(sums, second)]),
    )
    assert messages.start() == WAITING
    assert messages.peer == 7
    assert mpi.calls == [("start", 1), ("start", 2), ("test", 1)]
    mpi.done = {1}
    assert messages.advance() == WAITING
    assert messages.peer == 8
    assert list(sums) == [1, 2]
    mpi.done = {2}
    assert messages.advance() == WAITING
    assert messages.peer == 9
    assert list(sums) == [11, 22]
    mpi.done = {3}
    assert messages.advance() == DONE
    assert list(sums) == [111, 222]
    mpi.done = {1, 2, 3}
    mpi.calls.clear()
    assert messages.start() == DONE  # again, from the beginning
    assert mpi.calls == [("start", 1), ("start", 2), ("test", 1), ("test", 2), ("start", 3), ("test", 3)]
    assert list(sums) == [221, 442]


@pytest.mark.parametrize("call", [("start", 2), ("test", 1)])
def test_an_error_of_mpi(mpi: Mpi, call: tuple[str, int]) -> None:
    mpi.errors = {call: 15}
    messages = mpi.messages(([1, 2], [(1, 0)], []))
    assert messages.start() == FAILED
    assert messages.error == 15
    assert mpi.calls[-1] == call


@pytest.mark.parametrize("failed", [1, 11])
def test_an_error_of_a_message_that_is_through(mpi: Mpi, failed: int) -> None:
    """MPI says both at once; what is looked at next is no error."""
    long = pipeline(mpi, [(1, 7, 0), (2, 7, 0)], [(11, 5, 1, True, [])])
    assert long.start() == WAITING
    mpi.done, mpi.errors = {1, 2, 11}, {("test", failed): 15}
    assert (work(long), long.error) == (FAILED, 15)


class SecondLook:
    """Requests whose messages are there when they are looked at for the second time."""

    def __init__(self) -> None:
        self._seen: set[object] = set()

    def __contains__(self, request: object) -> bool:
        is_there = request in self._seen
        self._seen.add(request)
        return is_there


def test_whoever_looks_ends_with_every_message_that_moves(mpi: Mpi) -> None:
    """And so begins anew with the shortest naps, as often as there is time."""
    mpi.done = SecondLook()
    long = pipeline(mpi, receives=[(11, 5, 0, True, []), (12, 6, 0, True, [])])
    assert long.start() == WAITING
    look = _native.PoliteLook(LONG_US, LONG_US, 0)
    assert (long.work(look, 0, 100), long.moved, long.peer) == (WAITING, 1, 6)
    assert long.work(look, LONG_US, 100) == DONE


def test_nothing_to_do(mpi: Mpi) -> None:
    assert mpi.messages().start() == DONE


def pipeline(mpi: Mpi, sends: Any = (), receives: Any = (), first: Any = ()) -> _native.BoundPipeline:
    """With a window of two."""
    return _native.BoundPipeline(*mpi.functions, first, sends, receives, 2)


def work(pipeline: _native.BoundPipeline) -> int:
    """For so long that it looks at every message."""
    return pipeline.work(_native.PoliteLook(0, LONG_US, 0), 1000, 100)


def started(mpi: Mpi) -> list[int]:
    return [request for what, request in mpi.calls if what == "start"]


def test_a_pipeline_sends_and_receives_within_its_window(mpi: Mpi) -> None:
    """What goes into a slot is received ahead, and what goes into its place once what was there has left."""
    sums, arrived = floats(1, 2), floats(10, 20)
    sends = [(1, 7, 0), (2, 7, 0), (3, 8, 1)]
    receives = [(11, 5, 1, True, [addition(sums, arrived)]), (12, 5, 1, False, []), (13, 6, 0, True, [])]
    long = pipeline(mpi, sends, receives, [addition(sums, sums)])
    assert long.start() == WAITING
    assert (started(mpi), list(sums), long.peer, long.moved) == ([1, 2, 11], [2, 4], 5, 0)
    mpi.done = {11}
    assert work(long) == WAITING
    assert (started(mpi), list(sums), long.moved) == ([1, 2, 11], [2, 4], 0)  # what it is added to has not left
    mpi.done = {11, 1}
    assert work(long) == WAITING
    assert (started(mpi), list(sums)) == ([1, 2, 11, 12, 3, 13], [12, 24])
    mpi.done = {11, 1, 12}
    assert work(long) == WAITING
    assert (long.peer, long.moved) == (6, 3)
    mpi.done = {11, 1, 12, 13}
    assert work(long) == WAITING
    assert (long.peer, long.moved) == (8, 4)  # all is there; the last sends have not left
    mpi.done = {11, 1, 12, 13, 2, 3}
    assert work(long) == DONE
    mpi.calls.clear()
    assert long.start() == DONE  # again, from the beginning
    assert started(mpi) == [1, 2, 11, 12, 3, 13] and list(sums) == [34, 68]


@pytest.mark.parametrize("call", [("start", 1), ("start", 11), ("test", 11), ("test", 1)])
def test_an_error_in_a_pipeline(mpi: Mpi, call: tuple[str, int]) -> None:
    mpi.errors = {call: 15}
    mpi.done = {11}
    long = pipeline(mpi, [(1, 0, 0)], [(11, 0, 0, True, [])])
    assert long.start() == FAILED
    assert long.error == 15
    assert mpi.calls[-1] == call


def test_a_pipeline_of_nothing(mpi: Mpi) -> None:
    assert pipeline(mpi).start() == DONE


def test_a_look_goes_on_until_all_is_done(mpi: Mpi) -> None:
    messages = mpi.messages(([1], [(1, 0)], []))
    assert messages.start() == WAITING
    mpi.done = {1}
    assert messages.work(_native.PoliteLook(LONG_US, LONG_US, 0), 0, 100) == DONE


def test_a_look_ends_where_nothing_comes(mpi: Mpi) -> None:
    messages = mpi.messages(([1], [(1, 0)], []))
    assert messages.start() == WAITING
    assert messages.work(_native.PoliteLook(1, LONG_US, 0), 1000, 100) == WAITING


class Looks:
    """A condition that becomes true with the look number ``last``."""

    def __init__(self, last: int = 1_000_000) -> None:
        self.count = 0
        self._last = last

    def __call__(self) -> bool:
        self.count += 1
        return self.count >= self._last


def test_a_polite_look_ends_when_it_happened() -> None:
    looks = Looks(1000)
    assert _native.PoliteLook(LONG_US, LONG_US, 0).until(looks)
    assert looks.count == 1000


def test_a_polite_look_leaves_a_busy_core_alone() -> None:
    """Any offer of the core takes longer than -1 us: the first ends the look, and for long nobody looks on."""
    look = _native.PoliteLook(LONG_US, -1, LONG_US)
    first, second = Looks(), Looks()
    assert not look.until(first)
    assert not look.until(second)
    assert first.count > second.count == 2  # before and after
    assert _native.PoliteLook(LONG_US, -1, 0).until(Looks(1000))  # without courtesy


def test_a_polite_look_raises_what_its_condition_raises() -> None:
    def fail() -> bool:
        raise RuntimeError("as wanted")

    with pytest.raises(RuntimeError, match="as wanted"):
        _native.PoliteLook(LONG_US, LONG_US, 0).until(fail)


class Early:
    """Ranks of one node, of which rank 0 exchanges with a node of one that sends ``theirs``; float32 as ``wire``."""

    def __init__(
        self, mpi: Mpi, size: int, numels: tuple[int, ...] = (2,), wire: DType = DType.FLOAT32, look_us: int = 1
    ) -> None:
        self._offsets = [0, *itertools.accumulate(numels)]
        self.memory = np.zeros((3 * size + 3) * LINE, np.uint8)
        start = -self.memory.ctypes.data % LINE + self.memory.ctypes.data
        numel = self._offsets[-1]
        self.places = np.zeros((size, numel), np.float16 if wire is DType.FLOAT16 else np.float32)
        self.theirs = np.zeros_like(self.places[0])
        places = [place.ctypes.data for place in self.places]
        of_others = [places[0]], [places[0], self.theirs.ctypes.data], numel, wire, ReduceOp.SUM, 1.0, 1.0
        self.messages = mpi.messages(([1], [(1, 1)], [of_others]))
        self.counts = [_native.ReadyCounts(start, start + size * LINE, rank, size) for rank in range(size)]
        self.turns = [_native.EarlyTurns(counts, start + 2 * size * LINE) for counts in self.counts]
        self.bell = start + size * LINE  # of rank 0
        look = _native.PoliteLook(look_us, LONG_US, 0)
        in_node = (ReduceOp.SUM, 1.0, 1.0) if size > 1 else None
        layout = numels, self._offsets[:-1], numel
        self.calls = [
            _native.EarlyAllreduce(
                self.counts[rank],
                self.turns[rank],
                look,
                _native.EarlyShape(*layout, places, rank, DType.FLOAT32, wire, in_node),
                spin_us=1,
                patience_s=0.001,
            )
            for rank in range(size)
        ]
        self.calls[0].bind(self.messages)

    def run(
        self, rank: int, inputs: list[np.ndarray], outputs: list[np.ndarray], count: int = 1, heard: int = 0
    ) -> int:
        sources, targets = ([array.ctypes.data for array in arrays] for arrays in (inputs, outputs))
        return self.calls[rank].run(sources, targets, 1, count, heard)


@pytest.fixture(params=[DType.FLOAT32, DType.FLOAT16], ids=lambda dtype: dtype.label)
def wire(request: pytest.FixtureRequest) -> DType:
    return request.param


def test_early_allreduce_of_a_node_of_one(mpi: Mpi, wire: DType) -> None:
    """Of several tensors, not in place, and with a cast on the way."""
    early = Early(mpi, 1, (2, 1), wire)
    early.theirs[:] = [10, 20, 30]
    mpi.done = {1}
    inputs, outputs = [floats(1, 2), floats(3)], [floats(0, 0), floats(0)]
    assert early.run(0, inputs, outputs) == Call.DONE
    assert [list(output) for output in outputs] == [[11, 22], [33]]
    assert [list(value) for value in inputs] == [[1, 2], [3]]
    assert early.turns[0].has_come()
    assert early.calls[0].last() == (1, 1, Call.DONE)
    assert early.counts[0].all(1) == 1


def test_early_allreduce_of_a_node_of_two(mpi: Mpi, wire: DType) -> None:
    """The result is in all places before anybody hears of it."""
    early = Early(mpi, 2, wire=wire)
    early.theirs[:] = [100, 200]
    mpi.done = {1}
    values = [floats(1, 2), floats(10, 20)]
    early.counts[0].set(1, 1)
    assert early.run(1, [values[1]], [values[1]]) == Call.BEGUN
    assert early.calls[1].progress == WAITING
    assert list(values[1]) == [10, 20]
    assert not early.turns[1].has_come()
    assert early.run(0, [values[0]], [values[0]]) == Call.DONE
    assert list(values[0]) == [111, 222]
    assert early.turns[1].has_come()
    assert early.places.tolist() == [[111, 222], [111, 222]]


def test_nothing_is_begun_before_the_node_is_ready(mpi: Mpi) -> None:
    early = Early(mpi, 2)
    value = floats(1, 2)
    assert early.run(0, [value], [value]) == Call.NOT_YET
    assert early.calls[0].last() == (1, 1, Call.NOT_YET)
    early.counts[1].set(1, 1)
    assert early.counts[1].all(1) == 1  # rank 0 has said that it is ready
    assert early.places.tolist() == [[0, 0], [0, 0]]


def test_nothing_is_sent_before_the_node_has_begun(mpi: Mpi) -> None:
    early = Early(mpi, 2)
    mpi.done = {1}
    value = floats(1, 2)
    early.counts[1].set(1, 1)
    assert early.run(0, [value], [value]) == Call.BEGUN
    assert early.calls[0].progress == Call.NODE_IS_LATE
    assert mpi.calls == []
    assert not early.turns[0].all_have_begun()
    early.turns[1].begin()
    assert early.turns[0].all_have_begun()


def test_early_allreduce_whose_messages_are_late_or_fail(mpi: Mpi) -> None:
    early = Early(mpi, 1)
    value = floats(1, 2)
    assert early.run(0, [value], [value]) == Call.BEGUN
    assert early.calls[0].progress == WAITING
    assert early.calls[0].last() == (1, 1, Call.BEGUN)
    assert early.messages.peer == 1
    assert not early.turns[0].has_come()
    mpi.errors = {("test", 1): 3}
    assert early.run(0, [value], [value], count=2) == Call.BEGUN
    assert early.calls[0].progress == FAILED
    assert early.messages.error == 3
    assert list(value) == [1, 2]


def test_a_ring_ends_early_allreduce_at_once(mpi: Mpi) -> None:
    early = Early(mpi, 1, look_us=LONG_US)
    _native.doorbell_ring(early.bell)
    value = floats(1, 2)
    assert early.run(0, [value], [value], heard=0) == Call.BEGUN
    assert early.calls[0].has_news
    assert mpi.calls == [("start", 1), ("test", 1)]
    mpi.done = {1}
    assert early.run(0, [value], [value], count=2, heard=1) == Call.DONE
    assert early.run(0, [value], [value], count=3, heard=0) == Call.DONE_AND_RUNG


def test_the_leader_of_a_node_cannot_go_on_by_messages_that_are_closed(mpi: Mpi) -> None:
    early = Early(mpi, 2)
    assert [call.can_run for call in early.calls] == [True, True]
    early.messages.close()
    assert [call.can_run for call in early.calls] == [False, True]
    early.calls[0].bind(mpi.messages())
    assert early.calls[0].can_run
