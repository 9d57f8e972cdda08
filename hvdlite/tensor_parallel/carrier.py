"""What moves rows between the ranks of a team. Each call of a carrier is an exchange, which begins with a meeting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch

from hvdlite.tensor_parallel.meeting import Meeting


class Produce(Protocol):
    """What this rank contributes to a sum."""

    def __call__(self, out: torch.Tensor, begin: int, onto: torch.Tensor | None = None) -> object:
        """Fill ``out`` with the rows from number ``begin`` on; with ``onto``, added to that."""


Use = Callable[[torch.Tensor, int], object]
"""Works on rows of the whole, from the number that it is given on."""

Finish = Callable[[], torch.Tensor]
"""The result of an exchange that has been begun."""


class Rows(NamedTuple):
    """What every rank contributes to an exchange: a matrix of the same shape and dtype, on the same kind of device.

    Attributes:
        function: for whom; what is tuned has its name.
        detail: what else ranks must agree on.
    """

    function: str
    detail: str
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, function: str, detail: str, matrix: torch.Tensor) -> Rows:
        rows, columns = matrix.shape
        return cls(function, detail, (rows, columns), matrix.dtype, matrix.device)

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def empty(self, rows: int) -> torch.Tensor:
        """(rows, columns), on the device of this rank."""
        return torch.empty(rows, self.shape[1], dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        where = "" if self.device.type == "cpu" else f" on {self.device.type}"
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.function}{detail} of {self.shape} {str(self.dtype).removeprefix('torch.')}{where}"


class Carrier(ABC):
    """Moves rows between the ranks of ``meeting``; all of them make the same calls in order."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.rank = meeting.rank
        self.size = meeting.size

    @abstractmethod
    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        """The shards of all ranks, one below the other: (size * rows, columns).

        The result may be memory that ranks share: it is read only, and until this rank's next exchange.

        Args:
            use: called for all of it, or for parts of it in any order, as they come.
        """

    @abstractmethod
    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """This rank's part of the rows of the sum over ranks, (rows / size, columns), new; ``size`` divides the rows.

        16-bit floats are added in fp32 and rounded once; ranks are added in ascending order, but by multicast.

        Args:
            produce: called for all rows, or for parts of them in any order.
        """

    @abstractmethod
    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """The sum over ranks, (rows, columns), new; the same to the last bit on every rank."""

    def reserve(self, nbytes: int, like: torch.Tensor) -> None:
        """Make memory for exchanges whose result, over all ranks, has ``nbytes``, on the device of ``like``.

        All ranks ask for the same.
        """

    def begin_gather(self, rows: Rows, shard: torch.Tensor) -> Finish:
        """`gather`, beside what is done until its result is asked for: one `begin_reduce_scatter` at most.

        The result may be read until the exchange after that.
        """
        return partial(self.gather, rows, shard)

    def begin_reduce_scatter(self, rows: Rows, produce: Produce) -> Finish:
        """`reduce_scatter`, beside what is done until its result is asked for, which is before the next exchange."""
        result = self.reduce_scatter(rows, produce)
        return lambda: result
