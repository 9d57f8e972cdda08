"""Which gradient is in which bucket: what the ranks agree on (bucketing.py), and the buckets made of it.

In the first step nobody knows the order of arrival, nor what is sparse, and buckets are a guess. At its end the ranks
agree on both, and gradients get the buckets that they keep; once more, if large gradients can then have homes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.errors import MismatchError
from hvdlite.group import Group
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.prepared_allreduce import allreduce_now
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
from hvdlite.torch.gradients import Bucket, Slot, list_of
from hvdlite.torch.same_parameters import first_difference, identity_of
from hvdlite.torch.start import start_broadcast
from hvdlite.torch.tensor_view import views_of


class Assignment:
    """The slots of ``arrival`` in buckets that ``group`` reduces; unassigned at first.

    Args:
        groups: number of buckets of equally many parameters, or parameters (by index) that must share a bucket.

    Attributes:
        buckets: of the gradients that are reduced.
        is_loose: parameters were converted, and the buckets are not such as `move` makes, see `follow_conversion`.
        number: of the optimizer, among those that ``group`` reduces for.
        phase: how far the ranks have come.
    """

    def __init__(
        self, group: Group, arrival: Arrival, options: GradientOptions, groups: int | Sequence[Sequence[int]]
    ) -> None:
        self.buckets: list[Bucket] = []
        self.is_loose = False
        self._was_converted = False  # in this step
        self.number = 0
        self._made_after = group.joins
        self.phase = Phase.UNASSIGNED
        self._group = group
        self._arrival = arrival
        self._options = options
        self._groups = groups
        self._maker = BucketMaker(group, options)
        self._made = 0
        self._first_gradients: list[tuple[Slot, weakref.ref[torch.Tensor]]] = []  # large ones, of the step before
        for slot in arrival.slots:
            slot.bucket = slot.place = slot.view = slot.loaded = None
            slot.active = slot.is_sparse = False

    def guess(self) -> None:
        """Assign the gradients for the first step."""
        self.phase = Phase.BY_REGISTRATION
        shapes = [(tuple(slot.param.shape), slot.param.dtype) for slot in self._arrival.slots]
        self.number = self._group.next_number(self._made_after, "optimizer", str(shapes))
        self._bucketing = Bucketing(BUCKET_BYTES, False, self._registration_order())
        self._assign(is_guess=True)

    def follow_conversion(self) -> bool:
        """Have gradients of any dtype in the buckets, if parameters were converted, as by ``model.half()``.

        Looks at one parameter of each bucket, as it is called in every step. Buckets keep their names: by these ranks
        are told if others have not converted theirs.
        """
        if not any(bucket.slots[0].is_converted for bucket in self.buckets):
            return False
        self.buckets = [self._loosened(bucket) for bucket in self.buckets]
        self.is_loose = self._was_converted = True
        return True

    def follow_conversion_in(self, bucket: Bucket) -> Bucket:
        """Have gradients of any dtype in what is returned in place of ``bucket``, which could not be loaded."""
        loose = self._loosened(bucket)
        loose.count_active()
        loose.missing = bucket.missing
        self.buckets = [loose if other is bucket else other for other in self.buckets]
        self.is_loose = self._was_converted = True
        return loose

    def _loosened(self, bucket: Bucket) -> Bucket:
        is_sparse = isinstance(bucket, SparseBucket)
        loose = SparseBucket(bucket.name, bucket.slots) if is_sparse else self._maker.loose(bucket.name, bucket.slots)
        for slot in loose.slots:
            slot.leave_view()
            slot.measure()
            slot.bucket, slot.place, slot.view = loose, None, None
        return loose

    def stays_converted(self) -> bool:
        """Whether no parameter was converted in this step, as is done around each where half precision trains."""
        was_converted, self._was_converted = self._was_converted, False
        return not was_converted and not any(slot.is_converted for slot in self._arrival.slots)

    def are_all_here(self, *, ready: bool = True) -> bool:
        """Whether no rank has joined, which would hear of no agreement, and all are ``ready``. Collective."""
        here = torch.full((1,), not ready, dtype=torch.uint8, device="cpu")
        views = views_of((here,))
        try:
            allreduce_async(
                self._group, views, views, Reduction(ReduceOp.MAX), name=f"{self._prefix}.here", needs_all=True
            ).wait()
        except MismatchError:
            return False
        return not here.item()

    def forget(self) -> None:
        """Have nothing agreed on in this step, so that ranks that have joined can go on like this one."""
        is_guess = self.phase is Phase.BY_REGISTRATION
        for slot in self._arrival.slots:
            if is_guess or slot.bucket is None:
                slot.is_sparse = False
        if is_guess:
            self._made = 0
            self._assign(is_guess=True)

    def agree_on_order(self) -> Bucketing:
        """Have the first rank choose a bucketing, by the order in which its gradients have come. Collective.

        It is carried out by `move` and `settle`.
        """
        process_set = self._options.reduce.process_set
        chosen = torch.tensor(self._choose().encode(len(self._arrival.slots)), device="cpu")
        name = f"{self._prefix}.order"
        start_broadcast(
            [chosen], process_set.ranks[0], name, None, process_set, needs_all=False, background=False
        ).synchronize()
        self._bucketing = Bucketing.decode(chosen.tolist())
        return self._bucketing

    def gradient_bytes(self) -> int:
        """Of all gradients in the bucketing."""
        return sum(self._arrival.slots[index].nbytes for index in self._bucketing.order)

    def part_bytes(self, bucket_bytes: int) -> tuple[int, ...]:
        """Of each bucket, if buckets were of ``bucket_bytes``."""
        return tuple(sum(slot.nbytes for slot in part) for part in self._parts(bucket_bytes))

    def move(self) -> None:
        """Assign the gradients to new buckets and move them there, while nothing is in flight. Collective."""
        slots = self._arrival.slots
        for slot in slots:
            slot.leave_view()
        self._assign(is_guess=False)
        for slot in slots:
            slot.enter_view()

    def settle(self) -> None:
        """The end of an agreement: see next time whether large gradients stay where they are, if homes are of use."""
        large = [slot for slot in self._arrival.slots if slot.active and slot.view is None and not slot.is_sparse]
        self._first_gradients = [(slot, weakref.ref(slot.param.grad)) for slot in large if slot.param.grad is not None]
        homes_may_follow = self._options.allows_homes and not self._bucketing.has_homes and bool(large)
        self.phase = self.phase.after_agreement(homes_may_follow=homes_may_follow)

    def agree_on_sparse(self, late: Sequence[Slot]) -> None:
        """Take gradients that are sparse on some ranks, and dense on none, out of their buckets. Collective.

        Nothing but a gradient tells that it is sparse, and a rank that has none in this step has to know as well. Ranks
        ask it also where none may stay sparse: what they ask about shows whether they have the same parameters.

        Args:
            late: those that were switched on, on all ranks; a message names them where some ranks did not.

        Raises:
            MismatchError: ranks have different parameters, or have frozen different ones.
        """
        slots = self._arrival.slots
        has_dense, has_sparse = flags = torch.zeros(2, len(slots), dtype=torch.int64, device="cpu")
        for slot in slots:
            is_decided = slot.bucket is not None and (self.phase is not Phase.BY_REGISTRATION or not slot.active)
            if is_decided or slot.is_sparse or slot.param.grad is None:
                continue
            # A bucket that some rank has loaded already has no sparse gradients there, so all of it counts as dense.
            (has_sparse if slot.could_be_sparse else has_dense)[slot.index] = 1
        views = views_of((flags,))
        if late := [slot for slot in late if slot.bucket is None]:
            names = [f"which are sparse among {list_of(late)}"]
        else:
            known = [slot for slot in slots if slot.bucket is not None]
            names = [f"which are sparse among {list_of(known)}, checksum {identity_of(_named(known))}"]
        try:
            allreduce_now(
                self._group, views, views, Reduction(ReduceOp.MAX), name=f"{self._prefix}.sparse", names=names
            ).wait()
        except MismatchError as error:
            raise self._other_parameters(error) from None
        for slot in slots:
            if has_dense[slot.index] or not has_sparse[slot.index]:
                continue
            slot.is_sparse = True
            if slot.bucket is not None:
                assert isinstance(slot.bucket, DenseBucket)
                slot.bucket.leave_out(slot)
                if not slot.bucket.slots:
                    self.buckets.remove(slot.bucket)
                slot.bucket = self._sparse_bucket(slot)
                slot.bucket.count_active()
                self.buckets.append(slot.bucket)

    def explained(self, error: MismatchError) -> MismatchError:
        """What to raise for ``error``: the first parameter in which ranks differ, if they do. Collective."""
        named, process_set = _named(self._arrival.slots), self._options.reduce.process_set
        found = first_difference(named, f"{self._prefix}.parameters", process_set, in_training=True)
        if found is None:
            return error
        return MismatchError(f"the optimizers of the ranks have different parameters: {found}")

    def _other_parameters(self, error: MismatchError) -> MismatchError:
        """`explained`, of ranks that have not asked about the same ones."""
        explained = self.explained(error)
        if explained is not error:
            return explained
        return MismatchError(
            "the optimizers of the ranks ask about different parameters; call requires_grad_() on all ranks alike, and "
            f"make and step several optimizers in the same order. {error}"
        )

    def late_buckets(self, slots: Sequence[Slot]) -> list[Bucket]:
        """Buckets for this step only, of parameters that were switched on and on which no bucket counts yet."""
        copies = [Slot(slot.index, slot.name, slot.param, slot.sparse_as_dense, slot.changed) for slot in slots]
        for copy in copies:
            copy.active = True
        dense = [copy for copy, slot in zip(copies, slots, strict=True) if not slot.is_sparse]
        sparse = [copy for copy, slot in zip(copies, slots, strict=True) if slot.is_sparse]
        buckets: list[Bucket] = [self._maker.loose(f"{self._prefix}.late", dense)] if dense else []
        return buckets + [self._sparse_bucket(slot) for slot in sparse]

    def _choose(self) -> Bucketing:
        """This rank's proposal."""
        nodes = len(self._group.world.topology.nodes)
        stay = bool(self._first_gradients) and all(
            gradient() is not None and slot.param.grad is gradient() for slot, gradient in self._first_gradients
        )
        return Bucketing(
            self._best_bucket_bytes(),
            self._options.allows_homes and choose_homes(nodes, have=self._bucketing.has_homes, stay=stay),
            arrival_order([slot.index for slot in self._arrival.order], self._registration_order()),
        )

    def _best_bucket_bytes(self) -> int:
        """As far as this rank knows."""
        world = self._group.world
        on_device = any(slot.is_on_device for slot in self._arrival.slots)
        threads = 0 if on_device else world.node.local_size * torch.get_num_threads()
        chosen = choose_bucket_bytes(
            len(world.topology.nodes), world.node.cores, threads, world.engine.fastest_allreduce
        )
        return world.config.fusion_threshold_bytes if chosen is None else chosen

    @property
    def _prefix(self) -> str:
        """Of the names of operations: unique to this optimizer and this assignment."""
        return f"optimizer{self.number}.assignment{self._made}"

    def _registration_order(self) -> list[int]:
        """The reverse of the order of parameters, which is about that of backward."""
        return [slot.index for slot in reversed(self._arrival.slots) if slot.param.requires_grad]

    def _assign(self, *, is_guess: bool) -> None:
        """Make new buckets of the gradients in the order, each sparse gradient in a bucket of its own. Collective."""
        self._made += 1
        self.is_loose = False
        slots = self._arrival.slots
        for slot in slots:
            slot.measure()
            slot.bucket = slot.place = slot.view = None
            slot.active = False
        parts = self._parts(self._group.config.bucket_bytes or self._bucketing.bucket_bytes)
        named = [(f"{self._prefix}.bucket{i}", part) for i, part in enumerate(parts)]
        if is_guess:
            self.buckets = [self._maker.loose(*part) for part in named]
        else:
            self.buckets = self._maker.placed(self._prefix, named, has_homes=self._bucketing.has_homes)
        self.buckets += [self._sparse_bucket(slots[i]) for i in self._bucketing.order if slots[i].is_sparse]
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.bucket = bucket
                slot.active = slot.param.requires_grad
        self._arrival.waits_for_sparse = is_guess
        if is_guess:
            return
        if len(self.buckets) == 1:
            self._arrival.watch(parts[0] if parts else ())
        elif not self._arrival.watches_all:
            self._arrival.watch()

    def _parts(self, bucket_bytes: int) -> list[list[Slot]]:
        """The slots of dense gradients, by bucket."""
        slots = self._arrival.slots
        order = [index for index in self._bucketing.order if not slots[index].is_sparse]
        most_bytes = self._group.config.fusion_threshold_bytes
        parts = assign_buckets(
            [slot.nbytes for slot in slots],
            [slot.kind for slot in slots],
            order,
            min(bucket_bytes, most_bytes),
            split_evenly(order, self._groups) if isinstance(self._groups, int) else self._groups,
            most_bytes if bucket_bytes >= most_bytes else None,  # nothing is to overlap
        )
        return [[slots[index] for index in part] for part in parts]

    def _sparse_bucket(self, slot: Slot) -> Bucket:
        return SparseBucket(f"{self._prefix}.sparse{slot.index}", [slot])


def _named(slots: Sequence[Slot]) -> list[tuple[str, torch.Tensor]]:
    return [(slot.name, slot.param) for slot in slots]
