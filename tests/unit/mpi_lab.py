"""An MPI whose functions are Python's, for native code."""

from __future__ import annotations

import ctypes
from collections.abc import Container
from typing import Any, NamedTuple

from hvdlite import _native


class MpiFunctions(NamedTuple):
    """As `hvdlite.collectives.mpi_functions.MpiFunctions`, to import which starts MPI."""

    start: int
    test: int


class Mpi:
    """Requests are the numbers from 1; what is called is written down.

    Attributes:
        done: requests whose messages have come.
        errors: what calls return, by the call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.done: Container[int] = ()
        self.errors: dict[tuple[str, int], int] = {}
        self._start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(self._started)
        self._test = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_char)
        )(self._tested)

    def messages(self, *phases: Any) -> _native.BoundMessages:
        return _native.BoundMessages(*self.functions, phases)

    @property
    def functions(self) -> MpiFunctions:
        start, test = (ctypes.cast(each, ctypes.c_void_p).value for each in (self._start, self._test))
        assert start is not None and test is not None
        return MpiFunctions(start, test)

    def start(self, request: int) -> None:
        """It is on its way."""

    def test(self, request: int) -> bool:
        """Whether it has come."""
        return request in self.done

    def _started(self, request: int) -> int:
        self.start(request)
        return self._called("start", request)

    def _tested(self, request: int, is_done: Any, status: Any) -> int:
        status[255] = b"x"  # as much as there is room for
        error = self._called("test", request)
        is_done[0] = self.test(request)
        return error

    def _called(self, what: str, request: int) -> int:
        self.calls.append((what, request))
        return self.errors.get((what, request), 0)
