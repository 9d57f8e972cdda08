"""Bursts of few bytes that native code has collected in part, and what may come before the rest."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
import started_lab
from hvdlite._native import StartedBurst
from hvdlite.config import Tunable
from hvdlite.coordinator.burst import BURST_S
from hvdlite.errors import DuplicateNameError, HorovodInternalError, ShutDownError
from hvdlite.operations.configure import configure
from started_lab import FEW, TURNS, WORLD, Few, Sum, fails_in_a_child, total, until_native

PART = 2  # of a burst that is begun

running = started_lab.running

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]
with_others = pytest.mark.skipif(WORLD.size == 1, reason="alone nothing is collected")


def opened() -> tuple[Few, list[Sum]]:
    """A burst of native code of which all ranks have begun a part."""
    program = until_native()
    for _ in range(TURNS):
        program.turn += 1
        begun = program.go_on(0, PART)
        if all(WORLD.allgather(all(one.is_native and is_open() for one in begun))):
            return program, begun
        finish(program, begun)
        program.step()
    raise AssertionError("never of native code")


def is_open() -> bool:
    return hvdlite.runtime().group.world.coordinator.collector.is_open


def finish(program: Few, begun: list[Sum]) -> None:
    for one in [*begun, *program.go_on(PART, FEW)]:
        one.check()


def poll(begun: list[Sum]) -> None:
    while not all(hvd.poll(one.handle) for one in begun):
        pass


def wait(begun: list[Sum]) -> None:
    for one in begun:
        one.check()


def do_something_else(begun: list[Sum]) -> None:
    own = torch.full((2,), hvd.rank() + 1.0)
    assert hvd.allreduce_(own, op=hvd.Sum, name="something else")[1].item() == total()


def begin_something_else(begun: list[Sum]) -> None:
    begun.append(Sum(3.0, "something else"))


def tune(begun: list[Sum]) -> None:
    group = hvdlite.runtime().group
    configure(group, Tunable.of(group.config)._replace(segment_bytes=1 << 20))


def ask_for_a_name_that_is_taken(begun: list[Sum]) -> None:
    taken = begun[0].handle._name
    with pytest.raises(DuplicateNameError, match=taken):
        hvd.allreduce_async_(torch.ones(3), op=hvd.Sum, name=taken)


def record(begun: list[Sum]) -> None:
    recorder = hvdlite.runtime().group.recorder
    recorder.start()
    recorder.stop()


@with_others
@pytest.mark.parametrize(
    "happens", [wait, poll, do_something_else, begin_something_else, tune, ask_for_a_name_that_is_taken, record]
)
@pytest.mark.parametrize("on_all", [True, False], ids=["on all ranks", "on one rank"])
def test_what_comes_before_the_rest(happens: Callable[[list[Sum]], None], on_all: bool) -> None:
    if not on_all and happens in (do_something_else, begin_something_else, tune):
        pytest.skip("all ranks do that, or none")
    for turn in range(3):
        program, begun = opened()
        if on_all or turn % hvd.size() == hvd.rank():
            happens(begun)
        finish(program, begun)
        program.step()


@with_others
def test_what_does_not_come_to_its_end_is_done_nevertheless() -> None:
    """Though the thread slept when it was begun."""
    program, begun = opened()
    finish(program, begun)
    WORLD.allgather(None)
    time.sleep(3 * BURST_S)
    for one in program.begin():
        one.check()
    program.turn += 1
    begun = program.go_on(0, PART)
    time.sleep(3 * BURST_S)
    assert not is_open()
    poll(begun)
    finish(program, begun)


@with_others
def test_who_begins_late_is_waited_for() -> None:
    for turn in range(2 * hvd.size()):
        program, begun = opened()
        if turn % hvd.size() == hvd.rank():
            time.sleep(BURST_S / 4)
        finish(program, begun)


@with_others
def test_a_shutdown_before_the_rest() -> None:
    _, begun = opened()
    hvd.shutdown()
    for one in begun:
        assert hvd.poll(one.handle)
        with contextlib.suppress(ShutDownError):
            one.check()
    hvd.init()
    for one in begun:
        assert hvd.poll(one.handle)


@with_others
def test_a_failure_before_the_rest() -> None:
    _, begun = opened()
    WORLD.allgather(None)
    if hvd.rank() == 0:
        hvdlite.runtime().fail(ValueError("as a test"))
    for one in begun:
        for _ in range(2):
            with pytest.raises(HorovodInternalError, match="as a test"):
                one.check()
    WORLD.allgather(None)


@with_others
def test_a_forked_child_before_the_rest() -> None:
    """There it fails, and nowhere else."""
    program, begun = opened()
    assert fails_in_a_child(begun[-1])
    finish(program, begun)
    program.step()


@with_others
def test_memory_is_let_go_once_all_is_done() -> None:
    until_native()
    names, are_native = [f"let go {i}" for i in range(FEW)], []
    for _ in range(3 * TURNS):
        arrays = [np.ones(3, dtype=np.float32) for _ in names]
        handles = [
            hvd.allreduce_async_(torch.from_numpy(array), op=hvd.Sum, name=name)
            for array, name in zip(arrays, names, strict=True)
        ]
        are_native.append(all(isinstance(getattr(handle, "_burst", None), StartedBurst) for handle in handles))
        for handle in handles:
            hvd.synchronize(handle)
        kept = [weakref.ref(array) for array in arrays]
        del arrays, handles[1:], handle
        assert [array() is not None for array in kept] == [True] + [False] * (FEW - 1)
    assert any(are_native)
