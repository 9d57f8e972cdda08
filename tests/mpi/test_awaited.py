"""Blocking operations besides allreduce that repeat: done by their callers once all are ready, and right.

By one call where there is one, else step by step; native code is not asked before.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.coordinator.awaited import Awaited
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.worker import Worker
from hvdlite.operations.prepared import PreparedOperation
from machines_lab import ONE_AND_SEVERAL, ONE_MACHINE, WORLD, Machines, running_on
from prepared_lab import ends_of, freeze
from test_prepared import interrupt_while_waiting

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another"),
    pytest.mark.usefixtures("running"),
]


@pytest.fixture(params=ONE_AND_SEVERAL, ids=str)
def running(request: pytest.FixtureRequest) -> Iterator[Machines]:
    """For each test anew, since some of them end it."""
    if request.param != ONE_MACHINE and request.node.callspec.params.get("operation") is broadcast:
        pytest.skip("across nodes a plan of so much does not run free")
    with running_on(request.param):
        yield request.param


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """How each operation that a caller has done, or begun, ended."""
    known: list[Outcome] = []
    for kind in (Awaited, PreparedOperation):
        ends_of(kind, monkeypatch, known)
    return known


def ask_python() -> None:
    """What comes next is not left to native code."""
    hvdlite.runtime().group.world.coordinator.at_once.shortcut.close()


def broadcast(number: int) -> None:
    """Of so much that it is no allreduce."""
    root = hvd.size() - 1
    tensor = torch.full((30_000,), float(10 * hvd.rank() + number))
    assert (hvd.broadcast_(tensor, root, name="broadcast") == 10 * root + number).all()


def allgather(number: int) -> None:
    """Of other sizes each time, and some ranks have nothing."""
    rows = [(rank + number) % 3 for rank in range(hvd.size())]
    gathered = hvd.allgather(torch.full((rows[hvd.rank()], 2), float(hvd.rank() + number)), name="allgather")
    expected = torch.arange(hvd.size()).repeat_interleave(torch.tensor(rows)) + number
    assert gathered.shape == (sum(rows), 2) and (gathered == expected[:, None]).all()


def alltoall(number: int) -> None:
    size, me = hvd.size(), hvd.rank()
    splits = [[(sender + receiver + number) % 3 for receiver in range(size)] for sender in range(size)]
    tensor = torch.cat([torch.full((count,), 10 * me + receiver) for receiver, count in enumerate(splits[me])])
    output, received = hvd.alltoall(tensor, torch.tensor(splits[me]), name="alltoall")
    assert received.tolist() == [splits[sender][me] for sender in range(size)]
    expected = [10 * sender + me for sender in range(size) for _ in range(splits[sender][me])]
    assert output.tolist() == expected


def reducescatter(number: int) -> None:
    """The first ranks have a row more."""
    rows = 2 * hvd.size() + 1
    own = hvd.reducescatter(torch.arange(rows) + number * hvd.rank(), op=hvd.Sum, name="reducescatter")
    first = 2 * hvd.rank() + min(hvd.rank(), 1)
    ranks = sum(range(hvd.size()))
    assert own.tolist() == [hvd.size() * (first + i) + number * ranks for i in range(2 + (hvd.rank() == 0))]


def barrier(number: int) -> None:
    hvd.barrier()


OPERATIONS = [broadcast, allgather, alltoall, reducescatter, barrier]
NAMES = [operation.__name__ for operation in OPERATIONS]


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_what_repeats_is_done_by_its_caller(operation: Callable[[int], None], ends: list[Outcome]) -> None:
    for number in range(50):  # until that alone is the order
        operation(number)
    for _ in range(5):  # once in a while the thread is at work
        del ends[:]
        before = hvdlite.statistics()
        for number in range(30):
            ask_python()
            operation(number)
        after = hvdlite.statistics()
        assert after["counted"] - before["counted"] == after["submissions"] - before["submissions"] == 30
        if all(WORLD.allgather(len(ends) == 30)):
            return
    raise AssertionError(f"{len(ends)} of 30 by this rank's caller")


def test_all_of_them_between_allreduces(ends: list[Outcome]) -> None:
    """Each now and then late, for longer than anybody looks."""
    generator = random.Random(hvd.rank())
    value = torch.empty(3)

    def step(number: int) -> None:
        for operation in OPERATIONS:
            value.fill_(hvd.rank() + number)
            hvd.allreduce_(value, op=hvd.Sum, name=f"before {operation.__name__}")
            assert (value == sum(range(hvd.size())) + hvd.size() * number).all()
            if generator.random() < 0.05:
                time.sleep(3e-3)
            operation(number)

    freeze(step)
    for number in range(40):
        step(number)
    assert ends


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_who_waits_for_a_late_rank_hears_of_other_things(operation: Callable[[int], None], ends: list[Outcome]) -> None:
    """Another thread submits something that is not of the plan, while this one waits: the coordinator goes on.

    The coordinator does the operation where it is at work just when the operation is called, or ends the plan before.
    So there are more tries.
    """
    for _ in range(20):
        freeze(operation)
        del ends[:]
        ask_python()
        wait_for_a_late_rank(operation)
        if hvd.broadcast_object(Outcome.NOT_YET in ends, root_rank=0):
            break
    else:
        raise AssertionError("no caller waited")
    freeze(operation)


def wait_for_a_late_rank(operation: Callable[[int], None]) -> None:
    gathered: list[int] = []
    other = threading.Thread(
        target=lambda: gathered.extend(hvd.allgather(torch.tensor([hvd.rank()]), name="other").tolist())
    )
    if hvd.rank() == 0:
        waker = threading.Timer(0.05, other.start)
        waker.start()
        operation(1)
        waker.join()
    else:
        time.sleep(0.2)
        other.start()
        operation(1)
    other.join()
    assert gathered == list(range(hvd.size()))


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_an_interrupt_ends_the_wait_and_not_the_job(operation: Callable[[int], None], running: Machines) -> None:
    if running != ONE_MACHINE:
        pytest.skip("between machines it ends the job")
    freeze(operation)
    interrupt_while_waiting(operation)
    operation(2)


class Interrupt(Exception):
    """Comes at one of the places where Python takes signals: the first instruction of a function, or after a call.

    Only where an operation is begun by its caller, and not where it ends the job, as that of the coordinator's work
    does.
    """

    ends_the_job = frozenset(
        function.__code__ for function in (AtOnce.settle_or_end, Worker.follow, Coordinator._execute_alone)
    )

    def __init__(self, place: int) -> None:
        self.place = place
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        codes = set()
        at: FrameType | None = frame if event in ("call", "c_return") else None
        while at is not None:
            codes.add(at.f_code)
            at = at.f_back
        if AtOnce.run.__code__ in codes and not codes & self.ends_the_job:
            self.seen += 1
            if self.seen > self.place:
                raise self


def allreduce(number: int) -> None:
    value = torch.full((3,), float(hvd.rank() + number))
    assert (hvd.allreduce_(value, op=hvd.Sum, name="allreduce") == sum(range(hvd.size())) + hvd.size() * number).all()


@pytest.mark.parametrize("operation", [allreduce, allgather], ids=["allreduce", "allgather"])
def test_an_interrupt_anywhere_in_python_ends_no_job(operation: Callable[[int], None], running: Machines) -> None:
    """Either nobody was told of the operation, which can be called once more; or it is done when the others come."""
    if running != ONE_MACHINE:
        pytest.skip("between machines it ends the job")
    coordinator = hvdlite.runtime().group.world.coordinator

    def told() -> int:
        return coordinator._plan.plan.ready + coordinator.at_once.shortcut.untold  # type: ignore[union-attr]

    for place in range(200):
        freeze(operation)
        is_interrupted = False
        if hvd.rank() == 0:
            coordinator.at_once.shortcut.close()  # so that it comes to Python
            before = told()
            sys.setprofile(Interrupt(place))
            try:
                operation(place)
            except Interrupt:
                is_interrupted = True
            finally:
                sys.setprofile(None)
            if told() == before:
                operation(place)
        else:
            operation(place)
        is_interrupted = any(WORLD.allgather(is_interrupted))
        while coordinator._in_flight.keys():
            time.sleep(1e-3)
        if not is_interrupted:
            assert place > 20
            return
    raise AssertionError("so many places there are not")


def test_what_fails_in_the_middle_is_known_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze(allgather)

    def refuse(*_: object) -> None:
        raise MemoryError("no more of it")

    if hvd.rank() == 0:
        monkeypatch.setattr("hvdlite.torch.start.new_result", refuse)
        monkeypatch.setattr(torch.Tensor, "set_", refuse)
    with pytest.raises(hvd.HorovodInternalError, match="no more of it|rank 0"):
        for number in range(3):
            allgather(number)


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_another_order(operation: Callable[[int], None]) -> None:
    """Each of two orders as often as it takes to be frozen; and what comes in the middle of either."""
    freeze(operation)
    for number in range(10):
        for other in OPERATIONS:
            other(number)
    freeze(operation)
    hvd.barrier()
    allgather(1)
    freeze(operation)
