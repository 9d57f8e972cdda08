"""What the default runtime does to its process: forks, uncaught exceptions, the end of the interpreter."""

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
from hvdlite.errors import NotInitializedError, ShutDownError
from hvdlite.memory import TensorView

PATIENCE_S = 20.0


@pytest.fixture
def running() -> Iterator[None]:
    hvdlite.init()
    yield
    hvdlite.shutdown()


def total(name: str | None = None) -> float:
    array = np.full(1000, RANK + 1.0, np.float32)
    view = TensorView.of_numpy(array)
    hvdlite.runtime().group.allreduce_async([view], [view], name=name).wait()
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
        for call in (hvdlite.rank, hvdlite.size, hvdlite.local_rank):
            with pytest.raises(NotInitializedError):
                call()
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
            runtime.group.barrier_async()
        with pytest.raises(ShutDownError):
            runtime.group.allocate(8)
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
        handle = hvdlite.runtime().group.allreduce_async([view], [view], name=f"step {step}")
        if step % SIZE == RANK:
            children.append(Child(lambda: "fine"))
        handle.wait()
        problems.append(not (array == EXPECTED).all())
    assert not any(problems)
    assert {child.result() for child in children} <= {"fine"}


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
        from hvdlite.runtime import Runtime

        with Runtime(None, Config()) as alone:
            array = np.ones(10, np.float32)
            view = TensorView.of_numpy(array)
            alone.group.allreduce_async([view], [view]).wait()
            return f"{alone.size} {array.sum()}"

    assert Child(work).result() == "1 10.0"
    assert total() == EXPECTED
