"""Process groups on a simulated GPU: torch's work on the streams of a group, as `cuda_torch.TorchOnGpu` does it.

torch's futures know no simulated streams. On a GPU whoever waits for one has the current stream wait; here that is the
stream which was current where the future was completed, and all threads begin on one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.futures import Future

from cuda_lab import simulated
from cuda_torch import TorchOnGpu, _Operations
from hvdlite.distributed import streams


class SimulatedStreams(streams.Streams):
    """Of ``gpu``."""

    def __init__(self, gpu: TorchOnGpu) -> None:
        self._gpu = gpu

    def on(self, ordinal: int, stream: int) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for part in (self._gpu.cuda.current(), _Operations(self._gpu), self._gpu.on(ctypes.c_void_p(stream))):
            stack.enter_context(part)
        return stack

    def future(self, ordinal: int) -> Future[Any]:
        return Future()


@contextmanager
def on_gpu(device: int = 0, **options: Any) -> Iterator[TorchOnGpu]:
    """torch on a simulated GPU, whose tensors process groups take."""
    with TorchOnGpu(simulated(device), **options).in_hvdlite() as gpu:
        before, streams.streams = streams.streams, SimulatedStreams(gpu)
        try:
            yield gpu
        finally:
            streams.streams = before
