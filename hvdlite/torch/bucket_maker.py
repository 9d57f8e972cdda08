"""Of which kind the buckets of an optimizer are, and the fusion buffers in which some gradients live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdlite.group import Group
from hvdlite.memory.base import FusionBuffer
from hvdlite.operations.allocate import allocate
from hvdlite.torch.buckets import CompressedBucket, DenseBucket, LooseBucket
from hvdlite.torch.compression import AnyCompressor, is_custom
from hvdlite.torch.gradients import Bucket, Slot
from hvdlite.torch.homes import BlockBucket, HomeBucket, block_bytes
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
        self._buffers: dict[torch.dtype, FusionBuffer] = {}  # of all homes

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
        on_device = any(slot.is_on_device for _, slots in parts for slot in slots)
        if on_device or is_custom(self._options.compression):
            return [self.loose(*part) for part in parts]

        def is_at_home(part: Part) -> bool:
            return has_homes or (self._options.allows_homes and not any(slot.is_large for slot in part[1]))

        at_home = iter(self._at_home(name, [part for part in parts if is_at_home(part)]))
        memory = self._group.memory
        return [next(at_home) if is_at_home(part) else BlockBucket(*part, memory) for part in parts]

    def _at_home(self, name: str, parts: Sequence[Part]) -> list[HomeBucket]:
        """One behind the other in the fusion buffer of their dtype."""
        totals: dict[torch.dtype, int] = {}
        for _, slots in parts:
            totals[slots[0].dtype] = totals.get(slots[0].dtype, 0) + block_bytes(slots)
        for dtype, nbytes in totals.items():
            if dtype not in self._buffers or self._buffers[dtype].nbytes != nbytes:
                self._buffers[dtype] = allocate(self._group, nbytes, f"{name}.{str(dtype).removeprefix('torch.')}")
        offsets = dict.fromkeys(totals, 0)
        buckets = []
        for bucket_name, slots in parts:
            dtype = slots[0].dtype
            buckets.append(HomeBucket(bucket_name, slots, self._group.memory, self._buffers[dtype], offsets[dtype]))
            offsets[dtype] += block_bytes(slots)
        return buckets
