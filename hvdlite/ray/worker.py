"""What lives in an actor: one rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import ray

import hvdlite
from hvdlite import environment
from hvdlite.config import RAY_JOB
from hvdlite.errors import is_known_everywhere
from hvdlite.launched import told, without_launcher
from hvdlite.start.meeting_point import MeetingPoint


class Where(NamedTuple):
    """Of a worker: Ray's name of its node, the host's, and the GPUs that Ray has given it."""

    node: str
    host: str
    gpus: tuple[str, ...]


class Worker:
    """Rank ``rank`` of ``size``.

    Its repr() is what Ray puts before each line of its output, and into its tracebacks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._point: MeetingPoint | None = None
        self._executable: Any = None

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def where(self) -> Where:
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Where(ray.get_runtime_context().get_node_id(), socket.gethostname(), gpus)

    def open_meeting_point(self) -> dict[str, str]:
        """Variables by which ranks meet in this process."""
        self._point = MeetingPoint()
        self._point.open()
        return self._point.environment

    def prepare(self, variables: Mapping[str, str], is_horovod: bool) -> None:
        """Be a rank: before the user's code, which may import torch, comes here.

        Args:
            is_horovod: whether hvdlite is the driver's `horovod`, as it then is here.
        """
        before = environment.variables()
        foreign = before.keys() - without_launcher(before).keys()  # of mpirun or srun, which may have started Ray
        environment.remove(foreign)
        if is_horovod:
            import_module("hvdlite.compat.horovod")
        environment.add({RAY_JOB: "1", **told(self._rank, self._size), **variables})

    def make(self, kind: type | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The object that `execute` hands out."""
        if kind is not None:
            self._executable = self._together(lambda: kind(*args, **kwargs))

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._together(lambda: function(*args, **kwargs))

    def execute(self, function: Callable[[Any], Any]) -> Any:
        return self._together(lambda: function(self._executable))

    def execute_alone(self, function: Callable[[Any], Any]) -> Any:
        """While the others are idle, and wait for nothing."""
        return self._without_exit(lambda: function(self._executable))

    def settle(self) -> None:
        """Let go of a job that has failed: this process is to live on."""
        if hvdlite.is_initialized() and hvdlite.runtime().failure is not None:
            hvdlite.shutdown()

    def close(self) -> None:
        """End hvdlite in order, which completes the timeline."""
        hvdlite.shutdown()

    def _together(self, call: Callable[[], Any]) -> Any:
        """Outside of an actor an error would end this process, which is how the others would know."""
        try:
            return self._without_exit(call)
        except Exception as error:
            if hvdlite.is_initialized():
                if not is_known_everywhere(error):
                    hvdlite.runtime().fail(error)
                hvdlite.shutdown()
            raise

    def _without_exit(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SystemExit as error:  # would end the actor, and Ray would not say why
            raise RuntimeError(f"sys.exit({error.code!r}) was called") from error
