"""The ranks of a node exchange rows through windows in the memory of their GPUs, while their matmuls run.

Matmuls are torch's, on the caller's stream. Copies between GPUs, meetings and sums are on streams of `DeviceWindows`;
events order what depends on what, and threads only enqueue. Of three ranks, on the first (above: the caller's stream):

    gather, chunked     | own rows: to the window; matmul | of rank 1 | of rank 2
                          meet; copy rows of rank 1; copy rows of rank 2

    ring_exchange       | product for rank 1 | for rank 2 | own
                                               copy to rank 1; copy to rank 2; meet; sum

    pipeline            | half of all products | other half
                                                 meet; sum half; meet; sum other half

    bulk                | all products |
                                         meet; sum

By multicast a GPU writes its rows to the windows of all ranks at once, and the switch between the GPUs adds up what a
GPU reads (NVLink SHARP); matmuls are as in bulk:

    gather, multicast   | own rows
                          write them to all; meet | matmul
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hvdlite import _native
from hvdlite.dtypes import ReduceOp
from hvdlite.tensor_parallel.carrier import Carrier, Finish, Produce, Rows, Use
from hvdlite.tensor_parallel.device_windows import DeviceWindows, Place
from hvdlite.tensor_parallel.meeting import Meeting
from hvdlite.tensor_parallel.methods import Method
from hvdlite.torch.device import Now
from hvdlite.torch.tensor_view import dtype_of

_PIECES = 2  # of a pipeline
_VECTOR_BYTES = 16  # of which multicast takes whole ones


class DeviceCarrier(Carrier):
    """Exchanges between GPUs of a node, by ``method``.

    The caller's stream is ordered after an exchange as after any operation on it; nothing waits for a GPU.

    Args:
        windows: of the ranks of ``meeting``, that may map one another's.
        method: RING_EXCHANGE, PIPELINE, BULK or MULTICAST; the last of windows that have it. What is not in whole
            vectors of 16 bytes, it exchanges as BULK.
    """

    def __init__(self, meeting: Meeting, windows: DeviceWindows, method: Method) -> None:
        super().__init__(meeting)
        self._windows = windows
        self.method = method
        self._is_bulk = method in (Method.BULK, Method.MULTICAST)

    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        """One meeting; every rank copies the shards of the others, and uses what has come while the next comes."""
        stream = self._begin(rows, shard, self.size * rows.nbytes)
        whole, copied, _source = self._gathered(rows, shard)
        height = rows.shape[0]
        if not self._is_bulk:
            use(whole[self.rank], self.rank * height)
        for peer, moment in copied:
            moment.precede(stream)
            if not self._is_bulk:
                use(whole[peer], peer * height)
        if self._is_bulk:
            use(whole.flatten(0, 1), 0)
        return whole.flatten(0, 1)

    def begin_gather(self, rows: Rows, shard: torch.Tensor) -> Finish:
        stream = self._begin(rows, shard, self.size * rows.nbytes)
        self._windows.will_be_read_late()
        whole, copied, source = self._gathered(rows, shard)
        sources = [source]  # kept until the caller's stream, on which its memory is handed out again, has followed

        def finish() -> torch.Tensor:
            for _, moment in copied:
                moment.precede(stream)
            sources.clear()
            return whole.flatten(0, 1)

        return finish

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        return self.begin_reduce_scatter(rows, produce)()

    def begin_reduce_scatter(self, rows: Rows, produce: Produce) -> Finish:
        """A meeting, of a pipeline one for each piece; every rank adds up its rows of all products."""
        result = rows.empty(rows.shape[0] // self.size)
        stream = self._begin(rows, result, self._needed(rows.nbytes))
        if self.method is Method.RING_EXCHANGE:
            self._push(rows, produce, result)
        else:
            self._pull_sums(rows, produce, result, _PIECES if self.method is Method.PIPELINE else 1)
        done = self._windows.ended(str(rows))

        def finish() -> torch.Tensor:
            done.precede(stream)
            return result

        return finish

    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        """Two meetings; every rank adds up an equal share of all products, for all."""
        result = rows.empty(rows.shape[0])
        stream = self._begin(rows, result, rows.nbytes)
        place = self._windows.place(0, rows.nbytes)
        produce(place.memory.view(rows.dtype).view(rows.shape), 0)
        if self._by_multicast(place.multicast, rows.nbytes):
            self._windows.multicast_allreduce(place, dtype_of(rows.dtype))
        else:
            self._windows.allreduce(place, result.numel(), dtype_of(rows.dtype), ReduceOp.SUM)
        self._windows.first.copy(result.data_ptr(), place.addresses[self.rank], rows.nbytes)
        self._windows.ended(str(rows)).precede(stream)
        return result

    def reserve(self, nbytes: int, like: torch.Tensor) -> None:
        where = Now().on_device(like)
        assert where is not None
        self._windows.reserve(self._needed(nbytes), where)

    def _needed(self, nbytes: int) -> int:
        """Of a window, for products of ``nbytes``: what is sent and what is received have each a place of their own."""
        return 2 * nbytes if self.method is Method.RING_EXCHANGE else nbytes

    def _begin(self, rows: Rows, tensor: torch.Tensor, nbytes: int) -> int:
        """Meet on the host; the caller's stream, on which ``tensor`` is."""
        where = Now().on_device(tensor)
        assert where is not None
        purpose = f"{rows}, by {self.method.value}"
        self._windows.reserve(nbytes, where, purpose)
        self.meeting.meet(purpose)
        self._windows.begin(where)
        return where.current_stream()

    def _gathered(
        self, rows: Rows, shard: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[int, _native.Moment]], torch.Tensor]:
        """The window, (size, rows, columns), with this rank's shard; when the shards of which peers are there; and what
        is read until then."""
        place = self._windows.place(0, self.size * rows.nbytes)
        whole = place.memory.view(rows.dtype).view(self.size, *rows.shape)
        if self._by_multicast(place.multicast, rows.nbytes):
            source = shard.contiguous()
            if source.data_ptr() % _VECTOR_BYTES:
                source = source.clone()
            return whole, [(self.rank, self._spread(rows, source, place))], source
        whole[self.rank].copy_(shard)
        return whole, self._pulled(rows, place), shard

    def _spread(self, rows: Rows, source: torch.Tensor, place: Place) -> _native.Moment:
        """This rank writes its shard to all windows; when all ranks have done so."""
        windows = self._windows
        windows.await_readers()
        windows.follow(windows.first)
        windows.first.multicast_store(place.multicast + self.rank * rows.nbytes, source.data_ptr(), rows.nbytes)
        windows.meet()
        return windows.ended(str(rows))

    def _pulled(self, rows: Rows, place: Place) -> list[tuple[int, _native.Moment]]:
        """When the shards of which peers are in this rank's window, to which they are copied."""
        windows = self._windows
        windows.meet()
        windows.second.follow([windows.moment(windows.first)])
        copied = []
        for peer, stream in self._peers():
            offset = peer * rows.nbytes
            stream.copy(place.addresses[self.rank] + offset, place.addresses[peer] + offset, rows.nbytes)
            copied.append((peer, windows.moment(stream)))
        windows.join()
        windows.ended(str(rows))
        return copied

    def _push(self, rows: Rows, produce: Produce, result: torch.Tensor) -> None:
        """Products go to their ranks one after the other, this rank's own last; they are added where they have come."""
        windows = self._windows
        sent, received = windows.place(0, rows.nbytes), windows.place(rows.nbytes, rows.nbytes)
        part_bytes = rows.nbytes // self.size
        windows.await_readers()
        for peer, stream in self._peers():
            produce(self._part(rows, sent, peer), peer * len(result))
            windows.follow(stream)
            stream.copy(
                received.addresses[peer] + self.rank * part_bytes,
                sent.addresses[self.rank] + peer * part_bytes,
                part_bytes,
            )
        produce(self._part(rows, received, self.rank), self.rank * len(result))
        windows.join()
        windows.meet()
        own = received.addresses[self.rank]
        self._sum(rows, result, [own + peer * part_bytes for peer in range(self.size)])

    def _pull_sums(self, rows: Rows, produce: Produce, result: torch.Tensor, pieces: int) -> None:
        """A piece of every rank's rows after the other; while the next is computed, each rank adds up its own."""
        windows = self._windows
        place = windows.place(0, rows.nbytes)
        height = len(result)
        row_bytes = rows.nbytes // max(rows.shape[0], 1)
        if pieces == 1:
            produce(place.memory.view(rows.dtype).view(rows.shape), 0)
        for number in range(pieces):
            start, stop = (height * end // pieces for end in (number, number + 1))
            if pieces > 1:
                for peer in ((self.rank + step) % self.size for step in range(1, self.size + 1)):
                    produce(self._part(rows, place, peer)[start:stop], peer * height + start)
            windows.meet()
            offset = (self.rank * height + start) * row_bytes
            nbytes = (stop - start) * row_bytes
            if self._by_multicast(place.multicast, nbytes):
                windows.first.multicast_sum(result.data_ptr(), place.multicast + offset, nbytes, dtype_of(rows.dtype))
            else:
                self._sum(rows, result[start:stop], [address + offset for address in place.addresses])

    def _by_multicast(self, address: int, part_bytes: int) -> bool:
        """Whether what each rank writes or adds up, ``part_bytes`` of it, goes by multicast at ``address``."""
        return self.method is Method.MULTICAST and address != 0 and part_bytes % _VECTOR_BYTES == 0

    def _part(self, rows: Rows, place: Place, peer: int) -> torch.Tensor:
        """The rows of ``peer`` in this rank's copy of ``place``, which holds all."""
        height, columns = rows.shape
        return place.memory.view(rows.dtype).view(self.size, height // self.size, columns)[peer]

    def _sum(self, rows: Rows, result: torch.Tensor, sources: list[int]) -> None:
        if result.numel():
            self._windows.first.reduce([result.data_ptr()], sources, result.numel(), dtype_of(rows.dtype), ReduceOp.SUM)

    def _peers(self) -> Iterator[tuple[int, _native.DeviceStream]]:
        """The other ranks, from the next one on, and the stream for what is copied from or to each."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size, self._windows.first if step % 2 else self._windows.second
