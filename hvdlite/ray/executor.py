"""RayExecutor: what users see of ranks that are actors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hvdlite.errors import ConfigError, StartupError
from hvdlite.ray.one_node import several_nodes

if TYPE_CHECKING:
    from hvdlite.ray.workers import Workers


@dataclass(frozen=True)
class Settings:
    """How a `RayExecutor` starts.

    Attributes:
        timeout_s: longest that ``hvd.init()`` may take (HVDLITE_START_TIMEOUT).
        placement_group_timeout_s: longest wait for a node that has room for all workers.
        nics: network interfaces (HVDLITE_NETWORK_INTERFACES); None: hvdlite's choice.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: frozenset[str] | None = None


class RayExecutor:
    """Actors of Ray that are the ranks of one job, all on one node. May be used in a ``with`` statement.

    Workers live from start() to shutdown(), and no longer than this object or the process that has made it. Each runs
    one function at a time, and keeps its imports, its GPU and hvdlite's runtime from one to the next.

    Args:
        settings: of `create_settings`, or of Horovod.
        num_workers: number of ranks; or ``num_hosts`` (1) and ``num_workers_per_host``.
        cpus_per_worker: as Ray counts them.
        use_gpu: each worker gets ``gpus_per_worker`` (1), and sees those of all: `torch.cuda.set_device` takes
            ``hvd.local_rank()``.
        use_current_placement_group: place workers in the placement group that this code runs in, if there is one.
        min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout, override_discovery: of jobs that grow
            and shrink, which hvdlite does not have.

    Raises:
        ConfigError: (a StartupError and ValueError) arguments contradict one another, or ``min_workers`` is given.
        StartupError: there is more than one host.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | set[str] | None = None,
    ) -> Settings:
        """`Settings`. Ray starts the workers, so nothing of ssh is used."""
        return Settings(timeout_s, placement_group_timeout_s, frozenset(nics) if nics else None)

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if min_workers is not None or max_workers is not None:
            raise ConfigError("RayExecutor: the ranks of a job of hvdlite do not change; pass num_workers alone")
        if num_workers is not None and num_hosts is not None:
            raise ConfigError("RayExecutor: pass num_workers, or num_hosts and num_workers_per_host, not both")
        if num_hosts is not None and num_hosts > 1:
            raise several_nodes(f"{num_hosts} hosts", num_hosts * (num_workers_per_host or 1), "a:4,b:4")
        size = num_workers if num_workers is not None else (num_hosts or 0) * (num_workers_per_host or 1)
        if size < 1:
            raise ConfigError(f"RayExecutor: {size} workers; pass num_workers of at least 1")
        if gpus_per_worker is not None and not use_gpu:
            raise ConfigError("RayExecutor: gpus_per_worker without use_gpu=True; pass both")
        if gpus_per_worker is not None and gpus_per_worker < 1:
            raise ConfigError(f"RayExecutor: gpus_per_worker is {gpus_per_worker}; it must be at least 1")
        self.size = size
        self.settings = settings if settings is not None else Settings()
        self._resources: dict[str, float] = {"CPU": cpus_per_worker, "GPU": (gpus_per_worker or 1) if use_gpu else 0}
        self._use_current_placement_group = use_current_placement_group
        self._started: Workers | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, object] | None = None,
    ) -> None:
        """Start the workers.

        Args:
            executable_cls: each worker makes an object of it, with these arguments, which `execute` hands out.
            extra_env_vars: to be set in workers before anything else, as {"HVDLITE_TIMELINE": "trace.json"}.

        Raises:
            TimeoutError: no node had room for all workers within ``placement_group_timeout_s``.
            StartupError: workers are on several nodes, or Ray is not there.
            ray.exceptions.RayError: what a worker raised; see `run`.
        """
        if self._started is not None:
            raise StartupError("RayExecutor: start() was called before; call shutdown() first")
        try:
            from hvdlite.ray.workers import Workers
        except ModuleNotFoundError as error:
            raise StartupError(f"hvdlite.ray needs Ray ({error}): pip install 'hvdlite[ray]'") from error

        settings = self.settings
        variables = {"HVDLITE_START_TIMEOUT": f"{settings.timeout_s:g}"}
        if settings.nics:
            variables["HVDLITE_NETWORK_INTERFACES"] = ",".join(sorted(settings.nics))
        variables |= {name: str(value) for name, value in (extra_env_vars or {}).items()}
        started = Workers(
            self.size, self._resources, self._use_current_placement_group, settings.placement_group_timeout_s
        )
        try:
            started.prepare(variables)
            made = started.call_all("make", executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
            started.collect(made)
        except BaseException:
            started.close()
            raise
        self._started = started

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on all workers; returns what each has returned, in order of rank.

        Where one raises, the others learn that this rank has failed, as in any job of hvdlite; the next function has to
        call ``hvd.init()`` again.

        Args:
            callbacks: only elastic jobs of Horovod call them, so nobody does here.

        Raises:
            ray.exceptions.RayTaskError: of the rank that failed first, and also of the type that was raised there; its
                ``__cause__`` is a RankFailedError, which has the rank.
            ray.exceptions.RayActorError: the process of a worker has ended; likewise.
        """
        _no_callbacks(callbacks)
        workers = self._workers()
        return workers.collect(workers.call_all("run", fn, tuple(args or ()), dict(kwargs or {})))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """`run` that does not wait: an ObjectRef for each rank, whose errors `ray.get` raises.

        After a failure, workers whose function has returned end within HVDLITE_FAILURE_GRACE_SECONDS; `run` keeps them.
        """
        return self._workers().call_all("run", fn, tuple(args or ()), dict(kwargs or {}))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """`run`, of a function of the worker's ``executable_cls`` object, or of None."""
        _no_callbacks(callbacks)
        workers = self._workers()
        return workers.collect(workers.call_all("execute", fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """`execute` on rank 0 alone; what it raises ends no job."""
        workers = self._workers()
        return workers.collect([workers.call_first("execute_alone", fn)])[0]

    def shutdown(self) -> None:
        """End the workers: hvdlite in order where they are idle, their processes in any case. May be called again."""
        started, self._started = self._started, None
        if started is not None:
            started.close()

    def __enter__(self) -> RayExecutor:
        if self._started is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _workers(self) -> Workers:
        if self._started is None:
            raise StartupError("RayExecutor: no worker runs; call start() first")
        return self._started


def _no_callbacks(callbacks: Sequence[Callable[..., Any]] | None) -> None:
    if callbacks:
        warnings.warn("RayExecutor: callbacks are not called", RuntimeWarning, stacklevel=3)
