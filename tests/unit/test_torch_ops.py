"""The operations of hvdlite.torch, where other ranks are multiples of this one (fake_runtime.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from fake_runtime import FakeRuntime, install
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import MismatchError, ShutDownError
from hvdlite.torch.tensor_view import check_tensor, dtype_of, view_of


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return install(monkeypatch, FakeRuntime(3))


def test_everything_exported_exists() -> None:
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert len(set(hvd.__all__)) == len(hvd.__all__)


def test_ops_have_horovods_numbers() -> None:
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("op", "factor"), [(None, 2.0), (hvd.Average, 2.0), (hvd.Sum, 6.0), (hvd.Min, 1.0), (hvd.Max, 3.0), (1, 6.0)]
)
def test_allreduce(runtime: FakeRuntime, op: int | None, factor: float) -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    result = hvd.allreduce(tensor, op=op)
    assert torch.equal(result, tensor * factor)
    assert torch.equal(tensor, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert runtime.calls[-1]["shapes"] == [(2, 2)]


def test_factors_and_name(runtime: FakeRuntime) -> None:
    result = hvd.allreduce(torch.ones(2), name="t", op=hvd.Sum, prescale_factor=0.5, postscale_factor=4)
    assert torch.equal(result, torch.full((2,), 12.0))
    assert (runtime.calls[0]["name"], runtime.calls[0]["prescale"], runtime.calls[0]["postscale"]) == ("t", 0.5, 4.0)


def test_in_place_returns_its_argument(runtime: FakeRuntime) -> None:
    tensor = torch.ones(3)
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert torch.equal(tensor, torch.full((3,), 6.0))
    assert runtime.calls[0]["loose"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda: torch.arange(6.0).reshape(2, 3).t(),
        lambda: torch.arange(12.0)[::3],
    ],
    ids=["channels_last", "transposed", "strided"],
)
def test_tensors_that_are_not_contiguous(runtime: FakeRuntime, make: Callable[[], torch.Tensor]) -> None:
    tensor, given = make(), make()
    strides = tensor.stride()
    assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), given * 6)
    assert torch.equal(hvd.allreduce_(tensor, op=hvd.Sum), given * 6)
    assert tensor.stride() == strides
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    handle.synchronize()
    tensor.zero_()
    assert handle.synchronize().sum() == 0  # the result is copied back once


def test_scalars_and_empty_tensors(runtime: FakeRuntime) -> None:
    assert hvd.allreduce(torch.tensor(2.0), op=hvd.Sum).item() == 12.0
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    assert torch.equal(hvd.allgather(torch.tensor(2.0)), torch.full((3,), 2.0))


def test_groups_are_one_operation(runtime: FakeRuntime) -> None:
    a, b = torch.ones(2), torch.ones(3, dtype=torch.float64)
    results = hvd.grouped_allreduce([a, b], name="g", op=hvd.Sum)
    assert [result.tolist() for result in results] == [[6.0] * 2, [6.0] * 3]
    assert [call["names"] for call in runtime.calls] == [["g.0", "g.1"]]
    assert hvd.grouped_allreduce_([a, b], op=hvd.Sum)[0] is a
    handle = hvd.grouped_allreduce_async([a], op=hvd.Sum)
    assert [result.tolist() for result in hvd.synchronize(handle)] == [[36.0] * 2]
    assert hvd.synchronize(hvd.grouped_allreduce_async_([a], op=hvd.Sum))[0] is a


def test_poll_and_synchronize(runtime: FakeRuntime) -> None:
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    assert not hvd.poll(handle)
    result = hvd.synchronize(handle)
    assert result.item() == 6.0
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is result


@pytest.mark.parametrize("bad", [0, None, "allreduce.noname.0", torch.ones(1)])
def test_poll_and_synchronize_of_anything_else(bad: object) -> None:
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(bad)
    with pytest.raises(ValueError, match="handle"):
        hvd.synchronize(bad)


def test_a_handle_keeps_its_tensors(runtime: FakeRuntime) -> None:
    tensor = torch.ones(1000)
    kept = weakref.ref(tensor)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    del tensor
    gc.collect()
    assert kept() is not None
    assert hvd.synchronize(handle).sum() == 6000


def test_errors_come_at_synchronize(runtime: FakeRuntime) -> None:
    runtime.error = MismatchError("shapes differ")
    handle = hvd.allreduce_async(torch.ones(1))
    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
        hvd.synchronize(handle)


def test_average_is_deprecated(runtime: FakeRuntime) -> None:
    with pytest.warns(DeprecationWarning, match="op=hvd.Average"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == 6.0
    with pytest.warns(DeprecationWarning, match="op=hvd.Average"):
        assert hvd.allreduce(torch.ones(1), average=True).item() == 2.0
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


@pytest.mark.parametrize("op", [6, -1, "Sum"])
def test_unknown_op(runtime: FakeRuntime, op: int) -> None:
    with pytest.raises(ValueError, match=r"hvd\.Average"):
        hvd.allreduce(torch.ones(1), op=op)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(1, dtype=torch.complex64), "complex64"),
        (torch.ones(2, 2).to_sparse(), "to_dense"),
        (torch.ones(1, device="meta"), "cpu"),
        ([1.0], "torch.Tensor"),
    ],
    ids=["complex", "sparse", "device", "list"],
)
def test_tensors_that_cannot_travel(runtime: FakeRuntime, tensor: torch.Tensor, text: str) -> None:
    for operation in (hvd.allreduce_async, hvd.allgather_async, lambda t, name: hvd.broadcast_async(t, 0, name)):
        with pytest.raises(ValueError, match=f"'t'.*{text}"):
            operation(tensor, name="t")


def test_process_set_must_be_one(runtime: FakeRuntime) -> None:
    for operation in (
        hvd.allreduce,
        hvd.allgather,
        lambda t, process_set: hvd.broadcast(t, 0, process_set=process_set),
    ):
        with pytest.raises(ValueError, match="global_process_set"):
            operation(torch.ones(1), process_set=0)
    with pytest.raises(ValueError, match="global_process_set"):
        hvd.barrier(0)
    assert hvd.global_process_set.ranks == [0, 1, 2]
    assert hvd.global_process_set.included()


def test_before_init(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hvdlite.is_initialized()
    with pytest.raises(ShutDownError, match="init"):
        hvd.allreduce(torch.ones(1))
    with pytest.raises(hvd.HorovodInternalError, match="init"):
        hvd.barrier()
    with pytest.raises(ValueError, match="init"):
        hvd.rank()


def test_barrier(runtime: FakeRuntime) -> None:
    hvd.barrier()
    assert runtime.handles[0].done()


def test_allgather(runtime: FakeRuntime) -> None:
    tensor = torch.arange(4).reshape(2, 2).t()
    assert torch.equal(hvd.allgather(tensor), torch.cat([tensor] * 3))


def test_broadcast_forms(runtime: FakeRuntime) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    result = hvd.broadcast(tensor, 0, name="b")
    assert result is not tensor
    assert torch.equal(result, tensor)
    assert hvd.broadcast_(tensor, 0) is tensor
    assert runtime.calls[0]["name"] == "b"


# Gradients.


def test_gradient_of_allreduce_is_the_same_allreduce(runtime: FakeRuntime) -> None:
    tensor = torch.ones(2, requires_grad=True)
    result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0)
    assert result.requires_grad
    result.backward(torch.tensor([1.0, 10.0]))
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [12.0, 120.0]
    assert runtime.calls[1]["op"] is ReduceOp.SUM


def test_gradient_of_a_group(runtime: FakeRuntime) -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    x, y = hvd.grouped_allreduce([a, b])
    (x.sum() + 5 * y.sum()).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0, 2.0], [10.0])
    assert len(runtime.calls) == 2


def test_gradient_of_allgather_is_the_average_of_this_ranks_rows(runtime: FakeRuntime) -> None:
    tensor = torch.ones(2, 1, requires_grad=True)
    hvd.allgather(tensor).backward(torch.arange(6.0).reshape(6, 1))
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [[0.0], [2.0]]  # rows 0 and 1, times (1 + 2 + 3) / 3
    scalar = torch.ones((), requires_grad=True)
    hvd.allgather(scalar).sum().backward()
    assert scalar.grad is not None
    assert scalar.grad.shape == ()


@pytest.mark.parametrize(("rank", "expected"), [(0, 2.0), (1, 0.0)])
def test_gradient_of_broadcast_is_zero_off_the_root(runtime: FakeRuntime, rank: int, expected: float) -> None:
    runtime.rank = rank
    tensor = torch.ones(1, requires_grad=True)
    hvd.broadcast(tensor, 0).backward(torch.ones(1))
    assert tensor.grad is not None
    assert tensor.grad.item() == expected


# Compression.


def test_compression_on_the_way(runtime: FakeRuntime) -> None:
    hvd.allreduce(torch.ones(1), compression=hvd.Compression.fp16)
    hvd.grouped_allreduce([torch.ones(1)], compression=hvd.Compression.bf16)
    assert [call["wire_dtype"] for call in runtime.calls] == [DType.FLOAT16, DType.BFLOAT16]


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_compression_methods(name: str) -> None:
    compression = getattr(hvd.Compression, name)
    tensor = torch.tensor([0.1, -3.0], dtype=torch.float64)
    compressed, ctx = compression.compress(tensor)
    assert compressed.dtype == {"none": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    restored = compression.decompress(compressed, ctx)
    assert restored.dtype == tensor.dtype
    assert torch.allclose(restored, tensor, rtol=1e-2)
    whole = torch.arange(3)
    assert compression.compress(whole)[0] is whole


class _Halving(hvd.Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor / 2).double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return (tensor * 2).to(ctx)


class _OffsetFp16(hvd.Compression.fp16):
    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return super().compress(tensor + 1)


def test_compressors_of_users(runtime: FakeRuntime) -> None:
    tensor = torch.ones(2, requires_grad=True)
    result = hvd.allreduce(tensor, op=hvd.Sum, compression=_Halving)
    assert result.dtype == torch.float32
    assert result.tolist() == [6.0, 6.0]
    result.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [6.0, 6.0]
    assert runtime.calls[0]["wire_dtype"] is None


def test_a_subclass_of_ours_is_a_users(runtime: FakeRuntime) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, compression=_OffsetFp16).item() == 12.0
    assert runtime.calls[0]["wire_dtype"] is None


# Views.


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_has_a_view(dtype: DType) -> None:
    tensor = torch.zeros(3, 2, dtype=getattr(torch, dtype.label))
    view = view_of(check_tensor(tensor, "t"))
    assert (view.dtype, view.shape, view.address) == (dtype, (3, 2), tensor.data_ptr())
    assert view.nbytes == tensor.numel() * tensor.element_size()
    assert view.owner is tensor


def test_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(ValueError, match="complex128.*uint8.*bfloat16.*bool"):
        dtype_of(torch.complex128)
