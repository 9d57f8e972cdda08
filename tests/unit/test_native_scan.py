"""_native.first_beyond and _native.bit_sums: answers in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hvdlite import _native
from hvdlite.dtypes import DType
from hvdlite.torch.tensor_view import dtype_of

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BLOCK = 4096  # csrc/kernels/scan.cpp looks once for so many elements


def first(tensors: list[torch.Tensor], limit: float = math.inf) -> int:
    """`_native.first_beyond` of tensors of one dtype."""
    dtype = dtype_of(tensors[0].dtype)
    return _native.first_beyond([t.data_ptr() for t in tensors], [t.numel() for t in tensors], dtype, limit)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    for numel in (1, 2, 31, BLOCK - 1, BLOCK, BLOCK + 1):
        tensor = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
        tensor[::2] = torch.finfo(dtype).min
        assert first([tensor]) == -1
        for place in {0, numel // 2, numel - 1}:
            spoiled = tensor.clone()
            spoiled[place] = value
            assert first([spoiled]) == 0
            assert first([tensor, spoiled[:0], tensor, spoiled, spoiled]) == 3


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_a_limit(dtype: torch.dtype) -> None:
    at_limit = torch.tensor([1024.0, -1024.0, 0.0], dtype=dtype)
    beyond = torch.tensor([0.0, -1032.0], dtype=dtype)  # the next number of bfloat16
    assert first([at_limit], 1024.0) == -1
    assert first([at_limit, beyond], 1024.0) == 1
    assert first([torch.tensor([math.inf], dtype=dtype)], 1e300) == 0


def test_no_tensors_and_wrong_arguments() -> None:
    assert _native.first_beyond([], [], DType.FLOAT32, 1.0) == -1
    with pytest.raises(ValueError, match="int32 has no infinity"):
        _native.first_beyond([], [], DType.INT32, 1.0)
    with pytest.raises(ValueError, match="one count per address"):
        _native.first_beyond([1], [], DType.FLOAT32, 1.0)
    with pytest.raises(ValueError, match="one size per address"):
        _native.bit_sums([], [1])


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 4103])
def test_sums_of_bits(nbytes: int) -> None:
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes + 1, np.uint8)[1:]  # at an odd address
    whole = nbytes // 8 * 8
    words = [int.from_bytes(content[at : at + 8].tobytes(), "little") for at in range(0, whole, 8)]
    total = (sum(words) + int(content[whole:].sum(dtype=np.int64))) % (1 << 64)
    expected = total - (1 << 64) * (total >> 63)
    assert _native.bit_sums([content.ctypes.data, content.ctypes.data], [nbytes, 0]) == [expected, 0]
