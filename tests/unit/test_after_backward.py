"""Calls that begin in a backward which has all cores: done at its end, and earlier for who waits for them earlier."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from hvdlite.distributed import after_backward
from hvdlite.distributed.after_backward import LaneAfterBackward
from hvdlite.distributed.steps import BackwardWaits
from hvdlite.distributed.work import GroupWork
from hvdlite.recorder import Lane, Recorder

Hook = Callable[[torch.Tensor], object]


def lane_of(*, cores: int = 1, recorder: Recorder | None = None) -> LaneAfterBackward:
    return LaneAfterBackward("test", 1, cores, BackwardWaits(recorder or Recorder(0)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def lane() -> Iterator[LaneAfterBackward]:
    made = lane_of()
    yield made
    assert made.close(10)


class Calls:
    """Calls of ``lane``; which thread has done each, by number, and when."""

    def __init__(self, lane: LaneAfterBackward) -> None:
        self._lane = lane
        self.doers: dict[int, int] = {}
        self.ended_ns: list[int] = []

    def begin(self, number: int) -> GroupWork:
        def run() -> None:
            self.doers[number] = threading.get_ident()
            self.ended_ns.append(time.monotonic_ns())

        work = GroupWork(run, [], f"call {number}")
        work.begin(self._lane, is_awaited=False)
        return work


def backward(*hooks: Hook) -> None:
    """Of a chain; each hook is called when the gradient has come so far."""
    value = torch.ones(4, requires_grad=True)
    for hook in reversed(hooks):
        value = value * 2
        value.register_hook(partial(_call, hook))
    value.sum().backward()


def _call(hook: Hook, gradient: torch.Tensor) -> None:
    hook(gradient)


def compute(_: torch.Tensor) -> None:
    """For some looks long."""
    start_s = time.thread_time()
    while time.thread_time() - start_s < 0.1:
        torch.ones(64, 64) @ torch.ones(64, 64)


def test_done_at_the_end_of_backward_in_order_by_its_thread(lane: LaneAfterBackward) -> None:
    calls = Calls(lane)
    seen: list[dict[int, int]] = []

    def begin(number: int) -> Hook:
        def hook(_: torch.Tensor) -> None:
            seen.append(dict(calls.doers))
            calls.begin(number)

        return hook

    backward(begin(0), compute, begin(1), lambda _: seen.append(dict(calls.doers)))
    assert seen == [{}] * 3
    assert calls.doers == {0: threading.get_ident(), 1: threading.get_ident()}
    assert list(calls.doers) == [0, 1]


def test_outside_a_backward_or_with_a_core_to_spare_its_own_thread_does_it(lane: LaneAfterBackward) -> None:
    calls = Calls(lane)
    calls.begin(0).get_future().wait()
    assert calls.doers[0] != threading.get_ident()
    spare = lane_of(cores=2)
    calls = Calls(spare)
    backward(lambda _: calls.begin(0).get_future().wait())
    assert calls.doers[0] != threading.get_ident()
    assert spare.close(10)


def test_what_does_not_take_processors_is_not_put_off(lane: LaneAfterBackward) -> None:
    class Elsewhere(GroupWork):
        takes_processors = False

    doers: list[int] = []

    def hook(_: torch.Tensor) -> None:
        work = Elsewhere(lambda: doers.append(threading.get_ident()), [], "elsewhere")
        work.begin(lane, is_awaited=False)
        work.get_future().wait()

    backward(hook)
    assert doers != [threading.get_ident()]


@pytest.mark.parametrize("way", ["wait", "future", "then", "another thread"])
def test_whoever_waits_earlier_gets_it(lane: LaneAfterBackward, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(after_backward, "_MOST_S", math.inf)
    calls = Calls(lane)
    waited: list[dict[int, int]] = []

    def wait(_: torch.Tensor) -> None:
        work = calls.begin(len(calls.doers))
        if way == "wait":
            work.wait()
        elif way == "future":
            work.get_future().wait()
        elif way == "then":
            work.get_future().then(lambda _: None).wait()
        else:
            waiter = threading.Thread(target=work.get_future().wait)
            waiter.start()
            waiter.join()
        waited.append(dict(calls.doers))

    backward(wait, wait)
    assert [list(doers) for doers in waited] == [[0], [0, 1]]
    assert (calls.doers[0] == threading.get_ident()) is (way == "wait")


def test_one_that_looks_again_and_again_gets_it(lane: LaneAfterBackward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_backward, "_MOST_S", 0.1)
    monkeypatch.setattr(after_backward, "_LEAST_SHARE", 0.0)
    calls = Calls(lane)

    def look(_: torch.Tensor) -> None:
        future = calls.begin(0).get_future()
        while not future.done():
            compute(_)

    backward(look)
    assert list(calls.doers) == [0]


def test_a_timeline_shows_a_wait_after_backward() -> None:
    recorder = Recorder()
    recorder.start()
    lane = lane_of(recorder=recorder)
    calls = Calls(lane)
    backward(lambda _: calls.begin(0), compute)
    events, _ = recorder.drain()
    shown = {lane: (name, start_ns, end_ns) for _, lane, name, start_ns, end_ns, *_ in events}
    (_, start_ns, end_ns), wait = shown[Lane.BACKWARD], shown[Lane.WAIT]
    assert end_ns - start_ns >= 0.1e9
    assert wait[:2] == ("call 0", end_ns)
    (done_ns,) = calls.ended_ns
    assert end_ns <= done_ns <= wait[2]
    assert lane.close(10)


def test_a_program_that_always_waits_earlier_is_served_at_once(lane: LaneAfterBackward) -> None:
    calls = Calls(lane)
    for number in range(4):
        backward(lambda _, number=number: calls.begin(number).get_future().wait())  # type: ignore[misc]
    asked: list[int] = []
    lane._may_wait = lambda: bool(asked.append(1))  # type: ignore[method-assign]
    backward(lambda _: calls.begin(4).get_future().wait())
    assert list(calls.doers) == [0, 1, 2, 3, 4]
    assert not asked


def test_a_backward_that_fails_leaves_it_to_the_next_call(lane: LaneAfterBackward) -> None:
    calls = Calls(lane)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        backward(lambda _: calls.begin(0), fail)
    calls.begin(1).wait()
    assert list(calls.doers) == [0, 1]


def test_the_end_does_what_was_put_off() -> None:
    lane = lane_of()
    calls = Calls(lane)

    def fail(_: torch.Tensor) -> None:
        calls.begin(0)
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        backward(fail)
    assert lane.close(10)
    assert list(calls.doers) == [0]
