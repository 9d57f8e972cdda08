"""Calls of a process group on tensors in the memory of this rank's GPU: they are enqueued on a stream of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdlite import _native
from hvdlite.distributed import streams
from hvdlite.distributed.carrier import Carrier
from hvdlite.distributed.collectives import Collectives, Run
from hvdlite.distributed.device_carrier import DeviceCarrier
from hvdlite.distributed.device_messages import DeviceMessages
from hvdlite.distributed.device_watch import DeviceWatch, Enqueued
from hvdlite.distributed.device_work import DeviceWork, WaitedOnDevice
from hvdlite.distributed.post import Post
from hvdlite.distributed.site import Note, SiteGroup, Tensors
from hvdlite.distributed.work import GroupWork
from hvdlite.memory.views import OnDevice
from hvdlite.naps import nap_until
from hvdlite.torch import device
from hvdlite.world import World


class DeviceGroup(SiteGroup, WaitedOnDevice, Protocol):
    """A group, as this site asks it."""


class DeviceSite:
    """See `Site`. The engine of devices is built by the first call of `collectives`, which all ranks make.

    Args:
        host: the carrier of the group's tensors of the host.
        ranks: what errors call the ranks of the group.
        ordinal: of this rank's GPU.
    """

    def __init__(
        self,
        world: World,
        host: Carrier,
        post: Post,
        name: str,
        ranks: Sequence[int],
        group: DeviceGroup,
        ordinal: int,
    ) -> None:
        self._world = world
        self._host = host
        self._post = post
        self._group = group
        self._ordinal = ordinal
        self._stream = _native.DeviceStream(ordinal)
        self._watch = DeviceWatch(name, ranks, world)
        carrier = DeviceCarrier(world, host, ordinal, self._stream, self._watch)
        self.collectives = Collectives(carrier, world.engine, world.engine.rank, world.engine.size)
        self._messages = DeviceMessages(ordinal, world.check)

    def work(self, run: Run, result: Tensors, title: str, limit_s: float | None) -> GroupWork:
        """On the stream, after what the current one has been given until now."""
        where = self._here()

        def enqueue() -> None:
            self._stream.follow([where.ready])
            with self._group.timeout(limit_s):
                try:
                    with streams.streams.on(self._ordinal, self._stream.handle):
                        run()
                finally:  # also where only a part of it was enqueued
                    work.enqueued = Enqueued(self._moment(), title, (run, where), self._host.timeout_s)
                    self._watch.add(work.enqueued)

        work = DeviceWork(enqueue, result, title, self._group, where)
        return work

    def send(self, tensors: Tensors, to: int, tag: int, title: str, note: Note) -> GroupWork:
        """The thread waits until the tensor is on the host."""
        on_host = self._messages.download(tensors[0], title, self._group.timeout_s)
        work = GroupWork(None, tensors, title, self._group)
        note(work, tensors)
        self._post.send(on_host, to, tag, work, self._group.timeout_s)
        return work

    def receive(self, tensors: Tensors, source: int, tag: int, title: str, note: Note) -> GroupWork:
        """From memory of the host the message goes to the GPU once it is there, whoever waits for it."""
        (tensor,) = tensors
        arrival = self._messages.expect(tensor)
        limit_s = self._group.timeout_s

        def deliver() -> None:
            work.enqueued = Enqueued(arrival.upload(), title, (tensor, arrival), limit_s)
            self._watch.add(work.enqueued)

        work = _Received(deliver, tensors, title, self._group, arrival.where)
        note(work, tensors)
        self._post.receive(arrival.on_host, source, tag, work, limit_s)
        return work

    def settled(self, run: Run) -> Run:
        """``run``, once the GPU has done what the current stream and the group have been given before."""
        ready = self._here().ready

        def settle() -> None:
            self._stream.follow([ready])
            late = "barrier: what this rank's GPU was given before is not done"
            moment, limit_s = self._moment(), self._host.timeout_s
            nap_until(lambda: moment.is_reached, late, timeout_s=limit_s, check=self._world.check)
            run()

        return settle

    def close(self) -> None:
        """Let the stream come to an end."""
        self._watch.close()

    def _here(self) -> OnDevice:
        """This GPU, now in the current stream."""

        def stream_now() -> int:
            return device.gpus.current_stream(self._ordinal)

        return OnDevice(self._ordinal, _native.Moment(self._ordinal, stream_now()), stream_now)

    def _moment(self) -> _native.Moment:
        return _native.Moment(self._ordinal, self._stream.handle)


class _Received(DeviceWork):
    """A message; what delivers it to the GPU is done when it has come."""

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        if error is None and self._run is not None:
            try:
                self._run()
            except RuntimeError as refused:  # by the driver
                error = refused
        super().finish(error, source)
