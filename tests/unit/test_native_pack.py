"""_native.TensorList: what pack and unpack move, cast and leave alone."""

from __future__ import annotations

import hashlib
import mmap

import numpy as np
import pytest
import torch

from hvdlite import _native
from hvdlite.dtypes import DType

FLOATING = [dtype for dtype in DType if dtype.is_floating]
INTEGERS = [dtype for dtype in DType if not dtype.is_floating and dtype is not DType.BOOL]
TORCH = {
    DType.UINT8: torch.uint8, DType.INT8: torch.int8, DType.INT16: torch.int16, DType.INT32: torch.int32,
    DType.INT64: torch.int64, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32, DType.FLOAT64: torch.float64, DType.BOOL: torch.bool,
}  # fmt: skip
# Around the vectors of every path, and around the 1024 elements that a cast takes at a time.
SIZES = [0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 129, 1023, 1024, 1025, 3000]


def pack(
    tensors: list[torch.Tensor],
    offsets: list[int],
    buffer: torch.Tensor,
    begin: int,
    end: int,
    types: tuple[DType, DType],
    scale: float = 1.0,
) -> None:
    listed = _native.TensorList([t.data_ptr() for t in tensors], [t.numel() for t in tensors], offsets)
    listed.pack(buffer.data_ptr(), begin, end, *types, scale)


def cast(tensor: torch.Tensor, to: DType, scale: float = 1.0) -> torch.Tensor:
    """``tensor`` packed alone into a buffer of type ``to``."""
    source = next(dtype for dtype in DType if TORCH[dtype] is tensor.dtype)
    buffer = torch.full((tensor.numel(),), 1, dtype=TORCH[to])
    pack([tensor], [0], buffer, 0, tensor.numel(), (source, to), scale)
    return buffer


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, but one NaN is as good as another."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan()
    return bool(torch.equal(nan, b.isnan()) and torch.equal(a.view(bits)[~nan], b.view(bits)[~nan]))


@pytest.mark.parametrize("to", FLOATING, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("source", FLOATING, ids=lambda dtype: dtype.label)
def test_casts_of_small_integers_are_exact(source: DType, to: DType) -> None:
    for numel in SIZES:
        values = torch.arange(numel) % 255 - 127
        np.testing.assert_array_equal(cast(values.to(TORCH[source]), to).double(), values.double())
        halves = cast(values.to(TORCH[source]), to, scale=0.5).double()
        np.testing.assert_array_equal(halves, values.double() * 0.5)


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_fp32_rounds_like_torch(to: DType) -> None:
    generator = np.random.default_rng(1)
    anything = generator.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    ties = (np.arange(0x3300, 0x4780, dtype=np.uint32) << 16) + 0x1000  # in fp16, where it has numbers
    bfloat_ties = (np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000
    special = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000], np.uint32)
    bits = np.concatenate([anything, ties - 1, ties, ties + 1, ties + 0x7000, bfloat_ties, bfloat_ties + 1, special])
    values = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    assert same_bits(cast(values, to), values.to(TORCH[to]))


