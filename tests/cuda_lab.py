"""The CUDA driver in tests: a simulated one, and tensors in its memory that torch takes for its own.

torch's CPU build knows no GPU. A tensor of the host whose memory the simulated driver has given out counts as one on a
GPU (`SimulatedGpus`), and a kernel is a function that a stream calls, later.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch

from cuda_calls import INVALID_CONTEXT, NOT_PERMITTED, NOT_READY, Calls, Kernel
from gpusim.build import built
from hvdlite import _native
from hvdlite.memory.base import Region
from hvdlite.torch.device import Gpus

__all__ = [
    "INVALID_CONTEXT",
    "NOT_PERMITTED",
    "NOT_READY",
    "Cuda",
    "SimulatedGpus",
    "built",
    "simulated",
    "simulated_for",
]


class Cuda(Calls):
    """With tensors in the memory of the simulated device, which the host may touch as well."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """In the memory of the device, which is never given back."""
        nbytes = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
        memory = (ctypes.c_char * max(nbytes, 1)).from_address(self.allocate(nbytes))
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(dtype).reshape(shape)


class SimulatedGpus(Gpus):
    """Answers for tensors in the memory of ``cuda``; ``stream`` is the one on which they are made."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream = cuda.stream()

    def ordinal_of(self, tensor: torch.Tensor) -> int | None:
        return self.cuda.device if self.cuda.has(tensor.data_ptr()) else None

    def current(self) -> int | None:
        return self.cuda.device

    def current_stream(self, ordinal: int) -> int:
        assert self.stream.value is not None
        return self.stream.value

    def streaming(self, ordinal: int) -> Callable[[], AbstractContextManager[object]]:
        return self.cuda.current

    def new_empty(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        on_host = self.ordinal_of(tensor) is None
        return tensor.new_empty(shape) if on_host else self.cuda.tensor(tuple(shape), tensor.dtype)

    def bytes_of(self, region: Region) -> torch.Tensor:
        memory = (ctypes.c_char * region.nbytes).from_address(region.address)
        memory.owner = region.owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def later(self, kernel: Kernel, delay_s: float) -> None:
        self.cuda.launch(self.stream, kernel, delay_s=delay_s)


@cache
def simulated(device: int = 0) -> Cuda:
    """The simulated driver, from now on that of hvdlite as well, with a GPU for each of four ranks."""
    os.environ.setdefault("GPUSIM_DEVICES", "4")
    _native.use_cuda_library(str(built()))
    return Cuda(str(built()), device)


@cache
def simulated_for(rank: int) -> Cuda:
    """Likewise, with a GPU of its own for each rank, whose context is that of no thread yet."""
    cuda = simulated(rank)
    cuda.close()
    return cuda
