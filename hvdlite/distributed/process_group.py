"""torch's ProcessGroup over hvdlite: each method is torch's call of that name, on tensors of the host.

torch calls these from Python and, for DistributedDataParallel and functional collectives, from C++, by either of two
names where it has renamed a call. Options say whether the caller waits for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import Store
from torch.autograd.profiler import record_function

from hvdlite.distributed.collectives import Run, in_turn
from hvdlite.distributed.devices import OtherDevices, by_device
from hvdlite.distributed.membership import Membership
from hvdlite.distributed.messages import ANY
from hvdlite.distributed.work import GroupWork

Tensors = list[torch.Tensor]
NAME = "hvdlite"


class HvdliteProcessGroup(dist.ProcessGroup):
    """The ranks of ``membership``."""

    def __init__(self, membership: Membership, store: Store) -> None:
        super().__init__(membership.rank, membership.size)  # type: ignore[call-arg]  # the only form for subclasses
        self.membership = membership
        self._store = store
        timeout = timedelta(seconds=membership.timeout_s)
        self.other_devices = OtherDevices(store, membership.rank, membership.size, timeout)
        self._collectives = membership.collectives
        self._group_name = ""
        self._coalesced: list[GroupWork] | None = None
        self._done = 0

    # Names and numbers. C++ asks by the names of the first lines.

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    def getRank(self) -> int:
        return self.membership.rank

    rank = getRank

    def getSize(self) -> int:
        return self.membership.size

    size = getSize

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)
    supports_splitting = False  # torch 2.4 asks it in new_group

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: all ranks count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._done

    def set_timeout(self, timeout: timedelta) -> None:
        self.membership.set_timeout(timeout.total_seconds())

    def statistics(self) -> dict[str, int]:
        """What this rank has done in this group so far, by the names of `hvdlite.statistics`."""
        return self.membership.statistics()

    # Reductions.

    @by_device
    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, *_: Any, **keywords: Any) -> GroupWork:
        listed = _listed(tensors)
        op = _op(opts, keywords)
        return self._begin("all_reduce", self._collectives.all_reduce(listed, op), listed, opts)

    allreduce_coalesced = allreduce

    @by_device
    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, op: Any = dist.ReduceOp.SUM, *_: Any, **keywords: Any
    ) -> GroupWork:
        listed = _listed(tensors)
        root = _root(opts, keywords)
        run = self._collectives.all_reduce(listed, getattr(opts, "reduceOp", op), root)
        return self._begin("reduce", run, listed, opts)

    @by_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any, **keywords: Any) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        op = _op(opts, keywords)
        runs = [
            self._collectives.reduce_scatter(output, list(listed), op)
            for output, listed in zip(outputs, inputs, strict=True)
        ]
        return self._begin("reduce_scatter", in_turn(runs), outputs, opts)

    @by_device
    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    @by_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, wholes: Tensors, opts: Any = None) -> GroupWork:
        op = _op(opts, {})
        runs = [
            self._collectives.reduce_scatter_single(output, whole, op)
            for output, whole in zip(outputs, wholes, strict=True)
        ]
        return self._begin("_reduce_scatter_base", in_turn(runs), outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements.

    @by_device
    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, *_: Any, **keywords: Any) -> GroupWork:
        listed = _listed(tensors)
        root = _root(opts, keywords)
        runs = [self._collectives.broadcast(tensor, root) for tensor in listed]
        return self._begin("broadcast", in_turn(runs), listed, opts)

    @by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        runs = [self._collectives.all_gather(listed, tensor) for listed, tensor in zip(outputs, inputs, strict=True)]
        return self._begin("all_gather", in_turn(runs), outputs, opts)

    @by_device
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """outputs[rank][i] is what ``rank`` has as inputs[i]."""
        by_input = [list(listed) for listed in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    @by_device
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    @by_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        runs = [
            self._collectives.all_gather_single(output, tensor) for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._begin("_all_gather_base", in_turn(runs), outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **keywords: Any) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        listed = list(outputs[0]) if outputs else []
        run = self._collectives.gather(listed, inputs[0], _root(opts, keywords))
        return self._begin("gather", run, listed, opts)

    @by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **keywords: Any) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        listed = list(inputs[0]) if inputs else []
        run = self._collectives.scatter(outputs[0], listed, _root(opts, keywords))
        return self._begin("scatter", run, outputs, opts)

    @by_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **_: Any) -> GroupWork:
        return self._begin("all_to_all", self._collectives.all_to_all(outputs, inputs), outputs, opts)

    @by_device
    def alltoall_base(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
        **_: Any,
    ) -> GroupWork:
        run = self._collectives.all_to_all_single(output, whole, output_rows, input_rows)
        return self._begin("all_to_all", run, [output], opts)

    all_to_all_single = alltoall_base

    # Messages.

    @by_device
    def send(self, tensors: Tensors, to: int, tag: int = 0) -> GroupWork:
        work = self._new_work("send", tensors)
        self.membership.post.send(tensors[0], to, tag, work, self.membership.timeout_s)
        return work

    @by_device
    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        work = self._new_work("recv" if source != ANY else "recvAnySource", tensors)
        self.membership.post.receive(tensors[0], source, tag, work, self.membership.timeout_s)
        return work

    @by_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        return self.recv(tensors, ANY, tag)

    # Meetings.

    def barrier(self, opts: Any = None, **_: Any) -> GroupWork:
        return self._begin("barrier", self._collectives.barrier(), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come, all of them in any case."""
        with self.membership.timeout(None if timeout is None else timeout.total_seconds()):
            self._begin("monitored_barrier", self._collectives.barrier("monitored_barrier"), [], None).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None
        together = GroupWork(in_turn([work.synchronize for work in works]), [], "coalesced")
        together.perform()
        return together

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Every group has a world of its own, so there is nothing to split.

        Raises:
            ValueError: says what to do.
        """
        raise ValueError("process group hvdlite is not split: dist.new_group(ranks) makes a group of some of its ranks")

    # The end.

    def shutdown(self) -> None:
        self.other_devices.close()
        self.membership.close()

    abort = shutdown

    def _begin(self, title: str, run: Run, result: Any, opts: Any) -> GroupWork:
        """Have it done, at once where the caller waits."""
        limit_s = _timeout_s(opts)
        work = self._new_work(title, result, run if limit_s is None else partial(self._within, limit_s, run))
        if opts is None or getattr(opts, "asyncOp", True):
            work.begin(self.membership.lane, is_awaited=False)
        else:
            with self.membership.waiting(work.title):
                work.begin(self.membership.lane, is_awaited=True)
        return work

    def _within(self, limit_s: float, run: Run) -> None:
        """``run``, with another timeout than the group's."""
        with self.membership.timeout(limit_s):
            run()

    def _new_work(self, title: str, result: Any, run: Run | None = None) -> GroupWork:
        self.membership.check()
        work = GroupWork(run, result, f"{NAME}:{title}", self.membership)
        self._done += 1
        if self._coalesced is not None:
            self._coalesced.append(work)
        if _profiler_enabled():
            with record_function(f"{NAME}:{title}") as shown:
                shown._call_end_callbacks_on_future(work.get_future())
        return work


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op(opts: Any, keywords: dict[str, Any]) -> Any:
    """The reduction, which is an option or, in a shorter form of the call, an argument."""
    if opts is None:
        return keywords.get("op", dist.ReduceOp.SUM)
    return getattr(opts, "reduceOp", opts)


def _timeout_s(opts: Any) -> float | None:
    """Of this call; None: that of the group, as where torch says -1 ms."""
    given = getattr(opts, "timeout", None)
    return given.total_seconds() if given is not None and given > timedelta(0) else None


def _root(opts: Any, keywords: dict[str, Any]) -> int:
    if opts is None:
        return int(keywords["root"])
    return int(getattr(opts, "rootRank", opts))
