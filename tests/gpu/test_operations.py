"""Every operation on tensors of a GPU, whose contents come late, beside what torch makes of them on the host."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import hvdlite.torch as hvd
from gpu_lab import Gpu, of_all, of_rank, oracle

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REDUCING = [*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def mine(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return of_rank(hvd.rank(), shape, dtype)


def check(gpu: Gpu, result: torch.Tensor, expected: torch.Tensor) -> None:
    assert gpu.has(result)
    torch.testing.assert_close(gpu.read(result), expected, rtol=1e-2 if expected.dtype.itemsize == 2 else 1e-6, atol=0)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", REDUCING, ids=str)
def test_allreduce(gpu: Gpu, dtype: torch.dtype, op: int) -> None:
    if op == hvd.Average and not dtype.is_floating_point:
        expected = oracle(op, (7, 143), torch.float64).trunc().to(dtype)
    else:
        expected = oracle(op, (7, 143), dtype)
    check(gpu, hvd.allreduce(gpu.late(mine((7, 143), dtype)), op=op), expected)
    tensor = gpu.late(mine((7, 143), dtype))
    assert hvd.allreduce_(tensor, op=op) is tensor
    check(gpu, tensor, expected)


@pytest.mark.parametrize("numel", [0, 1, 255, 4096, 100_003, 5_000_000])
def test_allreduce_of_any_size(gpu: Gpu, numel: int) -> None:
    check(gpu, hvd.allreduce(gpu.late(mine((numel,))), op=hvd.Sum), oracle(hvd.Sum, (numel,), torch.float32))


def test_scales_and_compression(gpu: Gpu) -> None:
    tensor, total = gpu.late(mine((1001,))), oracle(hvd.Sum, (1001,), torch.float32)
    check(gpu, hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 2 * total)
    check(gpu, hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.bf16), total)


def test_a_group_of_several_types_and_places(gpu: Gpu) -> None:
    shapes = {torch.float32: (3,), torch.float16: (70_001,), torch.int32: (5, 5)}
    tensors = [gpu.late(mine(shape, dtype)) for dtype, shape in shapes.items()]
    for result, (dtype, shape) in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), shapes.items(), strict=True):
        check(gpu, result, oracle(hvd.Sum, shape, dtype))
    on_gpu, on_host = hvd.grouped_allreduce([gpu.late(mine((9,))), mine((8,))], op=hvd.Sum)
    check(gpu, on_gpu, oracle(hvd.Sum, (9,), torch.float32))
    assert torch.equal(on_host, oracle(hvd.Sum, (8,), torch.float32))


@pytest.mark.parametrize("in_place", [False, True])
def test_again_and_again(gpu: Gpu, in_place: bool) -> None:
    """Until it is prepared, and then; on another stream now and then."""
    reduce, name = (hvd.allreduce_, "in place") if in_place else (hvd.allreduce, "anew")
    for i in range(30):
        with gpu.side_stream() if i % 5 == 4 else nullcontext():
            check(gpu, reduce(gpu.late(mine((999,)) + i), op=hvd.Sum, name=name), mine_of_all(i))


def mine_of_all(plus: int) -> torch.Tensor:
    return oracle(hvd.Sum, (999,), torch.float32) + plus * hvd.size()


def test_many_at_once_on_several_streams(gpu: Gpu) -> None:
    handles = []
    for i in range(40):
        if i % 2:
            with gpu.side_stream():
                tensor = gpu.late(mine((100 + i,)))
                handles.append(hvd.allreduce_async(tensor, op=hvd.Sum, name=f"many {i}"))
        else:
            tensor = gpu.late(mine((100 + i,)))
            handles.append(hvd.allreduce_async(tensor, op=hvd.Sum, name=f"many {i}"))
    for i, handle in enumerate(handles):
        check(gpu, hvd.synchronize(handle), oracle(hvd.Sum, (100 + i,), torch.float32))


def test_a_result_on_the_stream_of_who_waits(gpu: Gpu) -> None:
    handle = hvd.allreduce_async(gpu.late(mine((5000,))), op=hvd.Sum)
    with gpu.side_stream():
        check(gpu, hvd.synchronize(handle), oracle(hvd.Sum, (5000,), torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_allgather_of_ragged_rows(gpu: Gpu, dtype: torch.dtype) -> None:
    rows = [of_rank(rank, (rank % 3 + 1, 4), dtype) for rank in range(hvd.size())]
    check(gpu, hvd.allgather(gpu.late(rows[hvd.rank()])), torch.cat(rows))


def test_broadcast(gpu: Gpu) -> None:
    for root in range(hvd.size()):
        tensor = gpu.late(mine((1001,)))
        assert hvd.broadcast_(tensor, root) is tensor
        check(gpu, tensor, of_rank(root, (1001,)))


def test_alltoall(gpu: Gpu) -> None:
    size, rank = hvd.size(), hvd.rank()
    result, received = hvd.alltoall(gpu.late(mine((3 * size, 2))), splits=torch.full((size,), 3))
    check(gpu, result, of_all((3 * size, 2))[:, 3 * rank : 3 * rank + 3].reshape(-1, 2))
    assert received.tolist() == [3] * size
    assert received.is_cpu


def test_reducescatter(gpu: Gpu) -> None:
    size, rank = hvd.size(), hvd.rank()
    expected = oracle(hvd.Sum, (2 * size, 3), torch.float32)[2 * rank : 2 * rank + 2]
    check(gpu, hvd.reducescatter(gpu.late(mine((2 * size, 3))), op=hvd.Sum), expected)


def test_ranks_that_contradict_one_another(gpu: Gpu) -> None:
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="shape is"):
            hvd.allreduce(gpu.late(mine((4 + (hvd.rank() == 0),))), name="odd")
        with pytest.raises(hvd.HorovodInternalError, match="device is the CPU on"):
            hvd.allreduce(gpu.late(mine((4,))) if hvd.rank() else mine((4,)), name="half")
    check(gpu, hvd.allreduce(gpu.late(mine((4,))), op=hvd.Sum), oracle(hvd.Sum, (4,), torch.float32))
