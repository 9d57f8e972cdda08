"""GradientReducer: takes each gradient from autograd's hook to the runtime while backward runs, and waits for all.

A gradient's way: `_on_gradient` counts it; the last one of its bucket has the bucket loaded and, where there are
several buckets, handed to the coordinator thread by `_submit`; `synchronize`, from ``optimizer.step()``, submits what
is left, waits, and makes ``p.grad`` the reduced gradient.

The first step guesses that gradients arrive in the reverse of the order of the parameters. At its end the order in
which they did arrive on rank 0 is made everybody's plan, with buckets of the size that suits nodes and network. By
then the ranks have also agreed on which gradients are sparse; buckets with one that may be wait for that. Homes for
gradients are allocated where they are of use: across nodes at once, and for buckets of small ones; for others on one
node after the second step, if they stay.
"""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

import hvdlite
from hvdlite.autotune.tuner import Tuner, start_tuning
from hvdlite.dtypes import ReduceOp
from hvdlite.errors import HorovodInternalError
from hvdlite.fusion.fusion_buffer import FusionBuffer
from hvdlite.group import Group
from hvdlite.timeline.recorder import Lane, Recorder
from hvdlite.torch.allreduce import Average, Max, Sum, allreduce_
from hvdlite.torch.broadcast import start_broadcast
from hvdlite.torch.buckets import BUCKET_BYTES, choose_bucket_bytes, plan_buckets, split_evenly
from hvdlite.torch.compression import AnyCompressor, is_custom, wire_dtype
from hvdlite.torch.gradients import (
    BlockBucket,
    Bucket,
    CompressedBucket,
    DenseBucket,
    HomeBucket,
    LooseBucket,
    Slot,
    SparseBucket,
    block_bytes,
)
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.sparse import SparseReduction
from hvdlite.torch.tensor_view import dtype_of


@dataclass(frozen=True)
class _Layout:
    """What the first rank decides for all. ``bucket_bytes`` is for where the settings name none."""

    bucket_bytes: int
    has_homes: bool


@dataclass(frozen=True)
class Reduction:
    """What happens to every gradient."""

    op: ReduceOp
    predivide_factor: float
    compression: AnyCompressor
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def keeps_sparse(self) -> bool:
        """Whether a sparse gradient is reduced as one; only in sums does it not matter that a rank lacks entries."""
        return not self.sparse_as_dense and self.op in (Average, Sum)


