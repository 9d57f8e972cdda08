"""What this hvdlite is made of and runs on, under the names by which Horovod's users ask."""

from __future__ import annotations

from hvdlite import mpi, nccl_library
from hvdlite.default_runtime import is_initialized, not_running


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI at once, so that a program may use mpi4py beside hvdlite.

    Raises:
        NotInitializedError: before init().
    """
    if not is_initialized():
        raise not_running()
    return not mpi.is_running() or mpi.allows_threads()


def mpi_enabled() -> bool:
    """Whether MPI runs in this process; not where ranks have met without it, and not in one that was started alone."""
    return mpi.is_running()


def mpi_built() -> bool:
    """Always: between nodes hvdlite communicates by MPI, though one node needs none."""
    return True


def gloo_enabled() -> bool:
    """Never."""
    return False


def gloo_built() -> bool:
    """Never."""
    return False


def nccl_built() -> int:
    """The version of the NCCL that hvdlite uses here, as 22809 for 2.28.9; 0 where there is none. Starts no CUDA."""
    try:
        return nccl_library.load().version
    except RuntimeError:
        return 0


def ddl_built() -> bool:
    """Never."""
    return False


def ccl_built() -> bool:
    """Never."""
    return False


def cuda_built() -> bool:
    """Always: the CUDA driver is loaded when a tensor on a GPU comes."""
    return True


def rocm_built() -> bool:
    """Never."""
    return False
