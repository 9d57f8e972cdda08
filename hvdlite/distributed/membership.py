"""This process's membership in a process group: all that the group owns here, from its creation to its end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hvdlite import recorder
from hvdlite.collectives.select import spin_us
from hvdlite.distributed.after_backward import LaneAfterBackward
from hvdlite.distributed.carrier import Carrier
from hvdlite.distributed.collectives import Collectives
from hvdlite.distributed.device_site import DeviceSite
from hvdlite.distributed.doors import Door, Entrance
from hvdlite.distributed.group_timeline import GroupTimeline
from hvdlite.distributed.lane import Lane
from hvdlite.distributed.network_carrier import NetworkCarrier
from hvdlite.distributed.node_carrier import NodeCarrier
from hvdlite.distributed.post import Post
from hvdlite.distributed.site import HostSite, Site
from hvdlite.distributed.steps import BackwardWaits, OptimizerSteps
from hvdlite.distributed.work import GroupWork
from hvdlite.errors import HorovodInternalError, ShutDownError, StallError, is_known_everywhere
from hvdlite.liveness.health import Health
from hvdlite.process_worlds import ProcessWorlds
from hvdlite.rank_list import rank_list
from hvdlite.torch import device
from hvdlite.world import World


class Membership:
    """A world of the group's own, whose backend is called in the order in which the program calls the group.

    Args:
        world: built, and not started: no coordinator is needed where all ranks make the same calls in the same order.
        name: of the group, for people.
        ranks: what the program calls the ranks of the group.
        timeout_s: the longest wait for a rank.
        entrance: for messages to this rank.
        doors: of all ranks.
        worlds: in which this process is beside this one.
        timeline: ends with the group, if there is one; ``steps`` likewise.
        store: torch's, of the group.
    """

    def __init__(
        self,
        world: World,
        name: str,
        ranks: Sequence[int],
        timeout_s: float,
        entrance: Entrance,
        doors: Sequence[Door],
        worlds: ProcessWorlds,
        timeline: GroupTimeline | None,
        steps: OptimizerSteps | None,
        store: Any,
    ) -> None:
        self.world = world
        self.name = name
        self.ranks = tuple(ranks)
        self.rank, self.size = world.topology.rank, len(world.topology.ranks)
        self._backward_waits = BackwardWaits(world.recorder)
        thread = f"hvdlite-group-{name}"
        self.lane: Lane
        self._carrier: Carrier
        if len(world.topology.nodes) == 1:
            self.lane = LaneAfterBackward(thread, self.size, world.node.cores, self._backward_waits)
            self._carrier = NodeCarrier(world, name, ranks, timeout_s)
        else:
            self.lane = Lane(thread)
            self._carrier = NetworkCarrier(world, name, ranks, timeout_s, store)
        patience_us = spin_us(world.config, world.node)
        self._post = Post(entrance, doors, self.rank, world.node.ranks, ranks, name, world.health, patience_us)
        world.health.add(self._post)
        self._collectives = Collectives(self._carrier, world.engine, self.rank, self.size)
        self._on_gpu: DeviceSite | None = None
        self._lock = threading.Lock()  # guards _on_gpu
        self._worlds = worlds
        self._timeline = timeline
        self._steps = steps
        self._is_closed = False

    def site_of(self, tensors: Iterable[torch.Tensor]) -> Site:
        """Where all of ``tensors`` are.

        Raises:
            ValueError: they are not all on the host, nor all on the GPU of this rank.
        """
        ordinals = {device.gpus.ordinal_of(tensor) for tensor in tensors}
        if ordinals <= {None}:
            return self._on_host()
        if len(ordinals) > 1:
            raise ValueError(f"process group {self.name}: tensors of one call are on the host and on a GPU, or on two")
        (ordinal,) = ordinals
        assert ordinal is not None
        device.gpus.choose(ordinal)
        with self._lock:
            if self._on_gpu is None:
                self._on_gpu = DeviceSite(self.world, self._carrier, self._post, self.name, self.ranks, self, ordinal)
            return self._on_gpu

    def _on_host(self) -> HostSite:
        # Not kept: it refers to this, which is to end, with the memory of its world, once nobody uses it any more.
        return HostSite(self._collectives, self._post, self)

    def barrier(self, name: str, title: str, limit_s: float | None) -> GroupWork:
        """On the host, once this rank's GPU has done what it was given before, if the group has worked with it."""
        run = self._collectives.barrier(name)
        return self._on_host().work(run if self._on_gpu is None else self._on_gpu.settled(run), [], title, limit_s)

    @property
    def timeout_s(self) -> float:
        """The longest wait for a rank."""
        return self._carrier.timeout_s

    def check(self) -> None:
        """Raise the reason once the group is of no use any more."""
        if self._is_closed:
            raise ShutDownError(f"process group {self.name} was destroyed on this rank, or belongs to another process")
        self.world.check()

    def set_timeout(self, timeout_s: float) -> None:
        """From here on."""
        self._carrier.timeout_s = timeout_s

    @contextmanager
    def timeout(self, timeout_s: float | None) -> Iterator[None]:
        """In the ``with`` block; None: as ever."""
        usual_s = self._carrier.timeout_s
        try:
            if timeout_s is not None:
                self._carrier.timeout_s = timeout_s
            yield
        finally:
            self._carrier.timeout_s = usual_s

    def waiting(self, title: str) -> AbstractContextManager[None]:
        """See `hvdlite.distributed.work.Waited`."""
        self._watch_steps()
        return self.world.recorder.span(recorder.Lane.WAIT, title)

    def is_waited_for_by_torch(self, title: str) -> None:
        """See `hvdlite.distributed.work.Waited`."""
        self._watch_steps()
        self._backward_waits.expect(title)

    def _watch_steps(self) -> None:
        if self._steps is not None:
            self._steps.watch()

    def whom_it_waits_for(self) -> str:
        """See `hvdlite.distributed.work.Waited`."""
        late = self._carrier.late()
        return f"of process group {self.name}" + (f", to which {rank_list(late)} did not come," if late else "")

    def departed(self) -> Sequence[int]:
        """The ranks that have left the group, as far as is known."""
        return () if self._is_closed else self._carrier.departed()

    def statistics(self) -> dict[str, int]:
        """What this rank has done in the group so far; see `hvdlite.statistics`."""
        return self.world.own_statistics()

    # The end.

    @property
    def has_failed(self) -> bool:
        """See `hvdlite.distributed.device_watch.Fallible`."""
        return self.world.has_failed

    @property
    def health(self) -> Health:
        """See `hvdlite.distributed.monitored_barrier.Watched`."""
        return self.world.health

    @property
    def failure(self) -> HorovodInternalError | None:
        """Why the group failed, if it did."""
        return self.world.failure

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks what has ended this one."""
        if not self._is_closed and not is_known_everywhere(error):
            self.world.health.report(error)

    def close(self) -> None:
        """Leave the group, after what is under way; other ranks need not. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        health, grace_s = self.world.health, self.world.config.failure_grace_s
        if not self.lane.close(grace_s):
            health.report(
                StallError(
                    f"process group {self.name}: a rank has ended while calls were under way for which it had waited "
                    f"{grace_s:g} s (HVDLITE_FAILURE_GRACE_SECONDS)"
                )
            )
            self.lane.close(grace_s)
        if self._on_gpu is not None:
            self._on_gpu.close()
        self._post.close(grace_s)
        if self._steps is not None:
            self._steps.close()
        if self._timeline is not None:
            self._timeline.close()
        self._worlds.remove(health)
        health.expect_end()
        self._carrier.leave()
        self.world.end()
        health.close()

    def abandon_in_child(self) -> None:
        """Called in a forked child: let go of what only the parent may use."""
        self._is_closed = True
        self._post.release()
        self.world.abandon(ShutDownError(f"process group {self.name} belongs to the process that has forked this one"))
        self.world.health.release()
