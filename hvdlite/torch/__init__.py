"""hvdlite for PyTorch; the drop-in for horovod.torch::

import hvdlite.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

import hvdlite
from hvdlite import (
    HorovodInternalError,
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvdlite.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvdlite.errors import HorovodVersionMismatchError, HostsUpdatedInterrupt
from hvdlite.torch import elastic
from hvdlite.torch.adasum import Adasum
from hvdlite.torch.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from hvdlite.torch.allreduce import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdlite.torch.alltoall import alltoall, alltoall_async
from hvdlite.torch.barrier import barrier
from hvdlite.torch.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvdlite.torch.compression import Compression, Compressor
from hvdlite.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdlite.torch.handle import Handle, poll, synchronize
from hvdlite.torch.join import join
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.process_set import (
    ProcessSet,
    add_process_set,
    add_process_sets,
    global_process_set,
    remove_process_set,
)
from hvdlite.torch.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdlite.torch.sparse import sparse_allreduce_async
from hvdlite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "statistics",
    "stop_timeline",
    "synchronize",
]


def init(comm: MPI.Comm | Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """`hvdlite.init`, which also sees to it that every rank runs the same version of torch, and registers process sets.

    Args:
        comm: who takes part; see `hvdlite.init`.
        process_sets: registered in this order, the same on every rank; of a communicator that was split, each rank
            passes its part. "dynamic", which Horovod needs for sets that are added later, is accepted; they always can
            be.

    Raises:
        ValueError: two sets have the same ranks; those that are not duplicates stay registered, and another init() with
            them makes the objects that it is given usable.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets is {process_sets!r}; pass a list of hvd.ProcessSet, or 'dynamic'")
        process_sets = None
    if not is_initialized():
        hvdlite.init(comm, versions={"torch": torch.__version__})
        global_process_set.mpi_comm = None if comm is None or isinstance(comm, Sequence) else comm
    if process_sets:
        add_process_sets(process_sets)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record a timeline of all ranks into ``file_path``; see `hvdlite.Runtime.start_timeline`."""
    hvdlite.runtime().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the file of `start_timeline`."""
    hvdlite.runtime().stop_timeline()


def statistics(process_set: ProcessSet | None = None) -> dict[str, int]:
    """`hvdlite.statistics`: what this rank has done since init().

    Args:
        process_set: only what it did there; None sums over all, those that were removed included.

    Raises:
        ValueError: this rank is not a member of ``process_set``.
    """
    return hvdlite.statistics() if process_set is None else process_set.group().statistics()
