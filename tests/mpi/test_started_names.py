"""The name of an operation that was started is taken until it is complete, whoever is at work."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
import started_lab
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.coordinator.submission import Submission
from hvdlite.errors import DuplicateNameError
from started_lab import TURNS, WORLD, Alone, Few, until_started

running = started_lab.running

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another"),
]


def test_the_name_of_what_was_started_is_taken() -> None:
    program = Alone()
    until_started(program)
    if hvd.rank() == 0:
        begun = program.begin()
        with pytest.raises(DuplicateNameError):
            hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3)], name="alone")
        WORLD.allgather(None)
    else:
        WORLD.allgather(None)
        begun = program.begin()
    begun[0].check()


@pytest.mark.parametrize(("kind", "name"), [(Alone, "alone"), (Few, "few 0")])
def test_it_is_free_once_all_ranks_have_started(kind: type[Alone], name: str) -> None:
    """Though nobody has polled, or waited for it, yet."""
    program = kind()
    until_started(program)
    for _ in range(TURNS):
        begun = program.begin()
        are_started = all(WORLD.allgather(all(one.is_started for one in begun)))
        if are_started:
            grouped = hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3)], op=hvd.Sum, name=name)
            assert hvd.synchronize(grouped)[1][2].item() == hvd.size()
        for one in begun:
            one.check()
        if are_started:
            return
    raise AssertionError("it was never started")


def test_it_is_taken_while_another_thread_is_at_work() -> None:
    """Which has yet to look at what was started."""
    program = Alone()
    until_started(program)
    at_work = hvdlite.runtime().group.world.coordinator._worker.at_work
    is_at_it, may_end = threading.Event(), threading.Event()

    def be_at_work() -> None:
        with at_work:
            is_at_it.set()
            assert may_end.wait(10)

    if hvd.rank() == 0:
        begun = program.begin()
        other = threading.Thread(target=be_at_work)
        other.start()
        assert is_at_it.wait(10)
        with pytest.raises(DuplicateNameError):
            hvd.allreduce(torch.ones(3), op=hvd.Sum, name="alone")
        may_end.set()
        WORLD.allgather(None)
        other.join()
    else:
        WORLD.allgather(None)
        begun = program.begin()
    begun[0].check()


def test_it_is_taken_while_the_thread_takes_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Alone()
    until_started(program)
    proceed, is_at_it = AtOnce._proceed, threading.Event()

    def proceed_slowly(at_once: AtOnce, *left: Any) -> Submission | None:
        is_at_it.set()
        time.sleep(0.01)
        return proceed(at_once, *left)

    def is_taken() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(AtOnce, "_proceed", proceed_slowly)
            hvdlite.runtime().group.world.coordinator._worker.wake()
            assert is_at_it.wait(10)
            with pytest.raises(DuplicateNameError):
                hvd.allreduce(torch.ones(3), op=hvd.Sum, name="alone")
        return True

    for _ in range(10):
        if hvd.rank() == 0:
            begun = program.begin()
            WORLD.allgather(is_done := begun[0].is_started and is_taken())
        else:
            is_done = WORLD.allgather(None)[0]
            begun = program.begin()
        begun[0].check()
        if is_done:
            return
    raise AssertionError("it was never started")
