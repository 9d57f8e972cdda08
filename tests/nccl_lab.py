"""NCCL in tests: a simulated one, on the simulated driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import cuda_lab
from gpusim.build import built_nccl
from hvdlite import _native
from hvdlite.collectives.nccl import NcclBackend
from hvdlite.memory.base import FusionBuffer
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.segment import Segment
from hvdlite.node import discover
from hvdlite.recorder import Recorder


@cache
def simulated() -> ctypes.CDLL:
    """The simulated NCCL, from now on that of hvdlite as well, on the simulated driver.

    NCCL_LAB_WITHOUT names what it lacks, see `built_nccl`.
    """
    cuda_lab.simulated()
    os.environ["GPUSIM_CUDA_LIBRARY"] = str(cuda_lab.built())
    library = str(built_nccl(*os.environ.get("NCCL_LAB_WITHOUT", "").split()))
    _native.use_nccl_library(library)
    return ctypes.CDLL(library)


class OwnMemory(DeviceMemory):
    """Memory of the simulated GPU for this rank alone, which a test may write as soon as it has it."""

    def __init__(self, segments: type[_native.DeviceSegment] = _native.FileSegment) -> None:
        simulated()
        super().__init__(discover(None, 0.0)[1], 0, segments)

    def allocate(self, nbytes: int) -> FusionBuffer:
        buffer = super().allocate(nbytes)
        self.synchronize()  # after which it has been zeroed
        return buffer

    def later(self, kernel: cuda_lab.Kernel, delay_s: float = 0.0) -> None:
        """Have the stream call ``kernel()``."""
        cuda_lab.simulated().launch(ctypes.c_void_p(self.stream.handle), kernel, delay_s=delay_s)

    def synchronize(self) -> None:
        self.moment().wait()


class Ranks(Protocol):
    """As mpi4py's communicators."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, data: Any, /) -> list[Any]: ...


def build(
    comm: Ranks,
    *,
    memory: DeviceMemory | None = None,
    interfaces: str = "",
    ranks: Sequence[int] | None = None,
    progress: Segment | None = None,
    timeout_s: float = 60.0,
    check: Callable[[], None] = lambda: None,
    members: Sequence[int] | None = None,
) -> NcclBackend:
    simulated()
    return NcclBackend(
        memory or OwnMemory(),
        everybody=comm,
        members=range(comm.size) if members is None else members,
        interfaces=interfaces,
        ranks=ranks,
        progress=progress,
        timeout_s=timeout_s,
        check=check,
        recorder=Recorder(),
    )
