"""The CUDA driver in tests: a simulated one, and tensors in its memory that torch takes for its own.

torch's CPU build knows no GPU. A tensor of the host whose memory the simulated driver has given out counts as one on a
GPU (`SimulatedGpus`), and a kernel is a function that a stream calls, later.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import torch

from hvdlite import _native
from hvdlite.torch.device import Gpus

SOURCE = Path(__file__).parent / "gpusim" / "cuda_sim.cpp"
NOT_READY, NOT_PERMITTED, INVALID_CONTEXT = 600, 800, 201
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Kernel = Callable[[], object]


def built() -> Path:
    """The simulated driver, compiled once per version of its source and user."""
    name = f"hvdlite-cuda-sim-{os.getuid()}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir(), name)
    if not library.exists():
        own = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", SOURCE, "-o", own], check=True)
        own.replace(library)  # of several ranks, whoever is last
    return library


class Cuda:
    """The driver's functions, of the first device, each of which must succeed; streams and events are its handles."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self._kept: list[object] = []  # callbacks, which the driver calls later
        self._call("cuInit", 0)
        self.context = self._handle("cuDevicePrimaryCtxRetain", 0)
        self._call("cuCtxPushCurrent_v2", self.context)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self.library, function)(*arguments)
        assert status == 0, (function, status)

    def _handle(self, function: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(function, ctypes.byref(handle), *arguments)
        return handle

    @contextmanager
    def current(self) -> Iterator[None]:
        """On any thread."""
        self._call("cuCtxPushCurrent_v2", self.context)
        yield
        self._handle("cuCtxPopCurrent_v2")

    def stream(self) -> ctypes.c_void_p:
        return self._handle("cuStreamCreate", 1)

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

    def launch(self, stream: ctypes.c_void_p, kernel: Kernel, *, delay_s: float = 0.0) -> None:
        """Have ``stream`` call ``kernel()``; ``delay_s`` after it has come there."""
        callback = Callback(lambda _: (time.sleep(delay_s), kernel()))
        self._kept.append(callback)
        self._call("cuLaunchHostFunc", stream, callback, None)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_ulonglong()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def copy(self, to: int, source: int, nbytes: int, stream: ctypes.c_void_p) -> int:
        """The driver's answer."""
        arguments = ctypes.c_ulonglong(to), ctypes.c_ulonglong(source), ctypes.c_size_t(nbytes), stream
        return int(self.library.cuMemcpyAsync(*arguments))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """In the memory of the device, which is never given back."""
        nbytes = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
        memory = (ctypes.c_char * max(nbytes, 1)).from_address(self.allocate(nbytes))
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(dtype).reshape(shape)

    def has(self, address: int) -> bool:
        ordinal = ctypes.c_int()
        return bool(self.library.cuPointerGetAttribute(ctypes.byref(ordinal), 9, ctypes.c_ulonglong(address)) == 0)


class SimulatedGpus(Gpus):
    """Answers for tensors in the memory of ``cuda``; ``stream`` is the one on which they are made."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream = cuda.stream()

    def ordinal_of(self, tensor: torch.Tensor) -> int | None:
        return 0 if self.cuda.has(tensor.data_ptr()) else None

    def current_stream(self, ordinal: int) -> int:
        assert self.stream.value is not None
        return self.stream.value

    def streaming(self, ordinal: int) -> Callable[[], AbstractContextManager[object]]:
        return self.cuda.current

    def new_empty(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        on_host = self.ordinal_of(tensor) is None
        return tensor.new_empty(shape) if on_host else self.cuda.tensor(tuple(shape), tensor.dtype)

    def later(self, kernel: Kernel, delay_s: float) -> None:
        self.cuda.launch(self.stream, kernel, delay_s=delay_s)


@cache
def simulated() -> Cuda:
    """The simulated driver, from now on that of hvdlite as well."""
    _native.use_cuda_library(str(built()))
    return Cuda(str(built()))
