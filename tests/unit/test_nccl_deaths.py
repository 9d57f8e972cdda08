"""A rank that is killed: the others' streams and waits end, they say who it was, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hvdlite.dtypes import DType
from hvdlite.errors import RankFailedError
from nccl_lab import OwnMemory, build

SIZE = 3
VICTIM = 0  # which has made the unique id
PATIENCE_S = 60.0


class PipedRanks:
    """The ranks, by way of the test's process."""

    size = SIZE

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank = rank
        self._pipe = pipe

    def allgather(self, data: Any) -> list[Any]:
        self._pipe.send(data)
        everybody: list[Any] = self._pipe.recv()
        return everybody


def rank_program(rank: int, pipe: Connection) -> None:
    """An allreduce to which the victim comes, and a barrier to which it does not."""
    died = threading.Event()

    def check() -> None:
        if died.is_set():
            raise RankFailedError(VICTIM, f"rank {VICTIM} was killed")

    ranks, memory = PipedRanks(rank, pipe), OwnMemory()
    backend = build(ranks, memory=memory, check=check)
    buf = memory.allocate(4000).buffer(0, 1000, DType.FLOAT32)
    backend.allreduce(buf).wait()
    memory.synchronize()
    ranks.allgather(b"once")
    if rank == VICTIM:
        signal.pause()

    def listen() -> None:
        pipe.recv()
        died.set()
        backend.wake()

    threading.Thread(target=listen, daemon=True).start()
    text = "the barrier did not wait"
    try:
        backend.barrier()
    except RankFailedError as error:
        text = str(error)
    memory.synchronize()
    backend.close()
    pipe.send(text if not is_left() else "the communicator is left behind")


def is_left() -> bool:
    """Whether this process still has the memory by which the simulated NCCL meets others, after a while."""
    deadline = time.monotonic() + 5
    while "memfd:nccl" in Path("/proc/self/maps").read_text():
        if time.monotonic() > deadline:
            return True
        time.sleep(1e-3)
    return False


def relay(pipes: list[Connection]) -> None:
    """One exchange of all ranks."""
    everybody = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(everybody)


def test_a_killed_rank() -> None:
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(SIZE)]
    pipes = [ours for ours, _ in pairs]
    children = [context.Process(target=rank_program, args=(rank, pairs[rank][1])) for rank in range(SIZE)]
    for child, (_, theirs) in zip(children, pairs, strict=True):
        child.start()
        theirs.close()  # so that the end of a child shows
    for _ in range(2):  # the cards, the outcomes
        relay(pipes)
    arrived = [pipe.recv() for pipe in pipes]
    assert arrived == [b"once"] * SIZE
    for rank, pipe in enumerate(pipes):
        if rank != VICTIM:
            pipe.send(arrived)
    assert not wait(pipes[VICTIM + 1 :], 0.3)  # the others wait for it
    children[VICTIM].kill()
    children[VICTIM].join()
    for rank, (pipe, child) in enumerate(zip(pipes, children, strict=True)):
        if rank != VICTIM:
            pipe.send(b"")
            assert pipe.poll(PATIENCE_S), f"rank {rank} hangs"
            assert pipe.recv() == f"rank {VICTIM} was killed"
            child.join(PATIENCE_S)
            assert child.exitcode == 0
