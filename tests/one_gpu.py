"""A GPU for tests: the simulated one, or this machine's, where HVDLITE_TEST_DRIVER names its driver."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from hvdlite.errors import StartupError

IS_SIMULATED = "HVDLITE_TEST_DRIVER" not in os.environ


class OneGpu:
    """torch's, by rank modulo how many there are; "cuda" is where it is."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(rank % torch.cuda.device_count())

    def hold(self, seconds: float) -> None:
        """What is enqueued next on the current stream comes so much later, or later still."""
        torch.cuda._sleep(int(seconds * 2e9))  # cycles

    def settle(self) -> None:
        """Wait for the current stream, whatever it has done."""
        torch.cuda.current_stream().synchronize()

    def synchronize(self) -> None:
        self.settle()


def not_at_first(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, whose first call fails on all ranks: that for memory of the node, before that for a rank's own."""
    calls = itertools.count()

    def make_later(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise StartupError("GPUs share no memory in this test")
        return make(*arguments)

    return make_later


@contextmanager
def one_gpu(rank: int, *, everywhere: bool = False) -> Iterator[OneGpu]:
    """In the ``with`` block hvdlite and torch work on it; ``everywhere``: so are new tensors and generators."""
    if not IS_SIMULATED:
        found = OneGpu(rank)
        if not everywhere:
            yield found
            return
        with torch.device("cuda"), patch.object(torch, "Generator", partial(torch.Generator, device="cuda")):
            yield found
    elif everywhere:
        from cuda_distributed import on_gpu

        with on_gpu(late=0.0, everywhere=True) as simulated_gpu:
            yield simulated_gpu
    else:
        from cuda_lab import simulated
        from cuda_torch import TorchOnGpu

        with TorchOnGpu(simulated(), late=0.0).in_hvdlite() as simulated_gpu:
            yield simulated_gpu