@pytest.mark.parametrize("to", [DType.FLOAT32, DType.FLOAT64], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("source", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_every_half_widens_exactly(source: DType, to: DType) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(TORCH[source])
    assert same_bits(cast(every, to), every.to(TORCH[to]))


def test_fp64_rounds_once() -> None:
    # Through fp32 these would first become a tie, and then go to the even side.
    tiny = 2.0**-40
    just_above_ties = torch.tensor(
        [1 + 2.0**-11 + tiny, -1 - 2.0**-11 - tiny, 2.0**-25 + 2.0**-60], dtype=torch.float64
    )
    expected = torch.tensor([1 + 2.0**-10, -1 - 2.0**-10, 2.0**-24], dtype=torch.float16)
    assert torch.equal(cast(just_above_ties.repeat(40), DType.FLOAT16), expected.repeat(40))
    just_below = torch.tensor([1 + 3 * 2.0**-11 - tiny, 65520 - tiny * 65536], dtype=torch.float64)
    assert torch.equal(cast(just_below, DType.FLOAT16), torch.tensor([1 + 2.0**-10, 65504], dtype=torch.float16))
    near_one = torch.tensor([1 + 2.0**-8 + tiny, 1 + 3 * 2.0**-8 - tiny, 1e300, -1e300], dtype=torch.float64)
    bfloat = torch.tensor([1 + 2.0**-7, 1 + 2.0**-7, torch.inf, -torch.inf], dtype=torch.bfloat16)
    assert torch.equal(cast(near_one, DType.BFLOAT16), bfloat)


def test_fp64_rounds_like_numpy() -> None:
    values = np.random.default_rng(2).standard_normal(20000) * np.logspace(-9, 5, 20000)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(values.astype(np.float16))
    assert same_bits(cast(torch.from_numpy(values), DType.FLOAT16), expected)
    assert same_bits(cast(torch.from_numpy(values), DType.FLOAT32), torch.from_numpy(values.astype(np.float32)))


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.label)
def test_integer_scale_truncates(dtype: DType) -> None:
    for numel in SIZES:
        values = torch.arange(numel) % 100 - (0 if dtype is DType.UINT8 else 50)
        scaled = cast(values.to(TORCH[dtype]), dtype, scale=0.3)
        np.testing.assert_array_equal(scaled, torch.trunc(values.double() * 0.3).to(TORCH[dtype]))


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
def test_same_type_is_copied_bit_by_bit(dtype: DType) -> None:
    for numel in SIZES:
        raw = np.random.default_rng(numel).integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)
        buffer = np.zeros_like(raw)
        _native.TensorList([raw.ctypes.data], [numel], [0]).pack(buffer.ctypes.data, 0, numel, dtype, dtype)
        np.testing.assert_array_equal(buffer, raw)


@pytest.mark.parametrize(
    ("source", "to", "scale"),
    [
        (DType.INT32, DType.INT64, 1.0),
        (DType.FLOAT32, DType.INT32, 1.0),
        (DType.BOOL, DType.UINT8, 1.0),
        (DType.BOOL, DType.BOOL, 0.5),
    ],
)
def test_what_cannot_be_cast(source: DType, to: DType, scale: float) -> None:
    tensors = _native.TensorList([], [], [])
    with pytest.raises(ValueError, match="cannot be cast"):
        tensors.pack(0, 0, 0, source, to, scale)
    with pytest.raises(ValueError, match="cannot be cast"):
        tensors.unpack(0, 0, 0, source, to, scale)
    with pytest.raises(ValueError, match="unknown dtype 10"):
        tensors.pack(0, 0, 0, source, max(DType) + 1)


