"""_native.Barrier.staged_allreduce: windows, casts, tensors that nobody stored; the ranks are threads here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from hvdlite import _native
from hvdlite.dtypes import DType, ReduceOp
from test_native_reduce import COMBINE, FLOATING, OPS, REDUCING, encode, source_values
from thread_comm import on_ranks

WINDOW_BYTES = 256  # small, so that many windows run on little data
TIMEOUT_S = 60.0  # never reached unless a test fails


@dataclass(frozen=True)
class Case:
    """One allreduce of tensors of ``numels`` elements, laid out with ``gap`` elements behind each."""

    numels: Sequence[int]
    dtype: DType
    wire: DType
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    gap: int = 0
    in_place: bool = True
    no_input: int = -1
    """The tensor that enters as zeros that nobody stored; -1 for none."""
    no_output: int = -1
    """The tensor whose result nobody wants."""

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(numel + self.gap for numel in self.numels)][:-1]

    @property
    def total(self) -> int:
        return sum(self.numels) + self.gap * (len(self.numels) - 1)

    def inputs(self, rank: int) -> list[np.ndarray]:
        return [source_values(rank + i, numel, self.dtype, self.op) for i, numel in enumerate(self.numels)]

    def expected(self, size: int) -> list[np.ndarray]:
        """Closed form, in memory as ``dtype``."""
        results = []
        for i, of_ranks in enumerate(zip(*(self.inputs(rank) for rank in range(size)), strict=True)):
            values = [0 * value if i == self.no_input else value for value in of_ranks]
            if (self.prescale, self.postscale) != (1.0, 1.0):
                values = [value * self.prescale for value in values]
            results.append(encode(functools.reduce(COMBINE[self.op], values) * self.postscale, self.dtype))
        return results


@dataclass
class Result:
    status: int
    outputs: list[np.ndarray]


class Ranks:
    """``size`` ranks of one node: a barrier, an abort word and windows, each with memory of its own."""

    def __init__(self, size: int, window_bytes: int = WINDOW_BYTES) -> None:
        self.size = size
        self._window_bytes = window_bytes
        self._page = np.zeros(64 + _native.Barrier.bytes_needed(size) + 64, np.uint8)
        self.abort_address = self._page.ctypes.data + -self._page.ctypes.data % 64
        self._staging = [np.zeros(_native.Barrier.STAGING_WINDOWS * window_bytes, np.uint8) for _ in range(size)]

    def barrier(self, rank: int) -> _native.Barrier:
        return _native.Barrier(self.abort_address + 64, rank, self.size, self.abort_address, 5)

    def allreduce(self, barrier: _native.Barrier, rank: int, case: Case, timeout_s: float = TIMEOUT_S) -> Result:
        """As one rank. Nothing but the call itself orders it against the ranks' next one."""
        inputs = [encode(values, case.dtype) for values in case.inputs(rank)]
        outputs = [tensor if case.in_place else np.full_like(tensor, 77) for tensor in inputs]

        def listed(tensors: list[np.ndarray], absent: int) -> _native.TensorList:
            addresses = [0 if i == absent else tensor.ctypes.data for i, tensor in enumerate(tensors)]
            return _native.TensorList(addresses, list(case.numels), case.offsets)

        status = barrier.staged_allreduce(
            listed(inputs, case.no_input),
            listed(outputs, case.no_output),
            [staging.ctypes.data for staging in self._staging],
            self._window_bytes // case.wire.itemsize,
            case.total,
            case.dtype,
            case.wire,
            case.op,
            case.prescale,
            case.postscale,
            timeout_s,
        )
        return Result(status, outputs)

    def untouched(self) -> bool:
        return not (any(staging.any() for staging in self._staging) or self._page.any())


