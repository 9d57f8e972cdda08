"""What GPUs were given and have not done: no more than they take, no longer than allowed; a GPU that fails is named."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from hvdlite.device_engine import DeviceEngine
from hvdlite.distributed.device_watch import DeviceWatch, Enqueued
from hvdlite.errors import CollectiveError, RankFailedError
from hvdlite.executor import _MOST_ENQUEUED, Executor
from hvdlite.recorder import Recorder


class Moment:
    """Of a GPU that has failed, or is reached once it was looked at so often."""

    def __init__(self, looks: float, problem: str = "") -> None:
        self._looks = looks
        self._problem = problem

    @property
    def is_reached(self) -> bool:
        if self._problem:
            raise RuntimeError(self._problem)
        self._looks -= 1
        return self._looks < 0


def executor(timeout_s: float = 60.0) -> Executor:
    """Of rank 5, which works with rank 3."""
    backend = SimpleNamespace(rank=1, late=lambda: [0], check_health=lambda: None)
    engine = SimpleNamespace(ranks=(3, 5), backend=backend)
    device = DeviceEngine(engine, SimpleNamespace(ordinal=2), timeout_s)  # type: ignore[arg-type]
    made = Executor(SimpleNamespace(recorder=Recorder()), lambda ordinal: device, timeout_s, lambda: None)  # type: ignore[arg-type]
    made.device_for(2)
    return made


def enqueue(made: Executor, times: int, looks: float = float("inf"), problem: str = "") -> None:
    for i in range(times):
        made.enqueued(Moment(looks, problem), SimpleNamespace(label=f"w{i}"), SimpleNamespace(label="another"))  # type: ignore[arg-type]


def test_who_enqueues_waits_where_a_gpu_has_much_to_do() -> None:
    """Else the driver would keep him in the end."""
    made = executor()
    enqueue(made, 3 * _MOST_ENQUEUED, looks=_MOST_ENQUEUED + 10)
    assert 0 < len(made._enqueued) <= _MOST_ENQUEUED


def test_a_gpu_that_has_much_to_do_and_does_not_go_on() -> None:
    made = executor(timeout_s=0.1)
    with pytest.raises(CollectiveError, match=r"'w0': GPU 2 has not done it in 0 s, and ranks \[3\] are behind"):
        enqueue(made, _MOST_ENQUEUED + 1)


def fail() -> None:
    raise RankFailedError(3, "rank 3 is gone")


def test_a_job_that_fails_while_a_gpu_has_much_to_do() -> None:
    made = executor()
    made._check = fail
    enqueue(made, _MOST_ENQUEUED)
    with pytest.raises(RankFailedError, match="rank 3 is gone"):
        enqueue(made, 1)


def test_a_job_that_fails_while_gpus_are_joined() -> None:
    """Nothing is enqueued then: the failure has let nobody's stream go, as there was none."""
    made = Executor(SimpleNamespace(recorder=Recorder()), lambda ordinal: None, 60.0, fail)  # type: ignore[arg-type]
    with pytest.raises(RankFailedError, match="rank 3 is gone"):
        made.device_for(2)


PROBLEM = "cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)"


def test_a_gpu_that_has_failed_is_named_with_the_way_out() -> None:
    with pytest.raises(CollectiveError, match="rank 5: 'w0': its GPU has failed: cuEventQuery.*CUDA_LAUNCH_BLOCKING=1"):
        enqueue(executor(), 1, problem=PROBLEM)


def test_a_gpu_that_has_failed_is_named_to_a_process_group() -> None:
    """By the thread that looks after it, which has nobody else to tell."""
    said: SimpleQueue[CollectiveError] = SimpleQueue()
    world = SimpleNamespace(
        health=SimpleNamespace(report=said.put, failure=None), topology=SimpleNamespace(rank=1, ranks=(0, 1))
    )
    watch = DeviceWatch("tensors", [3, 5], world)  # type: ignore[arg-type]
    watch.add(Enqueued(Moment(0, PROBLEM), "all_reduce", None, 60.0))  # type: ignore[arg-type]
    assert str(said.get(timeout=20)).startswith(
        f"rank 5: all_reduce of process group tensors: its GPU has failed: {PROBLEM}"
    )
