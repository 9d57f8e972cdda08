"""Process groups on a simulated GPU: torch's work on the streams of a group, as `cuda_torch.TorchOnGpu` does it.

torch's futures know no simulated streams. On a GPU whoever waits for one has the current stream wait; here that is the
stream which was current where the future was completed, and all threads begin on one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

import hvdlite.torch.device
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


class BucketsOnGpu(TorchDispatchMode):
    """In a ``with`` block floats that C++ makes room for are on the GPU, as the buckets of DistributedDataParallel."""

    def __init__(self, gpu: TorchOnGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_bucket = func is torch.ops.aten.empty.memory_format and made.is_floating_point() and not self._gpu.is_plain
        return self._gpu.empty(tuple(made.shape), made.dtype) if is_bucket and made.device.type == "cpu" else made


class FloatsOnGpu(TorchDispatchMode):
    """In a ``with`` block all floats that are made are on the GPU, and torch takes it for the CPU, also in Python.

    So runs what asks torch.cuda for streams and does without on the CPU, as FSDP2.
    """

    def __init__(self, gpu: TorchOnGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):  # a DTensor, which comes to its parts
            return NotImplemented
        gpu, made = self._gpu, func(*args, **(kwargs or {}))
        is_new = isinstance(made, torch.Tensor) and not any(isinstance(value, torch.Tensor) for value in args)
        if gpu.is_plain or not is_new or not made.is_floating_point() or made.device.type != "cpu":
            return made
        is_empty = func.__name__.startswith("empty")
        return gpu.empty(tuple(made.shape), made.dtype) if is_empty else gpu.to_device(made)


@contextmanager
def taken_for_the_cpu(gpu: TorchOnGpu, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, `FloatsOnGpu`; FSDP2 fills what it frees by NaN, in order, as simulated memory has one size."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def free(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        gpu.cuda.fill(storage.data_ptr(), 0xFF, storage.nbytes(), gpu.stream)

    patch.setattr(_fsdp_param, "alloc_storage", lambda tensor: None)
    patch.setattr(_fsdp_param, "free_storage", free)
    with gpu.cuda.current(), _Operations(gpu), FloatsOnGpu(gpu), in_groups(gpu):
        yield
    gpu.synchronize()


@contextmanager
def in_groups(gpu: TorchOnGpu) -> Iterator[None]:
    """Process groups take ``gpu`` for theirs."""
    before = hvdlite.torch.device.gpus, streams.streams
    hvdlite.torch.device.gpus, streams.streams = gpu, SimulatedStreams(gpu)
    try:
        yield
    finally:
        hvdlite.torch.device.gpus, streams.streams = before


@contextmanager
def on_gpu(device: int = 0, **options: Any) -> Iterator[TorchOnGpu]:
    """torch on a simulated GPU, whose tensors process groups take."""
    gpu = TorchOnGpu(simulated(device), **options)
    with in_groups(gpu), gpu.active():
        yield gpu
