"""Ranks that go on in a communicator of more: what a world asks of them, while all the others stay away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

from backend_lab import RANK, SIZE
from hvdlite.dtypes import DType
from hvdlite.errors import StartupError
from hvdlite.job_runtime import Runtime
from hvdlite.naps import Patience
from hvdlite.recovery.lifeline import Lifeline
from hvdlite.recovery.surviving_ranks import Medium, SurvivingRanks
from hvdlite.start.rendezvous import MissingError, RendezvousRanks
from machines_lab import machines
from runtime_lab import TINY, Tensor, agree, allreduce

several = pytest.mark.skipif(SIZE == 1, reason="needs a rank that stays away")


class Job:
    """Made while all ranks live."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.lifeline, self.medium = Lifeline(comm), Medium(comm)

    def ranks(self, members: list[int], name: str) -> SurvivingRanks:
        meeting = RendezvousRanks(self.lifeline, name, members, RANK, 20.0)
        return SurvivingRanks(meeting, members, self.medium, 20.0)

    def free(self) -> None:
        self.lifeline._comm.Free()
        self.medium.comm.Free()


@pytest.fixture
def job(comm: MPI.Intracomm) -> Iterator[Job]:
    job = Job(comm)
    yield job
    job.free()


@several
@pytest.mark.parametrize("apart", [False, True])
def test_a_runtime_on_the_ranks_that_are_left(comm: MPI.Intracomm, job: Job, apart: bool) -> None:
    """All but rank 0, on one node and each on its own; then on all once more, as yet another generation."""
    problems = []
    for number, members in enumerate([list(range(1, SIZE)), list(range(SIZE)), list(range(1, SIZE))]):
        if RANK not in members:
            continue
        with machines(tuple(members) if apart else (0,) * len(members)):
            runtime = Runtime(job.ranks(members, f"generation {number}"), TINY)
        with runtime:
            problems.append(None if (runtime.rank, runtime.size) == (members.index(RANK), len(members)) else "ranks")
            for numel in (5, 5003):
                tensor = Tensor.of(np.full(numel, float(RANK)), DType.FLOAT32)
                allreduce(runtime, tensor, name="gradient").wait()
                problems.append(tensor.problem(np.full(numel, float(sum(members))), f"{members}"))
    agree(comm, *problems)


@several
def test_what_an_earlier_generation_has_left_meets_no_later_one(comm: MPI.Intracomm, job: Job) -> None:
    """A message under way when the first ends, of the same ranks, in the same direction, with the same tag."""
    problem = None
    if RANK in (0, 1):
        first, second = job.ranks([0, 1], "first"), job.ranks([0, 1], "second")
        if RANK == 0:
            first.Isend([b"old", MPI.BYTE], 1).Wait()
            second.Isend([b"new", MPI.BYTE], 1).Wait()
        else:
            arrived = bytearray(3)
            second.Irecv([arrived, MPI.BYTE], 0).Wait()
            problem = None if arrived == b"new" else repr(arrived)
            first.Irecv([arrived, MPI.BYTE], 0).Wait()
    agree(comm, problem)


@several
def test_the_last_tags_that_the_library_has(comm: MPI.Intracomm, job: Job) -> None:
    """And then an error on all ranks, before MPI has one."""
    problems: list[str | None] = []
    job.medium.used = job.medium.last - 1
    if RANK in (0, 1):
        last = job.ranks([0, 1], "last")
        if RANK == 0:
            last.Isend([b"end", MPI.BYTE], 1, 7).Wait()
        else:
            arrived = bytearray(3)
            last.Irecv([arrived, MPI.BYTE], 0, 7).Wait()
            problems.append(None if arrived == b"end" else repr(arrived))
        try:
            job.ranks([0, 1], "beyond")
            problems.append("no error")
        except StartupError as error:
            problems.append(None if "MPI_TAG_UB" in str(error) else str(error))
    agree(comm, *problems)


@several
def test_parts_are_in_the_order_of_their_keys(comm: MPI.Intracomm, job: Job) -> None:
    ranks = job.ranks(list(range(SIZE)), "all")
    part = ranks.Split(0 if RANK != 0 else MPI.UNDEFINED, -RANK)
    problem = None
    if part is not None:
        order = part.allgather(RANK)
        problem = None if order == list(range(SIZE - 1, 0, -1)) else str(order)
    agree(comm, problem, None if (part is None) == (RANK == 0) else "who is not included has a part")


@several
def test_who_does_not_come_is_named(comm: MPI.Intracomm, job: Job) -> None:
    """On every rank that waits, within the time limit."""
    failure = None
    if RANK != SIZE - 1:
        failure = _missing(lambda: job.lifeline.gather("key", range(SIZE), RANK, b"", Patience(0.3)))
    comm.Barrier()
    agree(comm, None if RANK == SIZE - 1 or f"rank {SIZE - 1} did not come" in str(failure) else str(failure))


def _missing(action: Callable[[], object]) -> MissingError | None:
    try:
        action()
    except MissingError as error:
        return error
    return None


@several
def test_who_comes_to_the_end_of_mpi_sends_nothing_more(comm: MPI.Intracomm, job: Job) -> None:
    """A thread that calls others would end the process with an error of MPI's there."""
    problem = None
    if RANK == 0:
        job.lifeline.send(1, "before", b"1")
        job.lifeline.end()
        job.lifeline.send(1, "after", b"2")
        job.lifeline.send(1, "after", b"3")
    comm.Barrier()
    if RANK == 1:
        found = {"before": b"", "after": b""}
        for _ in range(200):
            found = {key: job.lifeline.receive(0, key) or value for key, value in found.items()}
            time.sleep(1e-3)
        problem = None if found == {"before": b"1", "after": b""} else repr(found)
    agree(comm, problem)
