"""What moves the tensors of a process group between GPUs: ranks meet on the host, and then enqueue.

The engine of devices moves what it can; all else passes through the host, by the carrier of its tensors, and the
thread waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hvdlite import _native
from hvdlite.device_engine import DeviceEngine
from hvdlite.device_transfer import DeviceTransfer
from hvdlite.distributed.call import Call
from hvdlite.distributed.carrier import NOTHING, Carrier, Part
from hvdlite.distributed.device_watch import DeviceWatch
from hvdlite.distributed.engine_moves import EngineMoves
from hvdlite.dtypes import DType, Reduction
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.world import World

OnHost = Callable[[Sequence[Part], Sequence[Part]], None]


class DeviceCarrier(Carrier):
    """See `hvdlite.distributed.carrier.Carrier`; parts are in the memory of this rank's GPU.

    A call returns when it is enqueued, after what ``stream`` was given, and before what it will be given.

    Args:
        host: the carrier of the host's tensors, of the same ranks, called by the same threads.
        ordinal: of this rank's GPU.
        stream: on that GPU.
        watch: looks after it, and after the engine.
    """

    takes_sparse = False  # torch would hand out what replaces their memory again by the order of our stream

    def __init__(
        self, world: World, host: Carrier, ordinal: int, stream: _native.DeviceStream, watch: DeviceWatch
    ) -> None:
        self._world = world
        self._host = host
        self._ordinal = ordinal
        self._stream = stream
        self._watch = watch
        self._transfer = DeviceTransfer(world.recorder, host.timeout_s, world.check)
        self._device: DeviceEngine | None = None
        self._moves: EngineMoves | None = None

    def meet(self, call: Call) -> None:
        self._host.meet(call.on_gpus)

    def allreduce(
        self, call: Call, inputs: Sequence[int], outputs: Sequence[int], layout: Layout, reduction: Reduction
    ) -> None:
        moves = self._met(call, layout.wire_dtype)
        if moves is not None:
            with self._enqueuing(call):
                moves.allreduce(inputs, outputs, layout, reduction, call.operation)
            return
        sizes = [numel * layout.dtype.itemsize for numel in layout.numels]

        def on_host(sources: Sequence[Part], targets: Sequence[Part]) -> None:
            self._host.allreduce(call.on_gpus, _addresses(sources), _addresses(targets), layout, reduction)

        self._by_host(call, _parts(inputs, sizes), _parts(outputs, sizes), on_host)

    def reduce_scatter(
        self, call: Call, inputs: Sequence[int], output: int, layout: Layout, reduction: Reduction
    ) -> None:
        moves = self._met(call, layout.wire_dtype)
        if moves is not None:
            with self._enqueuing(call):
                moves.reduce_scatter(inputs, output, layout, reduction, call.operation)
            return
        nbytes = layout.numels[0] * layout.dtype.itemsize

        def on_host(sources: Sequence[Part], targets: Sequence[Part]) -> None:
            self._host.reduce_scatter(call.on_gpus, _addresses(sources), targets[0][0], layout, reduction)

        self._by_host(call, _parts(inputs, [nbytes] * len(inputs)), [(output, nbytes)], on_host)

    def spread(self, call: Call, departure: Part, arrivals: Sequence[Part], nbytes: Sequence[int]) -> None:
        moves = self._met(call)
        if moves is not None:
            with self._enqueuing(call):
                moves.spread(departure, arrivals, nbytes, call.operation)
            return

        def on_host(sources: Sequence[Part], targets: Sequence[Part]) -> None:
            self._host.spread(call.on_gpus, sources[0], targets, nbytes)

        self._by_host(call, [departure], arrivals, on_host)

    def alltoall(self, call: Call, departures: Sequence[Part], arrivals: Sequence[Part]) -> None:
        """Through the host; the engine of devices has no such operation."""
        self._by_host(call, departures, arrivals, partial(self._host.alltoall, call.on_gpus))

    def late(self) -> Sequence[int]:
        return self._host.late()

    def _met(self, call: Call, reduced: DType | None = None) -> EngineMoves | None:
        """Once all ranks have come for ``call``: what moves it on GPUs, None where it passes through the host.

        Args:
            reduced: the type that it reduces, if it does.
        """
        self._host.meet(call.on_gpus)
        if self._device is None:
            self._device = self._world.device_engine(self._ordinal)
            if self._device is not None:
                self._moves = EngineMoves(self._device.engine)
                self._watch.watch_over(self._device.engine.backend)
        if self._device is None or (reduced is not None and not self._device.engine.backend.supports(reduced)):
            return None
        return self._moves

    @contextmanager
    def _enqueuing(self, call: Call) -> Iterator[None]:
        """What the engine's stream is given in the ``with`` block comes between what the group's stream is given."""
        assert self._device is not None
        memory = self._device.memory
        memory.stream.follow([self._moment()])
        with self._watch.enqueuing(str(call.on_gpus), self._host.timeout_s):
            yield
        self._stream.follow([memory.moment()])

    def _by_host(self, call: Call, sources: Sequence[Part], targets: Sequence[Part], operate: OnHost) -> None:
        """``operate`` on copies of ``sources`` and ``targets``; what it has done is there when this returns."""
        moment = self._moment()
        where = OnDevice(self._ordinal, moment, lambda: self._stream.handle)

        def views(parts: Sequence[Part]) -> list[TensorView]:
            return [TensorView(address, (nbytes,), DType.UINT8, None, where) for address, nbytes in map(_kept, parts)]

        def on_host(inputs: Sequence[TensorView], outputs: Sequence[TensorView]) -> None:
            operate(*([(view.address, view.nbytes) for view in views] for views in (inputs, outputs)))

        self._transfer.timeout_s = self._host.timeout_s
        self._transfer.run_on(views(sources), views(targets), on_host, call.operation)

    def _moment(self) -> _native.Moment:
        return _native.Moment(self._ordinal, self._stream.handle)


def _kept(part: Part) -> Part:
    """Without an address where there is nothing to copy."""
    return part if all(part) else NOTHING


def _parts(addresses: Sequence[int], sizes: Sequence[int]) -> list[Part]:
    return list(zip(addresses, sizes, strict=True))


def _addresses(parts: Sequence[Part]) -> list[int]:
    return [address for address, _ in parts]
