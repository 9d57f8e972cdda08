"""_native.reduce: answers in closed form."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from hvdlite import _native
from hvdlite.dtypes import DType, ReduceOp

REDUCING = [dtype for dtype in DType if dtype is not DType.BOOL]
FLOATING = [dtype for dtype in DType if dtype.is_floating]
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
# Below, at and above the bytes of a vector (16, 32, 64) and of the four that one step takes, for 1 to 8 bytes each.
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4097]
COMBINE = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def storage(dtype: DType) -> np.dtype:
    """The numpy type whose bytes hold ``dtype``; uint16 for bfloat16, which numpy lacks."""
    return np.dtype(np.uint16 if dtype is DType.BFLOAT16 else dtype.label)


def encode(values: np.ndarray, dtype: DType) -> np.ndarray:
    """``values``, exact in ``dtype`` (integers wrap), as they are in memory."""
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(storage(dtype))


def decode(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """The values of floating ``stored`` in float64."""
    if dtype is DType.BFLOAT16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return stored.astype(np.float64)


def at_offset(stored: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts ``offset`` bytes behind a cache line, with 64 bytes of 0xAB on either side."""
    raw = np.full(stored.nbytes + 256, 0xAB, dtype=np.uint8)
    start = -raw.ctypes.data % 64 + 64 + offset
    placed = raw[start : start + stored.nbytes].view(stored.dtype)
    placed[:] = stored
    return placed


def untouched_around(placed: np.ndarray) -> bool:
    raw = placed
    while raw.base is not None:
        raw = raw.base
    start = placed.ctypes.data - raw.ctypes.data
    return bool((raw[:start] == 0xAB).all() and (raw[start + placed.nbytes :] == 0xAB).all())


def reduce(
    destinations: Sequence[np.ndarray],
    sources: Sequence[np.ndarray],
    dtype: DType,
    op: ReduceOp = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    _native.reduce(
        [d.ctypes.data for d in destinations],
        [s.ctypes.data for s in sources],
        sources[0].size,
        dtype,
        op,
        prescale,
        postscale,
    )


def reduced(
    sources: Sequence[np.ndarray],
    dtype: DType,
    op: ReduceOp = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> np.ndarray:
    result = np.empty_like(sources[0])
    reduce([result], sources, dtype, op, prescale, postscale)
    return result


def source_values(index: int, numel: int, dtype: DType, op: ReduceOp) -> np.ndarray:
    """Integers that no op makes inexact in any float: up to 5 to add, 1 or 2 to multiply, signed ones to compare."""
    i = np.arange(numel, dtype=np.int64)
    if op is ReduceOp.SUM:
        return (i + index) % 5 + 1
    if op is ReduceOp.PRODUCT:
        return (i * 7 + index) % 3 % 2 + 1
    return (i * 37 + index * 11) % 101 - (0 if dtype is DType.UINT8 else 50)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
def test_known_answer(dtype: DType, op: ReduceOp, count: int) -> None:
    for numel in SIZES:
        values = [source_values(j, numel, dtype, op) for j in range(count)]
        sources = [encode(v, dtype) for v in values]  # nothing behind them that could be read by mistake
        destinations = [at_offset(np.zeros(numel, storage(dtype)), 0) for _ in range(2)]
        reduce(destinations, sources, dtype, op)
        expected = encode(functools.reduce(COMBINE[op], values), dtype)
        for destination in destinations:
            np.testing.assert_array_equal(destination, expected)
            assert untouched_around(destination)


@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
def test_addresses_need_no_alignment(dtype: DType) -> None:
    for numel in (1, 5, 64, 333):
        for offset in (1, 2, 3, 7, 31, 33, 63):
            values = [source_values(j, numel, dtype, ReduceOp.SUM) for j in range(3)]
            sources = [at_offset(encode(v, dtype), offset * j % 64) for j, v in enumerate(values)]
            destinations = [at_offset(np.zeros(numel, storage(dtype)), o) for o in (0, offset)]
            reduce(destinations, sources, dtype)
            for destination in destinations:
                np.testing.assert_array_equal(destination, encode(np.sum(values, axis=0), dtype))
                assert untouched_around(destination)


@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
def test_destinations_may_be_sources(dtype: DType) -> None:
    for numel in SIZES:
        for count, written in ((2, [0, 1]), (3, [2]), (4, [0, 1, 2, 3]), (6, [5, 0])):
            values = [source_values(j, numel, dtype, ReduceOp.SUM) for j in range(count)]
            sources = [encode(v, dtype) for v in values]
            reduce([sources[i] for i in written], sources, dtype)
            total = np.sum(values, axis=0)
            for j in range(count):
                np.testing.assert_array_equal(sources[j], encode(total if j in written else values[j], dtype))


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
def test_scales(dtype: DType, op: ReduceOp) -> None:
    values = [source_values(j, 301, dtype, op) for j in range(4)]
    result = reduced([encode(v, dtype) for v in values], dtype, op, prescale=0.5, postscale=4.0)
    expected = functools.reduce(COMBINE[op], [v * 0.5 for v in values]) * 4.0
    np.testing.assert_array_equal(decode(result, dtype), expected)


@pytest.mark.parametrize("count", [3, 7, 49, 1000])
@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
def test_a_postscale_of_one_over_n_divides(dtype: DType, count: int) -> None:
    values = np.arange(1, 128)
    result = reduced([encode(values, dtype)], dtype, postscale=1 / count)
    if not dtype.is_floating:
        np.testing.assert_array_equal(result, values // count)
    elif dtype.is_half:
        name = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}[dtype]
        expected = (torch.from_numpy(values).float() / count).to(name)
        np.testing.assert_array_equal(result.view(np.int16), expected.view(torch.int16).numpy())
    else:
        np.testing.assert_array_equal(result, values.astype(storage(dtype)) / storage(dtype).type(count))


def test_prescale_comes_before_the_sum() -> None:
    sources = [np.full(100, 1e4, np.float16)] * 8  # their sum is above 65504
    np.testing.assert_array_equal(reduced(sources, DType.FLOAT16, prescale=0.125), np.full(100, 1e4, np.float16))
    assert np.isinf(reduced(sources, DType.FLOAT16)).all()


@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        ([7, -7, 5, -1], 0.5, [3, -3, 2, 0]),
        ([100, -100, 1, 0], 10.0, [127, -128, 10, 0]),
        ([100, -100, 1, 0], float("nan"), [0, 0, 0, 0]),
        ([100, -100, 1, 0], float("inf"), [127, -128, 127, 0]),
        ([127, -128, 1, -1], -1.0, [-127, 127, -1, 1]),
    ],
)
def test_integer_scales_truncate_and_saturate(values: list[int], scale: float, expected: list[int]) -> None:
    stored = np.array(values * 33, np.int8)
    np.testing.assert_array_equal(reduced([stored], DType.INT8, postscale=scale), np.array(expected * 33, np.int8))
    np.testing.assert_array_equal(reduced([stored], DType.INT8, prescale=scale), np.array(expected * 33, np.int8))


