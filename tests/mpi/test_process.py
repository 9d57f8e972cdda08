"""The default runtime on several ranks: forks in the middle of work, and what it is when it starts again."""

from __future__ import annotations

import multiprocessing
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

import hvdlite
from backend_lab import RANK, SIZE
from hvdlite import default_runtime
from hvdlite.errors import NotInitializedError, ShutDownError, StartupError
from hvdlite.job_runtime import Runtime
from hvdlite.memory.views import TensorView
from hvdlite.operations.allocate import allocate
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.barrier import barrier_async

pytestmark = pytest.mark.up_to_three_ranks

PATIENCE_S = 20.0


@pytest.fixture
def running() -> Iterator[None]:
    hvdlite.init()
    yield
    hvdlite.shutdown()


def total(name: str | None = None) -> float:
    array = np.full(1000, RANK + 1.0, np.float32)
    view = TensorView.of_numpy(array)
    allreduce_async(hvdlite.runtime().group, [view], [view], name=name).wait()
    return float(array[0])


EXPECTED = SIZE * (SIZE + 1) / 2


class Child:
    """A forked process that runs ``work`` and says how it went, while its parent goes on."""

    def __init__(self, work: Callable[[], str]) -> None:
        self._out, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                text = work()
            except BaseException:
                text = traceback.format_exc()
            os.write(out, text.encode())
            os._exit(0)
        os.close(out)

    def result(self) -> str:
        assert select.select([self._out], [], [], PATIENCE_S)[0], "the child hangs"
        text = os.read(self._out, 1 << 16).decode()
        os.close(self._out)
        os.waitpid(self.pid, 0)
        return text


def test_a_child_cannot_take_part_and_says_why(running: None) -> None:
    def work() -> str:
        assert not hvdlite.is_initialized()
        assert (hvdlite.rank(), hvdlite.size()) == (RANK, SIZE)
        with pytest.raises(ShutDownError, match="was forked from one that runs hvdlite"):
            total()
        return "fine"

    before = total()
    children = [Child(work) for _ in range(3)]
    during = [total() for _ in range(20)]
    assert [child.result() for child in children] == ["fine"] * 3
    assert [before, *during, total()] == [EXPECTED] * 22


def test_a_child_does_not_touch_what_it_inherited(running: None) -> None:
    """A runtime that it still holds refuses, and closing it reaches nobody."""
    runtime = hvdlite.runtime()

    def work() -> str:
        with pytest.raises(ShutDownError):
            barrier_async(runtime.group)
        with pytest.raises(ShutDownError):
            allocate(runtime.group, 8)
        runtime.close()
        hvdlite.shutdown()
        return "fine"

    child = Child(work)
    assert child.result() == "fine"
    assert total() == EXPECTED


def test_a_child_holds_no_connection_of_its_parent(running: None) -> None:
    """Otherwise nobody would hear of the parent's death while the child lives."""

    def sockets() -> set[str]:
        found = set()
        for entry in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{entry}"))
            except FileNotFoundError:
                continue
        return {name for name in found if name.startswith("socket:")}

    hvdlite.shutdown()
    without = sockets()
    hvdlite.init()
    ours = sockets() - without
    assert ours or SIZE == 1
    child = Child(lambda: f"{sorted(ours & sockets())}")
    assert child.result() == "[]"


def test_a_child_that_fails_harms_nobody(running: None) -> None:
    """Its exception goes to its own stderr through our hook, and not to the other ranks."""

    def work() -> str:
        try:
            raise ValueError("of the child")
        except ValueError:
            sys.excepthook(*sys.exc_info())
        return "fine"

    assert Child(work).result() == "fine"
    assert total() == EXPECTED


def test_workers_may_be_forked_in_the_middle(running: None) -> None:
    """As a DataLoader's are; the other ranks wait meanwhile."""
    if RANK == 0:
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        worker = context.Process(target=queue.put, args=(np.arange(3),))
        worker.start()
        assert np.array_equal(queue.get(), np.arange(3))
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
    assert total() == EXPECTED


def test_forks_while_operations_are_in_flight(running: None) -> None:
    children = []
    problems = []
    for step in range(20):
        array = np.full(50_000, RANK + 1.0, np.float32)
        view = TensorView.of_numpy(array)
        submission = allreduce_async(hvdlite.runtime().group, [view], [view], name=f"step {step}")
        if step % SIZE == RANK:
            children.append(Child(lambda: "fine"))
        submission.wait()
        problems.append(not (array == EXPECTED).all())
    assert not any(problems)
    assert {child.result() for child in children} <= {"fine"}


