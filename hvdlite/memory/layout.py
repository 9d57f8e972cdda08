"""How tensors lie in a buffer: pure, from sizes alone, so it is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hvdlite.dtypes import DType

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register; every slot and shard starts on one

Range = tuple[int, int]
"""[start, stop) in elements of a buffer."""


def align_up(value: int, unit: int = ALIGNMENT) -> int:
    """The smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


def shard_bounds(numel: int, parts: int, index: int, itemsize: int) -> Range:
    """[start, stop) in elements of shard ``index`` of ``parts``: equal shares, each starting on a cache line.

    Trailing shards are shorter or empty where ``numel`` does not divide.
    """
    per_line = max(1, ALIGNMENT // itemsize)
    share = align_up(-(-numel // parts), per_line)
    return min(index * share, numel), min((index + 1) * share, numel)


def share_of(blocks: Sequence[Sequence[Range]], parts: int, index: int, itemsize: int) -> list[tuple[int, int, int]]:
    """The share ``index`` of ``parts`` equal ones of all elements in ``blocks``, in order: (owner, start, stop).

    Shares start on cache lines where blocks do, so equal blocks make every owner's share its own block.
    """
    total = sum(stop - start for ranges in blocks for start, stop in ranges)
    begin, end = shard_bounds(total, parts, index, itemsize)
    share = []
    position = 0  # of the current range, in elements of all blocks
    for owner, ranges in enumerate(blocks):
        for start, stop in ranges:
            first = max(start, start + begin - position)
            last = min(stop, start + end - position)
            if first < last:
                share.append((owner, first, last))
            position += stop - start
    return share


def windows(total: int, width: int) -> Iterator[Range]:
    """[0, total) in ranges of at most ``width`` elements."""
    for begin in range(0, total, max(width, 1)):
        yield begin, min(begin + width, total)


def slot_offsets(numels: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Where tensors of ``numels`` elements lie when they share a buffer, each on a cache line; and the total.

    Returns:
        (offsets, numel), both in elements.
    """
    per_line = ALIGNMENT // itemsize
    offsets = []
    end = 0
    for numel in numels:
        offsets.append(end)
        end += align_up(numel, per_line)
    return offsets, end


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of one type as they lie in a buffer, each in its slot.

    Attributes:
        dtype: of the tensors.
        wire_dtype: of the buffer.
        numels: of the tensors, in elements, as all that follows.
        offsets: of the slots.
        end: of the last tensor.
        following: where the slot of one more tensor would start.
        nbytes: up to ``end``, with the gaps between slots.
    """

    dtype: DType
    wire_dtype: DType
    numels: Sequence[int]
    offsets: Sequence[int]
    end: int
    following: int
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.end * self.wire_dtype.itemsize)

    @classmethod
    def of(cls, numels: Sequence[int], dtype: DType, wire_dtype: DType) -> Layout:
        """The layout of tensors of ``numels`` elements."""
        offsets, following = slot_offsets(numels, wire_dtype.itemsize)
        end = offsets[-1] + numels[-1] if offsets else 0
        return cls(dtype, wire_dtype, numels, offsets, end, following)


def concatenated(layouts: Sequence[Layout]) -> Layout:
    """Layouts of the same types one behind the other, as one."""
    numels: list[int] = []
    offsets: list[int] = []
    end = following = 0
    for layout in layouts:
        numels += layout.numels
        offsets += [following + offset for offset in layout.offsets]
        end = following + layout.end
        following += layout.following
    return Layout(layouts[0].dtype, layouts[0].wire_dtype, numels, offsets, end, following)
