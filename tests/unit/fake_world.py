"""Real groups and operations among ranks that are not there: what these send is a multiple of what this rank sends.

Only two things are not real: the coordinator, for which all ranks are always ready, and the backend, `Multiples`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hvdlite
from hvdlite import _native
from hvdlite.collectives.base import DONE, Backend, Completion
from hvdlite.config import Config, Tunable
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.submission import Submission
from hvdlite.counters import Traffic
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.engine import Engine
from hvdlite.errors import NotInitializedError
from hvdlite.group import Group
from hvdlite.memory.host import HostMemory
from hvdlite.memory.layout import Range
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer
from hvdlite.operations.allocate import Allocate
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology

STAGING_BYTES = 1 << 20


class Multiples(Backend):
    """Rank 0 of ``size``. Rank r sends r + 1 times what rank 0 sends to a reduction, and the same to all else.

    So a sum is n(n+1)/2 times the input, an average (n+1)/2 times, Min once and Max n times (of positive inputs).
    """

    rank = 0

    def __init__(self, size: int, recorder: Recorder) -> None:
        self.size = size
        self.memory = HostMemory(_Alone())
        self.recorder = recorder

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        if buf.numel:
            copies = [np.empty(buf.nbytes, np.uint8) for _ in range(self.size)]
            addresses = [copy.ctypes.data for copy in copies]
            for rank, address in enumerate(addresses):
                _native.reduce([address], [buf.address], buf.numel, buf.dtype, ReduceOp.SUM, rank + 1.0)
            _native.reduce([buf.address], addresses, buf.numel, buf.dtype, *reduction)
        return DONE

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        return self.allreduce(buf, reduction)

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        for theirs in blocks[1:]:
            for (start, stop), (begin, end) in zip(blocks[0], theirs, strict=True):
                assert stop - start == end - begin
                self.memory.copy(
                    buf.address + begin * buf.dtype.itemsize,
                    buf.address + start * buf.dtype.itemsize,
                    (stop - start) * buf.dtype.itemsize,
                )
        return DONE

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        return DONE

    def barrier(self) -> None:
        pass


class _Echo:
    """An alltoall in which every rank has as much as rank 0, and sends to it what that sends to itself."""

    traffic = Traffic()

    def __init__(self, size: int) -> None:
        self._size = size

    def tell(self, numbers: Sequence[int], label: str) -> Sequence[Sequence[int]]:
        return [numbers] * self._size

    def exchange(
        self, source: int, target: int, sent: Sequence[int], received: Sequence[int], label: str, owner: object
    ) -> None:
        for sender in range(self._size):
            _native.copy(target + sender * sent[0], source, sent[0])


class _Alone:
    """A node of one process."""

    local_rank = 0
    local_size = 1

    def share(self, nbytes: int, *, reserved: bool = True) -> Segment:
        return Segment(create_memory_file(nbytes), nbytes)


@dataclass(frozen=True)
class Submitted:
    """An operation as this rank has submitted it."""

    submission: Submission
    background: bool

    @property
    def request(self) -> Any:
        return self.submission.request

    @property
    def name(self) -> str:
        return self.submission.request.name

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return [spec.name for spec in self.submission.request.tensors]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [view.shape for view in self.submission.inputs]

    @property
    def has_home(self) -> bool:
        return self.submission.home is not None

    @property
    def loose(self) -> int:
        """How many tensors do not come from where their results go."""
        return sum(a.address != b.address for a, b in zip(self.submission.inputs, self.submission.outputs, strict=True))


class _Coordinator:
    """Executes an operation when it is waited for, and not before, so that whoever forgets to wait sees its inputs."""

    runs_free = False
    collector = SimpleNamespace(expects_bursts=False)

    def __init__(self, world: FakeWorld) -> None:
        self._world = world

    def submit(self, submission: Submission, *, background: bool = True) -> None:
        world = self._world
        if world.refusal is not None:
            raise world.refusal
        error, world.error = world.error, None
        world.submitted.append(Submitted(submission, background))
        submission.assist = lambda waiting: waiting.fail(error) if error else waiting.succeed(world.execute(waiting))

    def has_in_flight(self, prefix: str) -> bool:
        in_flight = (one.submission for one in self._world.submitted if not one.submission.is_done)
        return any(one.request.name.startswith(prefix) for one in in_flight)


class FakeWorld:
    """Rank 0 of ``size`` ranks on ``nodes`` nodes; what a `Group` and the operations need of a `World`.

    Attributes:
        submitted: in this order.
        error: what the next operation ends in.
        refusal: what every submission raises.
        runtime: the default one, where `start` was called.
    """

    def __init__(self, size: int, nodes: int, config: Config) -> None:
        self.config = config
        self.recorder = Recorder()
        self.topology = Topology(0, tuple(tuple(range(node, size, nodes)) for node in range(nodes)))
        self.node = SimpleNamespace(cores=64, local_size=size)
        self.joins = 0
        self.has_ended = False
        self.coordinator = _Coordinator(self)
        self.submitted: list[Submitted] = []
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        backend = Multiples(size, self.recorder)
        self.engine = Engine(
            backend,
            _Echo(size),
            backend.memory.allocate(STAGING_BYTES).buffer(0, STAGING_BYTES, DType.UINT8),
            STAGING_BYTES,
            self.topology,
            self.recorder,
            self,  # type: ignore[arg-type]
        )
        self.group = Group(self)  # type: ignore[arg-type]
        self.runtime = SimpleNamespace(
            world=self,
            rank=0,
            config=config,
            recorder=self.recorder,
            group=self.group,
            groups={0: self.group},
            choice=None,
            group_number=lambda ranks: None,
            process_sets=lambda: {0: list(self.group.ranks)},
        )

    def execute(self, submission: Submission) -> object:
        response = Response(submission.request, submission.sequence)
        return submission.request.run(self.engine, [(response, submission)], submission.label)  # type: ignore[attr-defined]

    def tune(self, settings: Tunable) -> None:
        self.config = settings.within(self.config)

    # For tests.

    def names(self) -> list[str]:
        return [each.name for each in self.submitted]

    def of_kind(self, label: str) -> list[Submitted]:
        return [each for each in self.submitted if each.request.label == label]

    @property
    def buckets(self) -> list[Submitted]:
        """Of an optimizer's gradients."""
        return [each for each in self.submitted if ".bucket" in each.name]

    @property
    def allocated(self) -> list[int]:
        """Bytes of each fusion buffer."""
        return [each.request.nbytes for each in self.submitted if isinstance(each.request, Allocate)]


class Universe:
    """The world that hvdlite runs in here, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._world: FakeWorld | None = None

    def start(self, size: int = 2, nodes: int = 2, **settings: Any) -> FakeWorld:
        """hvdlite runs as rank 0 of a new world; the one before has ended."""
        self.end()
        world = self._world = FakeWorld(size, nodes, Config(**settings))
        for name, value in {
            "runtime": lambda: world.runtime,
            "rank": lambda: 0,
            "size": lambda: size,
            "is_initialized": lambda: True,
        }.items():
            self._monkeypatch.setattr(hvdlite, name, value)
        return world

    def end(self) -> None:
        """hvdlite does not run."""

        def refuse() -> None:
            raise NotInitializedError

        if self._world is not None:
            self._world.has_ended = True
            for name in ("runtime", "rank", "size"):
                self._monkeypatch.setattr(hvdlite, name, refuse)
            self._monkeypatch.setattr(hvdlite, "is_initialized", lambda: False)
