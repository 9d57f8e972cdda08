"""GradientReducer: hands buckets of gradients to the coordinator while backward runs, and waits for all in step().

A gradient's way: its hook counts it (arrival.py). With the last one of its bucket the bucket is loaded, and submitted
if there are several: `_complete`. `synchronize`, from ``optimizer.step()``, loads and submits what is left (the only
bucket, once its gradients come as expected), waits, and has the buckets deliver: ``p.grad`` is the reduced gradient.

Which gradient is in which bucket is settled in the first steps (assignment.py).
"""

from __future__ import annotations

import operator
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from functools import partial

import torch

import hvdlite
from hvdlite.autotune.tuner import Tuner, start_tuning
from hvdlite.errors import HorovodInternalError, MismatchError, UsageError
from hvdlite.group import Group
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.prepared_allreduce import allreduce_now
from hvdlite.recorder import NO_SPAN, Lane
from hvdlite.torch.alike import compare_parameters
from hvdlite.torch.arrival import Arrival
from hvdlite.torch.assignment import Assignment
from hvdlite.torch.bucket_maker import GradientOptions
from hvdlite.torch.bucketing import Phase
from hvdlite.torch.buckets import SparseBucket
from hvdlite.torch.device import follow
from hvdlite.torch.eager import eager
from hvdlite.torch.gradients import Bucket, ConvertedParameter, Slot, UnderWay
from hvdlite.torch.numerics import GradientCheck
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.sparse import SparseReduction
from hvdlite.torch.state_check import StateCheck
from hvdlite.torch.twins import check_order_of_twins
from hvdlite.tracebacks import stacklevel

_requires_grad = operator.attrgetter("requires_grad")  # which takes half as long as in a comprehension

