"""This rank's simulated GPU, as a user of the runtime has it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from backend_lab import RANK, encode
from cuda_lab import Cuda, built, simulated
from hvdlite import _native
from hvdlite.dtypes import DType
from hvdlite.memory.views import OnDevice, TensorView


class Gpu:
    """This rank's GPU, the stream of its user, and tensors there."""

    def __init__(self) -> None:
        simulated()
        self.cuda = Cuda(str(built()), RANK)
        self.stream = self.cuda.stream()

    def where(self) -> OnDevice:
        handle = self.stream.value
        assert handle is not None
        return OnDevice(RANK, _native.Moment(RANK, handle), lambda: handle)

    def tensor(self, numel: int, dtype: DType, values: np.ndarray | None = None) -> DeviceTensor:
        """With ``values``, (numel,) float64, once the user's stream has come so far; else undefined."""
        nbytes = numel * dtype.itemsize
        address = self.cuda.allocate(nbytes)
        if values is not None and numel:
            data = encode(values, dtype).tobytes()
            self.cuda.launch(self.stream, lambda: ctypes.memmove(address, data, nbytes), delay_s=1e-3)
        return DeviceTensor(self, TensorView(address, (numel,), dtype, self, self.where()))


class DeviceTensor:
    def __init__(self, gpu: Gpu, view: TensorView) -> None:
        self._gpu = gpu
        self.view = view

    def problem(self, expected: np.ndarray, what: str = "") -> str | None:
        """None if it holds ``expected``, (numel,) float64, once the user's stream has come so far."""
        self._gpu.cuda.synchronize(self._gpu.stream)
        wanted = encode(expected, self.view.dtype).tobytes()
        label = f"{what} {self.view.dtype.label}{self.view.shape}"
        return None if ctypes.string_at(self.view.address, len(wanted)) == wanted else f"{label} is wrong"


def opened() -> Iterator[Gpu]:
    """The GPU, whose context is the thread's meanwhile."""
    gpu = Gpu()
    yield gpu
    gpu.cuda.close()