def digest() -> str:
    """A hash of many results, to compare paths to the last bit; one NaN is as good as another."""
    generator = np.random.default_rng(3)
    total = hashlib.sha256()
    for source in DType:
        bits = torch.from_numpy(generator.integers(0, 256, 3001 * source.itemsize, dtype=np.uint8))
        for to in FLOATING if source.is_floating else [source] * (source in INTEGERS):
            for scale in (1.0, 0.3, -1e5):
                result = cast(bits.view(TORCH[source]), to, scale)
                if to.is_floating:
                    total.update(result.isnan().numpy().tobytes())
                    result[result.isnan()] = 0
                total.update(result.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


NUMELS = [5, 0, 17, 1, 40, 3]
OFFSETS = [0, 8, 8, 32, 33, 80]
ABSENT = 3  # this tensor has address 0
TOTAL = 90


def layout(dtype: DType) -> tuple[list[torch.Tensor], _native.TensorList, torch.Tensor]:
    """Tensors, their list, and what the whole fused layout must hold in fp64."""
    tensors, fused = [], torch.zeros(TOTAL, dtype=torch.float64)
    for i, (numel, offset) in enumerate(zip(NUMELS, OFFSETS, strict=True)):
        values = torch.arange(numel) + 10 * i + 1
        tensors.append(values.to(TORCH[dtype]))
        if i != ABSENT:
            fused[offset : offset + numel] = values
    addresses = [0 if i == ABSENT else t.data_ptr() for i, t in enumerate(tensors)]
    return tensors, _native.TensorList(addresses, NUMELS, OFFSETS), fused


@pytest.mark.parametrize(
    ("tensor_type", "buffer_type"),
    [(DType.FLOAT32, DType.FLOAT32), (DType.FLOAT32, DType.BFLOAT16), (DType.FLOAT64, DType.FLOAT16)],
)
def test_every_range(tensor_type: DType, buffer_type: DType) -> None:
    originals, tensors, fused = layout(tensor_type)
    for begin in range(TOTAL + 1):
        for end in range(begin, TOTAL + 1, 7):
            buffer = torch.full((end - begin + 2,), 77, dtype=TORCH[buffer_type])
            tensors.pack(buffer[1:].data_ptr(), begin, end, tensor_type, buffer_type)
            np.testing.assert_array_equal(buffer[1:-1].double(), fused[begin:end])
            assert buffer[0] == buffer[-1] == 77

            expected = [t.double() for t in originals]
            for i, offset in enumerate(OFFSETS):
                low, high = max(begin - offset, 0), min(end - offset, NUMELS[i])
                if i != ABSENT and low < high:
                    expected[i][low:high] *= -2
            tensors.unpack(buffer[1:].data_ptr(), begin, end, buffer_type, tensor_type, -2.0)
            for tensor, values in zip(originals, expected, strict=True):
                np.testing.assert_array_equal(tensor.double(), values)
            for i, tensor in enumerate(originals):
                tensor.copy_(torch.arange(NUMELS[i]) + 10 * i + 1)


def test_a_tensor_at_its_place_is_not_touched() -> None:
    page = np.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), dtype=np.float32)  # a write would end the process
    address = page.ctypes.data
    tensors = _native.TensorList([address, address + 400], [100, 50], [0, 100])
    tensors.pack(address, 0, 150, DType.FLOAT32, DType.FLOAT32)
    tensors.pack(address + 80, 20, 120, DType.FLOAT32, DType.FLOAT32)
    tensors.unpack(address, 0, 150, DType.FLOAT32, DType.FLOAT32)


def test_a_tensor_at_its_place_is_scaled() -> None:
    values = torch.arange(50, dtype=torch.float32)
    pack([values], [0], values, 0, 50, (DType.FLOAT32, DType.FLOAT32), 0.5)
    assert torch.equal(values, torch.arange(50) * 0.5)


def test_offsets_beyond_32_bits() -> None:
    stored = torch.arange(100, dtype=torch.float32)
    first = 3 << 33  # the element of the tensor that is stored at all
    tensors = _native.TensorList(
        [0, (stored.data_ptr() - first * 4) % 2**64, 0], [1 << 33, 1 << 36, 10], [0, 1 << 33, 1 << 37]
    )
    begin = (1 << 33) + first + 7
    buffer = torch.zeros(50, dtype=torch.float32)
    tensors.pack(buffer.data_ptr(), begin, begin + 50, DType.FLOAT32, DType.FLOAT32)
    assert torch.equal(buffer, stored[7:57])
    tensors.unpack(buffer.data_ptr(), begin + 20, begin + 30, DType.FLOAT32, DType.FLOAT32)
    assert torch.equal(stored[27:37], torch.arange(7, 17))


def test_lists_must_make_sense() -> None:
    with pytest.raises(ValueError, match="equal length"):
        _native.TensorList([1], [1, 2], [0])
    with pytest.raises(ValueError, match="ascend and not overlap"):
        _native.TensorList([1, 2], [5, 5], [0, 4])
    with pytest.raises(ValueError, match="ascend and not overlap"):
        _native.TensorList([1, 2], [5, 5], [5, 0])


@pytest.mark.parametrize(("source", "to"), [(DType.FLOAT64, DType.FLOAT32), (DType.BFLOAT16, DType.FLOAT64)])
def test_casts_keep_subnormal_numbers_where_the_program_flushes_them(source: DType, to: DType) -> None:
    tiny = torch.arange(33, dtype=torch.int64) * 2.0**-133
    given, expected = tiny.to(TORCH[source]), tiny.to(TORCH[to])
    torch.set_flush_denormal(True)
    try:
        got = cast(given, to)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(got, expected)
