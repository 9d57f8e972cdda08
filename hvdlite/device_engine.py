"""The engine for tensors on GPUs: built by all ranks of a world together, when the first such tensors come."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdlite import _native, nccl_library
from hvdlite.agreement import agreed, exchange
from hvdlite.collectives.select_device import build_device_backend
from hvdlite.config import Config
from hvdlite.coordinator.submission import Allocate
from hvdlite.dtypes import DType
from hvdlite.engine import Engine
from hvdlite.errors import CollectiveError, StartupError, gpu_blamed
from hvdlite.everybody import Everybody
from hvdlite.memory.base import FusionBuffer
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import align_up
from hvdlite.memory.views import Buffer, TensorView
from hvdlite.nccl_library import NcclLibrary
from hvdlite.node import Node, discover
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from hvdlite.collectives.ring import RingBackend

_LOG = logging.getLogger("hvdlite")
_SETTLE_S = 5.0


class DeviceEngine:
    """Runs operations on GPUs, by enqueuing them.

    Attributes:
        engine: what operations run on.
        memory: its memory.
    """

    def __init__(self, engine: Engine, memory: DeviceMemory, timeout_s: float) -> None:
        self.engine = engine
        self.memory = memory
        self._timeout_s = timeout_s

    def can_run(self, operation: Any) -> bool:
        """Whether GPUs do it; if not, its tensors pass through the host."""
        backend = self.engine.backend
        return operation.runs_on_device and all(map(backend.supports, operation.reduced_types))

    def ordered(self, allocate: Allocate | None) -> Allocate | None:
        """``allocate`` of tensors that are written after whatever still uses their memory."""
        if allocate is None:
            return None

        def allocate_in_order(index: int, shape: tuple[int, ...]) -> TensorView:
            view = allocate(index, shape)
            if view.device is not None:
                self.memory.stream.follow([view.device.ready])
            return view

        return allocate_in_order

    def has_reached(self, moment: _native.Moment, label: str) -> bool:
        """Whether the GPU has done ``label``, as it has at ``moment``; raises CollectiveError where it has failed."""
        with gpu_blamed(self.engine.ranks[self.engine.backend.rank], f"'{label}'"):
            return moment.is_reached

    def watch(self, label: str, age_s: float) -> None:
        """Raise CollectiveError where a backend has failed, or ``label`` was enqueued too long ago."""
        backend = self.engine.backend
        backend.check_health()
        if age_s > self._timeout_s:
            late = [self.engine.ranks[place] for place in backend.late()]
            raise CollectiveError(
                f"'{label}': GPU {self.memory.ordinal} has not done it in {age_s:.0f} s"
                + (f", and ranks {late} are behind" if late else "")
                + "; if they are only slow, raise HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"
            )

    def configure(self, config: Config) -> None:
        self.engine.backend.configure(config)

    def wake(self) -> None:
        """End every wait of its stream, as the world has failed."""
        self.engine.backend.wake()

    def close(self) -> None:
        """Let its stream come to an end; what does not is left behind."""
        try:
            if not self.memory.settle(_SETTLE_S):
                _LOG.error(
                    "GPU %d does not come to an end with what it was given; it is left behind", self.memory.ordinal
                )
        finally:
            self.engine.backend.close()


class _Card(NamedTuple):
    """What a rank tells the others of its GPU.

    Attributes:
        problem: why it cannot be used with others; empty if it can.
        nccl: None: there is none.
    """

    uuid: str = ""
    name: str = ""
    nccl: NcclLibrary | None = None
    problem: str = ""


def build(
    ordinal: int | None,
    host: Engine,
    node: Node,
    cross: RingBackend | None,
    topology: Topology,
    config: Config,
    check: Callable[[], None],
) -> DeviceEngine | None:
    """The engine for the GPU of this rank, and those of the others. Collective, between operations of ``host``.

    Args:
        ordinal: of this rank's GPU; by default the ranks of a node take one each, as far as there are so many.
        cross: between the ranks that carry what goes to other nodes, in memory of the host, see `HierarchicalBackend`.

    Returns:
        None, on all ranks alike, where these GPUs cannot work together; a warning of the first rank says why.
    """
    everybody = Everybody(host.backend, host.staging(DType.UINT8))
    if ordinal is None:
        ordinal = _share_of_gpus(topology)
    cards = exchange(everybody, lambda: _card(ordinal))
    _warn_of_shared_gpus(topology, cards)
    problem = "; ".join(
        f"rank {rank}: {card.problem}" for rank, card in zip(topology.ranks, cards, strict=True) if card.problem
    )
    shared = None
    if not problem:
        try:
            shared = _shared_memory(everybody, node, ordinal, config)
        except StartupError as error:
            problem = str(error)
    has_nccl = _connected_by_nccl(cards)
    if shared is None and not has_nccl:
        _warn_of_host(topology, problem)
        return None
    # NCCL needs no memory that other ranks can reach.
    memory, staging = shared or _shared_memory(everybody, discover(None, 0.0)[1], ordinal, config)
    try:
        backend = build_device_backend(
            everybody,
            node,
            memory,
            cross,
            topology,
            config,
            check,
            host.recorder,
            staging=staging,
            is_shared=shared is not None,
            has_nccl=has_nccl,
        )
    except BaseException:
        _settle(memory)
        raise
    if backend is None:
        _settle(memory)
        _warn_of_host(topology, problem)
        return None
    engine = Engine(
        backend, host.exchange, staging, staging.nbytes, topology, host.recorder, host.administrator, host.executed
    )
    return DeviceEngine(engine, memory, config.collective_timeout_s)


def _shared_memory(everybody: Everybody, node: Node, ordinal: int, config: Config) -> tuple[DeviceMemory, Buffer]:
    """Memory of GPUs of ``node``, and some to pass through; of the same kind on all ranks."""
    try:
        return _memory(everybody, node, ordinal, config, _native.FileSegment)
    except StartupError as error:
        if everybody.rank == 0:
            _LOG.info("memory of GPUs is shared by CUDA IPC, as there are no file descriptors of it: %s", error)
    return _memory(everybody, node, ordinal, config, _native.HandleSegment)


def _memory(
    everybody: Everybody, node: Node, ordinal: int, config: Config, segments: type[_native.DeviceSegment]
) -> tuple[DeviceMemory, Buffer]:
    memory = agreed(everybody, lambda: DeviceMemory(node, ordinal, segments))
    nbytes = align_up(config.staging_bytes)
    buffers: list[FusionBuffer] = []
    try:
        agreed(everybody, lambda: buffers.append(memory.allocate(nbytes)))
    except BaseException:
        _settle(memory)
        raise
    return memory, buffers[0].buffer(0, nbytes, DType.UINT8)


def _settle(memory: DeviceMemory) -> None:
    """Before it goes, and a buffer to which it may have to write; where the GPU has failed, it has not."""
    with suppress(RuntimeError):
        memory.settle(_SETTLE_S)


def _share_of_gpus(topology: Topology) -> int:
    """The GPU of a rank that has not chosen one."""
    try:
        return topology.local_rank % max(_native.cuda_devices(), 1)
    except RuntimeError:  # no driver; the rank's card will say so
        return 0


def _card(ordinal: int) -> _Card:
    try:
        uuid, name = _native.cuda_device_uuid(ordinal), _native.cuda_device_name(ordinal)
    except RuntimeError as error:
        return _Card(problem=str(error))
    try:
        nccl = nccl_library.load()
    except RuntimeError:
        nccl = None
    return _Card(uuid, name, nccl)


def _connected_by_nccl(cards: Sequence[_Card]) -> bool:
    """Whether NCCL is everywhere, and may connect these GPUs."""
    have_one_each = len({card.uuid for card in cards}) == len(cards)
    return all(card.nccl is not None and (have_one_each or card.nccl.shares_gpus) for card in cards)


def _warn_of_host(topology: Topology, problem: str) -> None:
    if topology.rank == topology.ranks[0]:
        _LOG.warning("tensors on GPUs pass through memory of the host: %s", problem)


def _warn_of_shared_gpus(topology: Topology, cards: Sequence[_Card]) -> None:
    """Once, by the first of the ranks that share."""
    users: Counter[str] = Counter(card.uuid for card in cards)
    first = next((i for i, card in enumerate(cards) if users[card.uuid] > 1), None)
    if first is None or topology.ranks[first] != topology.rank:
        return
    sharing = [rank for rank, card in zip(topology.ranks, cards, strict=True) if card.uuid == cards[first].uuid]
    _LOG.warning(
        "ranks %s work on one GPU (%s, %s) and take turns; for a GPU each, start at most as many ranks as there are "
        "GPUs, and call torch.cuda.set_device(hvd.local_rank()) before the first tensor",
        sharing,
        cards[first].name,
        cards[first].uuid,
    )
