"""The CUDA driver's functions as tests call them."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOT_READY, NOT_PERMITTED, INVALID_CONTEXT = 600, 800, 201
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Kernel = Callable[[], object]


class Calls:
    """The driver's functions, of one device, each of which must succeed; streams and events are its handles."""

    def __init__(self, library: str, device: int = 0) -> None:
        self.library = ctypes.CDLL(library)
        self.device = device
        self._kernels: dict[int, tuple[Kernel, float]] = {}  # that are enqueued, by number, with what they are late
        self._numbers = itertools.count(1)
        self._callback = Callback(self._run)
        self._call("cuInit", 0)
        self.context = self._handle("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxPushCurrent_v2", self.context)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self.library, function)(*arguments)
        assert status == 0, (function, status)

    def _handle(self, function: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(function, ctypes.byref(handle), *arguments)
        return handle

    def close(self) -> None:
        """The thread's context is again what it was before."""
        self._handle("cuCtxPopCurrent_v2")

    @contextmanager
    def current(self) -> Iterator[None]:
        """On any thread."""
        self._call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self._handle("cuCtxPopCurrent_v2")

    def has_context(self) -> bool:
        """Whether one is current on this thread."""
        return self._handle("cuCtxGetCurrent").value is not None

    def is_in_kernel(self) -> bool:
        """Whether this thread runs one, and may not call the driver."""
        return bool(self.library.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == NOT_PERMITTED)

    def stream(self) -> ctypes.c_void_p:
        return self._handle("cuStreamCreateWithPriority", 1, 0)

    def event(self) -> ctypes.c_void_p:
        return self._handle("cuEventCreate", 2)

    def record(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: ctypes.c_void_p, event: ctypes.c_void_p) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_reached(self, event: ctypes.c_void_p) -> bool:
        status = self.library.cuEventQuery(event)
        assert status in (0, NOT_READY), status
        return bool(status == 0)

    def synchronize(self, stream: ctypes.c_void_p) -> None:
        self._call("cuStreamSynchronize", stream)

    def synchronize_all(self) -> None:
        """All streams."""
        with self.current():
            self._call("cuCtxSynchronize")

    def launch(self, stream: ctypes.c_void_p, kernel: Kernel, *, delay_s: float = 0.0) -> None:
        """Have ``stream`` call ``kernel()``; ``delay_s`` after it has come there."""
        number = next(self._numbers)
        self._kernels[number] = kernel, delay_s
        self._call("cuLaunchHostFunc", stream, self._callback, ctypes.c_void_p(number))

    def _run(self, number: int) -> None:
        kernel, delay_s = self._kernels.pop(number)
        if delay_s:
            time.sleep(delay_s)
        kernel()

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_ulonglong()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def fill(self, address: int, byte: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        self._call("cuMemsetD8Async", ctypes.c_ulonglong(address), byte, ctypes.c_size_t(nbytes), stream)

    def copy(self, to: int, source: int, nbytes: int, stream: ctypes.c_void_p) -> int:
        """The driver's answer."""
        arguments = ctypes.c_ulonglong(to), ctypes.c_ulonglong(source), ctypes.c_size_t(nbytes), stream
        return int(self.library.cuMemcpyAsync(*arguments))

    def has(self, address: int) -> bool:
        """Whether it is of memory of a device."""
        return self._kind(address) == 2

    def is_pinned(self, address: int) -> bool:
        """Whether it is of memory of the host that the driver has made, or knows."""
        return self._kind(address) == 1

    def _kind(self, address: int) -> int:
        kind = ctypes.c_uint()
        status = self.library.cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_ulonglong(address))
        return kind.value if status == 0 else 0
