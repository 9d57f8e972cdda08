"""Messages between ranks of a process group, as both ends know them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hvdlite.distributed.blocks import put_back
from hvdlite.distributed.work import GroupWork

ANY = -1  # rank


class NonsenseError(Exception):
    """What no rank sends, or what this one has no memory for. The text goes on with "has sent"."""


@dataclass(eq=False)
class Parcel:
    """A message that is to be sent: ``memory`` is that of ``block``."""

    tag: int
    block: torch.Tensor
    memory: memoryview
    work: GroupWork
    deadline_s: float


@dataclass(eq=False)
class Wish:
    """A tensor that waits for a message: ``memory`` is that of ``block``."""

    source: int
    tag: int
    tensor: torch.Tensor
    block: torch.Tensor
    memory: memoryview
    work: GroupWork
    deadline_s: float

    def takes(self, source: int, tag: int) -> bool:
        return self.source in (ANY, source) and self.tag == tag


class Offer(NamedTuple):
    """Where the bytes of a message are in the sender's memory, and its number among such messages."""

    address: int
    number: int


class Arrival:
    """A message that arrives, or has arrived.

    Attributes:
        wish: the tensor that waits for it; None so far.
        offer: the bytes are still to be taken; None: they come over the link.
        received: bytes of it that are there.
        is_complete: it is delivered as soon as it has a wish.
        memory: where they are, from `open` on.
    """

    def __init__(self, source: int, tag: int, nbytes: int, wish: Wish | None, offer: Offer | None) -> None:
        self.source = source
        self.tag = tag
        self.nbytes = nbytes
        self.wish = wish
        self.offer = offer
        self.received = 0
        self.is_complete = False
        self.memory = memoryview(b"")
        self._is_in_place = False
        if offer is None:
            self.open()

    @property
    def is_whole(self) -> bool:
        return self.received == self.nbytes

    def open(self) -> None:
        """From here on it has memory: that of the tensor that waits for it, if there is one and it fits.

        Raises:
            NonsenseError: there is no memory for it.
        """
        memory = None if self.wish is None else self.wish.memory
        self._is_in_place = memory is not None and len(memory) == self.nbytes
        if memory is None or not self._is_in_place:
            try:
                memory = memoryview(np.empty(self.nbytes, np.uint8).data)
            except (MemoryError, OverflowError, ValueError) as error:  # the last two: more than numpy can count
                raise NonsenseError(f"a message of {self.nbytes} bytes, for which there is no memory") from error
        self.memory = memory

    def deliver(self, names: Sequence[int]) -> None:
        """To the wish; ``names`` is what errors call the ranks."""
        wish = self.wish
        assert wish is not None
        own = wish.memory
        if len(own) != self.nbytes:
            wish.work.finish(
                ValueError(
                    f"recv: rank {names[self.source]} has sent {self.nbytes} bytes, and the tensor for them has "
                    f"{len(own)}; pass one of the same shape and dtype as the sender's"
                )
            )
            return
        if own and not self._is_in_place:
            own[:] = self.memory
        put_back([wish.tensor], [wish.block])
        wish.work.finish(source=self.source)


def memory_of(block: torch.Tensor) -> memoryview:
    """The bytes of ``block``, which is contiguous, as long as it lives."""
    nbytes = block.numel() * block.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(block.data_ptr())).cast("B") if nbytes else memoryview(b"")
