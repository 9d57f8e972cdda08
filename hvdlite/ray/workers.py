"""The actors of a `RayExecutor`: where they are, what they are asked, what comes of it, and their end."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hvdlite.config import Config
from hvdlite.errors import RankFailedError, is_known_everywhere
from hvdlite.ray.one_node import several_nodes
from hvdlite.ray.worker import Where, Worker

_CLOSE_S = 5.0  # how long hvdlite may take to end in order; a worker that is busy does not come to it


class Workers:
    """``size`` actors with ``resources`` each, on one node.

    Args:
        use_current: place them in the placement group that this code runs in, if there is one.
        timeout_s: longest wait for room.

    Raises:
        TimeoutError: there was none; says what was asked for, and what the nodes have.
    """

    def __init__(self, size: int, resources: Mapping[str, float], use_current: bool, timeout_s: float) -> None:
        group: Any = get_current_placement_group() if use_current else None
        self._give_room_back = None
        if group is None:
            group = _make_room(size, resources, timeout_s)
            # Ray keeps the room for as long as this process lives, even where nobody asks for it any more.
            self._give_room_back = weakref.finalize(self, remove_placement_group, group)
            self._give_room_back.atexit = False
        actor: Any = ray.remote(Worker)
        actor = actor.options(
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        self._actors = [actor.remote(rank, size) for rank in range(size)]

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Make them ranks of one job, with ``variables`` in their environment.

        Raises:
            StartupError: they are on several nodes.
        """
        places: list[Where] = self.collect(self.call_all("where"))
        if len({place.node for place in places}) > 1:
            hosts = Counter(place.host for place in places)
            listed = ",".join(f"{host}:{count}" for host, count in hosts.items())
            raise several_nodes(f"Ray has placed the workers on several nodes ({listed})", len(places), listed)
        told = self.collect([self.call_first("open_meeting_point")])[0]
        gpus = [gpu for place in places for gpu in place.gpus]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}  # all: GPUs of other ranks are mapped
        is_horovod = "hvdlite.compat.horovod" in sys.modules
        self.collect(self.call_all("prepare", {**told, **visible, **variables}, is_horovod))

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """An ObjectRef for each rank."""
        shared = [ray.put(argument) for argument in arguments]  # pickled once
        return [getattr(actor, method).remote(*shared) for actor in self._actors]

    def call_first(self, method: str, *arguments: Any) -> Any:
        """On rank 0."""
        return getattr(self._actors[0], method).remote(*arguments)

    def collect(self, calls: Sequence[Any]) -> list[Any]:
        """The results of ``calls``, in order of rank.

        Raises:
            ray.exceptions.RayError: of the rank that has failed first, once the others have ended as well, or had
                HVDLITE_FAILURE_GRACE_SECONDS; its ``__cause__`` has the rank.
        """
        ranks = {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        failures: dict[int, RayError] = {}
        pending, deadline_s = list(calls), None
        while pending:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            done, pending = ray.wait(pending, timeout=left_s)
            if not done:
                break
            try:
                results[ranks[done[0]]] = ray.get(done[0])
            except RayError as error:
                failures[ranks[done[0]]] = error
                deadline_s = deadline_s or time.monotonic() + Config.from_env().failure_grace_s
        if failures:
            self._settle()
            # What hvdlite raised on the others is the consequence of what one rank raised.
            rank = min(failures, key=lambda rank: is_known_everywhere(_cause(failures[rank])))
            raise failures[rank].with_traceback(None) from RankFailedError(rank, _summary(rank, failures[rank]))
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """End all processes."""
        ray.wait(self.call_all("close"), num_returns=len(self._actors), timeout=_CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)
        if self._give_room_back is not None:
            self._give_room_back()

    def _settle(self) -> None:
        """Workers that are idle would end a few seconds after a failure, as ranks do that nobody will use again."""
        ray.wait(self.call_all("settle"), num_returns=len(self._actors), timeout=_CLOSE_S)


def _make_room(size: int, resources: Mapping[str, float], timeout_s: float) -> Any:
    """A placement group on one node."""
    asked = f"{size} workers of {', '.join(f'{count:g} {name}' for name, count in resources.items() if count)}"
    has = [{name: node["Resources"].get(name, 0.0) for name in resources} for node in ray.nodes() if node["Alive"]]
    nodes = "; ".join(", ".join(f"{count:g} {name}" for name, count in node.items()) for node in has)
    if not any(all(node[name] >= size * count for name, count in resources.items()) for node in has):
        warnings.warn(
            f"RayExecutor: no node has room for {asked}, even if it were idle (nodes have {nodes}); waiting "
            f"{timeout_s:g} s for one that has",
            RuntimeWarning,
            stacklevel=4,
        )
    group: Any = placement_group([dict(resources)] * size, strategy="STRICT_PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise TimeoutError(
            f"RayExecutor: no node had room for {asked} within {timeout_s:g} s (placement_group_timeout_s); nodes have "
            f"{nodes}. All workers have to be on one: between nodes hvdlite needs MPI, see hvdliterun -H"
        )
    return group


def _cause(error: RayError) -> BaseException:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, BaseException) else error


def _summary(rank: int, error: RayError) -> str:
    if isinstance(error, RayActorError):
        return f"the process of rank {rank} has ended: killed, out of memory, or crashed in native code"
    cause = _cause(error)
    return f"rank {rank} raised {type(cause).__name__}: {cause}"
