"""torch's ProcessGroup over hvdlite: each method is torch's call of that name, on tensors of the host and of CUDA GPUs.

torch calls these from Python and, for DistributedDataParallel and functional collectives, from C++, by either of two
names where it has renamed a call. Options say whether the caller waits for the result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions as DistributedBackendOptions
from torch.autograd.graph import increment_version

from hvdlite.distributed.collectives import Run, in_turn
from hvdlite.distributed.devices import OtherDevices
from hvdlite.distributed.membership import Membership
from hvdlite.distributed.messages import ANY
from hvdlite.distributed.monitored_barrier import monitored_barrier
from hvdlite.distributed.profiled import Profiled
from hvdlite.distributed.site import Site
from hvdlite.distributed.torch_call import torch_call
from hvdlite.distributed.work import GroupWork, all_of
from hvdlite_untraced import untraced

Tensors = list[torch.Tensor]
Timeout = timedelta | None
NAME = "hvdlite"
# Before torch 2.7 C++ keeps nothing of a Work that Python has made but its C++ half, which waits for ever where the
# other one is gone. DistributedDataParallel waits for those two calls back.
_REMEMBERED = 64 if torch.__version__ < "2.7" else 0


class _NotToBeSplit:
    """A group where torch looks for what a new group's backend may be split from, by the device that is bound.

    Nothing has to be split for a new group of hvdlite's, NCCL's cannot be split from one, and torch 2.14 takes for that
    only what C++ has made. Where groups are split on purpose torch asks by the kind of device.
    """

    supports_splitting = False

    def __init__(self, group: HvdliteProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@untraced
class HvdliteProcessGroup(dist.ProcessGroup):
    """The ranks of ``membership``.

    Args:
        store: of the group.
        create: makes the process group that torch's DistributedBackendOptions describe.
    """

    def __init__(
        self, membership: Membership, store: Store, create: Callable[[DistributedBackendOptions], HvdliteProcessGroup]
    ) -> None:
        super().__init__(membership.rank, membership.size)  # type: ignore[call-arg]  # the only form for subclasses
        self.membership = membership
        self._store = store
        self._create = create
        self._parts: Counter[str] = Counter()  # those made without a name, by their ranks
        timeout = timedelta(seconds=membership.timeout_s)
        self.other_devices = OtherDevices(store, membership.rank, membership.size, timeout)
        self._group_name = ""
        self._coalesced: list[GroupWork] | None = None
        self._done = 0
        self._recent: deque[GroupWork] = deque(maxlen=_REMEMBERED)

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

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node."""
        return self.membership.world.topology.local_rank

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    # What torch asks of a backend.
    supports_coalescing = supports_time_estimate = supports_shrinking = False
    supports_splitting = True
    options = None  # of a parent, which torch hands to its parts

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether tensors for calls are allocated by the backend; torch's allocator has them."""
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Called where init_process_group has a ``device_id``, which torch binds to groups in C++ alone."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing: a part is made by its ranks."""

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return _NotToBeSplit(self) if device == self.bound_device_id else self

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: all ranks count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._done

    def set_timeout(self, timeout: timedelta) -> None:
        self.membership.set_timeout(timeout.total_seconds())
        self.other_devices.set_timeout(timeout)

    def statistics(self) -> dict[str, int]:
        """What this rank has done in this group so far, by the names of `hvdlite.statistics`."""
        return self.membership.statistics()

    # Reductions.

    @torch_call("tensors|tensor", "opts|op", "timeout")
    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Timeout = None) -> GroupWork:
        listed = _listed(tensors)
        site = self.membership.site_of(listed)
        run = site.collectives.all_reduce(listed, _op(opts))
        return self._begin(site, "all_reduce", run, listed, listed, opts, timeout)

    allreduce_coalesced = allreduce

    @torch_call("tensors|tensor", "opts|root", "op", "timeout")
    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = 0, op: Any = dist.ReduceOp.SUM, timeout: Timeout = None
    ) -> GroupWork:
        listed = _listed(tensors)
        site = self.membership.site_of(listed)
        run = site.collectives.all_reduce(listed, getattr(opts, "reduceOp", op), _root(opts))
        return self._begin(site, "reduce", run, listed, listed, opts, timeout)

    @torch_call("output_tensors|output", "input_tensors|input", "opts|op", "timeout")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        op, site = _op(opts), self.membership.site_of([*outputs, *chain(*inputs)])
        runs = [
            site.collectives.reduce_scatter(output, list(listed), op)
            for output, listed in zip(outputs, inputs, strict=True)
        ]
        _overwritten(outputs)
        return self._begin(site, "reduce_scatter", in_turn(runs), inputs, outputs, opts, timeout)

    @torch_call("outputTensor", "inputTensor", "opts")
    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    @torch_call("outputs", "inputs", "opts")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, wholes: Tensors, opts: Any = None) -> GroupWork:
        op, site = _op(opts), self.membership.site_of([*outputs, *wholes])
        runs = [
            site.collectives.reduce_scatter_single(output, whole, op)
            for output, whole in zip(outputs, wholes, strict=True)
        ]
        _overwritten(outputs)
        return self._begin(site, "_reduce_scatter_base", in_turn(runs), wholes, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements.

    @torch_call("tensors|tensor", "opts|root", "timeout")
    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = 0, timeout: Timeout = None) -> GroupWork:
        listed = _listed(tensors)
        root, site = _root(opts), self.membership.site_of(listed)
        runs = [site.collectives.broadcast(tensor, root) for tensor in listed]
        return self._begin(site, "broadcast", in_turn(runs), listed, listed, opts, timeout)

    @torch_call("output_tensors", "input_tensors|input_tensor", "opts|timeout")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._all_gather(outputs, inputs, outputs[0] if len(outputs) == 1 else outputs, opts)

    @torch_call("output_lists", "input_list", "opts")
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """outputs[rank][i] is what ``rank`` has as inputs[i]."""
        by_input = [list(listed) for listed in zip(*outputs, strict=True)]
        return self._all_gather(by_input, inputs, outputs, opts)

    def _all_gather(self, outputs: Sequence[Tensors], inputs: Tensors, result: Any, opts: Any) -> GroupWork:
        """outputs[i] are for what the ranks have as inputs[i].

        Args:
            result: ``outputs``, as whoever asks for the future expects them; of torch's own groups an only list is all.
        """
        site = self.membership.site_of([*chain(*outputs), *inputs])
        runs = [site.collectives.all_gather(listed, tensor) for listed, tensor in zip(outputs, inputs, strict=True)]
        _overwritten(chain(*outputs))
        return self._begin(site, "all_gather", in_turn(runs), inputs, result, opts)

    @torch_call("output", "input", "opts")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    @torch_call("outputs", "inputs", "opts")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        site = self.membership.site_of([*outputs, *inputs])
        runs = [
            site.collectives.all_gather_single(output, tensor) for output, tensor in zip(outputs, inputs, strict=True)
        ]
        _overwritten(outputs)
        return self._begin(site, "_all_gather_base", in_turn(runs), inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @torch_call("output_tensors", "input_tensors|input_tensor", "opts|root", "timeout")
    def gather(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: Timeout = None) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        listed = list(outputs[0]) if outputs else []
        site = self.membership.site_of([*listed, *inputs])
        run = site.collectives.gather(listed, inputs[0], _root(opts))
        _overwritten(listed)
        return self._begin(site, "gather", run, inputs, listed, opts, timeout)

    @torch_call("output_tensors|output_tensor", "input_tensors", "opts|root", "timeout")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: Timeout = None) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        listed = list(inputs[0]) if inputs else []
        site = self.membership.site_of([*outputs, *listed])
        run = site.collectives.scatter(outputs[0], listed, _root(opts))
        return self._begin(site, "scatter", run, listed, outputs, opts, timeout)

    @torch_call("output_tensors", "input_tensors", "opts")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        site = self.membership.site_of([*outputs, *inputs])
        run = site.collectives.all_to_all(outputs, inputs)
        _overwritten(outputs)
        return self._begin(site, "all_to_all", run, inputs, outputs, opts)

    @torch_call("output", "input", "output_split_sizes", "input_split_sizes", "opts|timeout")
    def alltoall_base(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        site = self.membership.site_of([output, whole])
        run = site.collectives.all_to_all_single(output, whole, output_rows, input_rows)
        return self._begin(site, "all_to_all", run, [whole], [output], opts)

    all_to_all_single = alltoall_base

    # Messages.

    @torch_call("tensors", "dstRank", "tag")
    def send(self, tensors: Tensors, to: int, tag: int = 0) -> GroupWork:
        self.membership.check()
        self._check_message(to, tag)
        return self.membership.site_of(tensors).send(tensors, to, tag, f"{NAME}:send", self._note)

    @torch_call("tensors", "srcRank", "tag")
    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        self.membership.check()
        self._check_message(0 if source == ANY else source, tag)
        title = f"{NAME}:recv" if source != ANY else f"{NAME}:recvAnySource"
        return self.membership.site_of(tensors).receive(tensors, source, tag, title, self._note)

    @torch_call("tensors", "tag")
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        return self.recv(tensors, ANY, tag)

    def _check_message(self, peer: int, tag: int) -> None:
        """Here, as what goes wrong on its way ends the group.

        Raises:
            TypeError: a number is no integer.
        """
        if not 0 <= index(peer) < self.membership.size:
            raise ValueError(f"process group {NAME}: {peer} is no rank of the {self.membership.size}")
        if not -(2**63) <= index(tag) < 2**63:
            raise ValueError(f"process group {NAME}: the tag {tag} has more than 64 bits")

    # Meetings.

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> Any:
        """Of hosts, and of GPUs on which the group has worked; of others, where ``opts`` name their device."""
        self.membership.check()
        other = self._other_group(getattr(opts, "device", None))
        if other is not None:
            return other.barrier(opts)
        limit_s = _timeout_s(opts if timeout is None else timeout)
        return self._begun(self.membership.barrier("barrier", f"{NAME}:barrier", limit_s), [], opts)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier at which rank 0 names who does not come within ``timeout``; all of them, or the first."""
        self.membership.check()

        def meet() -> None:
            work = self.membership.barrier("monitored_barrier", f"{NAME}:monitored_barrier", None)
            self._begun(work, [], None).wait()

        limit_s = self.membership.timeout_s if timeout is None else timeout.total_seconds()
        monitored_barrier(self.membership, self.send, self.recv, meet, limit_s, wait_all_ranks=wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        other = self._other_group(device)
        if other is None:
            self._coalesced = []
        else:
            other._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        other = self._other_group(device)
        if other is not None:
            return other._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return all_of(works)

    def coalesces_messages(self, device: torch.device) -> bool:
        """Whether those of a batch must begin at once, as NCCL's do: a send may wait there for a recv behind it."""
        other = self._other_group(device)
        return other is not None and other._get_backend(device).supports_coalescing

    def _other_group(self, device: torch.device | None) -> Any:
        """Who has the tensors of ``device``; None: this group."""
        return None if device is None else self.other_devices.group_of(device, self)

    # Parts.

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Timeout = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> HvdliteProcessGroup | None:
        """A process group of ``ranks`` of this one, which call this; None on others, which may call it.

        Args:
            timeout: of the new group; None: that of this one.
            opts: unused, as hvdlite has no options of a group.
            group_name: the same on all its ranks, and of no other group; None: made of its ranks.

        Raises:
            ValueError: ``ranks`` are none of this group; ``device_types`` are others than those of this group.
        """
        members = sorted(ranks)
        if not members or len({*members}) < len(members) or not {*members} <= {*range(self.membership.size)}:
            raise ValueError(f"split_group: {list(ranks)} are no distinct ranks below {self.membership.size}")
        if device_types is not None and not {*device_types} & {*self._device_types}:
            raise ValueError(f"split_group: process group hvdlite is of {self._device_types}, not of {device_types}")
        if self.membership.rank not in members:
            return None
        options = DistributedBackendOptions()
        ranked = "_".join(map(str, members))
        self._parts[ranked] += 1
        name = group_name or f"{self._group_name}:split:{ranked}:{self._parts[ranked]}"
        options.store = PrefixStore(f"{name}/", self._store)
        options.group_rank, options.group_size = members.index(self.membership.rank), len(members)
        options.timeout = timeout or timedelta(seconds=self.membership.timeout_s)
        options.group_id = name
        options.global_ranks_in_group = [self.membership.ranks[rank] for rank in members]
        part = self._create(options)
        part.setGroupName(name)
        part._set_group_desc(group_desc or "undefined")
        return part

    # The end.

    def shutdown(self) -> None:
        self.other_devices.close()
        self.membership.close()

    abort = shutdown

    def _begin(
        self, site: Site, title: str, run: Run, inputs: Any, result: Any, opts: Any, timeout: Timeout = None
    ) -> GroupWork:
        """Have it done, at once where the caller waits.

        Args:
            inputs: what profilers show; a list of tensors, or of such lists.
            opts: torch's options; or, in shorter forms of a call, what else it has in their place.
            timeout: of this call, in those forms that have it behind ``opts``.
        """
        self.membership.check()
        limit_s = _timeout_s(opts if timeout is None else timeout)
        return self._begun(site.work(run, result, f"{NAME}:{title}", limit_s), inputs, opts)

    def _begun(self, work: GroupWork, inputs: Any, opts: Any) -> GroupWork:
        self._note(work, inputs)
        if getattr(opts, "asyncOp", True):
            work.begin(self.membership.lane, is_awaited=False)
        else:
            with self.membership.waiting(work.title):
                work.begin(self.membership.lane, is_awaited=True)
        return work

    def _note(self, work: GroupWork, inputs: Any) -> None:
        """It is about to begin."""
        self._done += 1
        self._recent.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        if _profiler_enabled():
            work.profiled = Profiled(work.title, inputs)


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _overwritten(results: Iterable[torch.Tensor]) -> None:
    """Tell autograd, as torch does for its own groups and these calls: backward needs what they were, or is refused."""
    for result in results:
        increment_version(result)


def _op(opts: Any) -> Any:
    """The reduction: an option, or in their place."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _root(opts: Any) -> int:
    """An option, or in their place."""
    return int(getattr(opts, "rootRank", opts))


def _timeout_s(given: Any) -> float | None:
    """An option, or in their place; None: that of the group, as where torch says -1 ms."""
    given = getattr(given, "timeout", given)
    return given.total_seconds() if isinstance(given, timedelta) and given > timedelta(0) else None
