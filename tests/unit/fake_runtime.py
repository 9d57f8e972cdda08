"""A runtime without other processes: what other ranks would send is a multiple of what this one sends."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hvdlite
from hvdlite.autotune.settings import Settings
from hvdlite.config import Config
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.fusion.fusion_buffer import FusionBuffer, Home, slot_offsets
from hvdlite.memory import TensorView
from hvdlite.timeline.recorder import Recorder
from hvdlite.topology import Topology

_NUMPY = {DType.FLOAT32: np.float32, DType.FLOAT64: np.float64, DType.FLOAT16: np.float16, DType.INT64: np.int64}


def array_at(address: int, view: TensorView) -> np.ndarray:
    """(numel,) of the view's dtype; memory at ``address``."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    dtype = np.dtype(_NUMPY[view.dtype])
    return np.ctypeslib.as_array(pointer, (view.nbytes,)).view(dtype)


class FakeHandle:
    """Done only when waited for, so that whoever forgets to wait sees unreduced numbers."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work()
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        def raise_it() -> None:
            self._error = error

        self._work = raise_it


class FakeRuntime:
    """Rank 0 of ``size`` on ``nodes`` nodes; rank r sends r + 1 times what rank 0 sends.

    So a sum is n(n+1)/2 times the input, an average (n+1)/2 times, Min once and Max n times (of positive inputs).
    """

    def __init__(self, size: int = 2, nodes: int = 2, **config: Any) -> None:
        self.size = size
        self.rank = 0
        self.group = self
        self.ranks = range(size)
        self.topology = SimpleNamespace(nodes=[()] * nodes, rails=1)
        self.node = SimpleNamespace(cores=64, local_size=size)
        self.fastest_allreduce = 0.0
        self._numbers = itertools.count()
        self.config = Config(**config)
        self.choice: Any = None
        self.joins = 0
        self.topology = Topology(0, tuple(tuple(self.ranks[node::nodes]) for node in range(nodes)))
        self.recorder = Recorder()
        self.calls: list[dict[str, Any]] = []
        self.handles: list[FakeHandle] = []
        self.error: Exception | None = None  # what the next operation ends in
        self.allocated: list[int] = []

    def next_number(self) -> int:
        return next(self._numbers)

    def names(self) -> list[str]:
        return [call["name"] for call in self.calls]

    def factor(self, op: ReduceOp) -> float:
        total = self.size * (self.size + 1) / 2
        return {
            ReduceOp.SUM: total,
            ReduceOp.AVERAGE: total / self.size,
            ReduceOp.MIN: 1.0,
            ReduceOp.MAX: float(self.size),
        }[op]

    def allreduce_async(
        self,
        inputs: Sequence[TensorView],
        outputs: Sequence[TensorView],
        *,
        name: str | None = None,
        names: Sequence[str] | None = None,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire_dtype: DType | None = None,
        home: Home | None = None,
        needs_all: bool = False,
        background: bool = True,
    ) -> FakeHandle:
        at_place = self._check_home(outputs, home)
        self.calls.append(
            {
                "kind": "allreduce",
                "name": name,
                "names": names,
                "op": op,
                "home": home is not None,
                "background": background,
                "shapes": [view.shape for view in inputs],
                "wire_dtype": wire_dtype,
                "prescale": prescale,
                "postscale": postscale,
                "loose": sum(a.address != b.address for a, b in zip(inputs, outputs, strict=True)),
            }
        )
        assert at_place

        def work() -> None:
            for source, target in zip(inputs, outputs, strict=True):
                assert (source.shape, source.dtype) == (target.shape, target.dtype)
                if source.numel == 0:
                    continue
                values = array_at(source.address, source).copy() if source.address else 0
                array_at(target.address, target)[:] = values * (prescale * self.factor(op) * postscale)

        return self._handle(work)

    def _check_home(self, outputs: Sequence[TensorView], home: Home | None) -> bool:
        """Whether outputs with a home are where the runtime would look for them."""
        if home is None:
            return True
        itemsize = outputs[0].dtype.itemsize
        offsets, _ = slot_offsets([view.numel for view in outputs], itemsize)
        start = home.buffer.address + home.offset_bytes
        return [view.address for view in outputs if view.numel] == [
            start + offset * itemsize for view, offset in zip(outputs, offsets, strict=True) if view.numel
        ]

    def broadcast_async(
        self,
        tensors: Sequence[TensorView],
        *,
        root_rank: int,
        name: str | None = None,
        names: Sequence[str] | None = None,
        needs_all: bool = False,
    ) -> FakeHandle:
        assert root_rank == 0
        self.calls.append(
            {"kind": "broadcast", "name": name, "names": names, "shapes": [view.shape for view in tensors]}
        )
        return self._handle(lambda: None)

    def allgather_async(
        self,
        inputs: Sequence[TensorView],
        allocate: Callable[[int, tuple[int, ...]], TensorView],
        *,
        name: str | None = None,
        names: Sequence[str] | None = None,
        needs_all: bool = False,
    ) -> FakeHandle:
        """Every rank sends the same."""
        self.calls.append({"kind": "allgather", "name": name, "shapes": [view.shape for view in inputs]})

        def work() -> None:
            for i, view in enumerate(inputs):
                result = allocate(i, (view.shape[0] * self.size, *view.shape[1:]))
                data = ctypes.string_at(view.address, view.nbytes) * self.size
                ctypes.memmove(result.address, data, len(data))

        return self._handle(work)

    def configure(self, settings: Settings) -> None:
        self.calls.append({"kind": "configure", "name": None})
        self.config = settings.within(self.config)

    def barrier_async(self, *, background: bool = True) -> FakeHandle:
        self.calls.append({"kind": "barrier", "name": None})
        return self._handle(lambda: None)

    def allocate(self, nbytes: int, name: str | None = None) -> FusionBuffer:
        self.allocated.append(nbytes)
        base = np.zeros(nbytes + 64, np.uint8)
        start = -base.ctypes.data % 64
        return FusionBuffer(len(self.allocated), base[start : start + nbytes], 0, nbytes, nbytes)

    def _handle(self, work: Callable[[], Any]) -> FakeHandle:
        handle = FakeHandle(work)
        if self.error is not None:
            handle.fail(self.error)
            self.error = None
        self.handles.append(handle)
        return handle


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> FakeRuntime:
    """Make it the default runtime."""
    monkeypatch.setattr(hvdlite, "runtime", lambda: runtime)
    monkeypatch.setattr(hvdlite, "rank", lambda: runtime.rank)
    monkeypatch.setattr(hvdlite, "size", lambda: runtime.size)
    return runtime
