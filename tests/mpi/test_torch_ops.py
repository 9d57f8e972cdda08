"""Every operation of hvdlite.torch between real ranks, with each dtype, op and shape; any rank can build any input.

What every op makes of every dtype in every place is tested beneath (test_backends.py, test_runtime.py), what ranks can
do wrong in test_misuse.py.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

import hvdlite
import hvdlite.torch as hvd
from hvdlite.dtypes import ReduceOp
from hvdlite.errors import NotInitializedError
from torch_lab import LINEAR, REDUCING, rank_input

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 1, 3), (1023,), (64, 64), (300_001,)]
CHUNK = 1 << 20


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """(size, *shape): those of all ranks."""
    return torch.stack([rank_input(rank, shape, dtype) for rank in range(hvd.size())])


def reduced(op: int, stacked: torch.Tensor) -> torch.Tensor:
    wide = stacked.double()
    result = {
        hvd.Sum: wide.sum,
        hvd.Average: wide.mean,
        hvd.Min: wide.amin,
        hvd.Max: wide.amax,
        hvd.Product: wide.prod,
    }[ReduceOp(op)](dim=0)
    return (result if stacked.is_floating_point() else result.trunc()).to(stacked.dtype)


def check_allreduce(shape: tuple[int, ...], dtype: torch.dtype, op: int) -> None:
    """A new tensor, and in place; small integers come out exactly, but for averages."""
    tensor = rank_input(hvd.rank(), shape, dtype)
    expected = reduced(op, inputs(shape, dtype))
    result = hvd.allreduce(tensor, op=op)
    assert result.dtype == dtype
    assert result.shape == shape
    assert torch.allclose(result, expected, rtol=1e-6) if op == hvd.Average else torch.equal(result, expected)
    assert torch.equal(tensor, rank_input(hvd.rank(), shape, dtype))
    assert hvd.allreduce_(tensor, op=op) is tensor
    assert torch.equal(tensor, result)


@pytest.mark.parametrize("dtype", REDUCING, ids=str)
def test_allreduce_of_every_dtype(dtype: torch.dtype) -> None:
    check_allreduce((5, 1, 3), dtype, hvd.Sum)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product], ids=lambda op: op.label)
def test_allreduce_by_every_op(op: int) -> None:
    for dtype in (torch.float32, torch.int64):
        check_allreduce((1023,), dtype, op)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_allreduce_of_every_shape(shape: tuple[int, ...]) -> None:
    check_allreduce(shape, torch.float32, hvd.Sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [CHUNK // 4 - 1, CHUNK // 4, CHUNK // 4 + 1, CHUNK + 5])
def test_allreduce_in_chunks(numel: int, dtype: torch.dtype) -> None:
    result = hvd.allreduce(rank_input(hvd.rank(), (numel,), dtype), op=hvd.Sum)
    assert torch.equal(result, reduced(hvd.Sum, inputs((numel,), dtype)))


def test_scales() -> None:
    for dtype in (torch.float32, torch.float16, torch.int32):
        tensor = torch.full((10,), 3).to(dtype)
        result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert result.tolist() == [3.0 * hvd.size()] * 10
    # Before the sum integers are truncated: 3 * 0.5 is 1.
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5).item() == hvd.size()


def test_average_is_the_division_of_the_sum() -> None:
    """A product with 1/3 would differ from it in the last bit."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        first = torch.arange(1, 100).to(dtype)
        own = first.clone() if hvd.rank() == 0 else torch.zeros_like(first)
        expected = first // hvd.size() if dtype is torch.int64 else first / hvd.size()
        assert torch.equal(hvd.allreduce(own), expected)


LAYOUTS: list[Callable[[int], torch.Tensor]] = [
    lambda rank: (torch.arange(120.0).reshape(2, 3, 4, 5) + rank).to(memory_format=torch.channels_last),
    lambda rank: (torch.arange(12.0).reshape(3, 4) + rank).t(),
    lambda rank: (torch.arange(30.0) + rank)[::3],
    lambda rank: (torch.arange(3.0) + rank).expand(4, 3),
]


@pytest.mark.parametrize("make", LAYOUTS, ids=["channels_last", "transposed", "strided", "expanded"])
def test_layouts(make: Callable[[int], torch.Tensor]) -> None:
    expected = torch.stack([make(rank) for rank in range(hvd.size())]).sum(0)
    assert torch.equal(hvd.allreduce(make(hvd.rank()), op=hvd.Sum), expected)
    assert torch.equal(hvd.allgather(make(hvd.rank())), torch.cat([make(rank) for rank in range(hvd.size())]))
    assert torch.equal(hvd.broadcast(make(hvd.rank()), hvd.size() - 1), make(hvd.size() - 1))
    tensor = make(hvd.rank())
    if 0 not in tensor.stride():  # what overlaps itself cannot be written
        strides = tensor.stride()
        assert torch.equal(hvd.allreduce_(tensor, op=hvd.Sum), expected)
        assert torch.equal(hvd.broadcast_(make(hvd.rank()), hvd.size() - 1), make(hvd.size() - 1))
        assert tensor.stride() == strides