class GradientReducer:
    """Reduces the gradients of ``parameters``, which may be switched by ``requires_grad`` on all ranks alike.

    Alone in the world, or on a rank outside the process set, it registers no hooks and does nothing.

    Args:
        groups: number of buckets of equally many parameters, or parameters (by index) that must share a bucket.
        passes: backward passes per step.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.Tensor]],
        reduction: Reduction,
        groups: int | Sequence[Sequence[int]],
        passes: int,
    ) -> None:
        self.reduction = reduction
        self._bucket_groups = groups
        self._passes = passes
        self._slots: list[Slot] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[Bucket] = []
        self._plans = 0
        self._is_settled = False  # whether the plan is the last one, as long as the parameters stay the same
        self._first_gradients: list[tuple[Slot, weakref.ref[torch.Tensor]]] = []  # large ones, after the first step
        self._order: list[int] = []  # of arrival, as the ranks have agreed on it
        self._buffers: dict[torch.dtype, FusionBuffer] = {}  # of all homes
        self._tuner: Tuner | None = None
        self._arrived: list[Slot] = []  # since the last synchronize(), in the order of their hooks
        self._uncounted: list[torch.Tensor] = []  # parameters whose gradients arrived, and are to be counted yet
        self._inner: list[Slot] = []  # those whose hooks only append to that, in the order in which they should arrive
        self._inner_parameters: list[torch.Tensor] = []
        self._late: dict[Slot, None] = {}  # were switched on since then, so that no bucket counts on them
        self._paused = False
        self._backward_ns = (0, 0)
        wire = wire_dtype(reduction.compression)
        self._wire_dtype = None if wire is None else dtype_of(wire)
        self._attach(self._current_group())
        self.add(parameters)

    @property
    def recorder(self) -> Recorder:
        return self._group.recorder

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in what this one reduces."""
        return self._is_member and self._group.size > 1

    @property
    def has_pending(self) -> bool:
        """Whether there were gradients since the last synchronize()."""
        return bool(self._arrived or self._uncounted)

    @property
    def passes(self) -> int:
        """Backward passes per step."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        for slot in self._slots:
            slot.passes_left = passes

    def add(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Reduce these as well."""
        for name, parameter in parameters:
            slot = Slot(len(self._slots), name, parameter, not self.reduction.keeps_sparse)
            slot.passes_left = self._passes
            self._slots.append(slot)
            if self.is_distributed:
                self._hook(slot, partial(self._on_gradient, slot))

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients of backward passes in this context accumulate on their own rank, and are not counted."""
        before = self._paused
        if not before:
            self._count()
        self._paused = True
        try:
            yield
        finally:
            self._paused = before
            self._uncounted.clear()

    # In backward.

    def _on_gradient(self, slot: Slot, _: torch.Tensor) -> None:
        """Autograd has accumulated into ``slot``'s parameter."""
        if self._paused:
            return
        if not self._arrived:
            self._begin()
            if not self.is_distributed:
                return
        self._arrived.append(slot)
        slot.passes_left -= 1
        if slot.passes_left > 0:
            return
        if not slot.active:
            self._late[slot] = None
            return
        if slot.passes_left < 0:
            raise AssertionError(
                f"the gradient of '{slot.name}' was computed {self._passes - slot.passes_left} times before "
                f"optimizer.step(), but backward_passes_per_step is {self._passes}. Pass a larger one to "
                "hvd.DistributedOptimizer, or do the other passes inside optimizer.no_sync()."
            )
        if self._plans == 1 and not slot.is_sparse and slot.could_be_sparse:
            return  # its bucket waits until the ranks have agreed, in synchronize(), on what is sparse
        bucket = slot.bucket
        assert bucket is not None
        bucket.missing -= 1
        if bucket.missing == 0:
            self._complete(bucket)

    def _on_last(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient that should arrive last, of the only bucket."""
        if not self._paused:
            self._count()
        self._on_gradient(slot, parameter)

    def _count(self) -> None:
        """Count the gradients whose hooks only made a note: together if they arrived as planned, else one by one."""
        uncounted = self._uncounted.copy()
        if not uncounted:
            return
        self._uncounted.clear()
        if (
            len(uncounted) == len(self._inner)
            and self._passes == 1
            and self._buckets[0].missing == len(uncounted) + 1  # the first was counted, and all take part
            and all(map(operator.is_, uncounted, self._inner_parameters))
        ):
            self._arrived += self._inner
            for slot in self._inner:
                slot.passes_left = 0
            self._buckets[0].missing = 1
            return
        slots = {id(slot.param): slot for slot in self._slots}
        for parameter in uncounted:
            self._on_gradient(slots[id(parameter)], parameter)

    def _begin(self) -> None:
        """The first gradient of a step."""
        group = self._current_group()
        if group is not self._group:  # hvdlite was shut down and started again
            self._attach(group)
        if self._plans == 0 and self.is_distributed:
            self._number = self.reduction.process_set.next_number()
            self._layout = _Layout(BUCKET_BYTES, has_homes=False)
            self._plan(self._registration_order())
        if self.recorder.enabled:
            now_ns = time.monotonic_ns()
            self._backward_ns = (now_ns, now_ns)

    def _complete(self, bucket: Bucket) -> None:
        """All gradients of ``bucket`` are there."""
        bucket.load()
        # The only bucket of a plan by the order of arrival has nothing to overlap: step() reduces it itself.
        if self._plans == 1 or len(self._buckets) > 1:
            self._submit(bucket)
        if self.recorder.enabled:
            self.recorder.mark(Lane.BACKWARD, bucket.name)
            self._backward_ns = (self._backward_ns[0], time.monotonic_ns())

    def _submit(self, bucket: Bucket, background: bool = True) -> None:
        """Hand ``bucket`` to the coordinator thread; or to this one, if it waits for it at once."""
        factor = self.reduction.predivide_factor
        allreduce = partial(
            self._group.allreduce_async,
            op=self.reduction.op,
            prescale=1.0 / factor,
            postscale=factor,
            wire_dtype=self._wire_dtype,
            background=background,
        )
        try:
            if bucket.loaded is None:  # some of its parameters took no part in backward on this rank
                bucket.load()
            bucket.submit(allreduce)
        except HorovodInternalError:
            self._reset()
            raise

    # In step().

    def synchronize(self) -> None:
        """Return once every gradient is the reduced one; zeros where no rank has one.

        Raises:
            HorovodInternalError: a bucket was not reduced; says why. The next step can go on after a MismatchError.
        """
        self._count()
        if not self._arrived:
            self._begin()
        if not self.is_distributed:
            return
        switched = [slot for slot in self._slots if slot.param.requires_grad is not slot.active]
        for slot in switched:
            if not slot.active:
                self._late[slot] = None
            elif slot.passes_left == self._passes:  # switched off before backward, not after it
                self._switch_off(slot)
        late = list(self._late)
        replans = not self._is_settled or any(slot.bucket is None for slot in late)
        if replans and self.reduction.keeps_sparse:
            self._agree_on_sparse()
        buckets = [bucket for bucket in self._buckets if any(slot.active for slot in bucket.slots)]
        buckets += self._late_buckets(late)
        start_ns, end_ns = self._backward_ns
        if start_ns < end_ns:
            self.recorder.add(Lane.BACKWARD, "backward", start_ns, end_ns)
        try:
            with self.recorder.span(Lane.WAIT, "synchronize"):
                self._finish(buckets)
            if replans:
                self._replan()
        finally:
            for slot in {*switched, *late}:
                if slot.param.requires_grad:
                    slot.active = slot.bucket is not None
                elif slot.active:
                    self._switch_off(slot)
            self._reset()
        if self._tuner is not None and not self._tuner.after_step():
            self._tuner = None

    def _finish(self, buckets: Sequence[Bucket]) -> None:
        left = [bucket for bucket in buckets if bucket.pending is None]
        for bucket in left:
            self._submit(bucket, background=bucket is not left[-1])
        failure: HorovodInternalError | None = None
        for bucket in buckets:
            try:
                assert bucket.pending is not None
                bucket.pending.wait()
            except HorovodInternalError as error:  # raised only when nothing is in flight any more
                failure = failure or error
        if failure is not None:
            raise failure
        for bucket in buckets:
            bucket.deliver()

    def _switch_off(self, slot: Slot) -> None:
        slot.active = False
        if slot.view is not None and slot.param.grad is slot.view:
            slot.param.grad = slot.view.clone()  # its place takes part in the bucket, as zeros

    def _reset(self) -> None:
        """Nothing has arrived, nothing is in flight."""
        self._arrived.clear()
        self._uncounted.clear()
        self._late.clear()
        self._backward_ns = (0, 0)
        for slot in self._slots:
            slot.passes_left = self._passes
        for bucket in self._buckets:
            bucket.loaded = bucket.pending = None
            bucket.missing = sum(slot.active for slot in bucket.slots)

    # Plans.

    @property
    def _prefix(self) -> str:
        """Of the names of operations; unlike that of any other optimizer or plan."""
        return f"optimizer{self._number}.plan{self._plans}"

    def _current_group(self) -> Group:
        """What carries the reductions; on a rank outside the process set the whole job's, through which none goes."""
        return self.reduction.process_set.group_of_members() or hvdlite.runtime().group

    def _attach(self, group: Group) -> None:
        self._group = group
        self._is_member = self.reduction.process_set.included()
        self._buckets = []
        self._buffers = {}
        self._tuner = None
        self._plans = 0
        self._is_settled = False
        self._first_gradients = []
        for slot in self._slots:
            slot.bucket = slot.view = None
            slot.is_sparse = False
        self._hook_all([])

    def _hook_all(self, order: Sequence[Slot]) -> None:
        """Register hooks anew.

        Args:
            order: of the slots of the only bucket. Between the first and the last nothing is to be done before the last
                has come, so hooks of those in between call no Python.
        """
        self._inner = list(order[1:-1])
        self._inner_parameters = [slot.param for slot in self._inner]
        self.close()
        if not self.is_distributed:
            return
        inner = set(self._inner)
        for slot in self._slots:
            if slot in inner:
                self._hook(slot, self._uncounted.append)
            else:
                self._hook(slot, partial(self._on_last if order and slot is order[-1] else self._on_gradient, slot))

    def _hook(self, slot: Slot, hook: Callable[[torch.Tensor], None]) -> None:
        param = slot.param
        switched_on = param.requires_grad
        param.requires_grad_(True)  # torch refuses hooks otherwise, and keeps them when it is switched off
        self._hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        param.requires_grad_(switched_on)

    def _registration_order(self) -> list[int]:
        """The reverse of the order of parameters, which is about that of backward."""
        return [slot.index for slot in reversed(self._slots) if slot.param.requires_grad]

    def _plan(self, order: Sequence[int]) -> None:
        """Put the slots of ``order`` into new buckets, each that is sparse into one of its own."""
        self._plans += 1
        sparse = [self._slots[index] for index in order if self._slots[index].is_sparse]
        order = [index for index in order if not self._slots[index].is_sparse]
        for slot in self._slots:
            slot.measure()
            slot.bucket = slot.view = None
            slot.active = False
        parts = self._parts(order, self._group.config.bucket_bytes or self._layout.bucket_bytes)
        named = [(f"{self._prefix}.bucket{i}", part) for i, part in enumerate(parts)]
        if self._plans == 1:
            self._buckets = [self._bucket(name, part) for name, part in named]
        else:
            self._buckets = self._placed(named)
        self._buckets += [self._sparse_bucket(slot) for slot in sparse]
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.bucket = bucket
                slot.active = slot.param.requires_grad
            bucket.missing = sum(slot.active for slot in bucket.slots)
        only = self._plans > 1 and len(self._buckets) == 1
        if only or self._inner:
            self._hook_all([self._slots[index] for index in order] if only else [])

    def _parts(self, order: Sequence[int], bucket_bytes: int) -> list[list[Slot]]:
        """The slots of ``order``, by bucket."""
        most_bytes = self._group.config.fusion_threshold_bytes
        plan = plan_buckets(
            [slot.nbytes for slot in self._slots],
            [slot.dtype for slot in self._slots],
            order,
            min(bucket_bytes, most_bytes),
            split_evenly(order, self._bucket_groups) if isinstance(self._bucket_groups, int) else self._bucket_groups,
            most_bytes if bucket_bytes >= most_bytes else None,  # nothing is to overlap
        )
        return [[self._slots[index] for index in indices] for indices in plan]

    def _bucket(self, name: str, slots: Sequence[Slot]) -> DenseBucket:
        compression = self.reduction.compression
        return CompressedBucket(name, slots, compression) if is_custom(compression) else LooseBucket(name, slots)

    def _block_bucket(self, name: str, slots: Sequence[Slot]) -> DenseBucket:
        compression = self.reduction.compression
        return CompressedBucket(name, slots, compression) if is_custom(compression) else BlockBucket(name, slots)

    def _sparse_bucket(self, slot: Slot) -> Bucket:
        factor = self.reduction.predivide_factor
        reduction = partial(
            SparseReduction,
            op=self.reduction.op,
            process_set=self.reduction.process_set,
            prescale=1.0 / factor,
            postscale=factor,
            wire_dtype=wire_dtype(self.reduction.compression),
        )
        return SparseBucket(f"{self._prefix}.sparse{slot.index}", slot, reduction)

    def _late_buckets(self, slots: Sequence[Slot]) -> list[Bucket]:
        """For parameters that were switched on since the last step, and on which no bucket counts yet."""
        copies = [Slot(slot.index, slot.name, slot.param, slot.sparse_as_dense) for slot in slots]
        for copy, slot in zip(copies, slots, strict=True):
            copy.active = True
            copy.is_sparse = slot.is_sparse
        dense = [slot for slot in copies if not slot.is_sparse]
        buckets: list[Bucket] = [self._bucket(f"{self._prefix}.late", dense)] if dense else []
        return buckets + [self._sparse_bucket(slot) for slot in copies if slot.is_sparse]

    def _agree_on_sparse(self) -> None:
        """Take gradients that are sparse on some ranks, and dense on none, out of their buckets. Collective.

        Nothing but a gradient tells that it is sparse, and a rank that has none in this step has to know as well.
        """
        has_dense, has_sparse = flags = torch.zeros(2, len(self._slots), dtype=torch.int64)
        for slot in self._slots:
            in_a_plan_that_stays = slot.bucket is not None and self._plans > 1
            frozen = slot.bucket is not None and not slot.active
            if slot.is_sparse or in_a_plan_that_stays or frozen or slot.param.grad is None:
                continue
            # A bucket that some rank has submitted already has no sparse gradients there, so all of it counts as dense.
            (has_sparse if slot.could_be_sparse else has_dense)[slot.index] = 1
        allreduce_(flags, name=f"{self._prefix}.sparse", op=Max, process_set=self.reduction.process_set)
        for slot in self._slots:
            if has_dense[slot.index] or not has_sparse[slot.index]:
                continue
            slot.is_sparse = True
            if slot.bucket is not None:
                assert isinstance(slot.bucket, DenseBucket)
                slot.bucket.leave_out(slot)
                if not slot.bucket.slots:
                    self._buckets.remove(slot.bucket)
                slot.bucket = self._sparse_bucket(slot)
                self._buckets.append(slot.bucket)

    def _has_home(self, part: Sequence[Slot]) -> bool:
        """Small gradients are copied into a block in any case, so that may as well be in the fusion buffer."""
        return self._layout.has_homes or (self._could_have_homes and not any(slot.is_large for slot in part))

    def _placed(self, named: Sequence[tuple[str, Sequence[Slot]]]) -> list[Bucket]:
        """The buckets of these names and slots, those with a home in one fusion buffer per dtype."""
        totals: dict[torch.dtype, int] = {}
        for _, part in named:
            if self._has_home(part):
                totals[part[0].dtype] = totals.get(part[0].dtype, 0) + block_bytes(part)
        for dtype, nbytes in totals.items():
            if dtype not in self._buffers or self._buffers[dtype].nbytes != nbytes:
                self._buffers[dtype] = self._group.allocate(nbytes, f"{self._prefix}.{dtype_of(dtype).label}")
        offsets = dict.fromkeys(totals, 0)
        buckets: list[Bucket] = []
        for name, part in named:
            if not self._has_home(part):
                buckets.append(self._block_bucket(name, part))
                continue
            dtype = part[0].dtype
            buckets.append(HomeBucket(name, part, self._buffers[dtype], offsets[dtype]))
            offsets[dtype] += block_bytes(part)
        return buckets

    def _replan(self) -> None:
        """Plan by the order in which the first rank's gradients arrived; those that did not come last. Collective."""
        # The last hook of each, where there were several passes.
        arrived = list(dict.fromkeys(slot.index for slot in reversed(self._arrived)))[::-1]
        seen = set(arrived)
        order = arrived + [index for index in self._registration_order() if index not in seen]
        layout = self._choose_layout()
        sent = torch.full((2 + len(self._slots),), -1)
        sent[: 2 + len(order)] = torch.tensor([layout.bucket_bytes, layout.has_homes, *order])
        process_set = self.reduction.process_set
        start_broadcast(
            [sent], process_set.ranks[0], f"{self._prefix}.order", None, process_set, needs_all=False
        ).synchronize()
        bucket_bytes, has_homes, *order = sent.tolist()
        self._order = [index for index in order if index >= 0]
        if self._plans == 1:
            self._tuner = start_tuning(
                hvdlite.runtime(),
                self._group,
                self._number,
                sum(self._slots[index].nbytes for index in self._order),
                bucket_bytes,
                lambda nbytes: tuple(sum(slot.nbytes for slot in part) for part in self._parts(self._order, nbytes)),
                self._rearrange,
            )
        self._layout = _Layout(bucket_bytes, bool(has_homes))
        self._rearrange()
        large = [slot for slot in self._slots if slot.active and slot.view is None and not slot.is_sparse]
        self._first_gradients = [(slot, weakref.ref(slot.param.grad)) for slot in large if slot.param.grad is not None]
        self._is_settled = self._plans > 2 or self._layout.has_homes or not self._could_have_homes or not large

    def _rearrange(self) -> None:
        """Make new buckets, to which the gradients move; when nothing is in flight."""
        for slot in self._slots:
            if slot.view is not None and slot.param.grad is slot.view:
                slot.param.grad = slot.view.clone()  # its place may be another's in the new buckets
        self._plan(self._order)
        for slot in self._slots:
            gradient = slot.param.grad
            if slot.view is not None and gradient is not None and slot.active:
                slot.param.grad = slot.view.copy_(gradient)

    @property
    def _could_have_homes(self) -> bool:
        return self._wire_dtype is None and not is_custom(self.reduction.compression)

    def _choose_layout(self) -> _Layout:
        group = self._group
        nodes = len(group.topology.nodes)
        threads = group.node.local_size * torch.get_num_threads()
        bucket_bytes = choose_bucket_bytes(nodes, group.node.cores, threads, group.fastest_allreduce)
        stay = bool(self._first_gradients) and all(
            gradient() is not None and slot.param.grad is gradient() for slot, gradient in self._first_gradients
        )
        has_homes = self._could_have_homes and (nodes > 1 or stay or self._layout.has_homes)
        return _Layout(group.config.fusion_threshold_bytes if bucket_bytes is None else bucket_bytes, has_homes)