_STEPS_WITH_PARAMETERS = 20


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
        self._changed: list[Slot] = []
        self._live: list[Bucket] = []
        self._attach(self._current_group())
        self.add(parameters)
        _alive[self] = None

    def _current_group(self) -> Group:
        """What carries the reductions; on a rank outside the process set the whole job's, through which none goes."""
        return self.options.reduce.process_set.group_of_members() or hvdlite.runtime().group

    def _attach(self, group: Group) -> None:
        """Reduce by ``group`` from now on, as if no step had been taken."""
        self._group = group
        self.recorder = group.recorder
        self.is_distributed = self.options.reduce.process_set.included() and group.size > 1
        self._assignment = Assignment(group, self.arrival, self.options, self._groups)
        self._state_check = StateCheck.wanted(group, self.options.reduce.process_set) if self.is_distributed else None
        self._numerics = GradientCheck.wanted(group.config, hvdlite.runtime().rank, self.options.reduce)
        self._tuner: Tuner | None = None
        self._recount()
        self._completed = 0  # buckets of this step
        self._was_interrupted = False  # the last step, by Ctrl-C or another exception of a signal handler
        self._backward_ns = (0, 0)
        self._shown = (0, 0)  # a recording, and the steps of it whose parameters were shown
        if self.is_distributed:
            self.arrival.watch()
        else:
            self.arrival.unwatch()

    def add(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Reduce these as well."""
        slots = [
            Slot(index, name, parameter, sparse_as_dense=not self.options.keeps_sparse, changed=self._changed)
            for index, (name, parameter) in enumerate(parameters, start=len(self.arrival.slots))
        ]
        self.arrival.add(slots)
        if self.is_distributed:
            # Those for good come with the buckets, behind hooks by which the program changes gradients.
            self.arrival.hook(slots, for_now=True)
        self._recount()

    def follow(self) -> None:
        """Reduce by the group that there is now, if hvdlite was shut down and started again."""
        if self._group.world.has_ended:
            group = self._current_group()
            if group is not self._group:
                self._attach(group)

    def see_to_interrupt(self) -> None:
        """Before a step: whether ranks can go on if the last one was interrupted.

        Raises:
            UsageError: they cannot, as some wait for the rest of it.
        """
        if self._group.world.has_ended:  # and with it all that was on its way
            self._was_interrupted = False
            self.reset()
        if not self._was_interrupted:
            return
        if self._assignment.phase is not Phase.SETTLED or self._has_in_flight:
            raise UsageError(
                "optimizer.step() was interrupted while ranks waited for one another. Call hvd.shutdown() and "
                "hvd.init() on every rank, then hvd.broadcast_parameters() and hvd.broadcast_optimizer_state()."
            )
        self._was_interrupted = False
        warnings.warn(
            "optimizer.step() was interrupted: where another rank has taken that step, parameters differ now. "
            "hvd.broadcast_parameters() and hvd.broadcast_optimizer_state(), on every rank, make them alike.",
            stacklevel=stacklevel(),
        )

    @property
    def _has_in_flight(self) -> bool:
        return self._group.world.coordinator.has_in_flight(f"optimizer{self._assignment.number}.")

    # In backward.

    def _begin(self) -> bool:
        """The first gradient of a step, or a step without any; whether there is something to reduce."""
        self.see_to_interrupt()
        self.follow()
        if self._assignment.phase is Phase.UNASSIGNED and self.is_distributed:
            self._assignment.guess()
            self._recount()
        elif self._assignment.follow_conversion():
            self._recount()
        if self.recorder.enabled:
            now_ns = time.monotonic_ns()
            self._backward_ns = (now_ns, now_ns)
        return self.is_distributed

    def _complete(self, bucket: Bucket) -> None:
        """All gradients of ``bucket`` are there."""
        self._completed += 1
        if not self.arrival.watches_ends:  # else there may be more to come, and step() loads
            bucket = self._loaded(bucket)
            bucket.is_exposed = True
        if len(self._assignment.buckets) > 1:  # the only one has nothing to overlap: step() reduces it itself
            self._submit(bucket)
        if self.recorder.enabled:
            self.recorder.mark(Lane.BACKWARD, bucket.name)
            self._backward_ns = (self._backward_ns[0], time.monotonic_ns())

    def _loaded(self, bucket: Bucket) -> Bucket:
        """``bucket``; or what is in its place from now on, if a layer was converted alone."""
        if bucket.streams:
            follow(bucket.streams, bucket.slots[0].param)
        try:
            bucket.load()
        except ConvertedParameter:  # on all ranks, which have converted the same
            loose = self._assignment.follow_conversion_in(bucket)
            self._live = [loose if other is bucket else other for other in self._live]
            bucket = loose
            bucket.load()
        if self._numerics is not None:
            self._numerics.look(bucket)
        return bucket

    def _submit(self, bucket: Bucket, *, background: bool = True) -> Bucket:
        """Hand ``bucket`` to the coordinator thread; or to this one, if it waits for it at once. Returns `_loaded`."""
        try:
            if bucket.loaded is None:  # some of its parameters took no part in backward on this rank
                bucket = self._loaded(bucket)
            if isinstance(bucket, SparseBucket):
                bucket.pending = SparseReduction(bucket.loaded, bucket.name, self.options.reduce)
            else:
                bucket.pending = self._allreduce(bucket, background=background)
            if self.recorder.enabled:
                bucket.submitted_ns = time.monotonic_ns()
        except HorovodInternalError:
            self.reset()
            raise
        return bucket

    def _allreduce(self, bucket: Bucket, *, background: bool) -> UnderWay:
        group, reduce = self._group, self.options.reduce
        inputs, outputs = bucket.loaded
        start = allreduce_async if background else allreduce_now
        return start(
            group,
            inputs,
            outputs,
            reduce.reduction,
            name=bucket.name,
            names=bucket.names_compared,
            wire_dtype=reduce.wire_dtype,
            home=bucket.home,
        )

    # In step().

    @eager
    def synchronize(self) -> None:
        """Return once every gradient is the reduced one; zeros where no rank has one.

        Raises:
            HorovodInternalError: a bucket was not reduced; says why. The next step can go on after a MismatchError.
        """
        self.arrival.note_changes()
        if not self.arrival.order:
            self._begin()
        if not self.is_distributed:
            return
        if self.recorder.is_recording:
            self.recorder.stepping_thread = threading.get_ident()
        try:
            self._finish_step()
        except HorovodInternalError:
            raise
        except BaseException as error:  # of this rank alone
            self._was_interrupted = not isinstance(error, Exception) or self._has_in_flight
            raise
        if self._numerics is not None:
            self._numerics.end_step()
        if self._tuner is not None and not self._tuner.after_step():
            self._tuner = None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See that ``optimizer`` is the same on all ranks, if it is time for that. Collective.

        Raises:
            DivergenceError: it is not; names what, and on which rank.
        """
        if self._state_check is not None and self._assignment.phase is not Phase.UNASSIGNED:
            self._state_check.after_step(self._named(), optimizer, f"optimizer{self._assignment.number}.check")

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(slot.name, slot.param) for slot in self.arrival.slots]

    def _finish_step(self) -> None:
        with torch.inference_mode(False):  # gradients that stay must be such as later steps may change
            if self._is_as_before:
                try:
                    self._finish(self._live)
                finally:
                    self.reset()
            else:
                self._finish_changes()
            assignment = self._assignment
            if assignment.is_loose and assignment.are_all_here(ready=assignment.stays_converted()):
                self._move()

    def _finish(self, buckets: Sequence[Bucket]) -> None:
        """Submit what is left of ``buckets``, wait for all, and deliver."""
        start_ns, end_ns = self._backward_ns
        if start_ns < end_ns:
            self.recorder.add(Lane.BACKWARD, "backward", start_ns, end_ns)
        with self.recorder.span(Lane.WAIT, "synchronize") if self.recorder.enabled else NO_SPAN:
            try:
                buckets = self._reduce(buckets)
            except MismatchError as error:
                raise self._assignment.explained(error) from None
            for bucket in buckets:
                bucket.deliver()
            if self._changed:
                self.arrival.watch_closely()
                self._warn_of_changes()
        if self.recorder.enabled:
            self._show_parameters(buckets)

    def _reduce(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """``buckets``, reduced; or what is in their place from now on."""
        last = next((bucket for bucket in reversed(buckets) if bucket.pending is None), None)
        buckets = [
            self._submit(bucket, background=bucket is not last) if bucket.pending is None else bucket
            for bucket in buckets
        ]
        failure: HorovodInternalError | None = None
        for bucket in buckets:
            try:
                assert bucket.pending is not None
                bucket.pending.wait()
            except HorovodInternalError as error:  # raised only when nothing is in flight any more
                failure = failure or error
        if failure is not None:
            raise failure
        return buckets

    def _warn_of_changes(self) -> None:
        """One warning for all: whoever clips too early changes every gradient of the model, on every rank."""
        first, *more = sorted(self._changed, key=lambda slot: slot.index)
        self._changed.clear()
        others = f" and {len(more)} more" * bool(more)
        were = f"gradients of '{first.name}'{others} were" if more else f"gradient of '{first.name}' was"
        warnings.warn(
            f"the {were} changed between loss.backward() and optimizer.step(), on the way to other ranks; all or part "
            "of the change may be lost. Call optimizer.synchronize() before you clip, unscale or drop gradients, "
            "and optimizer.step() inside `with optimizer.skip_synchronize():` after that.",
            stacklevel=stacklevel(),
        )

    def _show_parameters(self, buckets: Sequence[Bucket]) -> None:
        """In the timeline, in a row for each: in the first steps only, or they would be most of a long recording."""
        if self._shown[0] != self.recorder.recordings:
            self._shown = self.recorder.recordings, 0
        recording, steps = self._shown
        if steps < _STEPS_WITH_PARAMETERS:
            self._shown = recording, steps + 1
            now_ns = time.monotonic_ns()
            for bucket in buckets:
                for slot in bucket.slots:
                    self.recorder.add(
                        Lane.PARAMETER, slot.name, bucket.submitted_ns or now_ns, now_ns, slot.nbytes, bucket.name
                    )

    def reset(self) -> None:
        """The end of a step, or of one that failed: no gradient has come, nothing is in flight."""
        self.arrival.reset()
        self._completed = 0
        self._backward_ns = (0, 0)
        for bucket in self._assignment.buckets:
            bucket.loaded = bucket.pending = None
            bucket.is_exposed = False
            bucket.missing = bucket.active
            bucket.streams.clear()

    # Steps around which buckets change: the first ones, and those in which parameters were switched on or off.

    @property
    def _is_as_before(self) -> bool:
        """Whether buckets stay, no parameter was switched on or off, and all gradients have come."""
        return (
            self._assignment.phase is Phase.SETTLED
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
        agrees = self._assignment.phase is not Phase.SETTLED or any(slot.bucket is None for slot in late)
        try:
            if agrees:
                self._assignment.agree_on_sparse(late)
            # As counted at the end of the last step: a rank cannot know what others have seen of this step's switches.
            live = [bucket for bucket in self._assignment.buckets if bucket.active]
            self._finish([*live, *self._assignment.late_buckets(late)])
            if agrees and self._assignment.are_all_here():
                self._agree_on_order()
            elif agrees:
                self._assignment.forget()
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
        for bucket in self._assignment.buckets:
            bucket.count_active()
        self._live = [bucket for bucket in self._assignment.buckets if bucket.active]
        self._counted_on = [slot.param for slot in self.arrival.slots if slot.active]
        self._left_out = [slot.param for slot in self.arrival.slots if not slot.active]

    def _agree_on_order(self) -> None:
        """Agree on buckets for the next step, and move gradients there. Collective."""
        assignment = self._assignment
        is_first = assignment.phase is Phase.BY_REGISTRATION
        if is_first:
            named, label, process_set = self._named(), f"optimizer{assignment.number}", self.options.reduce.process_set
            check_order_of_twins(named, partial(_reduced_by, process_set), label, self._group, process_set)
            compare_parameters(named, label, self._group, process_set)
        bucketing = assignment.agree_on_order()
        if is_first:
            self._tuner = start_tuning(
                hvdlite.runtime(),
                self._group,
                assignment.number,
                assignment.gradient_bytes(),
                bucketing.bucket_bytes,
                assignment.part_bytes,
                self._move,
            )
        self._move()
        assignment.settle()

    def _move(self) -> None:
        """Take over new buckets, while nothing is in flight. Collective."""
        self._assignment.move()
        self._recount()


_alive: weakref.WeakKeyDictionary[GradientReducer, None] = weakref.WeakKeyDictionary()
"""In the order in which they were made, which a set would not keep."""


def _reduced_by(process_set: ProcessSet) -> list[list[tuple[str, torch.Tensor]]]:
    """The parameters of each reducer of ``process_set``, in the order in which these were made."""
    return [reducer._named() for reducer in _alive if reducer.options.reduce.process_set is process_set]