def test_many_in_flight_in_another_order_on_every_rank() -> None:
    names = [f"t{i}" for i in range(60)]
    start = 17 * hvd.rank() % len(names)
    handles = {
        name: hvd.allreduce_async(torch.full((int(name[1:]) * 50,), hvd.rank() + 1.0), name=name, op=hvd.Sum)
        for name in names[start:] + names[:start]
    }
    total = hvd.size() * (hvd.size() + 1) / 2
    for name in names:
        result = hvd.synchronize(handles[name])
        assert hvd.poll(handles[name])
        assert torch.equal(result, torch.full((int(name[1:]) * 50,), total))


def test_abandoned_handles_do_no_harm() -> None:
    for i in range(20):
        hvd.allreduce_async_(torch.ones(10_000), name=f"abandoned{i}")
    gc.collect()
    hvd.barrier()


def test_from_several_threads() -> None:
    results: dict[int, float] = {}

    def work(number: int) -> None:
        for i in range(10):
            results[number] = hvd.allreduce(torch.ones(100), op=hvd.Sum, name=f"thread{number}.{i}").sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [100.0 * hvd.size()] * 4


@pytest.mark.parametrize("in_place", [False, True])
def test_grouped(in_place: bool) -> None:
    shapes = [(3,), (0,), (100, 7), (), (40_000,)]
    dtypes = [torch.float32, torch.float16, torch.int64, torch.float64, torch.float32]
    given = list(zip(shapes, dtypes, strict=True))
    tensors = [rank_input(hvd.rank(), shape, dtype) for shape, dtype in given]
    expected = [reduced(hvd.Sum, inputs(shape, dtype)) for shape, dtype in given]
    results = (hvd.grouped_allreduce_ if in_place else hvd.grouped_allreduce)(tensors, op=hvd.Sum, name="group")
    for tensor, result, right in zip(tensors, results, expected, strict=True):
        assert torch.equal(result, right)
        assert (result is tensor) == in_place
    assert hvd.grouped_allreduce([]) == []


@pytest.mark.parametrize(
    "operation", [hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter]
)
def test_a_group_from_a_generator(operation: Callable[..., list[torch.Tensor]]) -> None:
    tensors = [torch.ones(rows) for rows in (4, 6)]
    by_generator = operation(tensor.clone() for tensor in tensors)
    for result, right in zip(by_generator, operation(tensors), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("numel", [10, 100_000])
@pytest.mark.parametrize("step", [1, 2])
def test_a_group_in_place_that_has_a_tensor_twice(numel: int, step: int) -> None:
    """Weights that are tied stand twice in a state."""
    tied, other = (torch.full((numel * step,), float(hvd.rank()))[::step] for _ in range(2))
    results = hvd.grouped_allreduce_([tied, tied, other, tied], op=hvd.Sum)
    assert all(result is given for result, given in zip(results, [tied, tied, other, tied], strict=True))
    assert [tied.unique().tolist(), other.unique().tolist()] == [[sum(range(hvd.size()))]] * 2


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_in_place_of_tensors_that_overlap(order: int) -> None:
    numel = 3 * CHUNK
    whole = torch.arange(numel, dtype=torch.float64)
    whole *= hvd.rank() + 1
    hvd.grouped_allreduce_([whole, whole[1 : CHUNK + 1], whole[numel // 2 :]][::order], op=hvd.Sum)
    assert torch.equal(whole, torch.arange(numel, dtype=torch.float64) * sum(range(1, hvd.size() + 1)))


@pytest.mark.parametrize("dtype", [*REDUCING, torch.bool], ids=str)
def test_allgather(dtype: torch.dtype) -> None:
    for rows, rest in [(lambda r: r, ()), (lambda r: 3, (2, 5)), (lambda r: r % 2 * 7, (3,)), (lambda r: 0, (4,))]:
        parts = [rank_input(rank, (rows(rank), *rest), dtype) for rank in range(hvd.size())]
        assert torch.equal(hvd.allgather(parts[hvd.rank()]), torch.cat(parts))


def test_allgather_of_scalars_and_of_much() -> None:
    assert hvd.allgather(torch.tensor(hvd.rank())).tolist() == list(range(hvd.size()))
    parts = [torch.full((rank + 1, 1 << 20), float(rank)) for rank in range(hvd.size())]
    assert torch.equal(hvd.synchronize(hvd.allgather_async(parts[hvd.rank()], name="much")), torch.cat(parts))


@pytest.mark.parametrize("dtype", [*REDUCING, torch.bool], ids=str)
def test_broadcast(dtype: torch.dtype) -> None:
    for root in range(hvd.size()):
        for shape in SHAPES if dtype is torch.float32 else [(5, 1, 3)]:
            tensor = rank_input(hvd.rank(), shape, dtype)
            assert torch.equal(hvd.broadcast(tensor, root), rank_input(root, shape, dtype))
            assert torch.equal(tensor, rank_input(hvd.rank(), shape, dtype))
            assert hvd.synchronize(hvd.broadcast_async_(tensor, root)) is tensor
            assert torch.equal(tensor, rank_input(root, shape, dtype))


def test_barrier() -> None:
    for _ in range(3):
        hvd.barrier()


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32], ids=str)
def test_compression(dtype: torch.dtype, compression: type[hvd.Compressor]) -> None:
    tensor = rank_input(hvd.rank(), (5000,), dtype)
    result = hvd.allreduce(tensor, op=hvd.Sum, compression=compression)
    assert result.dtype == dtype
    assert torch.equal(result, reduced(hvd.Sum, inputs((5000,), dtype)))


def test_fp16_compression_rounds() -> None:
    result = hvd.allreduce(torch.full((10,), 1 / 3), compression=hvd.Compression.fp16)
    assert torch.equal(result, torch.full((10,), 1 / 3).half().float())


# Gradients; those of each operation: test_gradients.py.


def test_gradient_of_a_group_and_of_compression() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
    x, y = hvd.grouped_allreduce([a, b], op=hvd.Sum, compression=hvd.Compression.fp16)
    (x.sum() + 3 * y.sum()).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([hvd.size()] * 2, [3.0 * hvd.size()] * 3)


# Each in a form that native code does not know.
NOT_AT_ONCE: dict[str, Callable[[torch.Tensor], object]] = {
    "allreduce": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x]),
    "allgather": lambda x: hvd.allgather(x.t()),
    "grouped_allgather": lambda x: hvd.grouped_allgather([x]),
    "broadcast": lambda x: hvd.broadcast(x.t(), 0),
    "alltoall": lambda x: hvd.alltoall(x, splits=torch.ones(hvd.size(), dtype=torch.int32)),
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x]),
}


