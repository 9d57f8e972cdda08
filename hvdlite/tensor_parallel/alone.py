"""A team of one rank: nothing moves."""

from __future__ import annotations

import torch

from hvdlite.tensor_parallel.carrier import Carrier, Produce, Rows, Use


class LoneCarrier(Carrier):
    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        use(shard, 0)
        return shard

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        result = rows.empty(rows.shape[0])
        produce(result, 0)
        return result

    all_reduce = reduce_scatter
