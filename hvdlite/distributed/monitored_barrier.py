"""A barrier at which rank 0 sees who comes; it means, and says, what Gloo's does.

Rank 0 alone has a timeout, so no other rank is the first to give up; it gets a message from each that comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from hvdlite.errors import CollectiveError, StallError
from hvdlite.liveness.health import Health

_TAG = -1 << 62  # of no program's messages


class Watched(Protocol):
    """A group, as its barrier asks it: ``name`` and ``ranks`` are what errors call it and its ranks."""

    name: str
    rank: int
    ranks: tuple[int, ...]

    @property
    def health(self) -> Health: ...


Message = Callable[[list[torch.Tensor], int, int], Any]
"""send, to a rank with a tag, or recv; returns torch's Work."""


def monitored_barrier(
    group: Watched,
    send: Message,
    receive: Message,
    meet: Callable[[], object],
    timeout_s: float,
    *,
    wait_all_ranks: bool,
) -> None:
    """Return once all ranks have come.

    Args:
        meet: the barrier of the group, which ends when rank 0 gives it up.
        timeout_s: how long rank 0 waits.
        wait_all_ranks: rank 0 names all ranks that do not come, not only the first.

    Raises:
        CollectiveError: a rank did not come, or has died meanwhile; the group is of no use any more.
    """
    token = [torch.empty(0, device="cpu")]
    if group.rank == 0:
        try:
            arrivals = [receive(token, rank, _TAG) for rank in range(1, len(group.ranks))]
            _await(arrivals, group, timeout_s, wait_all_ranks=wait_all_ranks)
        except StallError as failure:
            group.health.report(failure)
            raise
        meet()
        return
    try:
        send(token, 0, _TAG).wait()
        meet()
    except CollectiveError as error:
        raise CollectiveError(
            f"Rank {group.ranks[group.rank]} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank {group.ranks[0]}: {error}"
        ) from error


def _await(arrivals: Sequence[Any], group: Watched, timeout_s: float, *, wait_all_ranks: bool) -> None:
    deadline_s = time.monotonic() + timeout_s
    after, of = f"{timeout_s * 1000:.0f} ms", f"process group {group.name}"
    if timeout_s <= 0 and arrivals:
        raise StallError(
            f"Rank {group.ranks[0]} timed out in monitoredBarrier after {after}. No ranks successfully processed in "
            f"monitoredBarrier of {of}."
        )
    missing = []
    why: CollectiveError | None = None
    for rank, arrival in zip(group.ranks[1:], arrivals, strict=True):
        try:
            arrival.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))
        except CollectiveError as error:
            if (failure := group.health.failure) is not None:  # it has ended every wait, and says who is to blame
                raise failure.with_traceback(None) from None
            why = why or error
            missing.append(str(rank))
            if not wait_all_ranks:
                break
    if missing:
        who = f"Rank{'s' if wait_all_ranks else ''} {', '.join(missing)}"
        raise StallError(f"[Rank {group.ranks[0]}]: {who} failed to pass monitoredBarrier in {after}, of {of}") from why
