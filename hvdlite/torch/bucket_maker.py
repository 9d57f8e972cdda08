"""Of which kind the buckets of an optimizer are, and the fusion buffers in which some gradients live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hvdlite.group import Group
from hvdlite.memory.base import FusionBuffer
from hvdlite.memory.device import DeviceMemory
from hvdlite.operations.allocate import allocate, allocate_on_device
from hvdlite.torch.block import Block, DeviceBlock, block_bytes
from hvdlite.torch.buckets import CompressedBucket, DenseBucket, LooseBucket
from hvdlite.torch.compression import AnyCompressor, is_custom
from hvdlite.torch.device import Now
from hvdlite.torch.device_homes import DeviceHomeBucket
from hvdlite.torch.gradients import Bucket, Kind, Slot
from hvdlite.torch.homes import BlockBucket, HomeBucket
from hvdlite.torch.reduce_options import Average, ReduceOptions, Sum

Part = tuple[str, Sequence[Slot]]
"""The name of a bucket, and the slots of the gradients in it."""


@dataclass(frozen=True)
class GradientOptions:
    """What happens to every gradient."""

    reduce: ReduceOptions
    compression: AnyCompressor
    sparse_as_dense: bool

    @property
    def keeps_sparse(self) -> bool:
        """Whether a sparse gradient is reduced as one; only in sums does it not matter that a rank lacks entries."""
        return not self.sparse_as_dense and self.reduce.reduction.op in (Average, Sum)

    @property
    def allows_homes(self) -> bool:
        """Whether gradients travel as they are, so that they can be reduced where they live."""
        return self.reduce.wire_dtype is None and not is_custom(self.compression)


class BucketMaker:
    """Makes the buckets that ``group`` reduces. New ones divide the memory of the old ones."""

    def __init__(self, group: Group, options: GradientOptions) -> None:
        self._group = group
        self._options = options
        self._buffers: dict[Kind, FusionBuffer | None] = {}  # of all homes; none where GPUs cannot share memory

    def loose(self, name: str, slots: Sequence[Slot]) -> DenseBucket:
        """Of gradients in memory of their own."""
        compression = self._options.compression
        return CompressedBucket(name, slots, compression) if is_custom(compression) else LooseBucket(name, slots)

    def placed(self, name: str, parts: Sequence[Part], *, has_homes: bool) -> list[Bucket]:
        """A bucket of each part, some with homes in the fusion buffer. Collective.

        Args:
            name: of the allocations.
            has_homes: whether large gradients have some. Small ones are copied into a block in any case, so a part
                that has no others has its block in the fusion buffer.
        """
        if is_custom(self._options.compression):
            return [self.loose(*part) for part in parts]

        def is_at_home(part: Part) -> bool:
            slots = part[1]
            if slots[0].is_on_device:
                return self._options.allows_homes
            return has_homes or (self._options.allows_homes and not any(slot.is_large for slot in slots))

        def elsewhere(part: Part) -> Bucket:
            return (
                self.loose(*part) if part[1][0].is_on_device else BlockBucket(*part, partial(Block, self._group.memory))
            )

        at_home = iter(self._at_home(name, [part for part in parts if is_at_home(part)]))
        return [next(at_home) if is_at_home(part) else elsewhere(part) for part in parts]

    def _at_home(self, name: str, parts: Sequence[Part]) -> list[Bucket]:
        """One behind the other in the fusion buffer of their kind, where there can be one."""
        totals: dict[Kind, int] = {}
        for _, slots in parts:
            totals[slots[0].kind] = totals.get(slots[0].kind, 0) + block_bytes(slots)
        for converted in self._buffers.keys() - totals.keys():
            del self._buffers[converted]
        for kind, nbytes in totals.items():
            known = self._buffers.get(kind)
            if known is None or known.nbytes != nbytes:
                beside = next(slots[0] for _, slots in parts if slots[0].kind == kind)
                self._buffers[kind] = self._allocate(nbytes, beside, name)
        offsets = dict.fromkeys(totals, 0)
        buckets: list[Bucket] = []
        for bucket_name, slots in parts:
            kind = slots[0].kind
            buckets.append(self._home(bucket_name, slots, self._buffers[kind], offsets[kind]))
            offsets[kind] += block_bytes(slots)
        return buckets

    def _allocate(self, nbytes: int, beside: Slot, name: str) -> FusionBuffer | None:
        """Collective."""
        label = f"{name}.{str(beside.dtype).removeprefix('torch.')}"
        where = Now().on_device(beside.param)
        if where is None:
            return allocate(self._group, nbytes, label)
        return allocate_on_device(self._group, nbytes, where, f"{label}.gpu")

    def _home(self, name: str, slots: Sequence[Slot], buffer: FusionBuffer | None, offset_bytes: int) -> Bucket:
        if buffer is None:
            return self.loose(name, slots)
        if not slots[0].is_on_device:
            return HomeBucket(name, slots, buffer, offset_bytes, partial(Block, self._group.memory))
        memory = self._group.device_memory
        assert isinstance(memory, DeviceMemory)
        return DeviceHomeBucket(name, slots, buffer, offset_bytes, partial(DeviceBlock, memory))
