"""Tensors on GPUs, as far as torch is asked: where they are, and the stream that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from hvdlite import default_runtime
from hvdlite._native import Moment
from hvdlite.memory.base import Region
from hvdlite.memory.views import OnDevice


class Gpus:
    """What is asked of torch; tests on machines without a GPU ask somebody else."""

    _chosen: tuple[int, int] | None = None  # in which life of this process's worlds, and the GPU of this rank there

    def choose(self, ordinal: int) -> None:
        """Raises:
        ValueError: ``ordinal`` is another GPU than that of this rank's first tensor, or on which it has joined.
        """
        chosen = self.chosen
        if chosen is None:
            self._chosen = default_runtime.worlds().pauses, ordinal
        elif ordinal != chosen:
            raise ValueError(
                f"a tensor is on cuda:{ordinal}, but this rank has begun on cuda:{chosen}, and a rank works with one "
                "GPU; call torch.cuda.set_device(hvd.local_rank()) before the first tensor is made, and before "
                "hvd.join(), and start a rank for every GPU"
            )

    @property
    def chosen(self) -> int | None:
        """The GPU of this rank; None while it has none, and again where every world of the process has ended."""
        if self._chosen is None or self._chosen[0] != default_runtime.worlds().pauses:
            return None
        return self._chosen[1]

    def current(self) -> int | None:
        """The GPU on which torch makes tensors on this thread, if it has begun to work with GPUs."""
        has_begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.cuda.current_device() if has_begun else None

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

    def bytes_of(self, region: Region) -> torch.Tensor:
        """The bytes of ``region``, on a GPU, as a tensor of uint8 that keeps them alive."""
        return torch.as_tensor(_CudaArray(region), device=f"cuda:{region.ordinal}")

    def tensor_of(self, array: Any, stream: int | None) -> torch.Tensor:
        """An array with ``__cuda_array_interface__`` as a tensor on the current GPU, which ``stream`` has made.

        Raises:
            ValueError: it is in the memory of another GPU.
        """
        tensor = torch.as_tensor(array, device="cuda")
        if tensor.numel() and tensor.data_ptr() != array.__cuda_array_interface__["data"][0]:
            raise ValueError("it is not in the memory of torch's current GPU; call torch.cuda.set_device")
        if stream is not None:
            torch.cuda.current_stream(tensor.device).wait_stream(_external(stream, tensor))
        return tensor

    def let_follow(self, stream: int | None, tensor: torch.Tensor) -> None:
        """Have ``stream`` wait for what the current stream makes of ``tensor`` until now."""
        if stream is not None:
            _external(stream, tensor).wait_stream(torch.cuda.current_stream(tensor.device))


def _external(stream: int, tensor: torch.Tensor) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.ExternalStream(stream, device=tensor.device)  # type: ignore[no-untyped-call]
    return made


class _CudaArray:
    """Memory of a GPU, by the CUDA array interface (numba.readthedocs.io, version 3)."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
        }


gpus = Gpus()


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in the memory of a GPU."""
    return gpus.ordinal_of(tensor) is not None


def current_stream(tensor: torch.Tensor) -> int:
    """The driver's handle of the stream on which torch works now, on this thread, on the GPU of ``tensor``."""
    ordinal = gpus.ordinal_of(tensor)
    assert ordinal is not None
    return gpus.current_stream(ordinal)


def follow(streams: Iterable[int], tensor: torch.Tensor) -> None:
    """Have the current stream on the GPU of ``tensor`` wait for what ``streams`` of it were given until now."""
    ordinal, current = gpus.ordinal_of(tensor), current_stream(tensor)
    assert ordinal is not None
    for stream in streams:
        if stream != current:
            Moment(ordinal, stream).precede(current)


class Now:
    """The moment in the current stream at which `on_device` is asked first: one event for all of an operation."""

    __slots__ = ("_here",)

    def __init__(self) -> None:
        self._here: OnDevice | None = None

    def on_device(self, tensor: torch.Tensor) -> OnDevice | None:
        """Where ``tensor`` is, whose contents are what the current stream makes of them until now.

        Raises:
            ValueError: it is not on the GPU of this rank.
            RuntimeError: there is no CUDA driver, or the stream is being captured into a CUDA graph.
        """
        ordinal = gpus.ordinal_of(tensor)
        if ordinal is None:
            return None
        gpus.choose(ordinal)
        if self._here is None:

            def stream_now() -> int:
                return gpus.current_stream(ordinal)

            self._here = OnDevice(ordinal, Moment(ordinal, stream_now()), stream_now)
        return self._here


def new_empty(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor beside ``tensor``, of its element type."""
    return gpus.new_empty(tensor, shape)


def wait_for(device: torch.device) -> None:
    """Sleep until the current stream of a GPU has done all that it was given; return at once on the host."""
    if device.type != "cpu":
        ordinal = device.index
        Moment(ordinal, gpus.current_stream(ordinal)).wait()


def bytes_of(region: Region) -> torch.Tensor:
    """``region``, on a GPU, as (nbytes,) uint8, which keeps it alive."""
    return gpus.bytes_of(region)


def storage_of(region: Region) -> torch.UntypedStorage:
    """The bytes of ``region``, which the storage keeps alive."""
    if region.ordinal is not None:
        return bytes_of(region).untyped_storage()
    assert isinstance(region.owner, np.ndarray)
    start = region.address - region.owner.ctypes.data
    return torch.from_numpy(region.owner[start : start + region.nbytes]).untyped_storage()


def streaming_like(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Contexts in which any thread makes tensors beside ``tensor`` as this one would here."""
    ordinal = gpus.ordinal_of(tensor)
    return nullcontext if ordinal is None else gpus.streaming(ordinal)
