"""Tensors on GPUs, as far as torch is asked: where they are, and the stream that makes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hvdlite._native import Moment
from hvdlite.memory.views import OnDevice


class Gpus:
    """What is asked of torch; tests on machines without a GPU ask somebody else."""

    def ordinal_of(self, tensor: torch.Tensor) -> int | None:
        """The GPU that has ``tensor``; None where that is in the host's memory."""
        return None if tensor.is_cpu else tensor.device.index

    def current_stream(self, ordinal: int) -> int:
        """The driver's handle of the stream on which torch works now, on this thread."""
        handle: int = torch.cuda.current_stream(ordinal).cuda_stream
        return handle

    def streaming(self, ordinal: int) -> Callable[[], AbstractContextManager[object]]:
        """Contexts in which any thread works on the stream that is current here."""
        stream = torch.cuda.current_stream(ordinal)
        return lambda: torch.cuda.stream(stream)

    def new_empty(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor beside ``tensor``, of its element type."""
        return tensor.new_empty(shape)


gpus = Gpus()


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in the memory of a GPU."""
    return gpus.ordinal_of(tensor) is not None


def on_device(tensor: torch.Tensor) -> OnDevice | None:
    """Where ``tensor`` is, whose contents are what the current stream makes of them until now.

    Raises:
        RuntimeError: there is no CUDA driver, or the stream is being captured into a CUDA graph.
    """
    ordinal = gpus.ordinal_of(tensor)
    return None if ordinal is None else OnDevice(ordinal, Moment(ordinal, gpus.current_stream(ordinal)))


def new_empty(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor beside ``tensor``, of its element type."""
    return gpus.new_empty(tensor, shape)


def streaming_like(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Contexts in which any thread makes tensors beside ``tensor`` as this one would here."""
    ordinal = gpus.ordinal_of(tensor)
    return nullcontext if ordinal is None else gpus.streaming(ordinal)
