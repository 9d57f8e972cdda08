"""Which backend serves which ranks with GPUs: the one place that decides, by a measurement where there is a choice.

    memory is shared    NCCL    within a node
    yes                 no      direct
    yes                 yes     the faster one, for what is small and for what is large
    no                  yes     nccl

Across nodes: hierarchical, one of these within each node and a ring across; or NCCL over all. The ring is the host's,
by way of pinned memory, or one of GPUs where MPI takes their memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdlite import _native
from hvdlite.agreement import Ranks
from hvdlite.collectives.adder import DeviceAdder
from hvdlite.collectives.base import Backend
from hvdlite.collectives.by_size import BySizeBackend
from hvdlite.collectives.direct import DirectBackend
from hvdlite.collectives.nccl import NcclBackend
from hvdlite.collectives.pinned import PinnedBackend
from hvdlite.collectives.select import hierarchical, spin_us
from hvdlite.collectives.thresholds import limits_of
from hvdlite.config import Config
from hvdlite.dtypes import DType
from hvdlite.errors import StartupError
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer
from hvdlite.node import Node
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from hvdlite.collectives.ring import RingBackend

_LOG = logging.getLogger("hvdlite")
_SMALL_BYTES = 64 << 10
_LARGE_BYTES = 8 << 20
_LIMIT_BYTES = 1 << 20  # between what is small and what is large
_TRIES = 5
_SHORT_S = 2e-3
_NAP_S = 1e-4


def build_device_backend(
    everybody: Ranks,
    node: Node,
    memory: DeviceMemory,
    cross: RingBackend | None,
    topology: Topology,
    config: Config,
    check: Callable[[], None],
    recorder: Recorder,
    *,
    staging: Buffer,
    is_shared: bool,
    has_nccl: bool,
) -> Backend | None:
    """The backend for the GPUs of all ranks of ``topology``; a collective call of all of them.

    None, on all ranks alike, where ranks of a node neither share memory nor come together by NCCL.

    Args:
        cross: between the ranks of a rail, in memory of the host; None where there is none.
        staging: of ``memory``, for measurements.
        is_shared: whether the ranks of a node map the memory of one another; if not, they have NCCL.
        has_nccl: whether NCCL may be used, on every rank.
    """
    places = {rank: place for place, rank in enumerate(topology.ranks)}

    def nccl(ranks: Sequence[int], progress: Segment | None = None) -> NcclBackend | None:
        try:
            backend = NcclBackend(
                memory,
                everybody=everybody,
                members=[places[rank] for rank in ranks],
                interfaces=config.network_interfaces,
                ranks=ranks,
                progress=progress,
                timeout_s=config.collective_timeout_s,
                check=check,
                recorder=recorder,
            )
            backend.prepare(staging)
            return backend
        except StartupError as error:
            if topology.rank == topology.ranks[0]:
                _LOG.warning("GPUs go without NCCL: %s", error)
            return None

    contest = _Contest(everybody, memory, staging, places, check)
    by_nccl = nccl(node.ranks, node.share(NcclBackend.progress_bytes(node.local_size))) if has_nccl else None
    if not is_shared and by_nccl is None:
        return None
    direct = DirectBackend(node, memory, recorder, spin_us=spin_us(config, node)) if is_shared else None
    in_node = contest.winner(direct, by_nccl, node.ranks)
    if len(topology.nodes) == 1:
        return in_node
    composed = _hierarchical(everybody, contest, in_node, cross, memory, topology, config, check)
    over_all = nccl(topology.ranks) if by_nccl is not None and config.gpu_allreduce != "hierarchical" else None
    if over_all is not None and config.gpu_allreduce == "nccl":
        return BySizeBackend(composed, over_all, 0)
    return contest.winner(composed, over_all, topology.ranks)


def _hierarchical(
    everybody: Ranks,
    contest: _Contest,
    in_node: Backend,
    cross: RingBackend | None,
    memory: DeviceMemory,
    topology: Topology,
    config: Config,
    check: Callable[[], None],
) -> Backend:
    """``in_node`` in each node, and across what MPI is able to do."""
    from hvdlite.collectives.device_trial import takes_memory_of_gpus

    pinned = hierarchical(in_node, None if cross is None else PinnedBackend(cross, memory), topology, config)
    if not takes_memory_of_gpus(everybody, cross, memory, config, check):
        return pinned
    direct = hierarchical(in_node, None if cross is None else ring_of_gpus(cross, memory, config), topology, config)
    if config.gpu_mpi == "direct":
        return direct
    limit = contest.limit_bytes([pinned, direct], topology.ranks, "by pinned memory and by MPI on GPUs")
    if limit == 0:
        return direct
    return pinned if limit is None else BySizeBackend(pinned, direct, limit)


def ring_of_gpus(host: RingBackend, memory: DeviceMemory, config: Config) -> RingBackend:
    """Between the ranks of ``host``, by an MPI that takes buffers in ``memory``."""
    from hvdlite.collectives.requests import Channel
    from hvdlite.collectives.ring import RingBackend

    return RingBackend(
        host.endpoint.beside(Channel.DEVICE),
        memory,
        DeviceAdder(memory),
        segment_bytes=config.segment_bytes,
        limits=limits_of(config.small_bytes, host.size),
        recorder=host.recorder,
    )


class _Contest:
    """Compares backends by allreduces of ``staging``; what all ranks measured decides, alike on all.

    Args:
        check: raises once the job has failed.
    """

    def __init__(
        self,
        everybody: Ranks,
        memory: DeviceMemory,
        staging: Buffer,
        places: dict[int, int],
        check: Callable[[], None],
    ) -> None:
        self._everybody = everybody
        self._memory = memory
        self._staging = staging.as_dtype(DType.FLOAT32)
        self._places = places
        self._check = check

    def winner(self, first: Backend | None, second: NcclBackend | None, ranks: Sequence[int]) -> Backend:
        """The faster one for what is large, and for what is small; ``second`` is closed if it never is."""
        if first is None or second is None:
            found = first or second
            assert found is not None
            return found
        limit = self.limit_bytes([first, second], ranks, "without and with NCCL")
        if limit is not None:
            return BySizeBackend(first, second, limit)
        second.close()
        return first

    def limit_bytes(self, backends: Sequence[Backend], ranks: Sequence[int], names: str) -> int | None:
        """Up to so much the first of two is to be taken, and the second above; None: the first always."""
        times = self._times(backends, ranks)
        _LOG.info("seconds of allreduces between GPUs of ranks %s, %s: %s", list(ranks), names, times)
        wins_small, wins_large = (second_s < first_s for first_s, second_s in times)
        if not wins_large:
            return None
        return 0 if wins_small else _LIMIT_BYTES

    def _times(self, backends: Sequence[Backend], ranks: Sequence[int]) -> list[list[float]]:
        """Of something small and of something large: seconds by backend, the best try of the slowest rank."""
        own = [self._tries(backends, nbytes) for nbytes in (_SMALL_BYTES, _LARGE_BYTES)]
        told = self._everybody.allgather(own)
        members = [told[self._places[rank]] for rank in ranks]
        return [
            [
                min(max(member[size][number][attempt] for member in members) for attempt in range(1, _TRIES + 1))
                for number in range(len(backends))
            ]
            for size in range(len(own))
        ]

    def _tries(self, backends: Sequence[Backend], nbytes: int) -> list[list[float]]:
        """Seconds of every try, by backend, in turns; the first one warms up."""
        buf = self._staging.narrow(0, min(nbytes, self._staging.nbytes) // self._staging.dtype.itemsize)
        tries: list[list[float]] = [[] for _ in backends]
        for _ in range(_TRIES + 1):
            for backend, seconds in zip(backends, tries, strict=True):
                began_s = time.perf_counter()
                try:
                    backend.allreduce(buf, label="comparison").wait()
                    self._await(self._memory.moment())
                except BaseException:
                    backend.wake()  # whom the world does not know yet
                    raise
                seconds.append(time.perf_counter() - began_s)
        return tries

    def _await(self, moment: _native.Moment) -> None:
        """Without naps as long as it is short, as it is measured; a rank may fail meanwhile."""
        naps_from_s = time.monotonic() + _SHORT_S
        while not moment.is_reached:
            if time.monotonic() > naps_from_s:
                self._check()
                time.sleep(_NAP_S)
