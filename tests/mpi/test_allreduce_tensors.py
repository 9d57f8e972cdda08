"""`ShmBackend.allreduce_tensors`: private memory through shared windows, in one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from backend_lab import RANK, SIZE, Lab, assert_none, difference, encode, reduced, values_of
from hvdlite import _native
from hvdlite.collectives.shm import ShmBackend
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.fusion.fusion_buffer import slot_offsets
from hvdlite.memory import Buffer

WINDOW = 256  # bytes; small, so that many windows run on little data
REDUCING = [dtype for dtype in DType if dtype is not DType.BOOL]

pytestmark = pytest.mark.skipif(SIZE == 1, reason="one rank passes nothing through shared memory")


@pytest.fixture(scope="module")
def backend() -> ShmBackend:
    lab = Lab()
    node = lab.node((tuple(range(SIZE)),))
    return ShmBackend(
        node, spin_us=5, window_bytes=WINDOW, timeout_s=lab.timeout_s, check=lab.check, recorder=lab.recorder
    )


class Tensors:
    """Tensors of ``numels`` elements, and the layout that they share; nobody stored the one at ``missing``."""

    def __init__(self, numels: Sequence[int], dtype: DType, wire: DType, salt: int, missing: int = -1) -> None:
        self.dtype, self.numels, self.salt = dtype, numels, salt
        self.arrays = [encode(values_of(RANK, numel, salt + i), dtype) for i, numel in enumerate(numels)]
        self.offsets, _ = slot_offsets(numels, wire.itemsize)
        self.total = self.offsets[-1] + numels[-1]
        addresses = [0 if i == missing else array.ctypes.data for i, array in enumerate(self.arrays)]
        self.list = _native.TensorList(addresses, list(numels), self.offsets)

    def buffer(self, index: int) -> Buffer:
        array = self.arrays[index]
        return Buffer((array.ctypes.data,), 0, self.numels[index], self.dtype, array)


@pytest.mark.parametrize("dtype", REDUCING)
def test_one_tensor_in_place_at_every_size(backend: ShmBackend, dtype: DType) -> None:
    per_window = WINDOW // dtype.itemsize
    problems = []
    for windows, shift in itertools.product(range(6), (-1, 0, 1, 7)):
        numel = max(0, windows * per_window + shift)
        tensors = Tensors([numel], dtype, dtype, salt=windows)
        assert backend.allreduce_tensors(tensors.list, tensors.list, tensors.total, dtype, dtype)
        problems.append(difference(tensors.buffer(0), reduced(ReduceOp.SUM, numel, dtype, salt=windows)))
    assert_none(*problems)


@pytest.mark.parametrize("wire", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_several_tensors_of_which_some_are_not_stored(backend: ShmBackend, dtype: DType, wire: DType) -> None:
    numels = [3, 500, 1, 64, 0, 131, 1000]
    problems = []
    for salt in range(5):
        inputs = Tensors(numels, dtype, wire, salt, missing=3)
        outputs = Tensors(numels, dtype, wire, salt, missing=5)
        before = outputs.arrays[5].copy()
        backend.allreduce_tensors(inputs.list, outputs.list, inputs.total, dtype, wire)
        for i, numel in enumerate(numels):
            if i == 5:
                problems.append(None if np.array_equal(outputs.arrays[5], before) else "tensor 5 was written")
                continue
            expected = np.zeros(numel) if i == 3 else reduced(ReduceOp.SUM, numel, dtype, salt=salt + i)
            problems.append(difference(outputs.buffer(i), expected, f"tensor {i}"))
    assert_none(*problems)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_operations_and_scales(backend: ShmBackend, op: ReduceOp) -> None:
    problems = []
    # Scaled products of four ranks would pass int8.
    factors = [(1.0, 1.0)] if op is ReduceOp.PRODUCT else [(1.0, 1.0), (0.5, 1.0), (1.0, 1.5)]
    for dtype, scales in itertools.product(REDUCING, factors):
        tensors = Tensors([777], dtype, dtype, salt=1)
        backend.allreduce_tensors(
            tensors.list, tensors.list, tensors.total, dtype, dtype, op=op, prescale=scales[0], postscale=scales[1]
        )
        problems.append(difference(tensors.buffer(0), reduced(op, 777, dtype, *scales, salt=1), f"{op.label} {scales}"))
    assert_none(*problems)


def test_a_backend_without_windows_declines(backend: ShmBackend) -> None:
    tensors = Tensors([5], DType.FLOAT32, DType.FLOAT32, salt=0)
    without = Lab().shm((tuple(range(SIZE)),))
    assert not without.allreduce_tensors(tensors.list, tensors.list, 5, DType.FLOAT32, DType.FLOAT32)
