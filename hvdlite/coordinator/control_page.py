"""The shared page through which the ranks of a node talk and wake each other; nothing in it polls.

Per rank a doorbell (a futex), a byte stream to the node leader, and a line that says how much of the frozen plan it is
ready for (csrc/node/ready_counts.h); from the leader one byte stream, the log, that the other local ranks read. Bytes
are written before the head that covers them is stored with release order.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from hvdlite import _native
from hvdlite.node import Node

_LINE_BYTES = 64  # every word that another rank writes has a cache line of its own
_MAILBOX_BYTES = 1 << 16
_LOG_BYTES = 1 << 18


class ByteStream:
    """A bounded pipe from one writer to ``readers``, over shared memory.

    It takes what fits and gives what is there: neither end ever waits here.
    """

    def __init__(self, memory: memoryview, address: int, readers: int, capacity: int) -> None:
        self._head = address
        self._tails = [address + _LINE_BYTES * (1 + i) for i in range(readers)]
        data = _LINE_BYTES * (1 + readers)
        self._data = memory[data : data + capacity]
        self._capacity = capacity
        self._room_until = capacity  # what readers have left free when the writer looked last
        self.bytes_written = 0  # at this end, by this process: also where it is, since nobody else writes
        self.bytes_read = 0

    @staticmethod
    def bytes_needed(readers: int, capacity: int) -> int:
        return _LINE_BYTES * (1 + readers) + capacity

    def write(self, outbox: bytearray) -> bool:
        """Move bytes from the front of ``outbox`` into the stream; whether any were."""
        head = self.bytes_written
        if head + len(outbox) > self._room_until:
            self._room_until = self._capacity + min(map(_native.load64, self._tails))
        count = min(self._room_until - head, len(outbox))
        if count == 0:
            return False
        start = head % self._capacity
        first = min(count, self._capacity - start)
        self._data[start : start + first] = outbox[:first]
        if first < count:
            self._data[: count - first] = outbox[first:count]
        del outbox[:count]
        self.bytes_written += count
        _native.store64(self._head, self.bytes_written)
        return True

    def read(self, reader: int) -> bytes:
        """Everything that this reader has not read yet."""
        tail = _native.load64(self._tails[reader])
        count = _native.load64(self._head) - tail
        if count == 0:
            return b""
        start = tail % self._capacity
        data = bytes(self._data[start : start + count])
        if len(data) < count:
            data += bytes(self._data[: count - len(data)])
        _native.store64(self._tails[reader], tail + count)
        self.bytes_read += count
        return data


class ControlPage:
    """One rank's view of its node's page. Collective to build."""

    def __init__(self, node: Node) -> None:
        size = node.local_size
        mailbox_bytes = ByteStream.bytes_needed(1, _MAILBOX_BYTES)
        log_bytes = ByteStream.bytes_needed(size - 1, _LOG_BYTES)
        self._segment = node.share(2 * _LINE_BYTES * size + mailbox_bytes * size + log_bytes)
        self._abort_address = node.abort_address
        self._local_rank = node.local_rank
        self._local_size = size
        self._doorbells = [self._segment.address + _LINE_BYTES * i for i in range(size)]
        self.counts = _native.ReadyCounts(
            self._segment.address + _LINE_BYTES * size,
            self._segment.address,
            node.local_rank,
            size,
        )
        """How much of the frozen plan each rank is ready for, for native code."""
        self.want_ring(node.local_rank == 0)  # leaders pass counts on

        memory = self._segment.memory.data
        offset = 2 * _LINE_BYTES * size
        self._mailboxes = []
        for _ in range(size):
            self._mailboxes.append(ByteStream(memory[offset:], self._segment.address + offset, 1, _MAILBOX_BYTES))
            offset += mailbox_bytes
        self._log = ByteStream(memory[offset:], self._segment.address + offset, size - 1, _LOG_BYTES)

    @property
    def aborted(self) -> bool:
        """Whether the world has failed, as far as this node knows."""
        return _native.load32(self._abort_address) != 0

    @property
    def bytes_written(self) -> int:
        """By this rank: to its leader, or, as the leader, to the log."""
        return self._log.bytes_written + sum(mailbox.bytes_written for mailbox in self._mailboxes)

    @property
    def bytes_read(self) -> int:
        """By this rank: of the log, or, as the leader, of what its node has sent."""
        return self._log.bytes_read + sum(mailbox.bytes_read for mailbox in self._mailboxes)

    def send_to_leader(self, outbox: bytearray) -> None:
        """Take what fits off the front of ``outbox``."""
        if self._mailboxes[self._local_rank].write(outbox):
            self.ring(0)

    def receive(self, local_rank: int) -> bytes:
        """For the leader: what a local rank has sent."""
        return self._mailboxes[local_rank].read(0)

    def publish(self, outbox: bytearray) -> None:
        """For the leader: append to the log what fits, for the other ranks to read."""
        if self._local_size == 1:
            outbox.clear()
        elif self._log.write(outbox):
            for local_rank in range(self._local_size):
                if local_rank != self._local_rank:
                    self.ring(local_rank)

    def read_log(self) -> bytes:
        """For other ranks than the leader: what it has appended."""
        return self._log.read(self._local_rank - 1)

    def set_ready(self, plan: int, count: int) -> None:
        """Say how much of plan number ``plan`` this rank is ready for; if all have waited for it, ring who wants it."""
        self.counts.set(plan, count)

    def ready(self, plan: int) -> int:
        """How many operations of a plan all local ranks are ready for."""
        return self.counts.all(plan)

    def agree(self, plan: int, wish: int, heard: int, timeout_s: float, spin_us: int) -> bool:
        """Whether all local ranks want the same in place of ``plan``; see `hvdlite._native.ReadyCounts.agree`."""
        return self.counts.agree(plan, wish, heard, timeout_s, spin_us)

    def want_ring(self, wanted: bool) -> None:
        """Whether this rank's coordinator is rung when all local ranks are ready for more of a plan than before."""
        self.counts.want_ring(wanted)

    def ring(self, local_rank: int) -> None:
        """Wake a rank's coordinator."""
        _native.doorbell_ring(self._doorbells[local_rank])

    def ring_self(self) -> None:
        """Wake this rank's coordinator, from any of its threads."""
        _native.doorbell_ring(self._doorbells[self._local_rank])

    def ring_for(self, sockets: Iterable[socket.socket]) -> _native.SocketBell:
        """From here on ring this rank's coordinator whenever one of ``sockets`` has something new."""
        descriptors = [end.fileno() for end in sockets]
        return _native.SocketBell(descriptors, self._doorbells[self._local_rank], self._segment)

    def rings(self) -> int:
        """How often this rank was rung; give it to `sleep` to miss none that came since."""
        return _native.load32(self._doorbells[self._local_rank])

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Sleep on this rank's doorbell unless it has rung since ``seen``, and no other thread follows that."""
        _native.doorbell_wait(self._doorbells[self._local_rank], seen, timeout_s)

    # For a thread that does the coordinator's work for a while.

    def begin_assistance(self) -> None:
        """From here on rings wake this thread, and the coordinator thread sleeps on."""
        _native.doorbell_begin_assistance(self._doorbells[self._local_rank])

    def assist(self, seen: int, timeout_s: float, spin_us: int) -> None:
        """`sleep` of that thread, which spins a little before."""
        _native.doorbell_assist(self._doorbells[self._local_rank], seen, timeout_s, spin_us)

    def end_assistance(self, heard: int) -> int:
        """Leave, with ``heard`` rings followed; how often this rank was rung by then."""
        return _native.doorbell_end_assistance(self._doorbells[self._local_rank], heard)
