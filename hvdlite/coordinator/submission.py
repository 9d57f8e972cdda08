"""What a user thread hands to the coordinator: the request that all ranks must share, and this rank's memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdlite.coordinator.handle import Handle
from hvdlite.coordinator.messages import Claim, Key, Kind, Request, Response, Sizes, TensorSpec
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.fusion.fusion_buffer import Home
from hvdlite.memory import TensorView, filled

Allocate = Callable[[int, tuple[int, ...]], TensorView]
"""(index of the tensor, shape of its result) -> where the result shall go; called on the coordinator thread."""


@dataclass(slots=True)
class Submission:
    """One operation of this rank. ``inputs`` and ``outputs`` keep the tensors alive until it is complete."""

    request: Request
    sequence: int
    inputs: Sequence[TensorView] = ()
    outputs: Sequence[TensorView] = ()
    sizes: Sizes | None = None
    home: Home | None = None
    allocate: Allocate | None = None
    handle: Handle = field(default_factory=Handle)
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.request.name, self.sequence

    @property
    def label(self) -> str:
        """The name for people: in errors and in the timeline."""
        return self.request.name if self.sequence < 0 else f"{self.request.name}.{self.sequence}"

    def claim(self, rank: int) -> Claim:
        if self.sizes is None:
            return Claim(self.request, self.sequence)
        return Claim(self.request, self.sequence, (rank,), (self.sizes,))


def absent(response: Response) -> Submission:
    """What a rank that has joined takes part with: nothing, so that the others' result is that of their tensors."""
    request = response.request
    if request.kind is Kind.ALLGATHER:
        inputs = [_nothing(TensorSpec(spec.name, spec.dtype, (0, *spec.shape))) for spec in request.tensors]
    elif request.op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        inputs = [_nothing(spec) for spec in request.tensors]
    else:
        inputs = [filled(spec.shape, spec.dtype, _identity(request, spec.dtype)) for spec in request.tensors]
    outputs = [_nothing(spec) for spec in request.tensors]

    def allocate(index: int, shape: tuple[int, ...]) -> TensorView:
        return filled(shape, request.tensors[index].dtype, 0)

    return Submission(request, response.sequence, inputs, outputs, allocate=allocate)


def has_identity(request: Request) -> bool:
    """Whether there is something that a rank can contribute without changing the result of the others."""
    integers = {spec.dtype for spec in request.tensors if not spec.dtype.is_floating}
    if request.op is not ReduceOp.PRODUCT or not integers:
        return True
    # Integers are truncated once they are prescaled, and no integer times 2 is 1.
    return abs(request.prescale) <= 1.0 and (request.prescale >= 0.0 or DType.UINT8 not in integers)


def _identity(request: Request, dtype: DType) -> float:
    """What, once it is prescaled, changes no minimum, maximum or product."""
    prescale = request.prescale
    lowest, highest = dtype.limits
    if prescale == 0.0:
        return 0.0  # as everybody's; infinity times 0 would be no number
    if request.op is not ReduceOp.PRODUCT:
        return highest if (request.op is ReduceOp.MIN) == (prescale > 0.0) else lowest
    if dtype.is_floating:
        return 1.0 / prescale
    # Below 2 and above 1 once it is prescaled. Where that is beyond the type, so is it for everybody, and 0 comes out.
    whole = math.ceil(min(1.0 / abs(prescale), 2.0**63))
    return min(max(math.copysign(whole, prescale), lowest), highest)


def _nothing(spec: TensorSpec) -> TensorView:
    """Zeros that nobody stored, and a result that nobody wants."""
    return TensorView(0, spec.shape, spec.dtype, None)
