"""Runtimes on any grouping of the ranks of one machine into nodes, tensors of every type, and what they must become."""

from __future__ import annotations

import array
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from backend_lab import RANK, SIZE, encode, values_of
from hvdlite.config import Config
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.job_runtime import Runtime
from hvdlite.memory.views import TensorView
from hvdlite.mpi import MpiRanks
from hvdlite.operations.allreduce import allreduce_async
from machines_lab import Machines, machines

REDUCING = [dtype for dtype in DType if dtype is not DType.BOOL]
CHUNK = 2048  # bytes; small, so that long paths run on little data
STAGING = 8192
TINY = Config(
    idle_s=math.inf,
    chunk_bytes=CHUNK,
    staging_bytes=STAGING,
    segment_bytes=512,
    small_bytes=768,
    cache_capacity=64,
    tree_fanout=1,  # nodes in a chain, so that leaders pass on what others say
    fusion_threshold_bytes=20_000,
    spin_us=0,
)
SIZES = [0, 1, 7, 63, 64, 65, 191, 192, 193, 255, 256, 257, 511, 512, 513, 1024, 2047, 2048, 2049, 5003]

LAYOUTS: list[Machines] = {
    1: [(0,)],
    2: [(0, 0), (0, 1)],
    3: [(0, 0, 0), (0, 1, 0), (0, 1, 2)],
    4: [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 3)],
}.get(SIZE, [(0,) * SIZE])


def agree(world: MPI.Intracomm, *problems: str | None) -> None:
    """Fail on every rank if one of them has a problem: in the middle of a test no rank may go on alone."""
    found = [problem for problem in problems if problem]
    most = array.array("i", [0])
    request = world.Iallreduce([array.array("i", [len(found)]), MPI.INT], [most, MPI.INT], MPI.MAX)
    while not request.Test():
        time.sleep(1e-4)  # a blocking call spins, on a core that a rank which is not there yet may need
    if most[0]:
        everywhere = world.allgather(found)
        assert not any(everywhere), {rank: texts for rank, texts in enumerate(everywhere) if texts}


@contextmanager
def running(comm: MPI.Intracomm, config: Config = TINY, machine_of: Machines | None = None) -> Iterator[Runtime]:
    with machines(machine_of or (0,) * comm.size):
        runtime = Runtime(MpiRanks(comm), config)
    with runtime:
        yield runtime


@dataclass
class Tensor:
    """A tensor of any element type; numpy has no bfloat16, so its memory is bytes."""

    memory: np.ndarray
    view: TensorView

    @classmethod
    def of(cls, values: np.ndarray, dtype: DType, shape: Sequence[int] | None = None) -> Tensor:
        """``values``: (numel,) float64."""
        memory = encode(values, dtype)
        return cls(memory, TensorView(memory.ctypes.data, tuple(shape or (len(values),)), dtype, memory))

    @classmethod
    def at(cls, memory: np.ndarray, values: np.ndarray, dtype: DType) -> Tensor:
        """In ``memory``, (nbytes,) uint8."""
        place = memory[: len(values) * dtype.itemsize]
        place[:] = encode(values, dtype)
        return cls(place, TensorView(place.ctypes.data, (len(values),), dtype, memory))

    @classmethod
    def input(cls, numel: int, dtype: DType, salt: int = 0) -> Tensor:
        """This rank's contribution, whose sum and product `backend_lab.reduced` knows."""
        return cls.of(values_of(RANK, numel, salt), dtype)

    @classmethod
    def empty(cls, numel: int, dtype: DType) -> Tensor:
        """Filled with what no result has."""
        memory = np.full(numel * dtype.itemsize, 0xA5, np.uint8)
        return cls(memory, TensorView(memory.ctypes.data, (numel,), dtype, memory))

    def problem(self, expected: np.ndarray, what: str = "") -> str | None:
        """None if it holds ``expected``, (numel,) float64."""
        wanted = encode(expected, self.view.dtype)
        if np.array_equal(self.memory, wanted):
            return None
        if len(self.memory) != len(wanted):
            return f"{what}: {len(self.memory)} bytes instead of {len(wanted)}"
        first = int(np.flatnonzero(self.memory != wanted)[0]) // self.view.dtype.itemsize
        tensor = f"{what} {self.view.dtype.label}{self.view.shape}"
        return f"{tensor} differs from element {first} on, expected {expected[first]}"


def allreduce(
    runtime: Runtime,
    *tensors: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
    **options: Any,
) -> Submission:
    """In place."""
    views = [tensor.view for tensor in tensors]
    return allreduce_async(runtime.group, views, views, Reduction(op, prescale, postscale), **options)


class Gathered:
    """The results of an allgather, as they are allocated."""

    def __init__(self, dtypes: Sequence[DType]) -> None:
        self.tensors: list[Tensor | None] = [None] * len(dtypes)
        self._dtypes = dtypes

    def allocate(self, index: int, shape: tuple[int, ...]) -> TensorView:
        tensor = Tensor.empty(int(np.prod(shape)), self._dtypes[index])
        tensor.view = TensorView(tensor.view.address, shape, tensor.view.dtype, tensor.memory)
        self.tensors[index] = tensor
        return tensor.view

    def problem(self, index: int, expected: np.ndarray, shape: tuple[int, ...], what: str = "") -> str | None:
        tensor = self.tensors[index]
        if tensor is None:
            return f"{what}: nothing was allocated"
        if tensor.view.shape != shape:
            return f"{what}: shape {tensor.view.shape} instead of {shape}"
        return tensor.problem(expected, what)


class Difference(Counter[str]):
    """What this rank counts in a ``with`` block, in which all ranks begin and end together."""

    def __init__(self, statistics: Callable[[], dict[str, int]], world: MPI.Intracomm) -> None:
        super().__init__()
        self._statistics, self._world = statistics, world

    def __enter__(self) -> Difference:
        self._world.Barrier()
        self.update(self._statistics())
        self._world.Barrier()
        return self

    def __exit__(self, *_: object) -> None:
        self._world.Barrier()
        after = self._statistics()
        self._world.Barrier()
        assert list(after) == list(self)
        for name, count in after.items():
            self[name] = count - self[name]
