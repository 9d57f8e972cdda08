"""Tells torch.distributed of its backend ``hvdlite``; torch calls `register` at the end of ``import torch``.

A module of its own, since it runs in every process that imports torch: hvdlite itself is imported by the first process
group.
"""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from hvdlite_untraced import run_as_it_is

NAME = "hvdlite"


def register() -> None:
    """Make ``dist.init_process_group("hvdlite")`` work; again, or without torch.distributed, does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch asks this table where processes meet that were told nothing else; there is no public way to go between.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = _Meet(handlers["env"])
    modules: tuple[Any, ...] = (dist, import_module("torch.distributed.distributed_c10d"))
    for module in modules:
        module.monitored_barrier = _monitored_barrier(module.monitored_barrier)
        module.batch_isend_irecv = _batch_isend_irecv(module.batch_isend_irecv)
        module.get_node_local_rank = _node_local_rank(module.get_node_local_rank)
    join: Any = import_module("torch.distributed.algorithms.join").Join
    join.notify_join_context = staticmethod(_notify_join_context(join.notify_join_context))


def _create(options: Any, backend_options: Any) -> Any:
    from hvdlite.distributed.creation import create

    return create(options)


class _Meet:
    """What ``env://`` does, also in ranks of mpirun and hvdliterun that have no MASTER_ADDR."""

    def __init__(self, by_variables: Any) -> None:
        self._by_variables = by_variables

    def __call__(self, url: str, *args: Any, **keywords: Any) -> Any:
        from hvdlite.distributed.meeting import meets_without_variables, stores

        if meets_without_variables(url):
            return stores(*args, **keywords)
        return self._by_variables(url, *args, **keywords)


# What torch grants to backends that it knows, and does not ask others for.


def _ours(group: Any) -> Any:
    """``group``, by default of all ranks, if it is over hvdlite; else None."""
    import torch.distributed as dist

    asked = dist.group.WORLD if group is None else group
    return asked if isinstance(asked, dist.ProcessGroup) and asked.name() == NAME else None


def _monitored_barrier(by_torch: Any) -> Any:
    @wraps(by_torch)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        ours = _ours(group)
        if ours is None:
            by_torch(group, timeout, wait_all_ranks)
        else:
            limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
            ours.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _batch_isend_irecv(by_torch: Any) -> Any:
    @run_as_it_is
    @wraps(by_torch)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        import torch
        import torch.distributed as dist

        if torch.compiler.is_compiling():  # it is traced, and torch.compile has rules for torch's own function
            return by_torch(p2p_op_list)
        first = p2p_op_list[0] if p2p_op_list else None
        if isinstance(first, dist.P2POp):
            ours, device = _ours(first.group), first.tensor.device
            if ours is not None and ours.coalesces_messages(device):
                coalescing = import_module("torch.distributed.distributed_c10d")._coalescing_manager
                with coalescing(ours, device, async_ops=True) as manager:
                    by_torch(p2p_op_list)
                return manager.works
        return by_torch(p2p_op_list)

    return batch_isend_irecv


def _node_local_rank(by_torch: Any) -> Any:
    # Whoever makes the group, with a store of his own too, or ranks that share a GPU, which have no LOCAL_RANK.
    @wraps(by_torch)
    def get_node_local_rank(fallback_rank: int | None = None) -> int:
        try:
            return int(by_torch())
        except RuntimeError:  # there is no LOCAL_RANK
            ours = _ours(None)
            return int(by_torch(fallback_rank) if ours is None else ours.local_rank)

    return get_node_local_rank


# By who joins. DistributedDataParallel hands the work to C++, which keeps no more of it than its C++ half, and waits
# for that in backward: for ever, once the other half is gone.
_notices: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _notify_join_context(by_torch: Any) -> Any:
    @wraps(by_torch)
    def notify_join_context(joinable: Any) -> Any:
        work = by_torch(joinable)
        if work is not None and _ours(joinable.join_process_group) is not None:
            _notices[joinable] = work
        return work

    return notify_join_context
