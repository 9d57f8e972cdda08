"""Whether MPI really moves memory of GPUs: tried before it is used, with patterns that are compared on the host."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np

from hvdlite import _native, cuda_aware_mpi
from hvdlite.agreement import Ranks, exchange
from hvdlite.collectives.requests import Channel, Endpoint
from hvdlite.collectives.ring import RingBackend
from hvdlite.config import Config
from hvdlite.dtypes import DType
from hvdlite.errors import StartupError
from hvdlite.memory.device import DeviceMemory

_LOG = logging.getLogger("hvdlite")
_SIZES = (8, 4 << 10, 1 << 20)  # what MPI sends at once, what it may buffer, and what it asks the receiver for first


def takes_memory_of_gpus(
    everybody: Ranks,
    cross: RingBackend | None,
    memory: DeviceMemory,
    config: Config,
    check: Callable[[], None],
) -> bool:
    """Whether MPI does on all ranks, or may not be asked to; the first rank says why not. Collective.

    An MPI that does not know GPUs reads such an address as one of the host, and the process ends. So it is tried only
    where it says that it does, or the user says so.

    Args:
        cross: between this rank and those with the same local rank; None where some node has none.

    Raises:
        StartupError: ``config.gpu_mpi`` is "direct", and it does not.
    """
    if config.gpu_mpi == "pinned":
        return False
    if config.gpu_mpi == "auto" and not all(everybody.allgather(cuda_aware_mpi.is_reported())):
        if everybody.rank == 0:
            _LOG.info(
                "between nodes, tensors on GPUs pass through memory of the host: MPI does not say that it takes memory "
                "of GPUs; HVDLITE_GPU_MPI=direct if it does"
            )
        return False

    if everybody.rank == 0:
        _LOG.info("a trial of MPI with memory of GPUs begins; if it ends the process, set HVDLITE_GPU_MPI=pinned")

    def attempt() -> None:
        if cross is not None:
            try_out(cross.endpoint.beside(Channel.TRIAL, config.start_timeout_s), memory)

    try:
        exchange(everybody, attempt)
    except RuntimeError as error:
        check()  # the failure of a rank is no word on MPI
        problem = f"MPI does not move memory of GPUs: {error}"
        if config.gpu_mpi == "direct":
            raise StartupError(f"{problem}; unset HVDLITE_GPU_MPI=direct") from error
        if everybody.rank == 0:
            _LOG.warning("between nodes, tensors on GPUs pass through memory of the host: %s", problem)
        return False
    return True


def try_out(endpoint: Endpoint, memory: DeviceMemory) -> None:
    """Exchange patterns with the ranks at distances 1, 2, 4, ...; collective between the ranks of ``endpoint``.

    Raises:
        StartupError: something else came.
        CollectiveError: nothing came in time, or MPI failed.
    """
    most = max(_SIZES)
    sent, arrived = (memory.filled((most,), DType.UINT8, 0) for _ in range(2))
    pinned = _native.PinnedMemory(memory.ordinal, most)
    on_host = np.ctypeslib.as_array((ctypes.c_uint8 * most).from_address(pinned.address))
    distance = 1
    with _native.DeviceContext(memory.ordinal), endpoint.operation("a trial of MPI with GPUs", "", sent, arrived):
        while distance < endpoint.size:
            ahead, behind = (endpoint.rank + distance) % endpoint.size, (endpoint.rank - distance) % endpoint.size
            for nbytes in _SIZES:
                on_host[:nbytes] = _pattern(endpoint.rank, nbytes)
                memory.copy(sent.address, pinned.address, nbytes)
                memory.moment().wait()
                arrival = endpoint.receive(arrived.address, nbytes, behind)
                departure = endpoint.send(sent.address, nbytes, ahead)
                endpoint.wait(behind, arrival)
                endpoint.wait(ahead, departure)
                memory.copy(pinned.address, arrived.address, nbytes)
                memory.moment().wait()
                if not np.array_equal(on_host[:nbytes], _pattern(behind, nbytes)):
                    raise StartupError(f"{nbytes} bytes came as others than were sent")
            distance *= 2


def _pattern(rank: int, nbytes: int) -> np.ndarray:
    """(nbytes,) uint8, another one for every rank and size."""
    first = rank * 1_000_003 + nbytes
    return (np.arange(first, first + nbytes, dtype=np.uint64) * 2654435761 >> 16).astype(np.uint8)
