"""What allreduce and reducescatter have in common: how they reduce, what contradicts, and what an absent rank gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import Difference
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.memory.base import Memory
from hvdlite.operations.operation import Operation, nothing


@dataclass(frozen=True, eq=False)
class ReducingOperation(Operation):
    """An operation that combines tensors.

    Attributes:
        wire_dtype: floats are cast to it on the way.
    """

    reduction: Reduction = SUM
    wire_dtype: DType | None = None

    repeats = True

    def __post_init__(self) -> None:
        """Refuse what does not reduce.

        Raises:
            ValueError: an element type that does not reduce.
            NotImplementedError: Adasum.
        """
        if self.reduction.op is ReduceOp.ADASUM:
            raise NotImplementedError("Adasum is not one reduction; use hvdlite.torch.allreduce(op=Adasum)")
        if any(spec.dtype is DType.BOOL for spec in self.tensors):
            raise ValueError(f"{self.label} of bool is not defined; convert to uint8, and use Max for or, Min for and")

    def travels_as(self, dtype: DType) -> DType:
        """The type in which tensors of ``dtype`` travel."""
        return self.wire_dtype if self.wire_dtype is not None and dtype.is_floating else dtype

    @cached_property
    def reduced_types(self) -> Iterable[DType]:
        return {self.travels_as(spec.dtype) for spec in self.tensors}

    def differences(self, other: ReducingOperation) -> Iterator[Difference]:
        yield from super().differences(other)
        rows = (
            ("op", self.reduction.op.label, other.reduction.op.label, "op"),
            ("prescale factor", self.reduction.prescale, other.reduction.prescale, "prescale_factor"),
            ("postscale factor", self.reduction.postscale, other.reduction.postscale, "postscale_factor"),
            ("compression", _label(self.wire_dtype), _label(other.wire_dtype), "compression"),
        )
        for what, mine, theirs, argument in rows:
            yield Difference("", what, mine, theirs, f"Pass the same {argument} on every rank")

    def objection(self, absent: Sequence[int]) -> str | None:
        if super().objection(absent) is None and not self._has_identity:
            return (
                f", and no integer times the prescale factor {self.reduction.prescale} leaves a product as it is. Use "
                "postscale_factor, or floats"
            )
        return super().objection(absent)

    def absentee(self, response: Response, memory: Memory) -> Submission:
        if self.reduction.op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            inputs = [nothing(spec) for spec in self.tensors]
        else:
            inputs = [memory.filled(spec.shape, spec.dtype, self._identity(spec.dtype)) for spec in self.tensors]
        return Submission(self, response.sequence, inputs, [nothing(spec) for spec in self.tensors])

    @property
    def _has_identity(self) -> bool:
        """Whether there is something that a rank can contribute without changing the result of the others."""
        op, prescale, _ = self.reduction
        integers = {spec.dtype for spec in self.tensors if not spec.dtype.is_floating}
        if op is not ReduceOp.PRODUCT or not integers:
            return True
        # Integers are truncated once they are prescaled, and no integer times 2 is 1.
        return abs(prescale) <= 1.0 and (prescale >= 0.0 or DType.UINT8 not in integers)

    def _identity(self, dtype: DType) -> float:
        """What, once it is prescaled, changes no minimum, maximum or product."""
        op, prescale, _ = self.reduction
        lowest, highest = dtype.limits
        if prescale == 0.0:
            return 0.0  # as everybody's; infinity times 0 would be no number
        if op is not ReduceOp.PRODUCT:
            return highest if (op is ReduceOp.MIN) == (prescale > 0.0) else lowest
        if dtype.is_floating:
            return 1.0 / prescale
        # Below 2 and above 1 once it is prescaled. Where that is beyond the type, it is so for all, and 0 comes out.
        whole = math.ceil(min(1.0 / abs(prescale), 2.0**63))
        return min(max(math.copysign(whole, prescale), lowest), highest)


def _label(dtype: DType | None) -> str:
    return "none" if dtype is None else dtype.label
