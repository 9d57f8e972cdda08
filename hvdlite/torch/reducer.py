"""GradientReducer: hands buckets of gradients to the coordinator while backward runs, and waits for all in step().

A gradient's way: its hook counts it (arrival.py). With the last one of its bucket the bucket is loaded, and submitted
if there are several: `_complete`. `synchronize`, from ``optimizer.step()``, submits what is left, waits, and has the
buckets deliver: ``p.grad`` is the reduced gradient.

In the first step nobody knows the order of arrival, nor what is sparse. At its end the ranks agree on both, and
assign gradients to buckets anew (bucketing.py).
"""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Sequence

import torch

import hvdlite
from hvdlite.autotune.tuner import Tuner, start_tuning
from hvdlite.errors import HorovodInternalError
from hvdlite.group import Group
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.recorder import NO_SPAN, Lane
from hvdlite.torch.allreduce import allreduce_
from hvdlite.torch.arrival import Arrival
from hvdlite.torch.bucket_maker import BucketMaker, GradientOptions
from hvdlite.torch.bucketing import (
    BUCKET_BYTES,
    Bucketing,
    Phase,
    arrival_order,
    assign_buckets,
    choose_bucket_bytes,
    choose_homes,
    split_evenly,
)
from hvdlite.torch.buckets import DenseBucket, SparseBucket
from hvdlite.torch.gradients import Bucket, Slot
from hvdlite.torch.reduce_options import Max
from hvdlite.torch.sparse import SparseReduction
from hvdlite.torch.start import start_broadcast

_requires_grad = operator.attrgetter("requires_grad")  # which takes half as long as in a comprehension


