"""The GPU of this rank, as benchmarks use it; or a simulated one, which proves the program and measures nothing."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite import _native
from hvdlite.torch import device


class Gpu:
    """Chosen by local rank, modulo how many there are; from now on torch's current one.

    Attributes:
        where: what torch calls the place of models and their batches.
    """

    def __init__(self) -> None:
        self.count = torch.cuda.device_count()
        self.ordinal = hvd.local_rank() % self.count
        self.where = torch.device("cuda", self.ordinal)
        torch.cuda.set_device(self.where)

    def empty(self, numel: int) -> torch.Tensor:
        """float32."""
        return torch.empty(numel, device=self.where)

    def synchronize(self) -> None:
        """Wait for what torch has enqueued."""
        torch.cuda.synchronize(self.where)

    def facts(self) -> dict[str, Any]:
        version = _native.cuda_version()
        return {
            "gpu": _native.cuda_device_name(self.ordinal),
            "gpus": self.count,
            "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
            "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
            "torch_cuda": torch.version.cuda,
            "kernels": _native.kernel_image(),
        }


class SimulatedGpu(Gpu):
    """Of the simulated driver of tests/; torch's models are on the host."""

    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        lab = importlib.import_module("cuda_lab")
        self._gpus = device.gpus = lab.SimulatedGpus(lab.simulated())
        self.count, self.ordinal, self.where = _native.cuda_devices(), 0, torch.device("cpu")

    def empty(self, numel: int) -> torch.Tensor:
        tensor: torch.Tensor = self._gpus.cuda.tensor((numel,))
        return tensor

    def synchronize(self) -> None:
        self._gpus.cuda.synchronize(self._gpus.stream)
