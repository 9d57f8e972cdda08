"""Ranks that cannot map each other's memory exchange rows by hvdlite's operations, before or after their matmuls."""

from __future__ import annotations

import torch

from hvdlite.tensor_parallel.carrier import Carrier, Produce, Rows, Use
from hvdlite.tensor_parallel.meeting import Meeting
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.reduce_options import Sum, reduce_options
from hvdlite.torch.start import start_allgather, start_allreduce, start_reducescatter


class OperationMeeting(Meeting):
    """Cards travel by a small allgather of ``process_set``.

    Args:
        name: of the operation; the same on every rank, and not taken.
    """

    def __init__(self, process_set: ProcessSet, name: str) -> None:
        super().__init__(process_set.ranks, process_set.rank())
        self._process_set = process_set
        self._name = name

    def _exchange_cards(self, card: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(card), dtype=torch.uint8).unsqueeze(0)
        return [row.numpy().tobytes() for row in _allgather(own, self._name, self._process_set)]


class UnfusedCarrier(Carrier):
    """Exchanges by operations of ``process_set``.

    Args:
        name: of the operations; the same on every rank, and not taken.
    """

    def __init__(self, meeting: Meeting, process_set: ProcessSet, name: str) -> None:
        super().__init__(meeting)
        self._process_set = process_set
        self._name = name
        self._options = reduce_options(None, Sum, 1.0, 1.0, process_set)

    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        self.meeting.meet(f"{rows}, unfused")
        whole = _allgather(shard, f"{self._name}.rows", self._process_set)
        use(whole, 0)
        return whole

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        product = self._product(rows, produce)
        name = f"{self._name}.reduce_scatter"
        return start_reducescatter([product], name, self._options, grouped=False, background=False).synchronize()[0]

    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        product = self._product(rows, produce)
        name = f"{self._name}.all_reduce"
        return start_allreduce(
            [product], name, self._options, in_place=True, grouped=False, background=False
        ).synchronize()[0]

    def _product(self, rows: Rows, produce: Produce) -> torch.Tensor:
        self.meeting.meet(f"{rows}, unfused")
        product = rows.empty(rows.shape[0])
        produce(product, 0)
        return product


def _allgather(tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    return start_allgather([tensor], name, process_set, grouped=False, background=False).synchronize()[0]