class GradientReducer:
    """Reduces the gradients of ``parameters``, which may be switched by ``requires_grad`` on all ranks alike.

    Alone in the world, or on a rank outside the process set, it registers no hooks and does nothing.

    Args:
        groups: number of buckets of equally many parameters, or parameters (by index) that must share a bucket.
        passes: backward passes per step.

    Attributes:
        arrival: of the gradients since the last `synchronize`.
        is_distributed: whether other ranks reduce together with this one.
        recorder: of the world that reduces.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.Tensor]],
        options: GradientOptions,
        groups: int | Sequence[Sequence[int]],
        passes: int,
    ) -> None:
        self.options = options
        self.arrival = Arrival(passes, self._begin, self._complete)
        self._groups = groups
        self._attach(self._current_group())
        self.add(parameters)

    def _current_group(self) -> Group:
        """What carries the reductions; on a rank outside the process set the whole job's, through which none goes."""
        return self.options.reduce.process_set.group_of_members() or hvdlite.runtime().group

    def _attach(self, group: Group) -> None:
        """Reduce by ``group`` from now on, as if no step had been taken."""
        self._group = group
        self.recorder = group.recorder
        self.is_distributed = self.options.reduce.process_set.included() and group.size > 1
        self._maker = BucketMaker(group, self.options)
        self._tuner: Tuner | None = None
        self._phase = Phase.UNASSIGNED
        self._assignments = 0
        self._buckets: list[Bucket] = []
        self._first_gradients: list[tuple[Slot, weakref.ref[torch.Tensor]]] = []  # large ones, of the step before
        for slot in self.arrival.slots:
            slot.bucket = slot.view = None
            slot.active = slot.is_sparse = False
        self._recount()
        self._completed = 0  # buckets of this step
        self._backward_ns = (0, 0)
        if self.is_distributed:
            self.arrival.watch()
        else:
            self.arrival.unwatch()

    def add(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Reduce these as well."""
        for name, parameter in parameters:
            slot = Slot(len(self.arrival.slots), name, parameter, sparse_as_dense=not self.options.keeps_sparse)
            self.arrival.add(slot, is_watched=self.is_distributed)
        self._recount()

    # In backward.

    def _begin(self) -> bool:
        """The first gradient of a step, or a step without any; whether there is something to reduce."""
        if self._group.world.has_ended:  # hvdlite was shut down, and perhaps started again
            group = self._current_group()
            if group is not self._group:
                self._attach(group)
        if self._phase is Phase.UNASSIGNED and self.is_distributed:
            self._phase = Phase.BY_REGISTRATION
            self._number = self._group.next_number()
            self._bucketing = Bucketing(BUCKET_BYTES, False, self._registration_order())
            self._assign(is_guess=True)
        if self.recorder.enabled:
            now_ns = time.monotonic_ns()
            self._backward_ns = (now_ns, now_ns)
        return self.is_distributed

    def _complete(self, bucket: Bucket) -> None:
        """All gradients of ``bucket`` are there."""
        self._completed += 1
        bucket.load()
        if len(self._buckets) > 1:  # the only one has nothing to overlap: step() reduces it itself
            self._submit(bucket)
        if self.recorder.enabled:
            self.recorder.mark(Lane.BACKWARD, bucket.name)
            self._backward_ns = (self._backward_ns[0], time.monotonic_ns())

    def _submit(self, bucket: Bucket, *, background: bool = True) -> None:
        """Hand ``bucket`` to the coordinator thread; or to this one, if it waits for it at once."""
        try:
            if bucket.loaded is None:  # some of its parameters took no part in backward on this rank
                bucket.load()
            if isinstance(bucket, SparseBucket):
                bucket.pending = SparseReduction(bucket.loaded, bucket.name, self.options.reduce)
            else:
                inputs, outputs = bucket.loaded
                bucket.pending = allreduce_async(
                    self._group,
                    inputs,
                    outputs,
                    self.options.reduce.reduction,
                    name=bucket.name,
                    names=bucket.names,
                    wire_dtype=self.options.reduce.wire_dtype,
                    home=bucket.home,
                    background=background,
                )
            bucket.loaded = None
        except HorovodInternalError:
            self.reset()
            raise

    # In step().

    def synchronize(self) -> None:
        """Return once every gradient is the reduced one; zeros where no rank has one.

        Raises:
            HorovodInternalError: a bucket was not reduced; says why. The next step can go on after a MismatchError.
        """
        self.arrival.count_noted()
        if not self.arrival.order:
            self._begin()
        if not self.is_distributed:
            return
        if self._is_as_before:
            try:
                self._finish(self._live)
            finally:
                self.reset()
        else:
            self._finish_changes()
        if self._tuner is not None and not self._tuner.after_step():
            self._tuner = None

    def _finish(self, buckets: Sequence[Bucket]) -> None:
        """Submit what is left of ``buckets``, wait for all, and deliver."""
        start_ns, end_ns = self._backward_ns
        if start_ns < end_ns:
            self.recorder.add(Lane.BACKWARD, "backward", start_ns, end_ns)
        with self.recorder.span(Lane.WAIT, "synchronize") if self.recorder.enabled else NO_SPAN:
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

    def reset(self) -> None:
        """The end of a step, or of one that failed: no gradient has come, nothing is in flight."""
        self.arrival.reset()
        self._completed = 0
        self._backward_ns = (0, 0)
        for bucket in self._buckets:
            bucket.loaded = bucket.pending = None
            bucket.missing = bucket.active

    # Steps around which buckets change: the first ones, and those in which parameters were switched on or off.

    @property
    def _is_as_before(self) -> bool:
        """Whether buckets stay, no parameter was switched on or off, and all gradients have come."""
        return (
            self._phase is Phase.SETTLED
            and self._completed == len(self._live)
            and not self.arrival.late
            and all(map(_requires_grad, self._counted_on))
            and not any(map(_requires_grad, self._left_out))
        )

    def _finish_changes(self) -> None:
        """`_finish`, and what the ranks have to agree on before and after. Collective."""
        arrival = self.arrival
        switched = [slot for slot in arrival.slots if slot.param.requires_grad is not slot.active]
        for slot in switched:
            if not slot.active:
                arrival.late[slot] = None
            elif not arrival.has_come(slot):  # switched off before backward, not after it
                self._switch_off(slot)
        late = sorted(arrival.late, key=lambda slot: slot.index)  # which have come in an order of this rank's own
        agrees = self._phase is not Phase.SETTLED or any(slot.bucket is None for slot in late)
        try:
            if agrees and self.options.keeps_sparse:
                self._agree_on_sparse()
            # As counted at the end of the last step: a rank cannot know what others have seen of this step's switches.
            live = [bucket for bucket in self._buckets if bucket.active]
            self._finish([*live, *self._late_buckets(late)])
            if agrees:
                self._agree_on_order()
        finally:
            for slot in {*switched, *late}:
                if slot.param.requires_grad:
                    slot.active = slot.bucket is not None
                elif slot.active:
                    self._switch_off(slot)
            self._recount()
            self.reset()

    def _switch_off(self, slot: Slot) -> None:
        """Leave ``slot`` in its bucket, contributing zeros."""
        slot.active = False
        slot.leave_view()

    def _recount(self) -> None:
        """Note which slots are active, after slots were switched on or off, or assigned to buckets."""
        for bucket in self._buckets:
            bucket.count_active()
        self._live = [bucket for bucket in self._buckets if bucket.active]
        self._counted_on = [slot.param for slot in self.arrival.slots if slot.active]
        self._left_out = [slot.param for slot in self.arrival.slots if not slot.active]

    def _late_buckets(self, slots: Sequence[Slot]) -> list[Bucket]:
        """Buckets for this step only, of parameters that were switched on and on which no bucket counts yet."""
        copies = [Slot(slot.index, slot.name, slot.param, slot.sparse_as_dense) for slot in slots]
        for copy in copies:
            copy.active = True
        dense = [copy for copy, slot in zip(copies, slots, strict=True) if not slot.is_sparse]
        sparse = [copy for copy, slot in zip(copies, slots, strict=True) if slot.is_sparse]
        buckets: list[Bucket] = [self._maker.loose(f"{self._prefix}.late", dense)] if dense else []
        return buckets + [self._sparse_bucket(slot) for slot in sparse]

    def _agree_on_sparse(self) -> None:
        """Take gradients that are sparse on some ranks, and dense on none, out of their buckets. Collective.

        Nothing but a gradient tells that it is sparse, and a rank that has none in this step has to know as well.
        """
        slots = self.arrival.slots
        has_dense, has_sparse = flags = torch.zeros(2, len(slots), dtype=torch.int64)
        for slot in slots:
            is_decided = slot.bucket is not None and (self._phase is not Phase.BY_REGISTRATION or not slot.active)
            if is_decided or slot.is_sparse or slot.param.grad is None:
                continue
            # A bucket that some rank has loaded already has no sparse gradients there, so all of it counts as dense.
            (has_sparse if slot.could_be_sparse else has_dense)[slot.index] = 1
        allreduce_(flags, name=f"{self._prefix}.sparse", op=Max, process_set=self.options.reduce.process_set)
        for slot in slots:
            if has_dense[slot.index] or not has_sparse[slot.index]:
                continue
            slot.is_sparse = True
            if slot.bucket is not None:
                assert isinstance(slot.bucket, DenseBucket)
                slot.bucket.leave_out(slot)
                if not slot.bucket.slots:
                    self._buckets.remove(slot.bucket)
                slot.bucket = self._sparse_bucket(slot)
                slot.bucket.count_active()
                self._buckets.append(slot.bucket)

    def _agree_on_order(self) -> None:
        """Have the first rank choose a bucketing, by the order in which its gradients have come. Collective."""
        process_set, slots = self.options.reduce.process_set, self.arrival.slots
        chosen = torch.tensor(self._choose().encode(len(slots)))
        start_broadcast(
            [chosen], process_set.ranks[0], f"{self._prefix}.order", None, process_set, needs_all=False
        ).synchronize()
        self._bucketing = Bucketing.decode(chosen.tolist())
        if self._phase is Phase.BY_REGISTRATION:
            self._tuner = start_tuning(
                hvdlite.runtime(),
                self._group,
                self._number,
                sum(slots[index].nbytes for index in self._bucketing.order),
                self._bucketing.bucket_bytes,
                lambda nbytes: tuple(sum(slot.nbytes for slot in part) for part in self._parts(nbytes)),
                self._move,
            )
        self._move()
        large = [slot for slot in slots if slot.active and slot.view is None and not slot.is_sparse]
        self._first_gradients = [(slot, weakref.ref(slot.param.grad)) for slot in large if slot.param.grad is not None]
        homes_may_follow = self.options.allows_homes and not self._bucketing.has_homes and bool(large)
        self._phase = self._phase.after_agreement(homes_may_follow=homes_may_follow)

    def _choose(self) -> Bucketing:
        """This rank's proposal."""
        world = self._group.world
        nodes = len(world.topology.nodes)
        threads = world.node.local_size * torch.get_num_threads()
        bucket_bytes = choose_bucket_bytes(nodes, world.node.cores, threads, world.engine.fastest_allreduce)
        stay = bool(self._first_gradients) and all(
            gradient() is not None and slot.param.grad is gradient() for slot, gradient in self._first_gradients
        )
        return Bucketing(
            world.config.fusion_threshold_bytes if bucket_bytes is None else bucket_bytes,
            self.options.allows_homes and choose_homes(nodes, have=self._bucketing.has_homes, stay=stay),
            arrival_order([slot.index for slot in self.arrival.order], self._registration_order()),
        )

    # Buckets.

    @property
    def _prefix(self) -> str:
        """Of the names of operations: unique to this optimizer and this assignment."""
        return f"optimizer{self._number}.assignment{self._assignments}"

    def _registration_order(self) -> list[int]:
        """The reverse of the order of parameters, which is about that of backward."""
        return [slot.index for slot in reversed(self.arrival.slots) if slot.param.requires_grad]

    def _move(self) -> None:
        """Assign the gradients to new buckets and move them there, while nothing is in flight. Collective."""
        slots = self.arrival.slots
        for slot in slots:
            slot.leave_view()
        self._assign(is_guess=False)
        for slot in slots:
            if slot.view is not None and slot.param.grad is not None and slot.active:
                slot.param.grad = slot.view.copy_(slot.param.grad)

    def _assign(self, *, is_guess: bool) -> None:
        """Make new buckets of the gradients in the order, each sparse gradient in a bucket of its own. Collective."""
        self._assignments += 1
        slots = self.arrival.slots
        for slot in slots:
            slot.measure()
            slot.bucket = slot.view = None
            slot.active = False
        parts = self._parts(self._group.config.bucket_bytes or self._bucketing.bucket_bytes)
        named = [(f"{self._prefix}.bucket{i}", part) for i, part in enumerate(parts)]
        if is_guess:
            self._buckets = [self._maker.loose(*part) for part in named]
        else:
            self._buckets = self._maker.placed(self._prefix, named, has_homes=self._bucketing.has_homes)
        self._buckets += [self._sparse_bucket(slots[i]) for i in self._bucketing.order if slots[i].is_sparse]
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.bucket = bucket
                slot.active = slot.param.requires_grad
        self._recount()
        self.arrival.waits_for_sparse = is_guess
        if not is_guess and len(self._buckets) == 1:
            self.arrival.watch(parts[0] if parts else ())
        elif self.arrival.expects_an_order:
            self.arrival.watch()

    def _parts(self, bucket_bytes: int) -> list[list[Slot]]:
        """The slots of dense gradients, by bucket."""
        slots = self.arrival.slots
        order = [index for index in self._bucketing.order if not slots[index].is_sparse]
        most_bytes = self._group.config.fusion_threshold_bytes
        parts = assign_buckets(
            [slot.nbytes for slot in slots],
            [slot.dtype for slot in slots],
            order,
            min(bucket_bytes, most_bytes),
            split_evenly(order, self._groups) if isinstance(self._groups, int) else self._groups,
            most_bytes if bucket_bytes >= most_bytes else None,  # nothing is to overlap
        )
        return [[slots[index] for index in part] for part in parts]

    def _sparse_bucket(self, slot: Slot) -> Bucket:
        return SparseBucket(f"{self._prefix}.sparse{slot.index}", [slot])
