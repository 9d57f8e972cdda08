"""What native code calls of MPI, by address: of the library that mpi4py has loaded, so hvdlite itself links none."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from mpi4py import MPI


class MpiFunctions(NamedTuple):
    """Addresses of functions that are the same in every MPI, since they take requests by address."""

    start: int
    test: int


def loaded() -> MpiFunctions | None:
    """Those of this process; None where they are not found by name."""
    return found_in(ctypes.CDLL(MPI.__file__))  # by the module's handle one finds what it is linked to


def found_in(library: ctypes.CDLL) -> MpiFunctions | None:
    """Those that ``library`` has, or what it is linked to."""
    try:
        return MpiFunctions(_address(library.MPI_Start), _address(library.MPI_Test))
    except AttributeError:
        return None


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def address_of(request: MPI.Request) -> int:
    """Of MPI's own request; ``request`` has to live as long."""
    return MPI._addressof(request)