@pytest.mark.parametrize("dtype", [d for d in REDUCING if not d.is_floating], ids=lambda dtype: dtype.label)
def test_integer_scales_saturate_at_both_ends(dtype: DType) -> None:
    limits = np.iinfo(storage(dtype))
    ends = np.array([limits.min, limits.max] * 20, storage(dtype))
    np.testing.assert_array_equal(reduced([ends], dtype, postscale=3.0), ends)


@pytest.mark.parametrize("dtype", [d for d in REDUCING if not d.is_floating], ids=lambda dtype: dtype.label)
def test_integers_wrap(dtype: DType) -> None:
    limits = np.iinfo(storage(dtype))
    top, one, two = (np.full(131, v, storage(dtype)) for v in (limits.max, 1, 2))
    np.testing.assert_array_equal(reduced([top, one], dtype), np.full(131, limits.min, storage(dtype)))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(reduced([top, two], dtype, ReduceOp.PRODUCT), top * two)


def test_int64_is_exact_beyond_fp64() -> None:
    big = np.full(77, 2**53 + 1, np.int64)
    np.testing.assert_array_equal(reduced([big, big, big], DType.INT64), 3 * big)
    np.testing.assert_array_equal(reduced([big, -big, big], DType.INT64, ReduceOp.MAX), big)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**60 + 7])
def test_the_average_of_int64_is_exact_beyond_fp64(count: int, value: int) -> None:
    sources = [np.full(77, value + i, np.int64) for i in range(count)]
    average = int(sum(int(source[0]) for source in sources) / Fraction(count))  # which truncates
    np.testing.assert_array_equal(reduced(sources, DType.INT64, postscale=1 / count), np.full(77, average))


def test_int64_is_exact_until_it_is_scaled() -> None:
    sources = [np.full(77, value, np.int64) for value in (2**53 + 1, -(2**53))]
    np.testing.assert_array_equal(reduced(sources, DType.INT64, postscale=2.5), np.full(77, 2))


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
def test_nan_and_infinity(dtype: DType, op: ReduceOp) -> None:
    count, numel = 4, 67
    for position in range(count):
        values = [np.ones(numel) for _ in range(count)]
        values[position][::3] = np.nan
        values[position][1::3] = np.inf
        values[position][2::3] = -np.inf
        result = decode(reduced([encode(v, dtype) for v in values], dtype, op), dtype)
        np.testing.assert_array_equal(result, functools.reduce(COMBINE[op], values))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN], ids=lambda op: op.label)
