"""Asynchronous allreduces of few bytes that repeat: who submits starts them; who waits, or comes next, completes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
import started_lab
from hvdlite.config import Tunable
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.errors import DuplicateNameError, HorovodInternalError, ShutDownError
from hvdlite.memory.layout import ALIGNMENT
from hvdlite.operations.configure import configure
from prepared_lab import SMALL
from started_lab import FEW, TURNS, WORLD, Alone, Few, Sum, fails_in_a_child, total, until_native, until_started

MANY = (32 << 10) // 4 + 1  # elements
PATIENCE_S = 0.1
"""More than a caller has before it leaves late ranks to the coordinator."""

running = started_lab.running

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]
with_others = pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another")


@pytest.fixture(params=[Alone, Few], ids=lambda kind: kind.__name__)
def program(request: pytest.FixtureRequest) -> Alone:
    if request.param is Few:
        return until_native()
    made = Alone()
    until_started(made)
    return made


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new"])
@pytest.mark.parametrize("name", ["named", None])
@pytest.mark.parametrize("numel", [1, 5, SMALL // 4 - 1, SMALL // 4])
def test_what_repeats_is_started(name: str | None, numel: int, in_place: bool) -> None:
    until_started(Alone(name, numel, in_place=in_place))


def test_of_many_bytes_none_is_started() -> None:
    program = Alone("many", MANY)
    for _ in range(2 * TURNS):
        assert not program.step()
    for _ in range(2 * TURNS):
        hvd.allreduce_(torch.ones(MANY), op=hvd.Sum, name="many")
    assert not program.step()


@with_others
def test_equal_ones_that_are_waited_for_together_become_a_burst() -> None:
    """Though each was one period of the plan at first."""
    until_started(Alone(None))
    for turn in range(100 * TURNS):
        begun = [Sum(float(i), None) for i in range(FEW)]
        are_in_burst = any(one.is_in_burst for one in begun)
        for one in begun:
            one.check()
        if turn % TURNS == 0 and all(WORLD.allgather(are_in_burst)):
            return
    raise AssertionError(f"still alone: {[type(one.handle).__name__ for one in begun]}")


def test_each_is_counted_once(program: Alone) -> None:
    begun = program.begin()
    for one in begun:
        one.check()
    operations, numel = len(begun), sum(one.given.numel() for one in begun)
    hvd.barrier()
    before = hvd.statistics()
    for _ in range(TURNS):
        program.step()
    after = hvd.statistics()
    assert after["submissions"] - before["submissions"] == TURNS * operations
    reduced, counted, responses = (after[name] - before[name] for name in ("reduced_bytes", "counted", "responses"))
    assert counted + responses == TURNS * operations
    assert TURNS * 4 * numel <= reduced < TURNS * (4 * numel + operations * ALIGNMENT)


def test_what_comes_next_is_done_as_ever(program: Alone) -> None:
    for other in (
        lambda: hvd.allreduce_(torch.ones(3), name="blocking"),
        lambda: hvd.allreduce_(torch.ones(100_000), name="large"),
        lambda: hvd.synchronize(hvd.allreduce_async_(torch.ones(100_000), name="large and asynchronous")),
        lambda: hvd.allgather(torch.ones(2), name="gathered"),
        lambda: hvd.barrier(),
        lambda: hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3)], name="grouped")),
    ):
        for _ in range(3):
            begun = program.begin()
            other()
            for one in begun:
                one.check()


def test_polled(program: Alone) -> None:
    for _ in range(TURNS):
        begun = program.begin()
        while not all(hvd.poll(one.handle) for one in begun):
            pass
        for one in begun:
            assert hvd.poll(one.handle)
            one.check()


@with_others
def test_late_ranks(program: Alone) -> None:
    """None of them waits for another in a call that only begins; the rest is as ever."""
    for turn in range(6):
        is_late = turn % hvd.size() == hvd.rank()
        if is_late:
            WORLD.allgather(None)
            time.sleep((0.0, PATIENCE_S)[turn % 2])
        begun = program.begin()
        if not is_late:
            assert not any(hvd.poll(one.handle) for one in begun)
            WORLD.allgather(None)
        for one in begun:
            one.check()


@with_others
def test_who_has_begun_need_not_wait(program: Alone) -> None:
    """The other ranks have what they need."""
    for turn in range(2 * hvd.size()):
        begun = program.begin()
        if turn % hvd.size() == hvd.rank():
            WORLD.allgather(None)
        for one in begun:
            one.check()
        if turn % hvd.size() != hvd.rank():
            WORLD.allgather(None)


@with_others
@pytest.mark.parametrize("how", ["another", "one less", "a barrier", "blocking"])
def test_what_deviates(program: Alone, how: str) -> None:
    for turn in range(4):
        begun = program.begin()
        if how == "another":
            begun.append(Sum(2.0, f"another {turn}"))
        if how == "one less":
            begun[-1].check()
            hvd.allreduce_(torch.ones(3), name="instead")
        if how == "a barrier":
            hvd.barrier()
        if how == "blocking":
            own = torch.full((2,), hvd.rank() + 1.0)
            assert hvd.allreduce_(own, op=hvd.Sum, name="blocking")[1].item() == total()
        for one in begun:
            one.check()
    until_started(program)


@with_others
@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_begins_something_else_before(program: Alone, who: int) -> None:
    """Which the others begin after what they have started."""
    for turn in range(4):
        other = Sum(3.0, f"before {turn}", 100_000) if hvd.rank() == who else None
        begun = program.begin()
        for one in [*begun, other or Sum(3.0, f"before {turn}", 100_000)]:
            one.check()


def test_a_name_that_is_in_flight(program: Alone) -> None:
    """It may be done already."""
    for _ in range(3):
        first = Sum(1.0, program.first_name)
        try:
            second = Sum(1.0, program.first_name)
        except DuplicateNameError:
            second = None
        first.check()
        done = torch.tensor(float(second is not None))
        if hvd.allreduce(done, op=hvd.Sum, name="second").item() not in (0.0, hvd.size()):
            second = second or Sum(1.0, program.first_name)
        if second is not None:
            second.check()


class Interrupted(BaseException):
    pass


@contextmanager
def interrupted_soon() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@with_others
def test_an_interrupt_ends_the_wait_and_nothing_else(program: Alone) -> None:
    for turn in range(4):
        if turn % hvd.size() == hvd.rank():
            begun = program.begin()
            with interrupted_soon():
                begun[0].check()
            WORLD.allgather(None)
        else:
            WORLD.allgather(None)
            begun = program.begin()
        for one in begun:
            one.check()
    until_started(program)


def test_a_signal_handler_waits_as_well(program: Alone) -> None:
    seen = []

    def check(number: int, frame: FrameType | None) -> None:
        begun[0].check()
        seen.append(number)

    before = signal.signal(signal.SIGALRM, check)
    try:
        begun = program.begin()
        os.kill(os.getpid(), signal.SIGALRM)
        while not seen:
            pass
        for one in begun:
            one.check()
    finally:
        signal.signal(signal.SIGALRM, before)


@with_others
def test_a_signal_handler_that_interrupts_hvdlite_polls(program: Alone) -> None:
    """While rank 0 has not begun."""
    coordinator = hvdlite.runtime().group.world.coordinator
    if hvd.rank() == 0:
        WORLD.allgather(None)
    begun = program.begin()
    if hvd.rank() != 0:
        with coordinator._worker.at_work:
            coordinator.at_once.shortcut.close()
            assert not any(hvd.poll(one.handle) for one in begun)
        WORLD.allgather(None)
    for one in begun:
        one.check()


def test_several_threads(program: Alone) -> None:
    """One begins what others wait for, and what others do blocking comes between."""
    failures: list[BaseException] = []

    def caught(work: Callable[[int], None]) -> Callable[[int], None]:
        def run(number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                failures.append(error)

        return run

    @caught
    def wait(number: int) -> None:
        for one in begun:
            one.check()

    @caught
    def block(number: int) -> None:
        for turn in range(TURNS):
            own = torch.full((2,), (hvd.rank() + 1.0) * turn)
            assert hvd.allreduce_(own, op=hvd.Sum, name=f"thread {number}")[1].item() == total(turn)

    blocking = [threading.Thread(target=block, args=(number,)) for number in range(2)]
    for thread in blocking:
        thread.start()
    for _ in range(TURNS):
        begun = program.begin()
        waiting = [threading.Thread(target=wait, args=(number,)) for number in range(2)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
    for thread in blocking:
        thread.join()
    assert not failures


def test_what_is_under_way_when_hvdlite_is_shut_down(program: Alone) -> None:
    """It is done, or fails; and a later generation has nothing to do with it."""
    begun = program.begin()
    WORLD.allgather(None)
    hvd.shutdown()
    for one in begun:
        assert hvd.poll(one.handle)
        try:
            one.check()
        except ShutDownError:
            with pytest.raises(ShutDownError):
                one.check()
    hvd.init()
    for one in begun:
        assert hvd.poll(one.handle)
    until_started(type(program)())


@with_others
@pytest.mark.parametrize("how", ["poll", "wait"])
def test_a_job_that_fails_meanwhile(program: Alone, how: str) -> None:
    """Rank 0 has not begun, and never does."""
    WORLD.allgather(None)
    begun = [] if hvd.rank() == 0 else program.begin()
    WORLD.allgather(None)
    if hvd.rank() == 0:
        hvdlite.runtime().fail(ValueError("as a test"))
    for one in begun:
        while how == "poll" and not hvd.poll(one.handle):
            pass
        for _ in range(2):
            with pytest.raises(HorovodInternalError, match="as a test"):
                one.check()
    WORLD.allgather(None)


@with_others
def test_a_forked_child(program: Alone) -> None:
    """What is under way fails there, and nowhere else."""
    if hvd.rank() == 0:
        begun = program.begin()
        assert fails_in_a_child(begun[-1])
        WORLD.allgather(None)
    else:
        WORLD.allgather(None)
        begun = program.begin()
    for one in begun:
        one.check()
    program.step()


@with_others
def test_what_is_left_to_the_coordinator_is_done_by_its_thread() -> None:
    """So that who polls need not wait."""
    program = Alone()
    until_started(program)
    if hvd.rank() == 0:
        WORLD.allgather(None)
        time.sleep(0.01)
        begun = program.begin()
    else:
        begun = program.begin()
        hvd.statistics()  # which counts what native code has done
        WORLD.allgather(None)
        while not hvd.poll(begun[0].handle):
            pass
    begun[0].check()
    program.step()


@pytest.mark.skipif(WORLD.size > 1, reason="others would fail as well, in their own time")
def test_a_failure_of_what_is_counted_is_one_of_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Alone()
    until_started(program)
    while not (begun := program.begin()[0]).is_started:
        begun.check()

    def fail(*_: object) -> None:
        raise ValueError("as a test")

    monkeypatch.setattr(AtOnce, "_proceed", fail)
    with pytest.raises(ValueError, match="as a test"):
        hvd.statistics()
    for _ in range(2):
        with pytest.raises(ValueError, match="as a test"):
            begun.check()


def test_a_timeline_sees_all(program: Alone) -> None:
    """From when it starts until it stops; what is under way meanwhile is done."""
    recorder = hvdlite.runtime().group.recorder
    begun = program.begin()
    recorder.start()
    try:
        for one in begun:
            one.check()
        recorder.drain()
        begun = program.begin()
        assert not any(one.is_started for one in begun)
    finally:
        recorder.stop()
    for one in begun:
        one.check()
    until_started(program)


def test_other_settings(program: Alone) -> None:
    """A job that is tuned prepares everything anew."""
    group = hvdlite.runtime().group
    begun = program.begin()
    configure(group, Tunable.of(group.config)._replace(segment_bytes=1 << 20))
    for one in begun:
        one.check()
    until_started(program)


def test_memory_that_is_taken_away_is_kept(program: Alone) -> None:
    for _ in range(3):
        begun = program.begin()
        given = [one.given.clone() for one in begun]
        for one, copy in zip(begun, given, strict=True):
            one.given.set_(copy.untyped_storage())  # type: ignore[call-overload]
        for one in begun:
            hvd.synchronize(one.handle)
    program.step()
