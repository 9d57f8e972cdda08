"""Whether multicast does what it says, found out by patterns before anything of a user's goes by it."""

from __future__ import annotations

import torch

from hvdlite.tensor_parallel.carrier import Rows
from hvdlite.tensor_parallel.device import DeviceCarrier

_COLUMNS = 1024
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def why_not_to_use(carrier: DeviceCarrier, ordinal: int) -> str:
    """Collective; empty where patterns arrive at all ranks and are added up there, and else the same on every rank.

    Waits for GPU ``ordinal``; one that does not come ends the job, as in any exchange.
    """
    problems = [_problem(carrier, dtype, torch.device("cuda", ordinal)) for dtype in _DTYPES]
    told = carrier.meeting.tell("trial of multicast", next(filter(None, problems), ""))
    found = [f"rank {rank}: {text}" for rank, text in zip(carrier.meeting.ranks, told, strict=True) if text]
    return "; ".join(found)


def _problem(carrier: DeviceCarrier, dtype: torch.dtype, device: torch.device) -> str:
    size, rank = carrier.size, carrier.rank
    # Small integers, whose sums over dozens of ranks are exact in every type.
    whole = (torch.arange(size * _COLUMNS, device=device).view(size, _COLUMNS) % 3).to(dtype)
    rows = Rows.of("trial of multicast", "", whole)
    shard = Rows.of("trial of multicast", "", whole[:1])
    own, total = whole + rank % 2, size * whole + size // 2

    def produce(out: torch.Tensor, begin: int, onto: torch.Tensor | None = None) -> None:
        out.copy_(own[begin : begin + len(out)])

    # Each rank makes all of these exchanges, whatever it finds.
    is_there = torch.equal(carrier.gather(shard, whole[rank : rank + 1]), whole)
    is_added_up = torch.equal(carrier.reduce_scatter(rows, produce), total[rank : rank + 1])
    is_added_up_for_all = torch.equal(carrier.all_reduce(rows, produce), total)
    if not is_there:
        return f"{dtype} did not arrive"
    return "" if is_added_up and is_added_up_for_all else f"{dtype} was not added up"
