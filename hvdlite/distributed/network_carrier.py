"""Ranks of several nodes: by the world's backend, through staging memory, after an allreduce that compares cards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from hvdlite.distributed.call import TEXT_BYTES, Call, contradiction
from hvdlite.distributed.carrier import Carrier, Part, half_done
from hvdlite.distributed.engine_moves import EngineMoves
from hvdlite.distributed.late_watch import LateWatch
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.engine import Engine
from hvdlite.errors import CollectiveError, HorovodInternalError, StallError
from hvdlite.memory.layout import Layout
from hvdlite.world import World

_MAX = Reduction(ReduceOp.MAX)


Method = TypeVar("Method", bound=Callable[..., None])


def _told(method: Method) -> Method:
    """A method after whose failure no rank waits for the others any more."""

    @wraps(method)
    def watched(self: NetworkCarrier, call: Call, *args: Any) -> None:
        self.watch.begin(call)
        try:
            method(self, call, *args)
        except CollectiveError as error:
            self.health.report(StallError(str(error)))  # the first that is reported counts, of the cause as a rule
            raise
        except HorovodInternalError:
            raise
        except BaseException as error:
            self.health.report(half_done(call, self._name, self._ranks[self._engine.rank], error))
            raise
        finally:
            self.watch.end()

    return cast(Method, watched)


class NetworkCarrier(Carrier):
    """See `hvdlite.distributed.carrier.Carrier`. Waits for ranks are the backend's, and end with the world's health.

    Args:
        world: of these ranks, whose backend nobody else uses.
        name: of the group, for people.
        ranks: what errors call the ranks of the group.
        timeout_s: the longest wait for a rank.
        store: torch's, of the group.
    """

    def __init__(self, world: World, name: str, ranks: Sequence[int], timeout_s: float, store: Any) -> None:
        self.health = world.health
        self.watch = LateWatch(world, name, ranks, timeout_s, store, world.health.report)
        self._engine: Engine = world.engine
        self._moves = EngineMoves(world.engine)
        self._memory, self._backend = world.engine.memory, world.engine.backend
        self._size = world.engine.size
        self._name = name
        self._ranks = tuple(ranks)

    @property
    def timeout_s(self) -> float:
        """The longest wait for a rank."""
        return self.watch.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.watch.timeout_s = timeout_s

    def late(self) -> Sequence[int]:
        return self.watch.late()

    def leave(self) -> None:
        self.watch.close()

    @_told
    def meet(self, call: Call) -> None:
        self._meet(call)

    def _meet(self, call: Call) -> None:
        """The greatest card and the smallest one are the same."""
        card = call.card >> 1  # as a positive 64-bit integer
        own = np.array([card, -card], np.int64)
        part = self._engine.staging(DType.INT64).narrow(0, 2)
        self._memory.copy(part.address, own.ctypes.data, own.nbytes)
        self._backend.allreduce(part, _MAX, label=call.operation).wait()
        found = np.empty(2, np.int64)
        self._memory.copy(found.ctypes.data, part.address, found.nbytes)
        if found[0] != -found[1]:
            raise contradiction(self._name, self._tell(call), self._ranks)

    @_told
    def allreduce(
        self, call: Call, inputs: Sequence[int], outputs: Sequence[int], layout: Layout, reduction: Reduction
    ) -> None:
        self._meet(call)
        self._moves.allreduce(inputs, outputs, layout, reduction, call.operation)

    @_told
    def reduce_scatter(
        self, call: Call, inputs: Sequence[int], output: int, layout: Layout, reduction: Reduction
    ) -> None:
        self._meet(call)
        self._moves.reduce_scatter(inputs, output, layout, reduction, call.operation)

    @_told
    def spread(self, call: Call, departure: Part, arrivals: Sequence[Part], nbytes: Sequence[int]) -> None:
        self._meet(call)
        self._moves.spread(departure, arrivals, nbytes, call.operation)

    @_told
    def alltoall(self, call: Call, departures: Sequence[Part], arrivals: Sequence[Part]) -> None:
        self._meet(call)
        sent, wanted = ([nbytes for _, nbytes in parts] for parts in (departures, arrivals))
        told = np.array(self._engine.exchange.tell([*sent, *wanted], "sizes of an all_to_all"))
        if not np.array_equal(told[:, : self._size], told[:, self._size :].T):
            raise contradiction(self._name, self._tell(call), self._ranks)
        source, target = _gathered(departures), _room_for(arrivals)
        self._engine.exchange.exchange(
            ctypes.addressof(source), ctypes.addressof(target), sent, wanted, call.operation, (source, target)
        )
        offset = ctypes.addressof(target)
        for address, nbytes in arrivals:
            self._memory.copy(address, offset, nbytes)
            offset += nbytes

    def _tell(self, call: Call) -> list[bytes]:
        """What all ranks have come for."""
        own = ctypes.create_string_buffer(call.text, TEXT_BYTES)
        told = [ctypes.create_string_buffer(TEXT_BYTES) for _ in self._ranks]
        arrivals = [(ctypes.addressof(text), TEXT_BYTES) for text in told]
        self._moves.spread((ctypes.addressof(own), TEXT_BYTES), arrivals, [TEXT_BYTES] * self._size, call.operation)
        return [text.raw for text in told]


def _room_for(parts: Sequence[Part]) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * max(1, sum(nbytes for _, nbytes in parts)))()


def _gathered(parts: Sequence[Part]) -> ctypes.Array[ctypes.c_char]:
    """``parts``, one behind the other."""
    memory = _room_for(parts)
    offset = ctypes.addressof(memory)
    for address, nbytes in parts:
        ctypes.memmove(offset, address, nbytes)
        offset += nbytes
    return memory
