"""Ranks of a node meet in shared memory, on the threads that call; the coordinator only makes the memory, once."""

from __future__ import annotations

import torch

from hvdlite import _native
from hvdlite.collectives.select import spin_us
from hvdlite.errors import CollectiveError, ShutDownError
from hvdlite.group import Group
from hvdlite.memory.layout import align_up
from hvdlite.operations.allocate import allocate
from hvdlite.recorder import Lane
from hvdlite.tensor_parallel.meeting import CARD_BYTES, Meeting, purpose_of

_TURNS = 2  # whoever has passed the next barrier knows that all have read these cards


def shared_memory(group: Group, name: str, nbytes: int) -> torch.Tensor:
    """Memory of the host that all ranks of ``group`` map, which are on one node; zeroed. Collective.

    Returns:
        (at least nbytes,) uint8.
    """
    return torch.from_numpy(allocate(group, -(-nbytes // group.size), name).owner)  # the copies of a buffer, as one


class SharedMeeting(Meeting):
    """Of ``group``, whose ranks are on one node. Collective to build.

    Args:
        name: of the memory; the same on every rank, and not taken.
    """

    def __init__(self, group: Group, name: str) -> None:
        super().__init__(group.ranks, group.rank)
        self.group = group
        world = group.world
        barrier_bytes = align_up(_native.Barrier.bytes_needed(self.size))
        self._page = shared_memory(group, name, barrier_bytes + _TURNS * self.size * CARD_BYTES)
        self._cards = self._page.numpy()[barrier_bytes:].data
        spin = spin_us(world.config, world.node)
        self._limit_s = world.config.ub_timeout_s
        self._barrier = _native.Barrier(self._page.data_ptr(), self.rank, self.size, world.node.abort_address, spin)
        world.expect_at(self)

    def leave(self) -> None:
        """For the world: this rank comes to no other exchange."""
        self._barrier.leave()

    def _exchange_cards(self, card: bytes) -> list[bytes]:
        recorder = self.group.recorder
        if not recorder.enabled:
            return self._laid_out(card)
        with recorder.span(Lane.MEETING, purpose_of(card)[1]):
            return self._laid_out(card)

    def _laid_out(self, card: bytes) -> list[bytes]:
        """Wait until all cards are on the table, and look at them."""
        first = self._met % _TURNS * self.size
        own = (first + self.rank) * CARD_BYTES
        self._cards[own : own + CARD_BYTES] = card
        self._wait()
        places = range(first * CARD_BYTES, (first + self.size) * CARD_BYTES, CARD_BYTES)
        return [bytes(self._cards[place : place + CARD_BYTES]) for place in places]

    def _wait(self) -> None:
        status = self._barrier.wait(self._limit_s)
        if status == _native.Barrier.OK:
            return
        world = self.group.world
        where = f"tensor parallelism, exchange {self._met} of ranks {list(self.ranks)}"
        if status == _native.Barrier.TIMEOUT:
            late = [self.ranks[place] for place in self._barrier.late()]
            world.health.report(
                CollectiveError(
                    f"{where}: {late} did not come within {self._limit_s:g} s; if they are only slow, raise "
                    "HVDLITE_UB_TIMEOUT_SECONDS"
                )
            )
        world.check()
        if status == _native.Barrier.LEFT:
            world.hear_of_end()
            raise ShutDownError(f"{where}: a rank has shut down hvdlite")
        raise CollectiveError(f"{where}: the job was aborted while this rank waited")
