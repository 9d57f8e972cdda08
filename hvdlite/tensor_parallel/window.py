"""The ranks of a node exchange rows through windows of shared memory, which matmuls read and write in place.

There are two windows, used in turns, so that an exchange takes one barrier: whoever has passed the barrier of exchange
n + 1 knows that every rank is done with the window of exchange n, and may fill it for exchange n + 2. All of it runs on
the thread that calls; the coordinator only makes the memory, once, and again when an exchange needs larger windows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from hvdlite import _native
from hvdlite.dtypes import ReduceOp
from hvdlite.recorder import NO_SPAN, Lane
from hvdlite.tensor_parallel.carrier import Carrier, Produce, Rows, Use
from hvdlite.tensor_parallel.methods import Method
from hvdlite.tensor_parallel.shared_meeting import SharedMeeting, shared_memory
from hvdlite.torch.tensor_view import dtype_of

_WINDOWS = 2
_LEAST_BYTES = 1 << 20  # of a window
_SHAPES = 64  # views of a window that are kept
_SMALL_BYTES = 64 << 10  # so many are added up by every rank before it has waited for the others to add up a share
_FEW = 3  # ranks, of which each reads no more than where it would wait for, and copy, what the others have added up


def window_bytes(nbytes: int) -> int:
    """The size of a window that is made for exchanges of ``nbytes``."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())


class _View(NamedTuple):
    """A window as an exchange sees it.

    Attributes:
        whole: what all ranks contribute, one below the other, (size * rows, columns).
        own: this rank's part, (rows, columns).
        parts: the address of each rank's.
    """

    whole: torch.Tensor
    own: torch.Tensor
    parts: list[int]


class WindowCarrier(Carrier):
    """Exchanges in the shared memory of a node, on which all ranks are.

    Args:
        name: of the memory; the same on every rank, and not taken.
    """

    def __init__(self, meeting: SharedMeeting, name: str) -> None:
        super().__init__(meeting)
        self._group = meeting.group
        self._name = name
        self._windows = [torch.empty(0, dtype=torch.uint8)] * _WINDOWS
        # A matmul leaves little of the cache to what comes after it: to make a view then takes as long as a barrier.
        self._views: list[dict[tuple[tuple[int, int], torch.dtype], _View]] = [{} for _ in range(_WINDOWS)]
        self._filled_so_far = 0

    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        """One barrier; every rank copies its shard once."""

        view = self._next_view(rows)
        with self._span(rows):
            view.own.copy_(shard)
        self.meet(rows)
        use(view.whole, 0)
        return view.whole

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """One barrier; every rank reads its rows of all products."""
        view = self._filled(rows, produce)
        height, columns = rows.shape[0] // self.size, rows.shape[1]
        result = rows.empty(height)
        begin = self.rank * height * columns
        with self._span(rows):
            _sum(view, rows.dtype, begin, begin + height * columns, [result.data_ptr()])
        return result

    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """One barrier, and every rank adds up all; for many ranks two, and each adds up an equal share for all."""
        view = self._filled(rows, produce)
        numel = rows.shape[0] * rows.shape[1]
        if self.size <= _FEW or rows.nbytes <= _SMALL_BYTES:
            result = rows.empty(rows.shape[0])
            with self._span(rows):
                _sum(view, rows.dtype, 0, numel, [result.data_ptr()])
            return result
        begin, end = (numel * part // self.size for part in (self.rank, self.rank + 1))
        with self._span(rows):
            _sum(view, rows.dtype, begin, end, [part + begin * rows.dtype.itemsize for part in view.parts])
        self.meeting.meet(rows)
        return view.own.clone()

    def reserve(self, nbytes: int, like: torch.Tensor) -> None:
        self._reserve(self.size * nbytes, "reserve")

    def _reserve(self, nbytes: int, purpose: object) -> None:
        """Make the windows at least so large. All ranks ask for the same, for the same purpose."""
        have = len(self._windows[0])
        if nbytes <= have:
            return
        self.meeting.meet(f"{purpose}, with {nbytes} bytes of shared memory")
        each = window_bytes(nbytes)
        memory = shared_memory(self._group, f"{self._name}.{each}", _WINDOWS * each)
        self._windows = [memory[i * each : (i + 1) * each] for i in range(_WINDOWS)]
        self._views = [{} for _ in range(_WINDOWS)]

    def _span(self, rows: Rows) -> AbstractContextManager[None]:
        recorder = self._group.recorder
        if not recorder.enabled:
            return NO_SPAN
        return recorder.span(Lane.WINDOW, rows.function, rows.nbytes, dtype_of(rows.dtype).label)

    def _filled(self, rows: Rows, produce: Produce) -> _View:
        """The next window, once all ranks have put their products there."""
        view = self._next_view(rows)
        produce(view.own, 0)
        self.meet(rows)
        return view

    def _next_view(self, rows: Rows) -> _View:
        """Of the next window, with room for what all ranks contribute."""
        turn = self._filled_so_far % _WINDOWS
        view = self._views[turn].get((rows.shape, rows.dtype))
        if view is None:
            view = self._view(self.next_window(self.size * rows.nbytes, rows), rows)
            views = self._views[turn]  # those of larger windows, if there were none with enough room
            if len(views) == _SHAPES:
                views.clear()
            views[rows.shape, rows.dtype] = view
        return view

    @torch.inference_mode(False)  # tensors that are made in it cannot be written outside
    def _view(self, window: torch.Tensor, rows: Rows) -> _View:
        whole = window.view(rows.dtype).view(self.size * rows.shape[0], rows.shape[1])
        first = whole.data_ptr()
        parts = [first + rank * rows.nbytes for rank in range(self.size)]
        return _View(whole, whole[self.rank * rows.shape[0] : (self.rank + 1) * rows.shape[0]], parts)

    def next_window(self, nbytes: int, purpose: object) -> torch.Tensor:
        """``nbytes`` that all ranks may write, each a part, until they `meet`. All ask for the same."""
        self._reserve(nbytes, purpose)
        return self._windows[self._filled_so_far % _WINDOWS][:nbytes]

    def meet(self, purpose: object) -> None:
        """Wait for all ranks, which have filled the next window for the same purpose."""
        self.meeting.meet(purpose)
        # After an error on all ranks the next exchange takes the same window, which nobody has read.
        self._filled_so_far += 1


class PairCarrier(Carrier):
    """The ring of two ranks: each leaves the other a product in a window, on which the other multiplies its own.

    Windows, and other exchanges, are those of ``window``.
    """

    def __init__(self, window: WindowCarrier) -> None:
        super().__init__(window.meeting)
        assert self.size == 2, self.size
        self._window = window

    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        return self._window.gather(rows, shard, use)

    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        return self._window.all_reduce(rows, produce)

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """One barrier; nothing is copied. A product of 16 bits is rounded on its way, as in any sum; the sum once."""
        height, columns = rows.shape[0] // 2, rows.shape[1]
        left = self._window.next_window(rows.nbytes, rows).view(rows.dtype).view(2, height, columns)
        peer = 1 - self.rank
        produce(left[peer], peer * height)
        self._window.meet(f"{rows}, by {Method.RING_EXCHANGE.value}")
        result = rows.empty(height)
        produce(result, self.rank * height, left[self.rank])
        return result


def _sum(view: _View, dtype: torch.dtype, begin: int, end: int, results: list[int]) -> None:
    """Add up elements [begin, end) of every rank's part of ``view``, into each address of ``results``."""
    sources = [part + begin * dtype.itemsize for part in view.parts]
    _native.reduce(results, sources, end - begin, dtype_of(dtype), ReduceOp.SUM)