@pytest.mark.parametrize("name", NOT_AT_ONCE)
def test_autograd_is_left_out_where_nothing_is_differentiated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a call longer than the exchange of a few bytes."""
    monkeypatch.setattr(torch.autograd.Function, "apply", None)
    rows = torch.ones(hvd.size(), 2)
    NOT_AT_ONCE[name](rows)
    rows.requires_grad_()
    with torch.no_grad():
        NOT_AT_ONCE[name](rows)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        NOT_AT_ONCE[name](rows)


def test_differentiated_twice() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    (g,) = torch.autograd.grad(hvd.allreduce(x**3, op=hvd.Average).sum(), x, create_graph=True)
    g.sum().backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(12.0)


def test_a_broadcast_differentiated_twice() -> None:
    root = hvd.size() - 1
    x = torch.tensor([2.0], requires_grad=True)
    (g,) = torch.autograd.grad(hvd.broadcast(x**3, root).square().sum(), x, create_graph=True)
    g.sum().backward()
    assert x.grad is not None
    # At the root g is 3 x^2 times the average of 2 y; the gradient of g reaches every y, and comes back as an average.
    wanted = (192.0, pytest.approx(192 + 288 / hvd.size())) if hvd.rank() == root else (0.0, 0.0)
    assert (g.item(), x.grad.item()) == wanted


@pytest.mark.parametrize("name", LINEAR)
def test_tangents_go_the_way_of_what_they_belong_to(name: str) -> None:
    """In forward mode, also of an operation that is done at once by now."""
    operation = LINEAR[name]
    x, tangent = (rank_input(hvd.rank() + i, (hvd.size() * 2,), torch.float32) for i in range(2))
    for _ in range(100):
        wanted = operation(tangent)
    with forward_ad.dual_level():
        assert torch.equal(operation(x), operation(x.clone()))  # which has no tangent
        result = forward_ad.unpack_dual(operation(forward_ad.make_dual(x, tangent)))
    assert torch.equal(result.primal, operation(x))
    assert torch.equal(result.tangent, wanted)


@pytest.mark.parametrize("op", [hvd.Max, hvd.Product])
def test_a_tangent_of_what_is_no_sum(op: int) -> None:
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"op={ReduceOp(op).label} .* forward mode"):
        hvd.allreduce(forward_ad.make_dual(torch.ones(3), torch.ones(3)), op=op)


def test_shutdown_and_again() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.size, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(NotInitializedError, match=r"hvd\.init\(\) first"):
            call()
    hvd.init()
    hvd.init()
    assert hvdlite.runtime().size == hvd.size()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