def test_a_child_cannot_take_its_parents_place_in_an_operation(running: None) -> None:
    """It has inherited what its parent waits for, while other ranks are yet to come."""
    total()
    array = np.full(1000, RANK + 1.0, np.float32)
    view = TensorView.of_numpy(array)
    submission = None
    if RANK == 0 and SIZE > 1:
        submission = allreduce_async(hvdlite.runtime().group, [view], [view], name="late")

        def work() -> str:
            with pytest.raises(ShutDownError, match="was forked from one that runs hvdlite"):
                submission.wait()
            return "fine"

        assert Child(work).result() == "fine"
    MPI.COMM_WORLD.Barrier()
    if submission is None:
        submission = allreduce_async(hvdlite.runtime().group, [view], [view], name="late")
    submission.wait()
    assert (array == EXPECTED).all()


def test_what_a_child_writes_to_shared_memory_is_its_own(running: None) -> None:
    """As `p.grad.zero_()` of gradients that live there."""
    home = allocate(hvdlite.runtime().group, 4096)
    home.memory[:] = RANK + 1
    children = [Child(lambda: (home.owner.fill(99), str(home.owner.sum()))[1]) for _ in range(2)]
    assert [child.result() for child in children] == [str(99 * home.owner.nbytes)] * 2
    total()
    assert (home.memory == RANK + 1).all()


def test_a_child_may_outlive_the_runtime_of_its_parent() -> None:
    hvdlite.init()

    def work() -> str:
        time.sleep(1.0)
        return "fine"

    child = Child(work)
    assert total() == EXPECTED
    start = time.monotonic()
    hvdlite.shutdown()
    hvdlite.init()
    assert total() == EXPECTED
    hvdlite.shutdown()
    took_s = time.monotonic() - start
    assert child.result() == "fine"
    assert MPI.COMM_WORLD.allreduce(took_s, MPI.MIN) < 0.9


def test_a_child_can_start_a_runtime_of_its_own(running: None) -> None:
    """Alone: MPI belongs to the parent."""

    def work() -> str:
        from hvdlite.config import Config
        from hvdlite.job_runtime import Runtime

        with Runtime(None, Config()) as alone:
            array = np.ones(10, np.float32)
            view = TensorView.of_numpy(array)
            allreduce_async(alone.group, [view], [view]).wait()
            return f"{alone.size} {array.sum()}"

    assert Child(work).result() == "1 10.0"
    assert total() == EXPECTED


def test_a_restart_is_a_new_runtime_of_the_same_ranks(running: None) -> None:
    before = hvdlite.runtime()
    assert total("gradient") == EXPECTED
    hvdlite.restart()
    assert hvdlite.runtime() is not before and before.closed
    assert (hvdlite.rank(), hvdlite.size()) == (RANK, SIZE)
    assert total("gradient") == EXPECTED


def test_a_restart_after_a_shutdown(running: None) -> None:
    hvdlite.shutdown()
    with pytest.raises(NotInitializedError):
        total()
    hvdlite.restart()
    assert total() == EXPECTED


def test_a_restart_on_some_ranks_leaves_out_the_others() -> None:
    """Ranks that never called init() are not waited for."""
    ranks = list(range(max(1, SIZE - 1)))
    if RANK in ranks:
        hvdlite.init(ranks)
        ranks.append(SIZE)  # what becomes of the caller's list is no concern of hvdlite's
        hvdlite.restart()
        assert hvdlite.size() == max(1, SIZE - 1)
        assert total() == sum(range(1, hvdlite.size() + 1))
        hvdlite.shutdown()


def test_a_restart_on_a_communicator_in_its_order(comm: MPI.Intracomm) -> None:
    backwards = comm.Split(0, -comm.rank)
    assert isinstance(backwards, MPI.Intracomm)
    hvdlite.init(backwards)
    hvdlite.restart()
    assert hvdlite.rank() == SIZE - 1 - RANK
    assert total() == EXPECTED
    backwards.Free()
    with pytest.raises(StartupError, match=r"the communicator that hvd\.init\(comm=\.\.\.\) was given has been freed"):
        hvdlite.restart()
    assert not hvdlite.is_initialized()


def test_a_restart_compares_versions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def start(*args: object, **kwargs: object) -> Runtime:
        told.append(kwargs["versions"])
        return Runtime(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(default_runtime, "Runtime", start)
    hvdlite.init(versions={"torch": "2.13.0"})
    hvdlite.restart()
    hvdlite.shutdown()
    assert told == [{"torch": "2.13.0"}] * 2


def test_ranks_of_tests_do_not_remove_the_same_temporary_directories(
    comm: MPI.Intracomm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert len(set(comm.allgather(tmp_path_factory.getbasetemp().parent))) == SIZE
