"""What native code calls of MPI is what mpi4py has loaded: a message to oneself, started and tested by address."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from hvdlite import _native
from hvdlite.collectives import mpi_functions

pytestmark = pytest.mark.any_mpi


def test_a_message_by_address() -> None:
    functions = mpi_functions.loaded()
    assert functions is not None
    comm = MPI.COMM_SELF
    sent, received = np.zeros(3, np.float32), np.zeros(3, np.float32)
    requests = [comm.Recv_init([received, MPI.FLOAT], 0), comm.Send_init([sent, MPI.FLOAT], 0)]
    addresses = [mpi_functions.address_of(request) for request in requests]
    messages = _native.BoundMessages(*functions, [(addresses, [(address, 0) for address in addresses], [])])
    try:
        for number in range(3):
            sent[:] = number + 1
            progress = messages.start()
            while progress == messages.WAITING:
                progress = messages.advance()
            assert progress == messages.DONE
            assert list(received) == [number + 1] * 3
            assert all(request.Test() for request in requests)  # for mpi4py too they are at rest
    finally:
        for request in requests:
            request.Free()


def test_an_error_is_that_of_mpi() -> None:
    functions = mpi_functions.loaded()
    assert functions is not None
    none = MPI.Request()  # MPI's null request, which cannot be started
    messages = _native.BoundMessages(*functions, [([mpi_functions.address_of(none)], [], [])])
    worlds = [MPI.COMM_WORLD, MPI.COMM_SELF]  # of the one or the other, by the version of MPI
    before = [world.Get_errhandler() for world in worlds]
    for world in worlds:
        world.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        assert messages.start() == messages.FAILED
        assert MPI.Exception(messages.error).Get_error_class() == MPI.ERR_REQUEST
    finally:
        for world, handler in zip(worlds, before, strict=True):
            world.Set_errhandler(handler)


def test_a_library_without_them(tmp_path: Path) -> None:
    """Python itself calls no MPI, and is linked to none."""
    extension = sys.modules["_ctypes"].__file__
    if extension is None:
        pytest.skip("this Python has its extensions inside")
    assert mpi_functions.found_in(ctypes.CDLL(extension)) is None
