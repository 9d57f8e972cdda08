"""`Backend.allreduce_tensors`: private memory, by way of shared windows in one call, or of a staging buffer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from backend_lab import RANK, WAYS, WINDOW, Lab, allocate, assert_none, difference, encode, reduced, values_of
from hvdlite.collectives.base import Backend, TensorReduction
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import Buffer

REDUCING = [dtype for dtype in DType if dtype is not DType.BOOL]


@pytest.fixture(scope="module", params=WAYS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Lab().build(request.param)


@pytest.fixture(scope="module")
def staging(backend: Backend) -> Buffer:
    return allocate(backend, WINDOW, DType.UINT8)


class Tensors:
    """Tensors of ``numels`` elements, and the layout that they share; nobody stored the one at ``missing``."""

    def __init__(
        self, backend: Backend, numels: Sequence[int], dtype: DType, wire: DType, salt: int, missing: int = -1
    ) -> None:
        self.dtype, self.numels, self.salt = dtype, numels, salt
        self.arrays = [encode(values_of(RANK, numel, salt + i), dtype) for i, numel in enumerate(numels)]
        self.layout = Layout.of(list(numels), dtype, wire)
        addresses = [0 if i == missing else array.ctypes.data for i, array in enumerate(self.arrays)]
        self.list = backend.memory.tensors(addresses, self.layout.numels, self.layout.offsets)

    def buffer(self, index: int) -> Buffer:
        array = self.arrays[index]
        return Buffer((array.ctypes.data,), 0, self.numels[index], self.dtype, array)


def allreduce(
    backend: Backend, staging: Buffer, inputs: Tensors, outputs: Tensors | None = None, reduction: Reduction = SUM
) -> None:
    outputs = outputs or inputs
    layout = inputs.layout
    part = staging.as_dtype(layout.wire_dtype)
    backend.allreduce_tensors(TensorReduction(inputs.list, outputs.list, layout, reduction), staging=part).wait()


@pytest.mark.parametrize("dtype", REDUCING)
def test_one_tensor_in_place_at_every_size(backend: Backend, staging: Buffer, dtype: DType) -> None:
    per_window = WINDOW // dtype.itemsize
    problems = []
    for windows, shift in itertools.product(range(6), (-1, 0, 1, 7)):
        numel = max(0, windows * per_window + shift)
        tensors = Tensors(backend, [numel], dtype, dtype, salt=windows)
        allreduce(backend, staging, tensors)
        problems.append(difference(tensors.buffer(0), reduced(ReduceOp.SUM, numel, dtype, salt=windows)))
    assert_none(*problems)


@pytest.mark.parametrize("wire", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_several_tensors_of_which_some_are_not_stored(
    backend: Backend, staging: Buffer, dtype: DType, wire: DType
) -> None:
    numels = [3, 500, 1, 64, 0, 131, 1000]
    problems = []
    for salt in range(5):
        inputs = Tensors(backend, numels, dtype, wire, salt, missing=3)
        outputs = Tensors(backend, numels, dtype, wire, salt, missing=5)
        before = outputs.arrays[5].copy()
        allreduce(backend, staging, inputs, outputs)
        for i, numel in enumerate(numels):
            if i == 5:
                problems.append(None if np.array_equal(outputs.arrays[5], before) else "tensor 5 was written")
                continue
            expected = np.zeros(numel) if i == 3 else reduced(ReduceOp.SUM, numel, dtype, salt=salt + i)
            problems.append(difference(outputs.buffer(i), expected, f"tensor {i}"))
    assert_none(*problems)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_operations_and_scales(backend: Backend, staging: Buffer, op: ReduceOp) -> None:
    problems = []
    # Scaled products of four ranks would pass int8.
    factors = [(1.0, 1.0)] if op is ReduceOp.PRODUCT else [(1.0, 1.0), (0.5, 1.0), (1.0, 1.5)]
    for dtype, scales in itertools.product(REDUCING, factors):
        tensors = Tensors(backend, [777], dtype, dtype, salt=1)
        allreduce(backend, staging, tensors, reduction=Reduction(op, *scales))
        problems.append(difference(tensors.buffer(0), reduced(op, 777, dtype, *scales, salt=1), f"{op.label} {scales}"))
    assert_none(*problems)
