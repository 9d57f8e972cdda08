"""All ranks on one node: a call is one native call, which finds out by itself whether ranks contradict one another."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence

from hvdlite import _native
from hvdlite.collectives.shm import ShmBackend
from hvdlite.distributed.call import TEXT_BYTES, Call, contradiction
from hvdlite.distributed.carrier import Carrier, Part, half_done
from hvdlite.distributed.engine_moves import EngineMoves
from hvdlite.dtypes import Reduction
from hvdlite.errors import CollectiveError, HorovodInternalError, StallError
from hvdlite.memory.layout import Layout
from hvdlite.rank_list import rank_list
from hvdlite.recorder import Lane
from hvdlite.world import World

_LOG = logging.getLogger("hvdlite")
_TELL = 0x7465_6C6C  # the card of ranks that tell one another what they have come for


class NodeCarrier(Carrier):
    """See `hvdlite.distributed.carrier.Carrier`. Collective to build.

    Args:
        world: of these ranks, whose backend nobody else uses.
        name: of the group, for people.
        ranks: what errors call the ranks of the group.
        timeout_s: the longest wait for a rank.
    """

    def __init__(self, world: World, name: str, ranks: Sequence[int], timeout_s: float) -> None:
        config = world.config
        self._world = world
        self._engine, self._moves = world.engine, EngineMoves(world.engine)
        self._recorder = world.recorder
        self._name = name
        self._ranks = tuple(ranks)
        self._stall_s = config.stall_report_s
        self.timeout_s = timeout_s
        backend = world.engine.backend
        assert isinstance(backend, ShmBackend) and backend.exchange is not None
        self._exchange = backend.exchange.native

    @property
    def timeout_s(self) -> float:
        """The longest wait for a rank."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._patience_s = min(timeout_s, self._stall_s)

    def meet(self, call: Call) -> None:
        status = self._exchange.meet(call.card, self._patience_s)
        if status:
            self._settle(call, status, lambda limit_s: self._exchange.meet(call.card, limit_s))

    def allreduce(
        self, call: Call, inputs: Sequence[int], outputs: Sequence[int], layout: Layout, reduction: Reduction
    ) -> None:
        try:
            self.meet(call)
            self._moves.allreduce(inputs, outputs, layout, reduction, call.operation)
        except HorovodInternalError:
            raise
        except BaseException as error:  # the others may wait for this rank in the second step
            rank = self._ranks[self._world.topology.rank]
            self._world.health.report(half_done(call, self._name, rank, error))
            raise

    def reduce_scatter(
        self, call: Call, inputs: Sequence[int], output: int, layout: Layout, reduction: Reduction
    ) -> None:
        arguments = (inputs, [layout.numels[0]] * len(inputs), output, layout.dtype, *reduction)
        self._engine.executed.buckets += 1
        self._engine.executed.reduced_bytes += layout.nbytes * len(inputs)
        with self._recorder.span(Lane.NODE_REDUCE_SCATTER, call.operation, layout.nbytes, layout.dtype.label):
            status = self._exchange.reduce_scatter(call.card, *arguments, self._patience_s)
        if status:
            again = self._exchange.reduce_scatter
            self._settle(call, status, lambda limit_s: again(call.card, *arguments, limit_s))

    def spread(self, call: Call, departure: Part, arrivals: Sequence[Part], nbytes: Sequence[int]) -> None:
        lane = Lane.BROADCAST if call.operation == "broadcast" else Lane.ALLGATHER
        with self._recorder.span(lane, call.operation, departure[1]):
            status = self._exchange.spread(call.card, departure, arrivals, self._patience_s)
        if status:
            again = self._exchange.spread
            self._settle(call, status, lambda limit_s: again(call.card, departure, arrivals, limit_s))

    def alltoall(self, call: Call, departures: Sequence[Part], arrivals: Sequence[Part]) -> None:
        with self._recorder.span(Lane.ALLTOALL, call.operation):
            status = self._exchange.alltoall(call.card, departures, arrivals, self._patience_s)
        if status:
            again = self._exchange.alltoall
            self._settle(call, status, lambda limit_s: again(call.card, departures, arrivals, limit_s))

    def late(self) -> Sequence[int]:
        return [self._ranks[place] for place in self._exchange.late()]

    def departed(self) -> Sequence[int]:
        return [self._ranks[place] for place in self._exchange.departed()]

    def leave(self) -> None:
        self._exchange.leave()

    def _settle(self, call: Call, status: int, again: Callable[[float], int]) -> None:
        """Go on waiting where ranks are only late, and return when it is done; else raise."""
        since_s = time.monotonic() - self._patience_s
        while status == _native.OrderedExchange.TIMEOUT:
            waited_s = time.monotonic() - since_s
            left_s = self._timeout_s - waited_s
            if left_s <= 0:
                self._fail(StallError(f"{self._late(call)} did not come within the timeout of {self._timeout_s:g} s"))
            _LOG.warning("%s did not come for %.0f s", self._late(call), waited_s)
            status = again(min(left_s, self._patience_s))
        if status == _native.OrderedExchange.CONTRADICTION:
            raise contradiction(self._name, self._tell(call), self._ranks)
        if status == _native.OrderedExchange.DEPARTED:
            departed = self.departed()
            gone = rank_list([rank for rank in self.late() if rank in departed])
            self._fail(
                StallError(
                    f"{call} of process group {self._name}: {gone} left the group, by destroy_process_group() or "
                    "at its end, so this call cannot be completed"
                )
            )
        if status == _native.OrderedExchange.ABORTED:
            self._world.check()
            raise CollectiveError(f"{call} of process group {self._name} was ended while this rank waited")

    def _late(self, call: Call) -> str:
        return f"{call} of process group {self._name}: {rank_list(self.late())}"

    def _fail(self, error: StallError) -> None:
        """The group is of no use any more, on all ranks; these live, and may go on without it."""
        self._world.health.report(error)
        raise error

    def _tell(self, call: Call) -> list[bytes]:
        """What all ranks have come for."""
        own = ctypes.create_string_buffer(call.text, TEXT_BYTES)
        told = [ctypes.create_string_buffer(TEXT_BYTES) for _ in self._ranks]
        arrivals = [(ctypes.addressof(text), TEXT_BYTES) for text in told]
        departure = (ctypes.addressof(own), TEXT_BYTES)
        status = self._exchange.spread(_TELL, departure, arrivals, self._timeout_s)
        if status:
            raise CollectiveError(
                f"{call} of process group {self._name}: the ranks contradict one another, and did not say how"
            )
        return [text.raw for text in told]
