"""What moves and reduces the tensors of a process group: by shared memory in a node, by MPI between nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hvdlite.distributed.call import Call
from hvdlite.dtypes import Reduction
from hvdlite.errors import StallError
from hvdlite.memory.layout import Layout

Part = tuple[int, int]
"""Address and bytes of memory of this rank's."""
NOTHING: Part = (0, 0)


class Carrier(ABC):
    """Collectives of ranks that all make the same calls in the same order, from one thread at a time.

    Every method waits until all ranks have come, and raises where they do not:

    - MismatchError: they contradict one another; the same text on all, and nothing was done.
    - CollectiveError: a rank has failed, has left, or did not come in time; the group is of no use any more.

    Parts are listed in the order of ranks.

    Attributes:
        timeout_s: the longest wait for a rank.
        takes_sparse: whether sparse tensors, whose memory is replaced, are added up by its means.
    """

    timeout_s: float
    takes_sparse = True

    @abstractmethod
    def meet(self, call: Call) -> None:
        """Return when all ranks have come."""

    @abstractmethod
    def allreduce(
        self, call: Call, inputs: Sequence[int], outputs: Sequence[int], layout: Layout, reduction: Reduction
    ) -> None:
        """Reduce tensors at ``inputs``, as they lie in ``layout``, into ``outputs``; not where that is 0."""

    @abstractmethod
    def reduce_scatter(
        self, call: Call, inputs: Sequence[int], output: int, layout: Layout, reduction: Reduction
    ) -> None:
        """Reduce what all ranks have for this one, one tensor as it lies in ``layout``; inputs[r] is for rank r."""

    @abstractmethod
    def spread(self, call: Call, departure: Part, arrivals: Sequence[Part], nbytes: Sequence[int]) -> None:
        """Send the same to all ranks, and take what is wanted of it.

        Args:
            arrivals: `NOTHING` for ranks whose bytes are not wanted.
            nbytes: what each rank sends.
        """

    @abstractmethod
    def alltoall(self, call: Call, departures: Sequence[Part], arrivals: Sequence[Part]) -> None:
        """Send departures[r] to each rank r, and receive arrivals[s] from each rank s."""

    def late(self) -> Sequence[int]:
        """The ranks that have not come for the call under way, as far as is known; from any thread."""
        return ()

    def departed(self) -> Sequence[int]:
        """The ranks that have left, as far as is known; from any thread."""
        return ()

    def leave(self) -> None:
        """From here on, whoever waits for this rank learns that it will not come."""


def half_done(call: Call, group: str, rank: int, error: BaseException) -> StallError:
    """Why ``group`` is of no use any more: ``error``, mostly of a signal handler, came between steps of ``call``."""
    return StallError(
        f"{call} of process group {group}: rank {rank} has left it half done, by {type(error).__name__}. Make the "
        "group anew if the program goes on"
    )
