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
from hvdlite.errors import HorovodVersionMismatchError, HostsUpdatedInterrupt
from hvdlite.torch import elastic
from hvdlite.torch.allgather import allgather, allgather_async
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
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.process_set import global_process_set
from hvdlite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
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
    "Product",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "elastic",
    "global_process_set",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def init(comm: MPI.Comm | Sequence[int] | None = None, process_sets: object = None) -> None:
    """`hvdlite.init`, which also sees to it that every rank runs the same version of torch."""
    hvdlite.init(comm, process_sets, versions={"torch": torch.__version__})


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record a timeline of all ranks into ``file_path``; see `hvdlite.Runtime.start_timeline`."""
    hvdlite.runtime().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the file of `start_timeline`."""
    hvdlite.runtime().stop_timeline()
