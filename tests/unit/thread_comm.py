"""Ranks played by threads of one process, for what needs no more of MPI than an allgather."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadComm:
    """The part of an mpi4py communicator that finding nodes needs."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self._board = board
        self._barrier = barrier

    def allgather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values


def on_ranks(size: int, work: Callable[[Any], T], timeout_s: float = 20.0) -> list[T]:
    """``work(comm)`` on every rank at once; the results by rank. Raises what a rank raised."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=timeout_s)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(rank, size, board, barrier))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
