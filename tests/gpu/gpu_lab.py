"""The GPU of the tests here: this machine's, or the simulated driver's where HVDLITE_TEST_SIMULATED_GPU=1 says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import hvdlite.torch as hvd
from hvdlite.torch import device

IS_SIMULATED = os.environ.get("HVDLITE_TEST_SIMULATED_GPU") == "1"
IS_HERE = IS_SIMULATED or torch.cuda.is_available()
_LATE_CYCLES = 20_000_000  # some 10 ms


class Gpu:
    """torch's, by local rank modulo how many there are."""

    def __init__(self) -> None:
        self.where = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(self.where)

    def late(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on the GPU, which has ``values`` once the current stream has come so far, and others until then."""
        source = values.to(self.where)
        tensor = source.new_full(source.shape, True if source.dtype is torch.bool else 99)
        torch.cuda._sleep(_LATE_CYCLES)
        return tensor.copy_(source)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.where

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the current stream makes of it."""
        return tensor.cpu()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream(self.where)):
            yield


class SimulatedGpu(Gpu):
    def __init__(self) -> None:
        from cuda_lab import SimulatedGpus, simulated

        self._gpus = device.gpus = SimulatedGpus(simulated())

    def late(self, values: torch.Tensor) -> torch.Tensor:
        tensor = self._gpus.cuda.tensor(tuple(values.shape), values.dtype)
        self._gpus.later(lambda: tensor.copy_(values), 0.005)
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or self._gpus.ordinal_of(tensor) == 0

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self._gpus.cuda.synchronize(self._gpus.stream)
        return tensor.clone()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        before, self._gpus.stream = self._gpus.stream, self._gpus.cuda.stream()
        yield
        self._gpus.stream = before


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, whose sums and products over eight ranks are exact in every type."""
    numel = int(torch.Size(shape).numel())
    return (torch.arange(numel).reshape(shape) % 3 + rank % 2 + 1).to(dtype)


def of_all(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(ranks, ...)"""
    return torch.stack([of_rank(rank, shape, dtype) for rank in range(hvd.size())])


def oracle(op: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``op`` makes of `of_rank` of all ranks, by torch on the host."""
    wide = of_all(shape, torch.float64)
    reduce: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
        hvd.Sum: lambda all_: all_.sum(0),
        hvd.Average: lambda all_: all_.mean(0),
        hvd.Min: lambda all_: all_.amin(0),
        hvd.Max: lambda all_: all_.amax(0),
        hvd.Product: lambda all_: all_.prod(0),
    }
    return reduce[op](wide).to(dtype)
