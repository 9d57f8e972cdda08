"""hvdlite: data-parallel training with MPI. The framework-free part; PyTorch users import hvdlite.torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

try:
    from hvdlite import _native  # noqa: F401
except ImportError as error:
    raise ImportError(
        "hvdlite's compiled extension is not here. In a checkout, Python finds the sources in the current directory "
        "before the installed package: change to another directory, or use hvdliterun; or build the extension here "
        "with: python setup.py build_ext --inplace"
    ) from error

from hvdlite import mpi
from hvdlite.config import Config
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import (
    CollectiveError,
    ConfigError,
    DuplicateNameError,
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    RankFailedError,
    ShutDownError,
    StallError,
    StallWarning,
    StartupError,
)
from hvdlite.launch import run
from hvdlite.logs import configure_logging
from hvdlite.memory import TensorView
from hvdlite.process import ProcessHooks
from hvdlite.runtime import Runtime
from hvdlite.version import __version__

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "CollectiveError",
    "Config",
    "ConfigError",
    "DType",
    "DuplicateNameError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "NotInitializedError",
    "RankFailedError",
    "ReduceOp",
    "Runtime",
    "ShutDownError",
    "StallError",
    "StallWarning",
    "StartupError",
    "TensorView",
    "__version__",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "runtime",
    "shutdown",
    "size",
    "statistics",
]

logging.getLogger("hvdlite").addHandler(logging.NullHandler())

_hooks: ProcessHooks | None = None  # holds the default runtime; the only module variable that changes


def init(
    comm: MPI.Comm | Sequence[int] | None = None,
    *,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Start hvdlite on the ranks of ``comm``; a collective call. Does nothing where it already runs.

    Args:
        comm: an mpi4py communicator (duplicated), a list of ranks of COMM_WORLD, or None for all ranks that the
            launcher started; without a launcher that is this process alone, and MPI is not touched.
        versions: of packages that must be the same on every rank.

    Raises:
        StartupError: says what is wrong and the way out.
    """
    global _hooks
    if is_initialized():
        return
    if _hooks is None:
        _hooks = ProcessHooks()
    config = Config.from_env()
    deadline = mpi.start_deadline(config)
    try:
        base = mpi.world(config)
        chosen = base if comm is None else comm if not isinstance(comm, Sequence) else _subset(base, comm)
        configure_logging(config, 0 if chosen is None else chosen.rank)
        _hooks.started(Runtime(chosen, config, versions=versions))
        if chosen is not None and isinstance(comm, Sequence):
            chosen.Free()  # the runtime has its own duplicate
    except BaseException:
        _hooks.startup_failed()
        raise
    finally:
        deadline.cancel()


def _subset(base: MPI.Intracomm | None, ranks: Sequence[int]) -> MPI.Intracomm | None:
    if base is None:
        if list(ranks) != [0]:
            raise ConfigError(f"hvd.init(comm={list(ranks)}), but this process was started alone; start it with mpirun")
        return None
    return mpi.subset(base, ranks)


def shutdown() -> None:
    """Stop hvdlite; operations in flight, and later ones, fail on every rank. init() starts it again."""
    if _hooks is not None and _hooks.runtime is not None and not _hooks.in_child:
        _hooks.runtime.close()
        if _hooks.runtime.failure is None:
            _hooks.runtime = None


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not, in this process."""
    return _hooks is not None and _hooks.runtime is not None and not _hooks.in_child and not _hooks.runtime.closed


def runtime() -> Runtime:
    """The default runtime.

    Raises:
        ShutDownError: hvdlite does not run in this process.
    """
    if _hooks is None or _hooks.runtime is None:
        raise ShutDownError("hvdlite is not running in this process; call hvd.init() first")
    if _hooks.in_child:
        raise ShutDownError(
            "this process was forked from one that runs hvdlite (a DataLoader worker, for example) and cannot take "
            "part; communicate in the parent only"
        )
    return _hooks.runtime


def _identity() -> Runtime:
    if not is_initialized():
        raise NotInitializedError
    return runtime()


def rank() -> int:
    """This process's number among all."""
    return _identity().rank


def size() -> int:
    """Number of processes."""
    return _identity().size


def local_rank() -> int:
    """This process's number among those of its node."""
    return _identity().local_rank


def local_size() -> int:
    """Number of processes on this node."""
    return _identity().local_size


def cross_rank() -> int:
    """This node's number among those that have a process with this local rank."""
    return _identity().cross_rank


def cross_size() -> int:
    """Number of nodes that have a process with this local rank."""
    return _identity().cross_size


def is_homogeneous() -> bool:
    """Whether every node has the same number of processes."""
    return _identity().is_homogeneous


def statistics() -> dict[str, int]:
    """What this rank has done since init(), over all process sets that it is or was a member of.

    Counted always, at the cost of additions; each count only grows, so two calls tell what lies between them. Of an
    operation that is done, all that this rank did for it is counted. docs/statistics.md says what to expect of them.

    ===================== ============================================================================================
    submissions           operations that this rank has submitted
    cycles                times that its coordinator has looked at everything it serves
    claims_sent           to the node leader; of a leader, to its parent in the tree
    claims_heard          by a leader: its own, of its node's ranks, of its children in the tree
    responses, faults     agreements read: that every rank is ready, that the ranks contradict one another
    batches               groups of operations agreed on together, within which allreduces may be fused
    plans                 how often an order that repeats was frozen
    counted               operations of frozen plans, agreed on by counting instead of claims and responses
    buckets               what was executed; operations that were fused are one
    reduced_bytes         of allreduce and reducescatter, in the type that travels, with the padding between tensors
    messages_cached       claims and responses that gave their request as a number: 17 bytes, and what ranks differ in
    messages_spelled_out  claims and responses whose request the other end did not know yet
    page_bytes_written    control messages within the node: to the leader; by the leader, to all
    page_bytes_read       the same from the other end
    tree_...              control messages between nodes, over TCP; leaders only
    ring_...              data between nodes, over MPI: allreduce, allgather, broadcast
    alltoall_...          data of alltoall, over MPI, within the node too
    ===================== ============================================================================================

    The last three are each ``messages_sent``, ``bytes_sent``, ``messages_received`` and ``bytes_received``.

    Raises:
        ShutDownError: hvdlite does not run in this process.
    """
    return runtime().statistics()
