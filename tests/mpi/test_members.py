"""Who takes part, whoever has started the ranks: all of them, lists of them, process sets, and all of them again."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import ConfigError
from hvdlite.launched import launched_rank, this_process

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("ends")]

PROCESS = this_process()
SIZE = 1 if PROCESS is None else PROCESS.size
RANK = launched_rank()


@pytest.fixture
def ends() -> Iterator[None]:
    """No test leaves a runtime behind."""
    yield
    hvd.shutdown()


def total(process_set: hvd.ProcessSet = hvd.global_process_set) -> float:
    """2 ** rank of the launcher, summed: says who has taken part."""
    return hvd.allreduce(torch.tensor([2.0**RANK]), op=hvd.Sum, process_set=process_set).item()


def of(ranks: list[int]) -> float:
    return sum(2.0**rank for rank in ranks)


def test_everybody_and_everybody_again() -> None:
    for _ in range(3):
        hvd.init()
        assert (hvd.rank(), hvd.size(), hvd.local_size()) == (RANK, SIZE, SIZE)
        assert total() == of([*range(SIZE)])
        hvd.shutdown()


def test_mpi_runs_only_where_it_was_asked_for() -> None:
    hvd.init()
    by_mpi = PROCESS is not None and PROCESS.launcher.name != "hvdliterun"
    assert hvd.mpi_enabled() is by_mpi
    assert ("mpi4py.MPI" in sys.modules) is by_mpi


def test_ranks_outside_a_list_are_not_waited_for() -> None:
    for last in range(SIZE):
        ranks = [last, *range(last)]  # the order is that of the list
        for _ in range(2):
            if RANK in ranks:
                hvd.init(ranks)
                assert hvd.rank() == ranks.index(RANK)
                assert total() == of(ranks)
                hvd.shutdown()


def test_a_list_that_makes_no_sense() -> None:
    for ranks in ([RANK, RANK], [RANK, SIZE]):
        with pytest.raises(ConfigError, match=r"hvd.init\(comm=\["):
            hvd.init(ranks)


def test_process_sets_of_any_ranks() -> None:
    hvd.init()
    lists = [ranks for count in range(1, SIZE) for ranks in itertools.combinations(range(SIZE), count)]
    for _ in range(2):
        sets = [hvd.add_process_set(ranks) for ranks in lists]
        for process_set in sets:
            if process_set.included():
                assert total(process_set) == of(process_set.ranks)
        for process_set in sets:
            assert hvd.remove_process_set(process_set)


@pytest.mark.skipif(SIZE < 3, reason="needs a job of several ranks, and one that is left out")
def test_process_sets_within_a_list() -> None:
    """Their ranks are those of the job."""
    if RANK > 0:
        hvd.init([*range(1, SIZE)])
        last = hvd.add_process_set([hvd.size() - 1])
        assert last.included() == (RANK == SIZE - 1)
        if last.included():
            assert total(last) == of([SIZE - 1])
