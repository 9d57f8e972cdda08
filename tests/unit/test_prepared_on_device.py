"""A prepared allreduce on a GPU that ends otherwise: who hears of it, and whether somebody looks after the GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdlite._native import DirectCall
from hvdlite.coordinator.prepared import Outcome
from hvdlite.errors import CollectiveError
from hvdlite.operations.prepared import Tensors
from hvdlite.operations.prepared_on_device import PreparedOnDevice
from hvdlite.recorder import Recorder

PLAN, COUNT = 3, 17
TENSORS = Tensors([0], [0], None, None)


class Call:
    """Of the backend: its GPU has something to do, what it was asked for ends as ``result``, and ``problem`` comes."""

    direct = None

    def __init__(self, result: int | None, problem: BaseException | None = None) -> None:
        self._last = (0, 0, 0) if result is None else (PLAN, COUNT, result)
        self._problem = problem
        self._done: str | None = None if result in (None, DirectCall.NOT_YET) else "the moment"

    def use_stream(self, stream: int) -> None:
        assert stream == 5

    def run(self, *_: object) -> int:
        if self._problem is not None:
            raise self._problem
        return self._last[-1]

    def last(self) -> tuple[int, int, int]:
        return self._last

    def take_done(self) -> str | None:
        done, self._done = self._done, None
        return done

    def count_done(self, times: int) -> None:
        pass


def prepared(call: Call, watched: list[object], *, is_first: bool) -> PreparedOnDevice:
    """On rank 5."""

    def enqueued(moment: object, *what: object) -> bool:
        watched.append(moment)
        return is_first

    executor = SimpleNamespace(enqueued=enqueued)
    engine = SimpleNamespace(executed=SimpleNamespace(buckets=0, reduced_bytes=0))
    world = SimpleNamespace(executor=executor, engine=engine, topology=SimpleNamespace(rank=5))
    request = SimpleNamespace(name="w", reduced_types=())
    layout = SimpleNamespace(nbytes=4, wire_dtype=SimpleNamespace(label="float32"))
    where = SimpleNamespace(ordinal=0, current_stream=lambda: 5)
    return PreparedOnDevice(SimpleNamespace(world=world, recorder=Recorder()), request, layout, call, where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "is_first", "outcome"),
    [
        (DirectCall.DONE, True, Outcome.DONE_AND_RUNG),
        (DirectCall.DONE, False, Outcome.DONE),
        (DirectCall.NOT_YET, True, Outcome.NOT_YET),
    ],
)
def test_somebody_is_told_of_the_first_that_a_gpu_has_to_do(result: int, is_first: bool, outcome: Outcome) -> None:
    watched: list[object] = []
    assert prepared(Call(result), watched, is_first=is_first).run(TENSORS, PLAN, COUNT, 0) is outcome
    assert len(watched) == (result == DirectCall.DONE)


def test_what_a_gpu_has_to_do_is_watched_though_an_interrupt_comes_as_the_call_returns() -> None:
    """Where it comes as a rule, as the call waits for the other ranks."""
    watched: list[object] = []
    with pytest.raises(KeyboardInterrupt):
        prepared(Call(DirectCall.DONE, KeyboardInterrupt()), watched, is_first=True).run(TENSORS, PLAN, COUNT, 0)
    assert watched == ["the moment"]


PROBLEM = "cuStreamWaitEvent: CUDA_ERROR_OUT_OF_MEMORY"


def test_a_gpu_that_refuses_what_others_count_on_is_named() -> None:
    said = f"rank 5: 'w': its GPU has failed: {PROBLEM}.*CUDA_LAUNCH_BLOCKING=1"
    with pytest.raises(CollectiveError, match=said):
        prepared(Call(DirectCall.ABORTED, RuntimeError(PROBLEM)), [], is_first=True).run(TENSORS, PLAN, COUNT, 0)


def test_what_is_refused_before_others_were_told_concerns_this_rank_alone() -> None:
    with pytest.raises(RuntimeError, match=f"^{PROBLEM}$"):
        prepared(Call(None, RuntimeError(PROBLEM)), [], is_first=True).run(TENSORS, PLAN, COUNT, 0)
