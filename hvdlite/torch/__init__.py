"""hvdlite for PyTorch; the drop-in for horovod.torch::

import hvdlite.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import hvdlite
from hvdlite.garbage import uncollected

with uncollected():
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
    from hvdlite.errors import HorovodVersionMismatchError, HostsUpdatedInterrupt, NotInitializedError
    from hvdlite.torch.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
    from hvdlite.torch.allreduce import (
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
        check_process_set,
        global_process_set,
        remove_process_set,
    )
    from hvdlite.torch.reduce_options import Adasum, Average, Max, Min, Product, Sum
    from hvdlite.torch.reducescatter import (
        grouped_reducescatter,
        grouped_reducescatter_async,
        reducescatter,
        reducescatter_async,
    )
    from hvdlite.torch.sampler import sampler
    from hvdlite.torch.sparse import sparse_allreduce_async
    from hvdlite.torch.startup import init
    from hvdlite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

if TYPE_CHECKING:
    from hvdlite.torch import elastic
else:  # or type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """hvd.elastic, imported by the programs that use it."""
        if name != "elastic":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("hvdlite.torch.elastic")


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
    "sampler",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "statistics",
    "stop_timeline",
    "synchronize",
]


def __dir__() -> list[str]:
    """What tab completion offers: not the modules that are here as well."""
    return sorted(__all__)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline of all ranks into ``file_path``; see `hvdlite.Runtime.start_timeline`."""
    hvdlite.runtime().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the file of `start_timeline`; after shutdown(), which has completed it, a call does nothing."""
    with suppress(NotInitializedError):
        hvdlite.runtime().stop_timeline()


def statistics(process_set: ProcessSet | None = None) -> dict[str, int]:
    """`hvdlite.statistics`: what this rank has done since init().

    Args:
        process_set: only what it did there; None sums over all, those that were removed included.

    Raises:
        ValueError: this rank is not a member of ``process_set``, or that is none.
    """
    return hvdlite.statistics() if process_set is None else check_process_set(process_set).group().statistics()
