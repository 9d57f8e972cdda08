"""The ranks of a node exchange rows through windows of shared memory, which matmuls read and write in place.

There are two windows, used in turns, so that an exchange takes one barrier: whoever has passed the barrier of exchange
n + 1 knows that every rank is done with the window of exchange n, and may fill it for exchange n + 2. All of it runs on
the thread that calls; the coordinator only makes the memory, once, and again when an exchange needs larger windows.
"""

from __future__ import annotations

import torch

from hvdlite import _native
from hvdlite.collectives.select import spin_us
from hvdlite.dtypes import ReduceOp
from hvdlite.errors import CollectiveError
from hvdlite.group import Group
from hvdlite.memory.layout import align_up
from hvdlite.operations.allocate import allocate
from hvdlite.tensor_parallel.carrier import CARD_BYTES, Carrier, Produce, Rows
from hvdlite.torch.tensor_view import dtype_of

_WINDOWS = 2
_LEAST_BYTES = 1 << 20  # of a window


class WindowCarrier(Carrier):
    """Exchanges in the shared memory of a node, on which all ranks of ``group`` are. Collective to build.

    Args:
        name: of the memory; the same on every rank, and not taken.
    """

    def __init__(self, group: Group, name: str) -> None:
        super().__init__(group.ranks, group.rank)
        self._group = group
        self._name = name
        world, size = group.world, self.size
        barrier_bytes = align_up(_native.Barrier.bytes_needed(size))
        self._page = self._shared(f"{name}.page", barrier_bytes + _WINDOWS * size * CARD_BYTES)
        self._cards = self._page.numpy()[barrier_bytes:].data
        spin = spin_us(world.config, world.node)
        self._barrier = _native.Barrier(self._page.data_ptr(), self.rank, size, world.node.abort_address, spin)
        self._windows: list[torch.Tensor] = [self._page[:0]] * _WINDOWS
        self._filled_so_far = 0

    def gather(self, rows: Rows, shard: torch.Tensor) -> torch.Tensor:
        """One barrier; every rank copies its shard once."""
        return self._filled(rows, lambda own: own.copy_(shard)).flatten(0, 1)

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """One barrier; every rank reads its rows of all products."""
        window = self._filled(rows, produce)
        height, columns = rows.shape
        result = torch.empty(height // self.size, columns, dtype=rows.dtype)
        begin = self.rank * result.numel()
        _sum(window, begin, begin + result.numel(), [result.data_ptr()])
        return result

    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """Two barriers; every rank adds up an equal share of all products, for all."""
        window = self._filled(rows, produce)
        numel = rows.shape[0] * rows.shape[1]
        begin, end = (numel * part // self.size for part in (self.rank, self.rank + 1))
        _sum(window, begin, end, [copy.data_ptr() + begin * rows.dtype.itemsize for copy in window])
        self.meet(rows)
        return window[self.rank].clone()

    def reserve(self, nbytes: int, purpose: object = "reserve") -> None:
        """Make the windows at least so large. All ranks ask for the same, for the same purpose."""
        have = len(self._windows[0])
        if nbytes <= have:
            return
        self.meet(f"{purpose}, with {nbytes} bytes of shared memory")
        each = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        memory = self._shared(f"{self._name}.{each}", _WINDOWS * each)
        self._windows = [memory[i * each : (i + 1) * each] for i in range(_WINDOWS)]

    def _filled(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """What all ranks have contributed: (size, *rows.shape), shared."""
        nbytes = self.size * rows.nbytes
        self.reserve(nbytes, rows)
        window = self._windows[self._filled_so_far % _WINDOWS][:nbytes].view(rows.dtype).view(self.size, *rows.shape)
        produce(window[self.rank])
        self.meet(rows)
        # After an error on all ranks the next exchange takes the same window, which nobody has read.
        self._filled_so_far += 1
        return window

    def _shared(self, name: str, nbytes: int) -> torch.Tensor:
        """``nbytes`` that all ranks map, zeroed: (at least nbytes,) uint8. The copies of a buffer, as one."""
        return torch.from_numpy(allocate(self._group, -(-nbytes // self.size), name).owner)

    def _exchange_cards(self, card: bytes) -> list[bytes]:
        # Cards have two places as well, and by the same reasoning.
        first = self._met % _WINDOWS * self.size
        own = (first + self.rank) * CARD_BYTES
        self._cards[own : own + CARD_BYTES] = card
        self._wait()
        places = range(first * CARD_BYTES, (first + self.size) * CARD_BYTES, CARD_BYTES)
        return [bytes(self._cards[place : place + CARD_BYTES]) for place in places]

    def _wait(self) -> None:
        world = self._group.world
        limit_s = world.config.ub_timeout_s
        status = self._barrier.wait(limit_s)
        if status == _native.Barrier.OK:
            return
        where = f"tensor parallelism, exchange {self._met} of ranks {list(self.ranks)}"
        if status == _native.Barrier.TIMEOUT:
            late = [self.ranks[place] for place in self._barrier.late()]
            world.health.report(
                CollectiveError(
                    f"{where}: {late} did not come within {limit_s:g} s; if they are only slow, raise "
                    "HVDLITE_UB_TIMEOUT_SECONDS"
                )
            )
        world.check()
        raise CollectiveError(f"{where}: the job was aborted while this rank waited")


def _sum(window: torch.Tensor, begin: int, end: int, results: list[int]) -> None:
    """Add up elements [begin, end) of every rank's part of ``window``, into each address of ``results``."""
    sources = [part.data_ptr() + begin * window.itemsize for part in window]
    _native.reduce(results, sources, end - begin, dtype_of(window.dtype), ReduceOp.SUM)
