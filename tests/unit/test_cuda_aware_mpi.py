"""What counts as the word of an MPI that it takes memory of GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlite.cuda_aware_mpi import says_so

SILENT: dict[str, str] = {}


def gpu_query(status: int, answer: int) -> Callable[[int, Any], int]:
    def query(kind: int, found: Any) -> int:
        found._obj.value = answer if kind == 0 else 1 - answer
        return status

    return query


@pytest.mark.parametrize("answer", [0, 1])
def test_open_mpi_answers(answer: int) -> None:
    assert says_so(SimpleNamespace(MPIX_Query_cuda_support=lambda: answer), SILENT) is bool(answer)


@pytest.mark.parametrize(("status", "answer", "says"), [(0, 1, True), (0, 0, False), (13, 1, False)])
def test_mpich_answers(status: int, answer: int, says: bool) -> None:
    library = SimpleNamespace(MPIX_Query_cuda_support=lambda: 0, MPIX_GPU_query_support=gpu_query(status, answer))
    assert says_so(library, SILENT) is says


@pytest.mark.parametrize(
    ("kinds", "says"), [("mpi,system", False), ("system, cuda:device", True), ("cuda", True), ("cuda:host", False)]
)
def test_mpi_4_1_answers(kinds: str, says: bool) -> None:
    assert says_so(SimpleNamespace(), {"mpi_memory_alloc_kinds": kinds}) is says


def test_a_library_that_knows_no_such_question() -> None:
    assert says_so(ctypes.CDLL(None), SILENT) is False