def test_every_half_rounds_like_torch(dtype: DType, op: ReduceOp) -> None:
    torch_type = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}[dtype]
    every = np.arange(1 << 16, dtype=np.uint16)
    other = np.random.default_rng(1).permutation(every)
    a, b = (torch.from_numpy(x.view(np.int16)).view(torch_type).float() for x in (every, other))
    combined = {ReduceOp.SUM: a + b, ReduceOp.PRODUCT: a * b, ReduceOp.MIN: torch.minimum(a, b)}[op]
    expected = combined.to(torch_type)
    result = torch.from_numpy(reduced([every, other], dtype, op).view(np.int16)).view(torch_type)
    assert torch.equal(result.isnan(), expected.isnan())
    number = ~expected.isnan()
    if op is ReduceOp.MIN:  # of +0 and -0 either may win
        assert torch.equal(result[number], expected[number])
    else:
        assert torch.equal(result.view(torch.int16)[number], expected.view(torch.int16)[number])


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: dtype.label)
def test_subnormal_numbers_count_where_the_program_flushes_them(dtype: DType) -> None:
    """Else two ranks that add up the same numbers could come to two results."""
    smallest = np.full(33, 1, f"u{dtype.itemsize}").view(storage(dtype))  # by its bits
    torch.set_flush_denormal(True)
    try:
        total = reduced([smallest] * 3, dtype)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(total.view(f"u{dtype.itemsize}"), np.full(33, 3))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_halves_round_once(dtype: DType) -> None:
    large = 2048.0 if dtype is DType.FLOAT16 else 256.0  # the next number is two away
    sources = [encode(np.full(50, v), dtype) for v in (large, 1.0, 1.0)]
    np.testing.assert_array_equal(decode(reduced(sources, dtype), dtype), np.full(50, large + 2))


def test_sum_follows_the_order_of_sources() -> None:
    a, b, c = (np.full(99, v, np.float32) for v in (1e8, 1.0, -1e8))
    np.testing.assert_array_equal(reduced([a, b, c], DType.FLOAT32), np.zeros(99, np.float32))
    np.testing.assert_array_equal(reduced([a, c, b], DType.FLOAT32), np.ones(99, np.float32))


def random_bits(dtype: DType, count: int, numel: int) -> list[np.ndarray]:
    """Arbitrary bit patterns: subnormals, infinities and NaNs among them."""
    generator = np.random.default_rng(dtype)
    return [np.frombuffer(generator.bytes(numel * dtype.itemsize), storage(dtype)) for _ in range(count)]


@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
def test_result_does_not_depend_on_where_an_array_is_cut(dtype: DType) -> None:
    sources = random_bits(dtype, 3, 700)
    whole = reduced(sources, dtype, prescale=0.3, postscale=0.7).tobytes()
    for start, stop in ((0, 699), (1, 700), (3, 40), (511, 530), (699, 700)):
        part = reduced([s[start:stop] for s in sources], dtype, prescale=0.3, postscale=0.7).tobytes()
        assert part == whole[start * dtype.itemsize : stop * dtype.itemsize]


def digest() -> str:
    """A hash of many results, to compare paths to the last bit; one NaN is as good as another."""
    total = hashlib.sha256()
    for dtype in REDUCING:
        sources = random_bits(dtype, 5, 3001)
        for op in OPS:
            for prescale, postscale in ((1.0, 1.0), (0.3, 1.7)):
                result = reduced(sources, dtype, op, prescale, postscale)
                if dtype.is_floating:
                    nan = np.isnan(decode(result, dtype))
                    total.update(nan.tobytes())
                    result[nan] = 0
                total.update(result.tobytes())
    return total.hexdigest()


def test_what_does_not_reduce() -> None:
    with pytest.raises(ValueError, match="does not reduce"):
        _native.reduce([], [1], 0, DType.BOOL, ReduceOp.SUM)
    with pytest.raises(ValueError, match="does not reduce"):
        _native.reduce([], [1], 0, DType.INT8, ReduceOp.ADASUM)
    with pytest.raises(ValueError, match="dtype 10 with op 1 does not reduce"):
        _native.reduce([], [1], 0, max(DType) + 1, ReduceOp.SUM)
    with pytest.raises(ValueError, match="at least one source"):
        _native.reduce([], [], 0, DType.INT8, ReduceOp.SUM)


def test_copy() -> None:
    _native.copy(0, 0, 0)  # the addresses of tensors without elements
    source = np.arange(1000, dtype=np.uint8)
    for numel in SIZES[:-1]:
        destination = at_offset(np.zeros(numel, np.uint8), 5)
        _native.copy(destination.ctypes.data, source.ctypes.data, numel)
        np.testing.assert_array_equal(destination, source[:numel])
        assert untouched_around(destination)
