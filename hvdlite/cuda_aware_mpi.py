"""Whether MPI takes addresses of memory of CUDA GPUs, as far as its library says."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

_KINDS = "mpi_memory_alloc_kinds"
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def is_reported() -> bool:
    """Whether the MPI that runs in this process says so."""
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    try:
        # The module is there already; by its handle one finds what it is linked to, wherever that lies.
        return says_so(ctypes.CDLL(MPI.__file__), dict(info.items()))
    finally:
        info.Free()


def says_so(library: Any, world_info: Mapping[str, str]) -> bool:
    """By the extension of Open MPI, which others have as well; by that of MPICH; or in the words of MPI 4.1.

    Args:
        library: its functions, by name, as ctypes has them.
        world_info: of COMM_WORLD.
    """
    if hasattr(library, "MPIX_Query_cuda_support") and library.MPIX_Query_cuda_support() == 1:
        return True
    if hasattr(library, "MPIX_GPU_query_support"):
        found = ctypes.c_int(0)
        if library.MPIX_GPU_query_support(_CUDA, ctypes.byref(found)) == 0 and found.value:
            return True
    kinds = world_info.get(_KINDS, "").split(",")
    return any(kind.strip() in ("cuda", "cuda:device") for kind in kinds)