def check(size: int, cases: Sequence[Case], window_bytes: int = WINDOW_BYTES) -> None:
    """Every rank runs all cases, one after the other, without meeting in between."""
    ranks = Ranks(size, window_bytes)

    def work(rank: int) -> list[Result]:
        barrier = ranks.barrier(rank)
        return [ranks.allreduce(barrier, rank, case) for case in cases]

    for rank, results in enumerate(on_ranks(size, lambda comm: work(comm.rank), 2 * TIMEOUT_S)):
        for case, result in zip(cases, results, strict=True):
            assert result.status == _native.Barrier.OK
            for i, expected in enumerate(case.expected(size)):
                if i == case.no_output:
                    entered = encode(case.inputs(rank)[i], case.dtype)
                    expected = entered if case.in_place else np.full_like(entered, 77)
                np.testing.assert_array_equal(result.outputs[i], expected, f"{case}, rank {rank}, tensor {i}")


@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_tensor_at_every_size(size: int, dtype: DType) -> None:
    per_window = WINDOW_BYTES // dtype.itemsize
    numels = {max(0, windows * per_window + shift) for windows in range(6) for shift in (-1, 0, 1, 7)}
    check(size, [Case([n], dtype, dtype, in_place=here) for n in sorted(numels) for here in (True, False)])


@pytest.mark.parametrize("wire", FLOATING, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_tensors_of_which_some_are_not_stored(size: int, dtype: DType, wire: DType) -> None:
    numels = [3, 500, 1, 64, 0, 131, 1000]
    options = itertools.product([0, 5], [True, False], [(-1, -1), (3, 5), (1, 6)])
    check(size, [Case(numels, dtype, wire, gap=g, in_place=p, no_input=i, no_output=o) for g, p, (i, o) in options])


@pytest.mark.parametrize("wire", [DType.FLOAT32, DType.BFLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_windows_of_several_blocks(size: int, wire: DType) -> None:
    layouts = [[5000], [12289], [3000, 17, 4000, 0, 2500]]
    cases = [Case(numels, DType.FLOAT32, wire, in_place=here) for numels in layouts for here in (True, False)]
    check(size, cases, window_bytes=8192)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
def test_operations_and_scales(op: ReduceOp) -> None:
    scales = [(1.0, 1.0), (0.5, 4.0)]
    check(3, [Case([150, 333], d, d, op, *s) for d in FLOATING for s in scales])
    # Integers are scaled at the end alone, where the answer has no fraction that is cut off.
    check(3, [Case([150, 333], d, d, op, 1.0, s) for d in REDUCING if not d.is_floating for s in (1.0, 2.0)])


def test_nothing_meets_nobody() -> None:
    ranks = Ranks(2)
    assert ranks.allreduce(ranks.barrier(0), 0, Case([0], DType.FLOAT32, DType.FLOAT32)).status == _native.Barrier.OK
    assert ranks.untouched()


def test_a_rank_that_does_not_come() -> None:
    case = Case([200], DType.FLOAT32, DType.FLOAT16)
    ranks = Ranks(2)
    assert ranks.allreduce(ranks.barrier(0), 0, case, timeout_s=0.05).status == _native.Barrier.TIMEOUT
    ranks = Ranks(2)
    _native.store32(ranks.abort_address, 1)
    assert ranks.allreduce(ranks.barrier(0), 0, case).status == _native.Barrier.ABORTED


def test_what_cannot_be_is_refused_before_it_arrives() -> None:
    ranks = Ranks(2)
    barrier = ranks.barrier(0)
    with pytest.raises(ValueError, match="does not reduce"):
        ranks.allreduce(barrier, 0, Case([100], DType.BOOL, DType.BOOL))
    with pytest.raises(ValueError, match="cannot be cast"):
        ranks.allreduce(barrier, 0, Case([100], DType.INT32, DType.FLOAT32))
    nothing = _native.TensorList([], [], [])
    rest = (100, DType.FLOAT32, DType.FLOAT32, ReduceOp.SUM, 1.0, 1.0, TIMEOUT_S)
    with pytest.raises(ValueError, match="one staging address per rank"):
        barrier.staged_allreduce(nothing, nothing, [64], 64, *rest)
    with pytest.raises(ValueError, match="window_numel must be above 0"):
        barrier.staged_allreduce(nothing, nothing, [64, 64], 0, *rest)
    assert ranks.untouched()
