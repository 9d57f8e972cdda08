"""Who asks again and again whether something is done lets the thread work that does it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from coordinator_lab import submission
from hvdlite import naps
from hvdlite.coordinator.burst import Burst
from hvdlite.distributed.work import GroupWork


@pytest.fixture
def unwilling() -> Iterator[None]:
    """A thread keeps the interpreter until it waits for something."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(usual_s)


Polled = tuple[Callable[[], bool], Callable[[], object]]
"""(what asks, what completes)."""


def operation() -> Polled:
    polled = submission("a")
    return polled.poll, polled.succeed


def in_burst() -> Polled:
    burst = Burst(cast(Any, None), 0, 0.0, lambda: None)
    burst.is_open = False
    return lambda: burst.poll(0), burst.succeed


def call_of_torch() -> Polled:
    work = GroupWork(None, [], "a call")
    return work.is_completed, work.finish


KINDS = [operation, in_burst, call_of_torch]


@pytest.mark.usefixtures("unwilling")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_polls_ends(kind: Callable[[], Polled]) -> None:
    poll, complete = kind()
    begins = threading.Lock()
    begins.acquire()

    def work() -> None:
        with begins:
            complete()

    thread = threading.Thread(target=work)
    thread.start()
    begins.release()
    assert any(poll() for _ in range(10_000))
    thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_who_polls_once_waits_for_nobody(kind: Callable[[], Polled], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a program may look at many in turn."""
    monkeypatch.setattr(naps, "WAY_S", -1.0)  # which time.sleep refuses
    assert not any(poll() for poll, _ in (kind() for _ in range(3)))
