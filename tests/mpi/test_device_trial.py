"""Whether MPI is given memory of GPUs: only where it says that it takes it and a trial is right, alike on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mpi4py import MPI

from backend_lab import (
    PATIENCE_S,
    RANK,
    SIZE,
    Lab,
    allocate,
    assert_none,
    difference,
    fill,
    nothing_failed,
    reduced,
    values_of,
)
from hvdlite import cuda_aware_mpi
from hvdlite.collectives import device_trial
from hvdlite.collectives.requests import Channel, Endpoint
from hvdlite.collectives.ring import RingBackend
from hvdlite.config import Config
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import CollectiveError, RankFailedError, StartupError
from hvdlite.memory.device import DeviceMemory
from nccl_lab import OwnMemory

pytestmark = [pytest.mark.any_mpi, pytest.mark.skipif(SIZE == 1, reason="one rank sends nothing")]

LAST = SIZE - 1
IMPATIENT_S = 0.2  # where some rank does not come
Intrude = Callable[[str, Callable[..., Any]], None]


@pytest.fixture(scope="module")
def memory() -> OwnMemory:
    return OwnMemory()


@pytest.fixture
def host(comm: MPI.Intracomm) -> Iterator[RingBackend]:
    backend = Lab().ring(comm.Dup())
    yield backend
    backend.close()


@pytest.fixture
def intrude(monkeypatch: pytest.MonkeyPatch) -> Intrude:
    """Replaces a method of endpoints, of the trial and on the last rank only, by a function of it and its arguments."""

    def replace(name: str, function: Callable[..., Any]) -> None:
        method = getattr(Endpoint, name)

        def called(self: Endpoint, *arguments: Any) -> Any:
            is_meant = self._channel is Channel.TRIAL and RANK == LAST
            return function(method, self, *arguments) if is_meant else method(self, *arguments)

        monkeypatch.setattr(Endpoint, name, called)

    return replace


def asked(
    comm: MPI.Intracomm, host: RingBackend, memory: DeviceMemory, way: str, patience_s: float = IMPATIENT_S
) -> bool | str:
    """The answer, or the error; the same on all ranks."""
    answer: bool | str
    try:
        config = Config(gpu_mpi=way, start_timeout_s=patience_s)
        answer = device_trial.takes_memory_of_gpus(comm, host, memory, config, nothing_failed)
    except StartupError as error:
        answer = str(error)
    answers = set(comm.allgather(answer if isinstance(answer, bool) else "StartupError"))
    assert len(answers) == 1, answers
    return answer


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, nobody_else_says_why: None) -> None:
    monkeypatch.setattr(cuda_aware_mpi, "is_reported", lambda: True)


@pytest.mark.usefixtures("reported")
@pytest.mark.parametrize("way", ["auto", "direct", "pinned"])
def test_a_trial_that_is_right(comm: MPI.Intracomm, host: RingBackend, memory: DeviceMemory, way: str) -> None:
    assert asked(comm, host, memory, way, PATIENCE_S) is (way != "pinned")


def test_an_mpi_that_does_not_say_so_is_not_tried(
    comm: MPI.Intracomm, host: RingBackend, memory: DeviceMemory, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """That of the wheels, and one that says so everywhere but on one rank: it would read the address as its own."""
    monkeypatch.setattr(device_trial, "try_out", None)
    with caplog.at_level(logging.INFO, "hvdlite"):
        assert asked(comm, host, memory, "auto") is False
        monkeypatch.setattr(cuda_aware_mpi, "is_reported", lambda: RANK != LAST)
        assert asked(comm, host, memory, "auto") is False
    told = [record for record in caplog.records if "HVDLITE_GPU_MPI=direct" in record.getMessage()]
    assert [record.levelname for record in told] == (["INFO", "INFO"] if RANK == 0 else [])


@pytest.mark.usefixtures("reported")
@pytest.mark.parametrize("way", ["auto", "direct"])
def test_what_arrives_is_compared(
    comm: MPI.Intracomm, host: RingBackend, memory: DeviceMemory, intrude: Intrude, caplog: Any, way: str
) -> None:
    """The last rank's GPU gets nothing: what arrives is received elsewhere."""
    other_place = memory.filled((1 << 20,), DType.UINT8, 0)
    intrude("receive", lambda receive, endpoint, address, *others: receive(endpoint, other_place.address, *others))
    with caplog.at_level(logging.WARNING, "hvdlite"):
        answer = asked(comm, host, memory, way)
    told = [text for text in caplog.messages if f"rank {LAST}: 8 bytes came as others" in text]
    if way == "auto":
        assert answer is False
        assert len(told) == (RANK == 0)
    else:
        assert "8 bytes came as others" in str(answer) and "unset HVDLITE_GPU_MPI=direct" in str(answer)
        assert not told


@pytest.mark.usefixtures("reported")
def test_messages_of_a_trial_that_failed_stay_behind(
    comm: MPI.Intracomm, host: RingBackend, memory: DeviceMemory, intrude: Intrude
) -> None:
    """The last rank leaves before it has received anything: what is on its way to it meets nobody, then or later."""

    def leave(*_: object) -> None:
        raise CollectiveError("MPI does not want to")

    intrude("receive", leave)
    assert asked(comm, host, memory, "auto") is False
    buf = allocate(host, 500, DType.FLOAT32)
    fill(buf, values_of(RANK, buf.numel))
    host.allreduce(buf).wait()
    assert_none(difference(buf, reduced(ReduceOp.SUM, buf.numel, DType.FLOAT32)))


@pytest.mark.usefixtures("reported")
def test_the_failure_of_a_rank_is_no_word_on_mpi(
    comm: MPI.Intracomm, host: RingBackend, memory: DeviceMemory, intrude: Intrude
) -> None:
    def die(*_: object) -> None:
        raise CollectiveError("MPI fails")

    def check() -> None:
        raise RankFailedError(LAST, f"rank {LAST} died")

    intrude("send", die)
    with pytest.raises(RankFailedError):
        device_trial.takes_memory_of_gpus(comm, host, memory, Config(start_timeout_s=IMPATIENT_S), check)
